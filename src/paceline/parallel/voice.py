"""One mistake, one line, however many processes torchrun started. No torch: most mistakes are found without it."""

import contextlib
import os
from collections.abc import Iterator

from paceline.core.errors import PacelineError


@contextlib.contextmanager
def one_voice() -> Iterator[None]:
    """An error that leaves the block says by `told` whether the first rank speaks of it."""
    try:
        yield
    except PacelineError as error:
        if error.told is None and "LOCAL_RANK" in os.environ:
            from paceline.parallel.meeting import tell_before_meeting

            tell_before_meeting(error)
        raise
