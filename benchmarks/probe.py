"""Whether a probe repeats: this machine measured twice, figure by figure.

    python benchmarks/probe.py [--full]

Wants a machine that does nothing else; where it was busy, the report says so. Writes benchmarks/results/probe.md.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

from trimaran.bench.trial.machine import hardware
from trimaran.files.catalogue import load_cluster, write_atomically
from trimaran.nouns.cluster import Cluster
from trimaran.report.tables import Field, render
from trimaran.study.torch_programs import run_program

RESULTS = Path(__file__).parent / "results" / "probe.md"
GOAL = 0.05
FIELDS = (
    Field("what", "Figures", left=True), Field("count", "Number"), Field("median", "Differ, median", ".1f", "%"),
    Field("within", "Within 5%", ".0f", "%"), Field("worst", "Worst", ".1f", "%"), Field("case", "Which", left=True),
)  # fmt: skip


def figures(cluster: Cluster) -> Iterator[tuple[str, str, float]]:
    """Kind, case and value of everything measured."""
    for rate in cluster.matmul:
        yield "matrix products", f"{rate.precision} {rate.m}x{rate.n}x{rate.k}", rate.tflops
    for one in cluster.attention:
        case = f"{one.precision} {one.batch_heads} heads of {one.head_dim}, sequence {one.seq_len}"
        yield "attention", f"{case}, forward", one.forward_us
        yield "attention", f"{case}, backward", one.backward_us
    yield "memory bandwidth", "", cluster.device.mem_bandwidth_gb_s
    yield "overhead of an operator", "", cluster.device.op_overhead_us
    for op in cluster.collectives:
        kind = "sends" if op.op == "send" else "collectives"
        yield kind, f"{op.op} of {op.bytes // 1024} KiB, {op.ranks} ranks", op.time_us
    for slower in cluster.contention:
        for name in ("matmul", "memory", "overhead"):
            yield "slots working at once", f"{name}, {slower.ranks} ranks", getattr(slower, name)


def compared(first: Cluster, second: Cluster) -> list[dict[str, object]]:
    """One line for each kind of figure."""
    by_kind: dict[str, list[tuple[float, str]]] = {}
    for (kind, case, a), (_, _, b) in zip(figures(first), figures(second), strict=True):
        by_kind.setdefault(kind, []).append((max(a, b) / min(a, b) - 1, case))
    lines: list[dict[str, object]] = []
    for kind, off in by_kind.items():
        worst, case = max(off)
        within = sum(by <= GOAL for by, _ in off) / len(off)
        median = statistics.median(by for by, _ in off)
        lines.append(
            {"what": kind, "count": len(off), "median": 100 * median, "within": 100 * within, "worst": 100 * worst,
             "case": case}
        )  # fmt: skip
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="all sizes and repeats; else as `probe --quick`")
    full = parser.parse_args().full
    with tempfile.TemporaryDirectory() as folder:
        probes = []
        for name in ("first", "second"):
            path = Path(folder) / f"{name}.toml"
            run_program("trimaran.probe", [*([] if full else ["--quick"]), "--slots", "2", "-o", str(path)], "probe")
            probes.append(load_cluster(str(path)))
    report = "\n".join(
        [
            "# One machine probed twice\n",
            f"`python benchmarks/probe.py{' --full' if full else ''}` on {hardware()}; 2 slots.\n",
            render(compared(*probes), FIELDS, "markdown"),
            *[f"\n{probe.name}: {probe.source}" for probe in probes],
        ]
    )
    write_atomically(RESULTS, report + "\n")
    print(report)


if __name__ == "__main__":
    main()
