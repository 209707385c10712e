"""What a Slurm script's `#SBATCH` lines say of nodes and devices."""

from __future__ import annotations

import re

_LINE = re.compile(r"^#SBATCH\s(.*)$", re.MULTILINE)
_NODES = re.compile(r"(?:^|\s)(?:--nodes(?:=|\s+)|-N\s*)(\d{1,6})\b")
# The first that is stated counts.
_PER_NODE = (
    re.compile(r"--gpus-per-node(?:=|\s+)(?:[\w-]+:)?(\d{1,3})\b"),
    re.compile(r"--gres(?:=|\s+)gpu:(?:[\w-]+:)?(\d{1,3})\b"),
    re.compile(r"--ntasks-per-node(?:=|\s+)(\d{1,3})\b"),
)


def nodes_of(script: str) -> tuple[int | None, int | None]:
    """Nodes, and devices or else tasks of each; None for what the directives do not state."""
    stated = [line.partition(" #")[0] for line in _LINE.findall(script)]
    nodes = _last(_NODES, stated)
    return nodes, next((number for kind in _PER_NODE if (number := _last(kind, stated))), None)


def _last(pattern: re.Pattern[str], lines: list[str]) -> int | None:
    found = [match for line in lines for match in pattern.findall(line)]
    return int(found[-1]) if found else None
