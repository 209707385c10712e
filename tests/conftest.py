"""What holds for all tests."""

import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

# a busy machine may take its time over one example
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")

# a shell's background jobs ignore Ctrl-C, and so would the programs that tests start from one
signal.signal(signal.SIGINT, signal.default_int_handler)


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
