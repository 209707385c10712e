"""Training speed: Trimaran's trainer against other trainers on two cores, in turns.

    make peers; python benchmarks/training.py [--part fp32] [--repeats 3] [--steps 6]

The workload: 8 layers, hidden 384, 6 heads, vocabulary 8192, sequence 256, 8 sequences a step; real
text, AdamW, clipping. Every repeat runs each contender once, so that a machine that slows down slows
all of them; a run's time is the median of its steps after the first two, and the table shows the median
of the runs with their spread. MFU is model operations (scores in full, nothing recomputed) over the
matmul ceiling, the median of what the repeats measured. Two processes have one thread each, one process has two.
torchtitan trains a Llama and litgpt a model with rotary positions and an untied head, of the same products.

Two further workloads, in fp32: one sequence of 4,096 tokens a step, 4 layers, which two ranks share by context
parallelism or TP; and the first workload on 4 ranks, a thread each, whose pairs share out what ZeRO 3 shards (hybrid
sharding).

A mixture of experts of Mixtral's kind: 4 layers, hidden 384, 8 experts of an inner width of 768, of which each token
goes to 2 and none is dropped, without losses of the load; the rest is as in the first workload. torchtitan has EP only
beside FSDP2, so that Trimaran's EP runs with whole weights and with ZeRO 3.

A run replaces its part of benchmarks/results/training.md; peers that are not installed are left out.
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

from _peers import INSTALLED, is_installed
from trimaran.layout.flops import model_flops
from trimaran.layout.notation import parse_layout
from trimaran.layout.stages import weighted_split
from trimaran.nouns.model import Model
from trimaran.nouns.workload import Workload
from trimaran.operators.counts import head_in_layers
from trimaran.protocol.host import processor_name
from trimaran.protocol.job import DataJob, TrainJob
from trimaran.recipe.data_settings import DataSettings
from trimaran.recipe.train_settings import TrainSettings
from trimaran.train.programs.tokenise import prepare

HERE = Path(__file__).parent
CORES = 2
WARM_UP_STEPS = 2
LONG = 4096
MODEL = Model(layers=8, hidden=384, heads=6, vocab=8192, max_positions=256, activation="gelu")
WORKLOAD = Workload(model=MODEL, seq_len=256, global_batch=8)
MIXTURE = Model(
    layers=4, hidden=384, heads=6, vocab=8192, max_positions=256, positions="rotary", norm="rmsnorm", mlp="swiglu",
    bias=False, tied_embedding=False, experts=8, top_k=2, moe_ffn_hidden=768,
)  # fmt: skip
MIXTURE_WORKLOAD = Workload(model=MIXTURE, seq_len=256, global_batch=8)
LONG_WORKLOAD = Workload(
    model=MODEL.model_copy(update={"layers": 4, "max_positions": LONG}), seq_len=LONG, global_batch=1
)
PEERS = HERE / "peers"
RESULTS = HERE / "results"
TRIMARAN = ("-m", "trimaran.train.process.worker")
PLAIN = (str(PEERS / "plain_pytorch.py"),)
NATIVE_PIPELINE = (str(PEERS / "torch_pipelining.py"),)
HUGGING_FACE = (str(PEERS / "hugging_face.py"),)
LITGPT = (str(PEERS / "lit_gpt.py"),)
TORCHTITAN = (str(PEERS / "torch_titan.py"),)


@dataclass(frozen=True)
class Contender:
    """One program on one layout; all use both cores. `package` is what the program cannot do without."""

    name: str
    program: tuple[str, ...]
    layout: str
    package: str = "torch"


CONTENDERS = (
    Contender("plain PyTorch", PLAIN, "mbs8"),
    Contender("transformers, accelerate", HUGGING_FACE, "mbs8", "accelerate"),
    Contender("litgpt", LITGPT, "mbs8", "litgpt"),
    Contender("Trimaran", TRIMARAN, "mbs8"),
    Contender("plain PyTorch, DDP", PLAIN, "dp2,mbs4"),
    Contender("transformers, accelerate DDP", HUGGING_FACE, "dp2,mbs4", "accelerate"),
    Contender("litgpt, DDP", LITGPT, "dp2,mbs4", "litgpt"),
    Contender("Trimaran, DP", TRIMARAN, "dp2,mbs4"),
    Contender("Trimaran, DP, one sequence at a time", TRIMARAN, "dp2,mbs1"),
    Contender("plain PyTorch, ZeroRedundancyOptimizer", PLAIN, "dp2,mbs4,zero1"),
    Contender("Trimaran, ZeRO 1", TRIMARAN, "dp2,mbs4,zero1"),
    Contender("plain PyTorch, FSDP2", PLAIN, "dp2,mbs4,fsdp"),
    Contender("torchtitan, FSDP2", TORCHTITAN, "dp2,mbs4,fsdp", "torchtitan"),
    Contender("Trimaran, ZeRO 3", TRIMARAN, "dp2,mbs4,fsdp"),
    Contender("Trimaran, TP", TRIMARAN, "tp2,mbs8"),
    Contender("torch.distributed.pipelining, 1F1B", NATIVE_PIPELINE, "pp2,mbs1"),
    Contender("torchtitan, 1F1B", TORCHTITAN, "pp2,mbs1", "torchtitan"),
    Contender("Trimaran, 1F1B", TRIMARAN, "pp2,mbs1"),
    Contender("Trimaran, interleaved 1F1B", TRIMARAN, "pp2,vpp2,mbs1"),
    Contender("Trimaran, zero bubble", TRIMARAN, "pp2,mbs1,zero_bubble"),
)
MIXTURE_CONTENDERS = (
    Contender("transformers' Mixtral, accelerate", HUGGING_FACE, "mbs8", "accelerate"),
    Contender("torchtitan's mixture", TORCHTITAN, "mbs8", "torchtitan"),
    Contender("Trimaran", TRIMARAN, "mbs8"),
    Contender("transformers' Mixtral, accelerate DDP", HUGGING_FACE, "dp2,mbs4", "accelerate"),
    Contender("Trimaran, DP", TRIMARAN, "dp2,mbs4"),
    Contender("torchtitan's mixture, EP, FSDP2", TORCHTITAN, "dp2,ep2,mbs4,fsdp", "torchtitan"),
    Contender("Trimaran, EP", TRIMARAN, "dp2,ep2,mbs4"),
    Contender("Trimaran, EP, ZeRO 3", TRIMARAN, "dp2,ep2,mbs4,fsdp"),
)
LONG_CONTENDERS = (
    Contender("plain PyTorch", PLAIN, "mbs1"),
    Contender("Trimaran", TRIMARAN, "mbs1"),
    Contender("plain PyTorch, its context parallelism", PLAIN, "cp2,mbs1"),
    Contender("Trimaran, CP by a ring", TRIMARAN, "cp2,mbs1"),
    Contender("Trimaran, CP by all-gather", TRIMARAN, "cp2,mbs1,cp-all_gather"),
    Contender("Trimaran, CP by Ulysses", TRIMARAN, "cp2,mbs1,cp-ulysses"),
    Contender("Trimaran, TP", TRIMARAN, "tp2,mbs1"),
)
SHARDED_CONTENDERS = (
    Contender("plain PyTorch, FSDP2", PLAIN, "dp4,mbs2,fsdp"),
    Contender("plain PyTorch, FSDP2, hybrid", PLAIN, "dp4,shard2,mbs2,fsdp"),
    Contender("Trimaran, ZeRO 3", TRIMARAN, "dp4,mbs2,fsdp"),
    Contender("Trimaran, ZeRO 3, hybrid", TRIMARAN, "dp4,shard2,mbs2,fsdp"),
    Contender("Trimaran, ZeRO 1, hybrid", TRIMARAN, "dp4,shard2,mbs2,zero1"),
)


@dataclass(frozen=True)
class Part:
    """A part of the page: contenders that train the same in one precision."""

    precision: str = "fp32"
    workload: Workload = WORKLOAD
    contenders: tuple[Contender, ...] = CONTENDERS


PARTS = {
    "fp32": Part(),
    "bf16_pure": Part("bf16_pure"),
    "4,096 tokens": Part(workload=LONG_WORKLOAD, contenders=LONG_CONTENDERS),
    "4 ranks": Part(contenders=SHARDED_CONTENDERS),
    "8 experts": Part(workload=MIXTURE_WORKLOAD, contenders=MIXTURE_CONTENDERS),
    "8 experts, bf16_pure": Part("bf16_pure", MIXTURE_WORKLOAD, MIXTURE_CONTENDERS),
}


def prepare_data(folder: Path) -> Path:
    """The standard library's source as token files of a BPE of 8192."""
    job = DataJob(data=DataSettings(tokenizer="bpe", max_mib=16), vocab=MODEL.vocab, cache_dir=str(folder / "cache"))
    return prepare(job)


