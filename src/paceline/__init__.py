"""GPT pre-training as fast as the hardware allows, and what each technique buys.

`import paceline` gives the names in `paceline.library.__all__`. They are looked up when they are used: importing the
package imports nothing, so that help and version answer at once.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.library import *  # noqa: F403 (type checkers read the one list there is)

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    library = import_module("paceline.library")
    if name != "__all__" and name not in library.__all__:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    return getattr(library, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *import_module("paceline.library").__all__])
