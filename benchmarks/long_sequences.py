"""Llama-2-7B in fp8 on H100s from 4,096 to 1,048,576 tokens a sequence: TFLOPs predicted beside those published.

Run by `python benchmarks/long_sequences.py`; writes benchmarks/results/long_sequences.md. Published by NVIDIA for NeMo
24.03.01 (NeMo at 8cfedd720346, docs/source/performance/performance_long_sequence.md): degrees and TFLOPs alone, so
that micro-batch, ZeRO and recompute are as the search chooses them.
"""

from __future__ import annotations

from pathlib import Path

from trimaran.api import plan

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
    lines, first = [], 0.0
    for seq, batch, dp, tp, pp, cp, measured in PUBLISHED:
        degrees = {"dp": dp, "tp": tp, "pp": pp, "cp": cp, "precision": "fp8"}
        found = plan(
            "llama2-7b", "dgx-h100", batch, seq=seq, devices=dp * tp * pp * cp, stack="megatron-core", top=1,
            fix=degrees,
        ).best  # fmt: skip
        first = first or found.tflops
        falls = f"{measured / PUBLISHED[0][-1]:.2f} | {found.tflops / first:.2f}"
        lines.append(f"| {seq:,} | {found.layout} | {measured} | {found.tflops:.0f} | {falls} | {found.mem_gib:.1f} |")
    return lines


def main() -> None:
    """Write the table."""
    head = (
        "# Long sequences",
        "Llama-2-7B in fp8 on H100s, uncalibrated: `python benchmarks/long_sequences.py`. NeMo 24.03.01 published",
        "degrees and TFLOPs; the rest of each layout is what the search chooses.",
        "",
        "| tokens | layout | TFLOPs published | predicted | of the first, published | predicted | GiB predicted |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    )
    RESULTS.write_text("\n".join((*head, *rows())) + "\n", encoding="utf-8")
    print(RESULTS.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
