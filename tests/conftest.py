"""What holds for all tests."""

import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# a busy machine may take its time over one example
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")

# a shell's background jobs ignore Ctrl-C, and so would the programs that tests start from one
signal.signal(signal.SIGINT, signal.default_int_handler)

# What a test usually takes; one that may take longer than others says so, and takes a part of that on a quiet machine.
USUAL_S, PART_OF_LIMIT = 5.0, 1 / 3


# Tests of the harness wait for schedulers, limits and faults, with ranks at work meanwhile; the others compute.
WAITING = "bench"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take longest come first: begun last, they would run alone when all else is done.

    One that waits comes before every two that compute: of several that wait at once, none would compute, or ranks of
    each run into time limits.
    """
    seconds: Counter[Path] = Counter()
    for item in items:
        limit = item.get_closest_marker("timeout")
        seconds[item.path] += limit.args[0] * PART_OF_LIMIT if limit else USUAL_S
    places: dict[Path, float] = {}
    for waits, apart in ((True, 2.0), (False, 1.0)):
        files = [file for file in seconds if (WAITING in file.parts) == waits]
        files.sort(key=lambda file: -seconds[file])
        places |= {file: number * apart for number, file in enumerate(files)}
    items.sort(key=lambda item: places[item.path])


@pytest.fixture(autouse=True)
def handlers_as_before() -> Iterator[None]:
    """Put back what a test, as by calling a verb in its own process, has made of the signals that end programs.

    A program that a later test starts would inherit an ignored Ctrl-C, and no signal could end it.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)
