"""What the planner answers to questions that others have answered by training, beside what they published.

Run by `make bench`; writes benchmarks/results/answers.md and the same table into docs/planning.md. Nothing is fitted:
each plan is what `trimaran plan` says. All TFLOPs are of the model's own operations: scores in full, nothing computed
again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trimaran.api import plan, workload_of
from trimaran.layout.flops import OWN_FORMULA, iteration_flops
from trimaran.nouns.flops_formula import FlopsFormula
from trimaran.nouns.precision import PrecisionName
from trimaran.nouns.workload import Workload
from trimaran.planner.plan import Entry

RESULTS = Path(__file__).parent / "results" / "answers.md"
PAGE = Path(__file__).parents[1] / "docs" / "planning.md"
BEGIN, END = "<!-- answers: benchmarks/answers.py -->", "<!-- end of answers -->"
HEAD = (
    "| model, tokens, sequences | devices | the planner's layout | TFLOPs, MFU | published |",
    "| --- | --- | --- | --: | --- |",
)
UNKNOWN = "-"


@dataclass(frozen=True)
class Published:
    """What somebody measured: TFLOPs of one device, counted by a formula, or its tokens a second.

    `source` is a word of SOURCES.
    """

    layout: str
    source: str
    tflops: float = 0.0
    tokens_per_s: float = 0.0
    formula: FlopsFormula = OWN_FORMULA


@dataclass(frozen=True)
class Question:
    """One question to the planner. `stack` is the cluster's usual one where none is named; `fix` holds choices."""

    model: str
    seq_len: int
    global_batch: int
    cluster: str
    devices: int
    precision: PrecisionName = "bf16"
    stack: str | None = None
    fix: Mapping[str, object] = field(default_factory=dict)
    published: Published | None = None


# Sources by the word that cites them: what they are, and where.
SOURCES = {
    "titan": (
        "torchtitan, December 2024: H100 of 500 W and 2.4 TB/s",
        "https://github.com/pytorch/torchtitan/blob/31a17bfd/benchmarks/llama3_h100_202412_torchtitan.md",
    ),
    "llama": ("Llama 3, table 4", "https://arxiv.org/abs/2407.21783"),
    "deepseek": ("Insights into DeepSeek-V3, table 4: H800, scores in full", "https://arxiv.org/abs/2505.09343"),
    "zoo": (
        "Megatron-MoE-ModelZoo, experts in forced balance, half of the scores",
        "https://github.com/yanring/Megatron-MoE-ModelZoo/blob/e8650517/best_practice/qwen3/readme.md",
    ),
    "core": (
        "Megatron-Core 0.9, number of GPUs not stated",
        "https://docs.nvidia.com/megatron-core/developer-guide/latest/api-guide/moe.html",
    ),
    "megatron": (
        "Narayanan et al., section 5.1, what is computed again counted in",
        "https://arxiv.org/abs/2104.04473",
    ),
}  # fmt: skip
QUESTIONS = (
    Question("llama3.1-8b", 8192, 16, "dgx-h100", 8, published=Published("dp8, FSDP", "titan", tokens_per_s=6667)),
    Question(
        "llama3.1-8b",
        131072,
        2,
        "dgx-h100",
        8,
        "fp8",
        published=Published("dp2, cp4, FSDP", "titan", tokens_per_s=1071),
    ),
    Question(
        "llama3.1-70b",
        8192,
        512,
        "dgx-h100",
        256,
        "fp8",
        published=Published("dp32, tp8, FSDP", "titan", tokens_per_s=876),
    ),
    Question("llama3.1-70b", 131072, 64, "dgx-h100", 256),
    Question("llama3.1-405b", 8192, 2048, "dgx-h100", 8192, published=Published("dp64, tp8, pp16", "llama", 430)),
    Question("llama3.1-405b", 8192, 2048, "dgx-h100", 16384, published=Published("dp128, tp8, pp16", "llama", 400)),
    Question(
        "llama3.1-405b", 131072, 128, "dgx-h100", 16384, published=Published("dp8, tp8, cp16, pp16", "llama", 380)
    ),
    Question(
        "deepseek-v3",
        4096,
        15360,
        "dgx-h100",
        2048,
        "fp8",
        published=Published("pp16, ep64", "deepseek", 432),
    ),
    Question(
        "qwen3-235b-a22b",
        4096,
        2048,
        "dgx-h100",
        256,
        published=Published("dp16, tp2, pp8, vpp4, ep32", "zoo", 276, formula="megatron_core"),
    ),
    Question(
        "qwen3-235b-a22b",
        131072,
        256,
        "dgx-h100",
        256,
        published=Published("tp4, cp8, pp8, vpp4, ep8", "zoo", 389, formula="megatron_core"),
    ),
    Question("mixtral-8x7b", 4096, 256, "dgx-h100", 64, published=Published("", "core", 468, formula="megatron_core")),
    Question("llama3.1-8b", 8192, 16, "dgx-b200", 8),
    Question("llama3.1-8b", 131072, 2, "dgx-b200", 8),
    Question("llama3.1-70b", 8192, 512, "dgx-b200", 256),
    Question("llama3.1-70b", 131072, 64, "dgx-b200", 256),
    Question("llama3.1-405b", 8192, 2048, "dgx-b200", 8192),
    Question("llama3.1-405b", 131072, 128, "dgx-b200", 8192),
    Question("deepseek-v3", 4096, 15360, "dgx-b200", 2048),
    Question("qwen3-235b-a22b", 4096, 2048, "dgx-b200", 256),
    Question("mixtral-8x7b", 4096, 256, "dgx-b200", 64),
    Question("gpt3-175b", 2048, 1536, "dgx-a100-80gb", 1024, stack="megatron"),
    Question(
        "gpt3-175b",
        2048,
        1536,
        "dgx-a100-80gb",
        1024,
        stack="megatron",
        fix={"recompute": "full", "sp": False},
        published=Published("full recompute", "megatron", 140, formula="megatron_eq3_k4"),
    ),
)


