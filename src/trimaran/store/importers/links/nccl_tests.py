"""Output of NVIDIA's nccl-tests (also RCCL's): the table that it prints, or the JSON that `-J` writes since 2.17.

Its size is that of the whole tensor, its bus bandwidth the size over time by a factor of the operation
(doc/PERFORMANCE.md of NVIDIA/nccl-tests): what a ring moves over each link.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls

from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.text import counted
from trimaran.store.importers.links.measured_link import MeasuredLink, StartUp

NAME = "nccl-tests"


@dataclass(frozen=True)
class Operation:
    """One program: bytes over each link over the tensor's, for n ranks; how often its first byte goes around (0: not).

    `redops` are what its column redop may hold; sends had a sum there in older versions. `rooted`: it has a root.
    """

    factor: Callable[[int], float]
    passes: int
    redops: tuple[str, ...]
    rooted: bool = False


OPERATIONS = {
    "all_reduce": Operation(lambda n: 2 * (n - 1) / n, 2, ("sum",)),
    "all_gather": Operation(lambda n: (n - 1) / n, 1, ("none",)),
    "reduce_scatter": Operation(lambda n: (n - 1) / n, 1, ("sum",)),
    "broadcast": Operation(lambda n: 1.0, 1, ("none",), rooted=True),
    "reduce": Operation(lambda n: 1.0, 1, ("sum",), rooted=True),
    "sendrecv": Operation(lambda n: 1.0, 0, ("none", "sum")),
    "alltoall": Operation(lambda n: (n - 1) / n, 0, ("none",)),
}
_HEADER = re.compile(r"size\s+count\s+type\s+redop\s+(root\s+)?(?:cpu)?time\s+algbw\s+busbw")
_RANK = re.compile(r"Rank\s+(\d+)\s+(?:Group\s+(\d+)\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device\s+\d+")
_BEGUN = r"(?:^|[:>\s])(\d+)[ \t]+(\d+)[ \t]+([a-z]\w*)[ \t]+([a-z]+)"
_FIGURES_BEHIND = r"((?:[ \t]+(?:[\d.]+(?:e[+-]?\d+)?|N/A|nan|inf))+)"
_ROW = re.compile(rf"{_BEGUN}[ \t]+(-?\d+){_FIGURES_BEHIND}")
# Until 2022 only the tables of operations with a root had a column of it.
_ROW_WITHOUT_ROOT = re.compile(rf"{_BEGUN}(){_FIGURES_BEHIND}")
_PROGRAM = re.compile(r"\b(\w+?)_perf(?:_mpi)?\b")
_OUT_OF_BOUNDS = re.compile(r"Out of bounds values\s*:\s*(\d+)")
_FIGURES, _PER_ITERATION = 4, 4


@dataclass(frozen=True)
class _Point:
    """One time of one size: microseconds, bandwidths in GB/s, wrong elements (0: none, or not counted)."""

    size: float
    time_us: float
    algbw: float
    busbw: float
    wrong: float
    redop: str
    root: str


def recognises(text: str) -> bool:
    """Whether this is such a table, or such JSON."""
    return bool(_HEADER.search(text)) or ('"nccl_version"' in text and '"results"' in text)


def read(text: str, path: Path) -> MeasuredLink:
    """The link of a table. Raises TrimaranError, in one line that says what to do, where it tells none."""
    ranks = _RANK.findall(text)
    hosts = [host for _, _, host in ranks]
    text = _without_debug_lines(text, hosts)
    headers = _HEADER.findall(text)
    if not headers:
        raise TrimaranError(f"{path} holds no table of nccl-tests: give its whole output")
    if len(headers) > 1:
        raise TrimaranError(f"{path} holds {len(headers)} tables: give each a file of its own")
    if bounds := _OUT_OF_BOUNDS.search(text):
        _refuse_wrong(path, float(bounds[1]))
    pattern = _ROW if headers[0] else _ROW_WITHOUT_ROOT
    points = [point for row in pattern.finditer(text) for point in _points(row)]
    programs = {name for name in _PROGRAM.findall(text) if name in OPERATIONS}
    return _link(path, points, hosts, {group for _, group, _ in ranks}, programs)


def read_json(content: Any, path: Path) -> MeasuredLink:
    """The link of what `-J FILE.json` wrote. Raises TrimaranError as `read` does."""
    try:
        if errors := [error for error in content.get("errors", ()) if error]:
            raise TrimaranError(f"{path}: nccl-tests ended with {errors[0]!r}: run it again")
        devices = content["config"]["devices"]
        points = [
            _Point(
                float(row["size"]), float(figures.get("time", figures.get("cpu_time"))), float(figures["alg_bw"]),
                float(figures["bus_bw"]), float(figures["nwrong"] or 0), str(row["redop"]), str(row["root"]).strip(),
            )
            for row in content["results"]
            for figures in (row.get("out_of_place"), row.get("in_place"))
            if figures
        ]  # fmt: skip
        words = [*content["args"], *(row.get("experiment_name") or "" for row in content["results"])]
        hosts = [str(device["hostname"]) for device in devices]
        groups = {str(device["group"]) for device in devices}
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise TrimaranError(f"{path} lacks what nccl-tests writes with -J ({error}): give the whole file") from None
    programs = {name for word in words for name in _PROGRAM.findall(str(word)) if name in OPERATIONS}
    return _link(path, points, hosts, groups, programs)


def _without_debug_lines(text: str, hosts: Sequence[str]) -> str:
    """The text without NCCL's own lines, which NCCL_DEBUG puts between a row's size and its times."""
    if not hosts:
        return text
    names = "|".join(sorted((re.escape(host) for host in set(hosts)), key=len, reverse=True))
    return re.sub(rf"(?:\[[\d :.-]+\] )?(?:{names})[\w.-]*:\d+:\d+ (?:\[\w+\] )?[^\n]*\bNCCL [^\n]*\n", "", text)


def _points(row: re.Match[str]) -> list[_Point]:
    """Out of place and in place; with `-I 1` four figures of single iterations stand behind each of them."""
    figures = [float(word) if word != "N/A" else 0.0 for word in row[6].split()]
    step = _FIGURES + (_PER_ITERATION if len(figures) >= 2 * (_FIGURES + _PER_ITERATION) else 0)
    taken = [figures[begin : begin + _FIGURES] for begin in range(0, 2 * step, step)]
    whole = [four for four in taken if len(four) == _FIGURES]
    return [
        _Point(float(row[1]), time, algbw, busbw, wrong, row[4], row[5] or "-1") for time, algbw, busbw, wrong in whole
    ]


def _link(
    path: Path, points: Sequence[_Point], hosts: Sequence[str], groups: set[str], programs: set[str]
) -> MeasuredLink:
    if not hosts:
        raise TrimaranError(
            f"{path} has no lines '#  Rank 0 ... on HOST device 0': give the whole output of nccl-tests"
        )
    points = [point for point in points if 0 < point.size < math.inf]
    if not points:
        raise TrimaranError(f"{path} has no row of sizes and times: give the whole output of nccl-tests")
    if len(groups) > 1:
        raise TrimaranError(
            f"{path} has {len(groups)} groups of ranks that ran side by side: run it without NCCL_TESTS_SPLIT"
        )
    _refuse_wrong(path, sum(point.wrong for point in points if point.wrong >= 1))
    counts = Counter(hosts)
    if len(hosts) == 1:
        raise TrimaranError(
            f"{path} ran on one device of {hosts[0]}: run it on two or more, built with MPI=1 for hosts"
        )
    if len(set(counts.values())) > 1:
        (first, most), (last, least) = counts.most_common()[0], counts.most_common()[-1]
        raise TrimaranError(f"{path} ran {most} ranks on {first} and {least} on {last}: run as many on each")
    operation = _operation(path, points, len(hosts), programs)
    per_host = counts[hosts[0]]
    passes, factor = OPERATIONS[operation].passes, OPERATIONS[operation].factor(len(hosts))
    if len(counts) > 1 and per_host > 1 and operation == "sendrecv":
        raise TrimaranError(
            f"{path}: of {per_host} ranks a host, sendrecv_perf sends to the next host from one alone: run "
            f"all_reduce_perf, or sendrecv_perf with one rank on each host"
        )
    if len(counts) > 1 and operation == "alltoall":
        # what all ranks of a host send to the others over its one link; ranks that share the host need none
        factor = per_host * (len(hosts) - per_host) / len(hosts)
    start_us, us_a_byte, misfit = _fit(path, points)
    gb_s = factor / us_a_byte / 1e3
    smallest, largest = min(point.size for point in points), max(point.size for point in points)
    if start_us > largest * us_a_byte:
        raise TrimaranError(
            f"{path}: even {_bytes(largest)} take less time to send than to start: run larger sizes, as -e 1G"
        )
    tells_delay = start_us >= smallest * us_a_byte
    no_delay = f"sizes from {_bytes(smallest)} tell no delay, and the file's stands: run from -b 8 for it"
    ran = f"{counted(len(counts), 'host')} of {per_host}"
    return MeasuredLink(
        file=path.name,
        tool=NAME,
        said=f"{operation}_perf, {ran}, {len({p.size for p in points})} sizes met within {misfit:.0%} on average",
        hosts=tuple(counts),
        per_host=per_host,
        there_gbps=gb_s * 8,
        back_gbps=gb_s * 8,
        start_up=StartUp(start_us, max(passes, 1), len(counts), per_host, passes > 0) if tells_delay else None,
        bus_gb_s=gb_s if len(counts) > 1 and passes and not OPERATIONS[operation].rooted else 0.0,
        remarks=() if tells_delay else (no_delay,),
    )


def _refuse_wrong(path: Path, wrong: float) -> None:
    if wrong:
        raise TrimaranError(
            f"{path} has {wrong:g} wrong results: what is sent does not arrive whole; mend the machines, then measure"
        )


def _operation(path: Path, points: Sequence[_Point], ranks: int, programs: set[str]) -> str:
    """The operation: as the file names it, or by its columns `redop` and `root` and by what busbw is over algbw."""
    if len(programs) == 1:
        return next(iter(programs))
    best = max(points, key=lambda point: point.algbw)
    ratio = best.busbw / best.algbw if best.algbw else 0.0
    fits = [
        name
        for name, known in OPERATIONS.items()
        if known.rooted == (best.root != "-1")
        and best.redop in known.redops
        and abs(known.factor(ranks) - ratio) < 0.02
    ]
    if len(fits) == 1:
        return fits[0]
    may_be = ", ".join(f"{name}_perf" for name in fits or OPERATIONS)
    raise TrimaranError(f"{path} does not say which program ran: put its command line above the table, one of {may_be}")


def _fit(path: Path, points: Sequence[_Point]) -> tuple[float, float, float]:
    """Microseconds to start and for each byte, both not negative, and the mean relative error of the times.

    Least squares of time = start + size x slope, in relative errors, so that small sizes tell the start and large
    ones the slope.
    """
    sizes = np.array([point.size for point in points])
    times = np.array([point.time_us for point in points])
    if len(set(sizes)) < 2:
        raise TrimaranError(
            f"{path} has one size, {_bytes(sizes[0])}, which cannot tell delay from bandwidth: run -b 8 -e 1G -f 2"
        )
    if not np.all(np.isfinite(times)) or not np.all(times > 0):
        raise TrimaranError(f"{path} has a time of {times.min():g} us, so no bandwidth: run more iterations, as -n 100")
    (start_us, us_a_byte), _ = nnls(np.stack([1 / times, sizes / times], axis=1), np.ones(len(times)))
    if not us_a_byte > 0:
        raise TrimaranError(
            f"{path}: times do not grow with size, so there is no bandwidth: run larger sizes, as -e 1G"
        )
    misfit = np.abs((start_us + sizes * us_a_byte) / times - 1).mean()
    return float(start_us), float(us_a_byte), float(misfit)


def _bytes(size: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"
