"""`trimaran convert`: a checkpoint as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trimaran.cli.terminal import tell


def convert(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, or a study's folder (its newest one).")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write; it must not exist yet.")],
    family: Annotated[
        str | None, typer.Option(help="Family to write, such as phi3, where several compute the same model.")
    ] = None,
) -> None:
    """Write a trained model as a Hugging Face folder of its family: config.json, safetensors, tokenizer.json.

    The other way needs no conversion: a recipe's `train.init_from` and `trimaran sample` take such folders.

    Example: trimaran convert runs/laptop -o laptop-gpt
    """
    from trimaran.protocol.job import ConvertJob
    from trimaran.study.torch_programs import run_program_on

    job = ConvertJob(source=str(checkpoint), output=str(output), family=family)
    run_program_on(job, "trimaran.train.programs.convert", "convert")
    tell(f"wrote {output}", err=True)
