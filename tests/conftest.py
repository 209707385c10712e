"""What holds for all tests."""

from hypothesis import settings

# a busy machine may take its time over one example
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")
