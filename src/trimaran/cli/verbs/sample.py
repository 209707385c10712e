"""`trimaran sample`: text from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def sample(
    checkpoint: Annotated[
        Path,
        typer.Argument(help="A checkpoint, a study's folder (its newest one), or a Hugging Face folder."),
    ],
    prompt: Annotated[str, typer.Option(help="Text to go on from. Default: the beginning of a document.")] = "",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to write at most.")] = 200,
    temperature: Annotated[
        float, typer.Option(min=0, help="0: always the likeliest token; higher: more surprising.")
    ] = 0.8,
    top_k: Annotated[int | None, typer.Option(min=1, help="Draw from so many of the likeliest tokens only.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Another seed draws another text.")] = 0,
) -> None:
    """Write text with a trained model, to see what it has learned.

    Example: trimaran sample runs/laptop --prompt "def main(" --tokens 100
    """
    from pydantic import ValidationError

    from trimaran.nouns.noun import TrimaranError, first_error
    from trimaran.protocol.job import SampleJob
    from trimaran.study.torch_programs import run_program_on

    try:
        job = SampleJob(
            source=str(checkpoint), prompt=prompt, tokens=tokens, temperature=temperature, top_k=top_k, seed=seed
        )
    except ValidationError as error:
        raise TrimaranError(first_error(error)) from None
    run_program_on(job, "trimaran.train.programs.sample", "sample")
