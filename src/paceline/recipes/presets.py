"""The presets by name. A preset is a function without arguments that returns a whole RunConfig."""

import difflib
from collections.abc import Callable

from paceline.core.errors import ConfigError
from paceline.recipes.baselines import BASELINES
from paceline.recipes.demo import demo
from paceline.recipes.records import RECORDS
from paceline.settings.run import RunConfig

PRESETS: dict[str, Callable[[], RunConfig]] = {"demo": demo, **RECORDS, **BASELINES}


def preset(name: str) -> RunConfig:
    """The preset called `name`, or an error that suggests the nearest."""
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(PRESETS)}"
        raise ConfigError(f"preset {name!r} does not exist; {hint}")
    return PRESETS[name]()
