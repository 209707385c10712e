"""What the tests on a real Slurm ask of it, and within which limits their trials run there."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

from trimaran.bench.watch.limits import Limits
from trimaran.nouns.measurement import Measurement

Run = Callable[..., Measurement]
LIMITS = Limits(timeout_s=60, start_s=30, hang_s=3, peers_s=1)
SUBMITS = pytest.mark.parametrize("submit", ["allocation", "job"])


def squeue() -> list[str]:
    done = subprocess.run(["squeue", "--noheader", "--format=%i %T"], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()
