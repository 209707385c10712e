"""Llama-2-7B in fp8 on H100s from 4,096 to 1,048,576 tokens a sequence: TFLOPs predicted beside those published.

Run by `python benchmarks/long_sequences.py`; writes benchmarks/results/long_sequences.md. Published by NVIDIA for NeMo
24.03.01 (NeMo at 8cfedd720346, docs/source/performance/performance_long_sequence.md): degrees and TFLOPs alone, so
that micro-batch, ZeRO and recompute are as the search chooses them. Nor is it said whose attention kernel ran, and long
sequences are mostly attention. Transformer Engine of those months takes cuDNN's on Hopper unless it is told otherwise
(v1.3 to v1.6, transformer_engine/pytorch/attention.py, "Select FusedAttention on sm90"), as it does today, but a cuDNN
of those months, whose rate nobody has published. So predictions stand beside each other for cuDNN's of today, as the
stack has it, and for FlashAttention-2's, at the rates that are published of both (arXiv 2407.08608).
"""

from __future__ import annotations

from pathlib import Path

from trimaran.api import plan
from trimaran.files.catalogue import load_stack

RESULTS = Path(__file__).parent / "results" / "long_sequences.md"
# Tokens a sequence, global batch, DP, TP, PP, CP, TFLOPs of one device.
PUBLISHED = (
    (4096, 1024, 4, 1, 1, 1, 768),
    (8192, 512, 4, 1, 2, 1, 730),
    (16384, 256, 8, 2, 1, 1, 660),
    (32768, 128, 8, 2, 1, 2, 610),
    (65536, 64, 8, 4, 1, 2, 574),
    (131072, 32, 8, 4, 1, 4, 555),
    (262144, 16, 8, 4, 1, 8, 549),
    (524288, 8, 4, 8, 1, 16, 549),
    (1048576, 4, 4, 8, 1, 32, 536),
)


def rows() -> list[str]:
    """A row of the table for each length; `of the first` says how TFLOPs fall with it."""
    today = load_stack("megatron-core")
    stacks = [today, today.model_copy(update={"flash_kernel": "flash"})]
    lines, first = [], list[float]()
    for seq, batch, dp, tp, pp, cp, measured in PUBLISHED:
        degrees = {"dp": dp, "tp": tp, "pp": pp, "cp": cp, "precision": "fp8"}
        devices = dp * tp * pp * cp
        found = [
            plan("llama2-7b", "dgx-h100", batch, seq=seq, devices=devices, stack=stack, top=1, fix=degrees).best
            for stack in stacks
        ]
        first = first or [each.tflops for each in found]
        predicted = " | ".join(f"{each.tflops:.0f}" for each in found)
        falls = " | ".join(f"{each.tflops / begun:.2f}" for each, begun in zip(found, first, strict=True))
        lines.append(
            f"| {seq:,} | {found[0].layout} | {measured} | {predicted} | {measured / PUBLISHED[0][-1]:.2f} | {falls} | "
            f"{found[0].mem_gib:.1f} |"
        )
    return lines


def main() -> None:
    """Write the table."""
    head = (
        "# Long sequences",
        "Llama-2-7B in fp8 on H100s, uncalibrated: `python benchmarks/long_sequences.py`. NeMo 24.03.01 published",
        "degrees and TFLOPs; the rest of each layout is what the search chooses. Which attention kernel ran is not",
        "published. Transformer Engine of those months took cuDNN's on Hopper unless told otherwise (v1.3 to v1.6,",
        "`pytorch/attention.py`), of a cuDNN whose rate nobody has published: predicted are cuDNN's of today, and",
        "FlashAttention-2's.",
        "",
        "| tokens | layout | TFLOPs published | cuDNN | FlashAttention-2 | of the first, published | cuDNN | "
        "FlashAttention-2 | GiB predicted |",
        "| --- | --- | --: | --: | --: | --: | --: | --: | --: |",
    )
    RESULTS.write_text("\n".join((*head, *rows())) + "\n", encoding="utf-8")
    print(RESULTS.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
