"""The presets by name. A preset is a function without arguments that returns a whole RunConfig."""

import difflib
from collections.abc import Callable
from dataclasses import replace

from paceline.core.errors import ConfigError
from paceline.recipes.baselines import BASELINES
from paceline.recipes.demo import demo
from paceline.recipes.frontier import FRONTIER, PREDECESSORS
from paceline.recipes.records import PUBLIC, RECORDS
from paceline.settings.plugins import LOADED, PluginRef
from paceline.settings.run import RunConfig

PRESETS: dict[str, Callable[[], RunConfig]] = {"demo": demo, **RECORDS, **FRONTIER, **BASELINES}


def preset(name: str) -> RunConfig:
    """The preset called `name`, or an error that suggests the nearest."""
    if name in PRESETS:
        return PRESETS[name]()
    for one in LOADED.values():
        if name in one.plugin.presets:
            return _changed(name, one.ref, *one.plugin.presets[name])
    near = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(PRESETS)}"
    raise ConfigError(f"preset {name!r} does not exist; {hint} (A plug-in's needs --plugin FILE.)")


def _changed(name: str, plugin: PluginRef, base: str, change: Callable[[RunConfig], RunConfig]) -> RunConfig:
    """A plug-in's preset: another one with its change."""
    before = preset(base)
    found = change(replace(before, preset=name, plugins=tuple(dict.fromkeys((*before.plugins, plugin)))))
    if not isinstance(found, RunConfig):
        raise ConfigError(
            f"preset {name}: {plugin.name} returns {found!r:.40}, not a RunConfig; use dataclasses.replace"
        )
    return replace(found, preset=name)


def predecessor(name: str) -> str | None:
    """What a preset is a change to, if it is one to a single other."""
    bases = {name: base for one in LOADED.values() for name, (base, _) in one.plugin.presets.items()}
    return {**PREDECESSORS, **bases}.get(name) or (PUBLIC[name].predecessor if name in PUBLIC else None)
