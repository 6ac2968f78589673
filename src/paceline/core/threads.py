"""How long a thread of torch's CPU kernels looks for work before it sleeps."""

import os

SPINS = "5000"
"""By default a thread spins for milliseconds at every barrier, and one other busy process makes a step many times
slower; sleeping sooner costs 3 % when alone."""


def limit_openmp_spin() -> None:
    """To be called before torch is first imported, which reads it then. What the user has set stays."""
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
