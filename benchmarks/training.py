"""Training speed: Trimaran's trainer against plain PyTorch on two cores, in turns.

    python benchmarks/training.py [--repeats 3] [--steps 8]

The workload: 8 layers, hidden 384, 6 heads, vocabulary 8192, sequence 256, 8 sequences a step; real
text, AdamW, clipping. Every repeat runs each contender once, so that a machine that slows down slows
all of them; a run's time is the median of its steps after the first two, and the table shows the median
of the runs with their spread. MFU is model operations (scores in full, nothing recomputed) over the
matmul ceiling that the same repeat measured. Writes benchmarks/results/training.md.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from trimaran.flops import model_flops
from trimaran.model import Model
from trimaran.notation import parse_layout
from trimaran.recipe import DataJob, DataSettings, TrainJob, TrainSettings
from trimaran.stages import weighted_split
from trimaran.workload import Workload

HERE = Path(__file__).parent
CORES = 2
WARM_UP_STEPS = 2
MODEL = Model(layers=8, hidden=384, heads=6, vocab=8192, max_positions=256, activation="gelu")
WORKLOAD = Workload(model=MODEL, seq_len=256, global_batch=8)
TRIMARAN = ("-m", "trimaran.train.worker")
NATIVE_PIPELINE = (str(HERE / "peers" / "torch_pipelining.py"),)
PLAIN = (str(HERE / "peers" / "plain_pytorch.py"),)


@dataclass(frozen=True)
class Contender:
    """One program on one layout; all use both cores."""

    name: str
    program: tuple[str, ...]
    layout: str


CONTENDERS = tuple(
    Contender(name, program, f"{layout},{precision}")
    for precision in ("fp32", "bf16_pure")
    for name, program, layout in (
        ("plain PyTorch, 1 process", PLAIN, "mbs8"),
        ("Trimaran, 1 process", TRIMARAN, "mbs8"),
        ("plain PyTorch, DDP 2", PLAIN, "dp2,mbs4"),
        ("Trimaran, DP 2", TRIMARAN, "dp2,mbs4"),
        ("Trimaran, TP 2", TRIMARAN, "tp2,mbs8"),
        ("torch.distributed.pipelining, PP 2 1F1B", NATIVE_PIPELINE, "pp2,mbs1"),
        ("Trimaran, PP 2 1F1B", TRIMARAN, "pp2,mbs1"),
    )
)


def prepare_data(folder: Path) -> Path:
    """The standard library's source as token files of a BPE of 8192."""
    job = DataJob(data=DataSettings(tokenizer="bpe", max_mib=16), vocab=MODEL.vocab, cache_dir=str(folder / "cache"))
    (folder / "data.json").write_text(job.model_dump_json())
    command = [sys.executable, "-m", "trimaran.train.data", str(folder / "data.json")]
    return Path(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())


def run(contender: Contender, data_dir: Path, out_dir: Path, steps: int) -> float:
    """Seconds per iteration of one run."""
    layout = parse_layout(contender.layout)
    job = TrainJob(
        workload=WORKLOAD,
        layout=layout,
        stage_split=weighted_split(MODEL.layers, layout.pp, MODEL.head_in_layers(WORKLOAD.seq_len)),
        train=TrainSettings(steps=60),
        data_dir=str(data_dir),
        out_dir=str(out_dir),
        steps=steps,
        threads_per_rank=CORES // layout.devices,
    )
    out_dir.mkdir(parents=True)
    (out_dir / "job.json").write_text(job.model_dump_json())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "WORLD_SIZE": str(layout.devices),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": str(job.threads_per_rank),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, *contender.program, str(out_dir / "job.json")],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(layout.devices)
    ]
    statuses = [rank.wait() for rank in ranks]
    if any(statuses):
        raise SystemExit(f"{contender.name} ({contender.layout}) failed")
    result = json.loads((out_dir / "result.json").read_text())
    return statistics.median(result["sec_per_it"][WARM_UP_STEPS:])


def matmul_gflops(precision: str) -> float:
    """The matmul ceiling of both cores together."""
    command = [sys.executable, str(HERE / "peers" / "matmul.py"), precision, str(CORES)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def table(seconds: dict[Contender, list[float]], ceilings: dict[str, list[float]]) -> str:
    """The result as Markdown."""
    flops = model_flops(MODEL, WORKLOAD.seq_len, WORKLOAD.global_batch)
    lines = [
        "| who | layout | sec/it | spread | tokens/s | MFU |",
        "| --- | --- | --: | --: | --: | --: |",
    ]
    for contender, times in seconds.items():
        middle = statistics.median(times)
        ceiling = statistics.median(ceilings[parse_layout(contender.layout).precision]) * 1e9
        lines.append(
            f"| {contender.name} | {contender.layout} | {middle:.3f} | {(max(times) - min(times)) / middle:.0%} | "
            f"{WORKLOAD.tokens_per_step / middle:.0f} | {flops / middle / ceiling:.0%} |"
        )
    return "\n".join(lines)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--repeats", type=int, default=3)
    arguments.add_argument("--steps", type=int, default=8, help="steps of one run, the first two untimed")
    options = arguments.parse_args()
    seconds: dict[Contender, list[float]] = {contender: [] for contender in CONTENDERS}
    ceilings: dict[str, list[float]] = {"fp32": [], "bf16_pure": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data_dir = prepare_data(folder)
        for repeat in range(options.repeats):
            for precision, rates in ceilings.items():
                rates.append(matmul_gflops(precision))
            for number, contender in enumerate(CONTENDERS):
                seconds[contender].append(run(contender, data_dir, folder / f"{repeat}-{number}", options.steps))
                print(f"{contender.name:40} {contender.layout:20} {seconds[contender][-1]:.3f} s", flush=True)
    rates = ", ".join(f"{precision} {statistics.median(found):.0f} GFLOP/s" for precision, found in ceilings.items())
    title = f"# Training speed on {CORES} cores\n\n{__doc__.split(chr(10) * 2)[2]}\n"
    text = f"{title}\nMatmul ceiling of both cores: {rates}. {options.repeats} repeats.\n\n{table(seconds, ceilings)}\n"
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results" / "training.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
