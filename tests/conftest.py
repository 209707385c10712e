"""What holds for all tests."""

import signal

from hypothesis import settings

# a busy machine may take its time over one example
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")

# a shell's background jobs ignore Ctrl-C, and so would the programs that tests start from one
signal.signal(signal.SIGINT, signal.default_int_handler)
