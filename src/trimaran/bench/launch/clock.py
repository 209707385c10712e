"""The processor's clock, capped while a trial runs and given back afterwards."""

from __future__ import annotations

import fcntl
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

    The clock is the whole machine's: ranks under a cap have it for themselves, those without one share it, by a lock
    that ends with the process. What was before lies in `kept` meanwhile: whoever comes after a process that was killed
    inside the block gives it back. Raises TrimaranError where the system has no such control, keeps it to itself,
    cannot go there, or where other ranks of this machine run at another clock.
    """
    files = sorted(cpus.glob("cpu[0-9]*/cpufreq/scaling_max_freq"))
    if not files:
        if clock_ghz is not None:
            raise TrimaranError(
                f"clock_ghz {clock_ghz:g}: this machine gives no control over its clock: drop clock_ghz"
            )
        yield
        return
    lock = _lock(kept.with_suffix(".lock"), clock_ghz)
    try:
        _give_back(kept)
        if clock_ghz is None:
            yield
            return
        before = {str(file): file.read_text() for file in files}
        write_atomically(kept, json.dumps({"before": before}))
        try:
            for file in files:
                _set(file, clock_ghz)
            yield
        finally:
            _give_back(kept)
    finally:
        if lock is not None:
            os.close(lock)


def _lock(file: Path, clock_ghz: float | None) -> int | None:
    """Take the machine's clock, beside others (None) or alone; None where it cannot be and need not be taken."""
    try:
        lock = os.open(file, os.O_RDONLY | os.O_CREAT, 0o644)
    except OSError as error:
        if clock_ghz is None:
            return None  # nobody has capped this machine's clock since it was started
        raise TrimaranError(
            f"clock_ghz {clock_ghz:g}: {file} cannot be made ({error.strerror}): run as root or drop clock_ghz"
        ) from None
    try:
        fcntl.flock(lock, (fcntl.LOCK_SH if clock_ghz is None else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        if clock_ghz is None:
            raise TrimaranError(
                "this machine's clock is capped for a trial of another command (clock_ghz of its variant), and times "
                "would be those of that clock: run this again when it has ended"
            ) from None
        raise TrimaranError(
            f"clock_ghz {clock_ghz:g}: ranks of another command run on this machine and share its clock: run this "
            f"again when they have ended, or drop clock_ghz"
        ) from None
    return lock


def _give_back(kept: Path) -> None:
    """Set the clock to what it was before the cap that `kept` is of, if there is one."""
    if not kept.exists():
        return
    try:
        for name, text in json.loads(kept.read_text())["before"].items():
            if Path(name).read_text() != text:
                Path(name).write_text(text)
        kept.unlink(missing_ok=True)
    except OSError as error:
        raise TrimaranError(
            f"this machine's clock is still capped by a trial that was killed, and cannot be given back "
            f"({error.strerror}): run any trial as root, or set the clock yourself and remove {kept}"
        ) from None


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
