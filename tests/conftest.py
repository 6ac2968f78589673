"""Settings of the whole suite."""

from hypothesis import settings

settings.register_profile("paceline", deadline=None)  # a shared core may stall any single example
settings.load_profile("paceline")
