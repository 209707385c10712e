"""`python -m trimaran.probe -o cluster.toml`: the probe as a program."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Literal

from trimaran.files.catalogue import dump_toml, load_model, load_stack
from trimaran.nouns.noun import TrimaranError
from trimaran.probe.links_result import LinksResult
from trimaran.probe.probe_settings import not_measured_whole, probe_settings
from trimaran.probe.probed_cluster import measure
from trimaran.protocol import progress
from trimaran.protocol.host import usable_cores

# Beyond this, ranks that share a core tell nothing any more and fill the memory.
SLOTS_PER_CORE = 16
# What the layouts that plans rank first have most often.
MICRO_BATCHES = (1, 2, 4)


def main(arguments: list[str] | None = None) -> int:
    """Measure and write the cluster file; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m trimaran.probe", description="Measure this machine.")
    parser.add_argument("-o", "--output", default="cluster.toml", help="cluster file to write")
    parser.add_argument("--slots", type=_positive, help="ranks that the node offers; default one a core or GPU")
    parser.add_argument("--model", help="catalogue name or file: measure its own products, layers and head too")
    parser.add_argument("--stack", help="software that --model is trained with; default trimaran")
    parser.add_argument("--seq-len", "--seq", type=_positive, help="sequence length for --model; default the model's")
    parser.add_argument(
        "--mbs", type=_positive, action="append", help="micro-batch for --model; may be repeated; default 1, 2 and 4"
    )
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repeats: under 40 s")
    parser.add_argument("--links", help="what trimaran.probe.links left: the links between as many nodes")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default cuda where there is one")
    options = parser.parse_args(arguments)
    try:
        _probe(options)
    except TrimaranError as error:
        print(f"trimaran: {error}", file=sys.stderr)
        return 2
    return 0


def _probe(options: argparse.Namespace) -> None:
    model = load_model(options.model) if options.model else None
    stack = load_stack(options.stack or "trimaran")
    for name in ("stack", "seq_len", "mbs"):
        if model is None and getattr(options, name):
            option = name.replace("_", "-")
            raise TrimaranError(f"--{option} says how --model is measured, and no model is given: add --model")
    output = Path(options.output)
    try:
        output.stem.encode()
    except UnicodeEncodeError:
        raise TrimaranError("--output is not Unicode, and the cluster is called as its file: choose another") from None
    import torch  # takes seconds, which a mistake should not cost

    device: Literal["cpu", "cuda"] = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise TrimaranError("--device cuda, but this PyTorch sees no CUDA device: leave --device out or use cpu")
    most = torch.cuda.device_count() if device == "cuda" else usable_cores()
    slots = options.slots or most
    if device == "cuda" and slots > most:
        raise TrimaranError(f"--slots {slots} exceeds the {most} GPUs of this machine: ask for at most {most}")
    if slots > SLOTS_PER_CORE * most:
        raise TrimaranError(
            f"--slots {slots} is more than {SLOTS_PER_CORE} for each of the {most} cores: ask for at most "
            f"{SLOTS_PER_CORE * most}"
        )
    settings = probe_settings(
        device=device,
        slots=slots,
        threads_per_rank=max(1, usable_cores() // slots),
        model=model,
        seq_len=options.seq_len,
        mbs=tuple(options.mbs or MICRO_BATCHES),
        quick=options.quick,
        stack=stack,
    )
    if model is not None and (refusal := not_measured_whole(model, stack)):
        progress.tell(refusal)
    cluster = measure(settings, name=output.stem)
    if options.links:
        cluster = LinksResult.model_validate_json(Path(options.links).read_text("utf-8")).joined(cluster)
    dump_toml(cluster, output)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return number


if __name__ == "__main__":
    sys.exit(main())
