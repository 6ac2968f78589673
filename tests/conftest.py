"""Settings of the whole suite."""

import contextlib

from paceline.core.threads import limit_openmp_spin

limit_openmp_spin()  # as the command line does, before any test imports torch

with contextlib.suppress(ImportError):  # the tests for a GPU run on machines without hypothesis, too
    from hypothesis import settings

    settings.register_profile("paceline", deadline=None)  # a shared core may stall any single example
    settings.load_profile("paceline")
