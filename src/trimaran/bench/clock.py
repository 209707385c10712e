"""The processor's clock, capped while a trial runs and given back afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trimaran.noun import TrimaranError

_CPUS = Path("/sys/devices/system/cpu")
_KHZ_PER_GHZ = 1e6


@contextmanager
def capped_clock(clock_ghz: float | None, cpus: Path = _CPUS) -> Iterator[None]:
    """Cap every core at `clock_ghz` inside the block (None: as it is).

    Raises TrimaranError where the system has no such control, keeps it to itself, or cannot go there.
    """
    if clock_ghz is None:
        yield
        return
    files = sorted(cpus.glob("cpu[0-9]*/cpufreq/scaling_max_freq"))
    if not files:
        raise TrimaranError(f"clock_ghz {clock_ghz:g}: this machine gives no control over its clock: drop clock_ghz")
    before = [file.read_text() for file in files]
    try:
        for file in files:
            _set(file, clock_ghz)
        yield
    finally:
        for file, text in zip(files, before, strict=True):
            if file.read_text() != text:
                file.write_text(text)


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
