"""What layers keep for the backward, traced under FakeTensorMode at full size, beside the cost model's operators.

    python benchmarks/traced/run.py

Needs `make peers`. Writes benchmarks/results/traced.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from cases import (
    Traced,
    hugging_face_gpt2,
    hugging_face_llama,
    hugging_face_mixtral,
    loss_peak,
    loss_peak_over_tp,
    megatron_core,
    megatron_core_experts,
    torchtitan,
    torchtitan_over_tp,
    trimaran,
)

from trimaran.files.catalogue import load_model
from trimaran.operators.counts import forward_operations
from trimaran.operators.layer import layer_operators
from trimaran.operators.mixture import mixture_block
from trimaran.operators.operator import Operator, Part

RESULTS = Path(__file__).parents[1] / "results" / "traced.md"
PART_OF = {
    "attention norm": "norms", "MLP norm": "norms", "rotary angles": "attention", "attention residual": "residual",
    "MLP residual": "residual", "experts norm": "norms", "dispatch": "experts", "experts up": "experts",
    "experts activation": "experts", "experts down": "experts", "combine": "experts",
}  # fmt: skip
# What a layer of experts alone is not.
AROUND = ("experts norm", "MLP residual")
GOAL, MIB = 0.03, 2.0**20
HEAD = """| software | model | shape | part | traced MiB | operators MiB | off |
| --- | --- | --- | --- | --: | --: | --: |"""


def part_of(traced: Traced) -> Part:
    """The shape that was traced."""
    width = float(traced.dtype.itemsize)
    return Part(
        traced.model, traced.seq_len, traced.stack, traced.on_cpu, float(traced.tp), float(traced.mbs), traced.tp > 1,
        width, width,
    )  # fmt: skip


def operators_of(traced: Traced, part: Part) -> list[Operator]:
    """The operators that stand for what was traced."""
    if traced.only == "mixture":
        return [operator for operator in mixture_block(part) if operator.name not in AROUND]
    return list(layer_operators(part))


def predicted(traced: Traced) -> dict[str, float]:
    """Bytes that the operators of the same layer keep, by part."""
    part = part_of(traced)
    found: dict[str, float] = {}
    for operator in operators_of(traced, part):
        name = PART_OF.get(operator.name, operator.name)
        size = sum(float(tensor.size) for tensor in (*operator.inputs, *operator.inside))
        found[name] = found.get(name, 0.0) + size
    return found


def lines(traced: Traced) -> tuple[list[str], list[float]]:
    """The table's rows of one layer, and how far off each part is; parts under 1% of the layer are not scored."""
    measured, ours = traced.by_part(), predicted(traced)
    total = sum(measured.values())
    shape = f"b {traced.mbs}, s {traced.seq_len}, {str(traced.dtype)[6:]}"
    rows, errors = [], []
    for part in (*ours, "the layer"):
        here = total if part == "the layer" else measured.get(part, 0)
        there = sum(ours.values()) if part == "the layer" else ours[part]
        if max(here, there) < 0.001 * total:
            continue
        off = there / here - 1.0 if here else 1.0
        if max(here, there) >= 0.01 * total:
            errors.append(abs(off))
        rows.append(
            f"| {traced.software} | {traced.model.name} | {shape} | {part} | {here / MIB:.1f} | {there / MIB:.1f} | "
            f"{off:+.1%} |"
        )
    return rows, errors


def cases() -> list[Callable[[], Traced]]:
    """Every layer that is traced."""
    bf16, fp32 = torch.bfloat16, torch.float32
    llama, gpt = load_model("llama3-8b"), load_model("gpt3-1b3")
    return [
        lambda: torchtitan("llama3-8b", 2, 8192, bf16, fused=False),
        lambda: torchtitan("llama3-8b", 2, 8192, bf16, fused=True),
        lambda: torchtitan("llama3-70b", 1, 8192, bf16, fused=True),
        lambda: torchtitan_over_tp("llama3-8b", 2, 8192, bf16, 2),
        lambda: torchtitan_over_tp("llama3-70b", 2, 8192, bf16, 8),
        lambda: hugging_face_llama("llama3-8b", 2, 8192, bf16),
        lambda: hugging_face_llama("llama2-7b", 2, 4096, fp32),
        lambda: hugging_face_gpt2("gpt2-1b5", 4, 1024, bf16),
        lambda: hugging_face_gpt2("gpt2-1b5", 4, 1024, fp32),
        lambda: megatron_core("gpt3-1b3", 4, 2048),
        lambda: megatron_core_experts("qwen3-235b-a22b", 1024, 1024),
        lambda: trimaran(llama, 2, 8192, bf16),
        lambda: trimaran(gpt, 4, 2048, bf16),
        lambda: trimaran(gpt, 4, 2048, fp32, on_cpu=True),
        lambda: trimaran(llama, 1, 2048, fp32, on_cpu=True),
    ]


def main() -> None:
    """Trace every case, print the page and keep it."""
    rows, errors = [], []
    for case in cases():
        made, off = lines(case())
        print("\n".join(made), flush=True)
        rows += made
        errors += off
    mixtral = hugging_face_mixtral("mixtral-8x7b", 1, 4096, torch.bfloat16)
    made, off = lines(mixtral)
    rows, errors = rows + made, errors + off
    ours = forward_operations(layer_operators(part_of(mixtral)))
    plain, freed = (loss_peak(16384, 128256, frees_logits=frees) / (16384 * 128256) for frees in (False, True))
    shared = loss_peak_over_tp(16384, 128256, 8) / (16384 * 128256 / 8)
    within = sum(error <= GOAL for error in errors)
    RESULTS.write_text(
        "\n\n".join(
            (
                "# What layers keep for the backward, traced and counted",
                "Real model code at full size under FakeTensorMode, tensors counted by storage, parameters left out; "
                "attention and norms by the kernels that CUDA takes, but where a row says CPU. Fake tensors stand on "
                "the CPU, since PyTorch without CUDA has no device guard for CUDA ones: flash attention is called by "
                "its name, and the fused RMS norm keeps what derivatives.yaml says. Megatron-Core's "
                "fused softmax keeps its result alone; the fp32 copy of its fallback is left out. Made by `python "
                "benchmarks/traced/run.py`.",
                "\n".join((HEAD, *rows)),
                f"{within} of {len(errors)} parts of 1% of their layer or more are within {GOAL:.0%}.",
                f"torch's cross-entropy over bf16 logits holds {plain:.1f} bytes an element of them at its peak, "
                f"{freed:.1f} where the logits are let go before the backward (the operators: 14 and 12); "
                f"DTensor's over 8 shares of the vocabulary {shared:.1f} (the operators: 16).",
                f"The products of Mixtral's layer forward are {mixtral.operations / 1e12:.3f} TFLOP as PyTorch counts "
                f"them, {ours / 1e12:.3f} as the operators do: {ours / mixtral.operations - 1.0:+.1%}.",
            )
        )
        + "\n"
    )
    print(f"{within} of {len(errors)} parts are within {GOAL:.0%}; loss {plain:.2f}, {freed:.2f} bytes")


if __name__ == "__main__":
    main()
