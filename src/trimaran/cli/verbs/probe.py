"""`trimaran probe`: measure this machine and write a cluster file."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from trimaran.cli.joining import place_among_ranks
from trimaran.cli.options import written_file
from trimaran.cli.terminal import tell


def probe(
    output: Annotated[Path, written_file("Cluster file to write.")] = Path("cluster.toml"),
    slots: Annotated[int | None, typer.Option(min=1, help="Ranks that the node offers. Default: one a core.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Measure this model's own products, whole layers and head too.")
    ] = None,
    stack: Annotated[
        str | None,
        typer.Option(help="Software that --model is trained with. Default: trimaran, whose layers are measured whole."),
    ] = None,
    seq: Annotated[
        int | None, typer.Option("--seq-len", "--seq", min=1, help="Sequence length for --model. Default: the model's.")
    ] = None,
    mbs: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Micro-batches for --model. May be repeated. Default: 1, 2 and 4."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes and repeats.")] = False,
) -> None:
    """Measure this machine: matmul by shape and precision, memory, collectives and sends.

    With --model one device tells about that model on many: its layers and head are run forward and backward, at
    the shares of tensor parallelism and the micro-batches that layouts need, and plan, predict and fit begin there.
    Products, attention and parts of a model take at most a minute each (--quick: 8 s each), and one case longer.
    Started on several nodes, by srun or torchrun, it measures the links between them too.

    Example: trimaran probe -o laptop.toml --slots 4 --model gpt2-124m
    """
    from trimaran.files.catalogue import require_room
    from trimaran.study.torch_programs import CLUSTER_BYTES, run_program

    arguments = ["-o", str(output)]
    arguments += ["--slots", str(slots)] if slots else []
    arguments += ["--model", model] if model else []
    arguments += ["--stack", stack] if stack else []
    arguments += ["--seq-len", str(seq)] if seq else []
    for size in mbs or []:
        arguments += ["--mbs", str(size)]
    arguments += ["--quick"] if quick else []
    place = place_among_ranks()
    if not (place and place.rank):
        require_room(output, CLUSTER_BYTES)
    with tempfile.TemporaryDirectory(prefix="trimaran-") as folder:
        if place:
            links = Path(folder) / "links.json"
            found = [str(links), *(["--quick"] if quick else [])]
            run_program("trimaran.probe.links", found, "probe", environment=place.environment)
            if place.rank:
                return
            arguments += ["--links", str(links)]
        run_program("trimaran.probe", arguments, "probe")
    tell(f"cluster file written to {output}", err=True)