def row(question: Question) -> str:
    """The table's row of one question."""
    workload = workload_of(question.model, question.global_batch, seq=question.seq_len)
    best = plan(
        question.model, question.cluster, question.global_batch, seq=question.seq_len, devices=question.devices,
        stack=question.stack, fix={"precision": question.precision, **question.fix}, top=1,
    ).best  # fmt: skip
    said = UNKNOWN
    if question.published:
        said = _said(question.published, workload, best)
    device = question.cluster.removeprefix("dgx-").split("-")[0].upper()
    return (
        f"| {question.model}, {question.seq_len:,}, {question.global_batch:,} | {question.devices:,} {device} | "
        f"{best.layout} | {best.tflops:.0f}, {best.mfu:.0%} | {said} |"
    )


def _said(published: Published, workload: Workload, best: Entry) -> str:
    """What was published, counted as the planner counts; in brackets what was printed."""
    printed, theirs = f"{published.tokens_per_s:,.0f} tokens/s", published.tflops
    if published.tokens_per_s:
        theirs = best.tflops * published.tokens_per_s / (best.tokens_per_s / best.devices)
    elif published.formula != OWN_FORMULA:
        by = (iteration_flops(workload, best.layout.tp, formula) for formula in (OWN_FORMULA, published.formula))
        printed, theirs = f"{theirs:.0f}", theirs * next(by) / next(by)
    else:
        printed = ""
    details = "; ".join(filter(None, (printed, published.layout, published.source)))
    return f"{theirs:.0f} ({details})"


def main() -> None:
    """Write the table, by itself and into the page."""
    told = "; ".join(f"{word}: [{what}]({where})" for word, (what, where) in SOURCES.items())
    table = "\n".join((*HEAD, *map(row, QUESTIONS), "", f"Sources: {told}."))
    RESULTS.write_text(f"# Answers\n\n{table}\n", encoding="utf-8")
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}", encoding="utf-8")
    print(table)


if __name__ == "__main__":
    main()
