"""Plug-ins: a user's own file that brings activations, loss terms, optimizer rules, rate shapes and presets. No torch.

The file ends in one `Plugin`. It is executed because somebody names it in this command or call (`recipes/plugins.py`);
a config keeps its name and hash, never its path, and never leads to code. A name that a config uses counts only if it
is paceline's own or belongs to a plug-in that the config lists, so equal configs compute the same.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from paceline.core.errors import ConfigError

Kind = Literal["activations", "loss_terms", "rules", "rate_shapes", "presets"]


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """What a file brings, by name. Importing it changes nothing, so its parts can be tested like any others."""

    activations: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    """For `model.activation`: a function of a tensor, element by element, without parameters."""
    loss_terms: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    """For `model.loss_terms`: `LossInputs` to the total over tokens (`model/loss.py`)."""
    rules: Mapping[str, type] = field(default_factory=dict)
    """For `optim.matrices` and `optim.groups`: a `Rule` (`optim/rule.py`), with `FACTS` as an attribute."""
    rate_shapes: Mapping[str, Callable[[float], float]] = field(default_factory=dict)
    """For `optim.schedule.shape`: from what remains of the cool-down, 1 to 0, to the multiplier, 1 to 0."""
    presets: Mapping[str, tuple[str, Callable[[Any], Any]]] = field(default_factory=dict)
    """Each as another preset's name and the change to it: from its `RunConfig` to the new one."""


@dataclass(frozen=True, kw_only=True)
class PluginRef:
    """A plug-in as configs and cards keep it."""

    name: str
    """Of the file, without the way there."""
    blake2b: str

    def __str__(self) -> str:
        return f"{self.name} {self.blake2b[:12]}"


@dataclass(frozen=True)
class Loaded:
    ref: PluginRef
    path: Path
    plugin: Plugin


LOADED: dict[str, Loaded] = {}
"""This process's, by hash. Only `recipes/plugins.py` changes it."""


def find(kind: Kind, name: str) -> Any:
    """What a loaded plug-in has under this name, or None."""
    return next((table[name] for table in tables(kind) if name in table), None)


def tables(kind: Kind, among: Iterable[PluginRef] | None = None) -> list[Mapping[str, Any]]:
    """Of all that are loaded, or of those of a config."""
    hashes = LOADED if among is None else [ref.blake2b for ref in among if ref.blake2b in LOADED]
    return [getattr(LOADED[found].plugin, kind) for found in hashes]


def not_loaded(plugins: Iterable[PluginRef]) -> list[PluginRef]:
    return [ref for ref in plugins if ref.blake2b not in LOADED]


def check_name(kind: Kind, name: str, own: Iterable[str], plugins: Iterable[PluginRef], setting: str) -> None:
    """Raise ConfigError unless the name is our own or that of a plug-in of the config."""
    theirs = [word for table in tables(kind, plugins) for word in table]
    if name not in (known := [*own, *theirs]):
        cure = "a plug-in's is given by --plugin FILE, or plugins=[FILE]"
        raise ConfigError(f"{setting} {name!r:.60} does not exist; there are {', '.join(known)}, and {cure}")
