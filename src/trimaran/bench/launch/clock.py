"""The processor's clock, capped while a trial runs and given back afterwards."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trimaran.files.catalogue import write_atomically
from trimaran.nouns.noun import TrimaranError

_CPUS = Path("/sys/devices/system/cpu")
_KEPT = Path("/run/trimaran-clock.json")
_KHZ_PER_GHZ = 1e6


@contextmanager
def capped_clock(clock_ghz: float | None, cpus: Path = _CPUS, kept: Path = _KEPT) -> Iterator[None]:
    """Cap every core at `clock_ghz` inside the block (None: as it is).

    What was before lies in `kept` meanwhile, with the process's number: whoever comes after a process that was killed
    inside the block gives it back. Raises TrimaranError where the system has no such control, keeps it to itself, or
    cannot go there.
    """
    with contextlib.suppress(PermissionError):  # who may not read it may not set the clock either
        _give_back(kept, of_ended_process=True)
    if clock_ghz is None:
        yield
        return
    files = sorted(cpus.glob("cpu[0-9]*/cpufreq/scaling_max_freq"))
    if not files:
        raise TrimaranError(f"clock_ghz {clock_ghz:g}: this machine gives no control over its clock: drop clock_ghz")
    try:
        before = {str(file): file.read_text() for file in files}
        write_atomically(kept, json.dumps({"process": os.getpid(), "before": before}))
    except OSError as error:
        raise TrimaranError(
            f"clock_ghz {clock_ghz:g}: {kept} cannot be written ({error.strerror}): run as root"
        ) from None
    try:
        for file in files:
            _set(file, clock_ghz)
        yield
    finally:
        _give_back(kept)


def _give_back(file: Path, *, of_ended_process: bool = False) -> None:
    try:
        kept = json.loads(file.read_text())
    except FileNotFoundError:
        return
    if of_ended_process and Path("/proc", str(kept["process"])).exists():
        return
    for name, text in kept["before"].items():
        if Path(name).read_text() != text:
            Path(name).write_text(text)
    file.unlink()


def _set(file: Path, clock_ghz: float) -> None:
    low, high = (int((file.parent / name).read_text()) for name in ("cpuinfo_min_freq", "cpuinfo_max_freq"))
    wanted = round(clock_ghz * _KHZ_PER_GHZ)
    if not low <= wanted <= high:
        raise TrimaranError(
            f"clock_ghz {clock_ghz:g} is not between this machine's {low / _KHZ_PER_GHZ:g} and "
            f"{high / _KHZ_PER_GHZ:g} GHz: change it"
        )
    try:
        file.write_text(str(wanted))
    except OSError as error:
        raise TrimaranError(
            f"clock_ghz {clock_ghz:g}: {file} cannot be written ({error.strerror}): run as root or drop clock_ghz"
        ) from None
