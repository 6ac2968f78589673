"""Settings from a file: `train --config FILE`, the `config.json` of a run or a TOML that states what differs from a
preset. What it does not state is the preset's; flags come on top. No torch."""

import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError
from paceline.core.migrations import leaves, migrate_config
from paceline.core.schema import plain, read_json, to_dict
from paceline.recipes.presets import preset
from paceline.recipes.scaling import with_steps
from paceline.settings.plugins import PluginRef
from paceline.settings.run import RunConfig, read_config

Follow = Callable[[RunConfig, dict[str, Any]], RunConfig]


def config_in(path: Path, default_preset: str, follow: Follow, plugins: Sequence[PluginRef] = ()) -> RunConfig:
    """The config that a file states, on top of the preset that it names, with these plug-ins. As on the command line,
    other steps scale the preset's schedule. `follow` gives a config the vocabulary of its data: a preset's before a
    TOML states anything on top of it, and a run's, which names all of it as a preset does."""
    values = _underscored(_read(path)) if path.suffix == ".toml" else _read(path)
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: holds no settings by name; give a run's config.json or a TOML")
    stated = {**migrate_config(values), "plugins": plain(plugins)}  # those given now, whatever a run of it had
    base, steps = preset(str(stated.get("preset", default_preset))), stated.get("steps")
    if type(steps) is int and steps > 0:
        base = with_steps(base, steps)
    try:
        if path.suffix != ".toml":
            return follow(read_config(_over(to_dict(base), stated)), dict(leaves(stated)))
        return read_config(_over(to_dict(follow(base, dict(leaves(stated)))), stated))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _read(path: Path) -> Any:
    if path.suffix != ".toml":
        return read_json(path)
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = f"cannot be read ({error.strerror})" if isinstance(error, OSError) else f"not valid TOML ({error})"
        raise ConfigError(f"{path}: {why}") from None


def _underscored(values: Any) -> Any:
    """Names as configs have them; a TOML may write them as flags are."""
    if isinstance(values, list):
        return [_underscored(value) for value in values]
    if not isinstance(values, dict):
        return values
    return {name.replace("-", "_"): _underscored(value) for name, value in values.items()}


def _over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """The values of both, those of `above` where both have one."""
    merged = dict(below)
    for name, value in above.items():
        under = below.get(name)
        merged[name] = _over(under, value) if isinstance(under, dict) and isinstance(value, dict) else value
    return merged
