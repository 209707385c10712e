"""How long the command line takes over a hundred thousand rows: import, merge, list, export.

Run by `make bench`. Writes benchmarks/results/rows.md.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from _others import others_since
from trimaran.bench.trial.machine import hardware
from trimaran.nouns.measurement import Measurement
from trimaran.protocol.host import Work
from trimaran.store import export_csv

RESULTS = Path(__file__).parent / "results" / "rows.md"
ROWS = 100_000
ROUNDS = 5
GOAL = "20 s, 500 MiB"
# The command line, which tells in its last line what it took: wall and processor seconds, peak memory in MiB.
MEASURED = """
import re, resource, sys, time
began = time.perf_counter()
from trimaran.cli import main
try:
    main()
finally:
    wall_s, used = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    # its own: the peak that `resource` tells is that of the program that started it, where that is higher
    peak_kib = re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]
    print(wall_s, used.ru_utime + used.ru_stime, int(peak_kib) / 1024, file=sys.stderr)
"""


def table(path: Path) -> None:
    """Two hundred documents of 500 rows each, which differ in time alone."""
    shape = {"layers": 24, "hidden": 2048, "heads": 16, "seq_len": 2048, "vocab": 50_257, "mbs": 1, "gbs": 8}
    rows = (
        Measurement.model_validate(
            {**shape, "source": f"document {n // 500}", "table": "T1", "row": str(n % 500), "sec_per_it": 1 + n / ROWS}
        )
        for n in range(ROWS)
    )
    export_csv(rows, path)


def commands(folder: Path) -> Iterator[tuple[str, list[str]]]:
    one, other = str(folder / "one.sqlite"), str(folder / "other.sqlite")
    yield "`import` of a CSV", ["import", str(folder / "rows.csv"), "--into", one]
    yield "`store merge` into a new store", ["store", other, "merge", one]
    yield "`store list`", ["store", one, "list"]
    yield "`store export` as CSV", ["store", one, "export", "-o", str(folder / "out.csv")]
    yield "`store export` as Parquet", ["store", one, "export", "-o", str(folder / "out.parquet")]


def measured(arguments: list[str]) -> list[float]:
    """Wall seconds, processor seconds, MiB of one run."""
    done = subprocess.run([sys.executable, "-c", MEASURED, *arguments], capture_output=True, text=True, check=True)
    return [float(word) for word in done.stderr.splitlines()[-1].split()]


def main() -> None:
    seen: dict[str, list[list[float]]] = defaultdict(list)
    began = Work.so_far()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        table(folder / "rows.csv")
        for _ in range(ROUNDS):  # what comes to the machine's other work meets all verbs alike
            for what, arguments in commands(folder):
                seen[what].append(measured(arguments))
            for store in folder.glob("*.sqlite*"):
                store.unlink()
    lines = [
        f"# {ROWS:,} rows",
        "",
        f"`python benchmarks/rows.py` on {hardware()}; medians of {ROUNDS} rounds, of which each runs every command "
        f"once. {others_since(began)}",
        "",
        "| command | wall | slowest | processor | peak memory | goal |",
        "| --- | --: | --: | --: | --: | --: |",
    ]
    for what, runs in seen.items():
        wall_s, cpu_s, mib = np.median(runs, axis=0)
        slowest_s = max(run[0] for run in runs)
        lines.append(f"| {what} | {wall_s:.1f} s | {slowest_s:.1f} s | {cpu_s:.1f} s | {mib:.0f} MiB | {GOAL} |")
    text = "\n".join(lines)
    print(text)
    RESULTS.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
