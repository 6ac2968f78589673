"""Settings of the whole suite."""

import contextlib
from collections.abc import Iterator

import pytest

from paceline.core.threads import limit_openmp_spin

limit_openmp_spin()  # as the command line does, before any test imports torch


@pytest.fixture(autouse=True, scope="module")
def no_plugins_of_other_modules() -> Iterator[None]:
    """Plug-ins stay loaded in a process; those of one module of tests would share names with those of another."""
    from paceline.settings.plugins import LOADED

    yield
    LOADED.clear()


with contextlib.suppress(ImportError):  # the tests for a GPU run on machines without hypothesis, too
    from hypothesis import settings

    settings.register_profile("paceline", deadline=None)  # a shared core may stall any single example
    settings.load_profile("paceline")