def run(contender: Contender, part: Part, data_dir: Path, out_dir: Path, steps: int) -> float:
    """Seconds per iteration of one run."""
    layout, workload = parse_layout(f"{contender.layout},{part.precision}"), part.workload
    head = head_in_layers(workload.model, workload.seq_len)
    job = TrainJob(
        workload=workload,
        layout=layout,
        stage_split=weighted_split(workload.model.layers, layout.pp * layout.vpp, head),
        train=TrainSettings(steps=60),
        data_dir=str(data_dir),
        out_dir=str(out_dir),
        steps=steps,
        threads_per_rank=max(1, CORES // layout.devices),
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
        "PYTHONPATH": str(INSTALLED),
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
    seconds: list[float] = json.loads((out_dir / "result.json").read_text())["sec_per_it"]
    return statistics.median(seconds[WARM_UP_STEPS:])


def matmul_gflops(precision: str) -> float:
    """The matmul ceiling of both cores together."""
    command = [sys.executable, str(PEERS / "matmul.py"), precision, str(CORES)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def processor() -> str:
    """What the results were measured on."""
    flags = Path("/proc/cpuinfo").read_text()
    extensions = [name for name in ("amx_bf16", "avx512_bf16") if name in flags]
    return f"{processor_name()} ({', '.join(extensions) or 'no bf16 instructions'})"


def table(workload: Workload, seconds: dict[Contender, list[float]], ceilings: list[float]) -> str:
    """One part's result as Markdown."""
    flops = model_flops(workload.model, workload.seq_len, workload.global_batch)
    ceiling = statistics.median(ceilings)
    lines = [
        f"Matmul ceiling of both cores: {ceiling:.0f} GFLOP/s. {len(ceilings)} repeats on {processor()}.",
        "",
        "| who | layout | sec/it | spread | tokens/s | MFU |",
        "| --- | --- | --: | --: | --: | --: |",
    ]
    for contender, times in seconds.items():
        middle = statistics.median(times)
        lines.append(
            f"| {contender.name} | {contender.layout} | {middle:.3f} | {(max(times) - min(times)) / middle:.0%} | "
            f"{workload.tokens_per_step / middle:.0f} | {flops / middle / ceiling / 1e9:.0%} |"
        )
    return "\n".join(lines)


def measure(name: str, repeats: int, steps: int, folder: Path, data_dir: Path) -> str:
    """All contenders of a part in turns; the table."""
    part = PARTS[name]
    contenders = [contender for contender in part.contenders if is_installed(contender.package)]
    seconds: dict[Contender, list[float]] = {contender: [] for contender in contenders}
    ceilings: list[float] = []
    for repeat in range(repeats):
        ceilings.append(matmul_gflops(part.precision))
        for number, contender in enumerate(contenders):
            out_dir = folder / f"{name}-{repeat}-{number}"
            seconds[contender].append(run(contender, part, data_dir, out_dir, steps))
            print(f"{contender.name:40} {contender.layout:24} {name:14} {seconds[contender][-1]:.3f} s", flush=True)
    return table(part.workload, seconds, ceilings)


def write_results(name: str, found: str) -> None:
    """Replace one part of the page."""
    page = RESULTS / "training.md"
    parts = page.read_text().split("\n## ")[1:] if page.exists() else []
    sections = {title: text.strip() for title, _, text in (part.partition("\n") for part in parts)} | {name: found}
    text = [f"# Training speed on {CORES} cores", *__doc__.strip().split("\n\n")[2:]]
    text += [f"## {title}\n\n{sections[title]}" for title in PARTS if title in sections]
    page.parent.mkdir(exist_ok=True)
    page.write_text("\n\n".join(text) + "\n")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--part", choices=PARTS, help="this one alone")
    arguments.add_argument("--repeats", type=int, default=3)
    arguments.add_argument("--steps", type=int, default=6, help="steps of one run, the first two untimed")
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        data_dir = prepare_data(folder)
        for name in (options.part,) if options.part else PARTS:
            text = measure(name, options.repeats, options.steps, folder, data_dir)
            write_results(name, text)
            print(text)


if __name__ == "__main__":
    main()
