"""GPT pre-training as fast as the hardware allows, and what each technique buys.

`import paceline` gives the names in `__all__`, which `paceline.library` explains. They are looked up when they are
used: importing the package imports nothing, so that help and version answer at once.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.library import (
        EvalRecord,
        PacelineError,
        Run,
        RunConfig,
        StepRecord,
        configure,
        load,
        presets,
        pretrain,
    )

__version__ = "0.1.0"
__all__ = [
    "EvalRecord",
    "PacelineError",
    "Run",
    "RunConfig",
    "StepRecord",
    "configure",
    "load",
    "presets",
    "pretrain",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    return getattr(import_module("paceline.library"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
