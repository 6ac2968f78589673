"""One mistake, one line, however many processes torchrun started. No torch: most mistakes are found without it."""

import contextlib
import os
from collections.abc import Iterator

from paceline.core.errors import PacelineError


@contextlib.contextmanager
def rank0_errors() -> Iterator[None]:
    """An error that leaves the block says by `told` whether rank 0 reports it."""
    try:
        yield
    except PacelineError as error:
        if error.told is None and "LOCAL_RANK" in os.environ:
            from paceline.parallel.rendezvous import report_before_rendezvous

            report_before_rendezvous(error)
        raise
