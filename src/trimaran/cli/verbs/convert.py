"""`trimaran convert`: a checkpoint as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trimaran.cli.terminal import tell


def convert(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, or a study's folder (its newest one).")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write; it must not exist yet.")],
) -> None:
    """Write a trained GPT-2, BLOOM or Llama model as a Hugging Face folder: config.json, safetensors, tokenizer.json.

    The other way needs no conversion: a recipe's `train.init_from` and `trimaran sample` take such folders.

    Example: trimaran convert runs/laptop -o laptop-gpt
    """
    from trimaran.protocol.job import ConvertJob
    from trimaran.study.torch_programs import run_program_on

    run_program_on(ConvertJob(source=str(checkpoint), output=str(output)), "trimaran.train.programs.convert", "convert")
    tell(f"wrote {output}", err=True)
