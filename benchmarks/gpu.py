"""Training speed on a CUDA device: Trimaran's trainer against plain PyTorch, GPT 1.3B on one card.

    python benchmarks/gpu.py [--steps 12] [--smoke] [--results DIR]

24 layers, hidden 2048, 16 heads, vocabulary 50304, sequence 2048, 32 sequences a step in micro-batches of 4; bf16
with fp32 master weights, AdamW, clipping, real text as bytes. Trimaran with and without recompute, and with the
layers' products in fp8; and a loop after nanoGPT (`peers/plain_pytorch.py`, autocast), compiled and not. What a device
cannot do is told as failed. A run's time is the median of its steps after the
first four; MFU is model operations, nothing recomputed, over the card's own matmul rate as measured here. Writes
RESULTS/DEVICE.md. Where no CUDA device is at hand it says so in RESULTS/gpu.md. `--smoke` runs the same code on the
CPU at a small size.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from trimaran.layout.flops import model_flops
from trimaran.layout.notation import parse_layout
from trimaran.nouns.model import Model
from trimaran.nouns.workload import Workload
from trimaran.protocol.exits import OUT_OF_MEMORY
from trimaran.protocol.host import processor_name
from trimaran.protocol.job import DataJob, TrainJob
from trimaran.recipe.data_settings import DataSettings
from trimaran.recipe.train_settings import TrainSettings
from trimaran.train.programs.tokenise import prepare

HERE = Path(__file__).parent
WARM_UP_STEPS = 4
NO_DEVICE = "no CUDA device is at hand: nothing is measured"
GPT_1B3 = Workload(
    model=Model(layers=24, hidden=2048, heads=16, vocab=50304, max_positions=2048), seq_len=2048, global_batch=32
)
SMOKE = Workload(model=Model(layers=2, hidden=64, heads=2, vocab=512, max_positions=64), seq_len=64, global_batch=8)
TRIMARAN = ("-m", "trimaran.train.process.worker")
PLAIN = (str(HERE / "peers" / "plain_pytorch.py"),)


@dataclass(frozen=True)
class Contender:
    """One program with its options."""

    name: str
    program: tuple[str, ...]
    recompute: str = ""
    precision: str = "bf16"
    options: tuple[str, ...] = ()


CONTENDERS = (
    Contender("plain PyTorch", PLAIN),
    Contender("plain PyTorch, torch.compile", PLAIN, options=("--compile",)),
    Contender("Trimaran", TRIMARAN),
    Contender("Trimaran, recompute", TRIMARAN, recompute=",recompute-full"),
    Contender("Trimaran, fp8", TRIMARAN, precision="fp8"),
)


def matmul_tflops(device: torch.device, workload: Workload, mbs: int, seconds: float) -> float:
    """The best rate that the device reaches on the shapes of the model's own products, in bf16."""
    model, tokens = workload.model, mbs * workload.seq_len
    wait: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    best = 0.0
    for k, n in ((model.hidden, 3 * model.hidden), (model.hidden, model.ffn_hidden), (model.ffn_hidden, model.hidden)):
        a = torch.randn(tokens, k, dtype=torch.bfloat16, device=device)
        b = torch.randn(n, k, dtype=torch.bfloat16, device=device)
        for _ in range(5):
            a @ b.t()
        wait()
        done, begin = 0, time.perf_counter()
        while time.perf_counter() < begin + seconds:
            for _ in range(10):
                a @ b.t()
            wait()
            done += 10
        best = max(best, 2.0 * tokens * n * k * done / (time.perf_counter() - begin) / 1e12)
    return best


def prepare_data(folder: Path, vocab: int) -> Path:
    """The standard library's source as bytes."""
    job = DataJob(data=DataSettings(max_mib=16), vocab=vocab, cache_dir=str(folder / "cache"))
    return prepare(job)


def run(
    contender: Contender, workload: Workload, mbs: int, device: str, data_dir: Path, out_dir: Path, steps: int
) -> tuple[float, float] | str:
    """Seconds per iteration, and peak memory in GiB, of one run; how it ended where it failed."""
    layout = parse_layout(f"dp1,mbs{mbs},{contender.precision}{contender.recompute}")
    job = TrainJob(
        workload=workload,
        layout=layout,
        stage_split=(workload.model.layers,),
        train=TrainSettings(steps=steps, learning_rate=2e-4, min_learning_rate=2e-5),
        data_dir=str(data_dir),
        out_dir=str(out_dir),
        steps=steps,
        device="cuda" if device == "cuda" else "cpu",
    )
    out_dir.mkdir(parents=True)
    (out_dir / "job.json").write_text(job.model_dump_json())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, *contender.program, str(out_dir / "job.json"), *contender.options]
    if status := subprocess.run(command, env={**os.environ, **place}, check=False).returncode:
        return "out of memory" if status == OUT_OF_MEMORY else f"failed, status {status}"
    result = json.loads((out_dir / "result.json").read_text())
    return statistics.median(result["sec_per_it"][WARM_UP_STEPS:]), max(result["mem_gib_per_rank"])


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--steps", type=int, default=12, help="steps of one run, the first four untimed")
    arguments.add_argument("--smoke", action="store_true", help="a small model on the CPU, to try the program")
    arguments.add_argument("--results", type=Path, default=HERE / "results")
    options = arguments.parse_args()
    options.results.mkdir(parents=True, exist_ok=True)
    if not options.smoke and not torch.cuda.is_available():
        print(NO_DEVICE)
        where = f"on {processor_name()}, PyTorch {torch.__version__}"
        (options.results / "gpu.md").write_text(f"# Training speed on a CUDA device\n\n{NO_DEVICE} ({where}).\n")
        return
    kind = "cpu" if options.smoke else "cuda"
    name = f"{processor_name()} (smoke)" if options.smoke else torch.cuda.get_device_name()
    workload, mbs = (SMOKE, 2) if options.smoke else (GPT_1B3, 4)
    tflops = matmul_tflops(torch.device(kind), workload, mbs, seconds=0.1 if options.smoke else 2.0)
    flops = model_flops(workload.model, workload.seq_len, workload.global_batch)
    model = workload.model
    lines = [
        f"# Training speed on {name}\n\nPyTorch {torch.__version__}; {model.layers} layers, hidden {model.hidden}, "
        f"sequence {workload.seq_len}, {workload.global_batch} sequences a step in micro-batches of {mbs}, bf16. "
        f"Measured matmul rate {tflops:.4g} TFLOP/s.\n",
        "| who | sec/it | tokens/s | MFU | peak GiB |",
        "| --- | --: | --: | --: | --: |",
    ]
    path = options.results / f"{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}.md"
    with tempfile.TemporaryDirectory() as folder:
        data_dir = prepare_data(Path(folder), workload.model.vocab)
        for number, contender in enumerate(CONTENDERS):
            shown = run(contender, workload, mbs, kind, data_dir, Path(folder) / str(number), options.steps)
            if isinstance(shown, str):
                lines.append(f"| {contender.name} | {shown} | | | |")
            else:
                seconds, gib = shown
                rate, mfu = workload.tokens_per_step / seconds, flops / seconds / tflops / 1e12
                lines.append(f"| {contender.name} | {seconds:.3f} | {rate:.0f} | {mfu:.0%} | {gib:.1f} |")
            # a later contender that takes the machine down leaves what was measured before it
            path.write_text("\n".join(lines) + "\n")
            print(lines[-1], flush=True)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
