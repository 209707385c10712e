"""`trimaran probe`: measure this machine and write a cluster file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trimaran.cli.terminal import tell


def probe(
    output: Annotated[Path, typer.Option("--output", "-o", help="Cluster file to write.")] = Path("cluster.toml"),
    slots: Annotated[int | None, typer.Option(min=1, help="Ranks that the node offers. Default: one a core.")] = None,
    model: Annotated[str | None, typer.Option(help="Measure this model's own matmul shapes too.")] = None,
    seq: Annotated[
        int | None, typer.Option("--seq-len", "--seq", min=1, help="Sequence length for --model. Default: the model's.")
    ] = None,
    mbs: Annotated[list[int] | None, typer.Option(min=1, help="Micro-batches for --model. May be repeated.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes and repeats.")] = False,
) -> None:
    """Measure this machine: matmul by shape and precision, memory, collectives and sends.

    Example: trimaran probe -o laptop.toml --slots 4
    """
    from trimaran.study.torch_programs import run_program

    arguments = ["-o", str(output)]
    arguments += ["--slots", str(slots)] if slots else []
    arguments += ["--model", model] if model else []
    arguments += ["--seq-len", str(seq)] if seq else []
    for size in mbs or []:
        arguments += ["--mbs", str(size)]
    arguments += ["--quick"] if quick else []
    run_program("trimaran.probe", arguments, "probe")
    tell(f"cluster file written to {output}", err=True)
