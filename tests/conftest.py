"""Settings of the whole suite."""

import contextlib

with contextlib.suppress(ImportError):  # the tests for a GPU run on machines without hypothesis, too
    from hypothesis import settings

    settings.register_profile("paceline", deadline=None)  # a shared core may stall any single example
    settings.load_profile("paceline")
