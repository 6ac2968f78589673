"""Loading plug-ins (`settings/plugins.py`): which files, whether they are the ones a run was trained with, and the one
place where they are executed. What is hashed is what is executed: a file is read once. No torch."""

import itertools
import sys
import traceback
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from paceline.checkpoint.run_folder import open_run
from paceline.core.errors import ConfigError
from paceline.core.files import new_digest
from paceline.recipes.presets import PRESETS
from paceline.settings.groups import own_rules
from paceline.settings.model import ACTIVATIONS
from paceline.settings.plugins import LOADED, Kind, Loaded, Plugin, PluginRef, not_loaded
from paceline.settings.run import MAY_CHANGE_ON_RESUME, RunConfig, own_loss_terms, read_config
from paceline.settings.schedule import RATE_SHAPES

Paths = Iterable[str | Path]


def load_plugins(paths: Paths) -> tuple[PluginRef, ...]:
    """Load these files; one that is loaded already is not executed again."""
    return tuple(_load(path, *_read(path)) for path in map(Path, paths))


def load_plugins_for(run: str | Path, paths: Paths) -> None:
    """Load these files to predict with a run: its plug-ins and no others. Which it takes is seen when it is loaded."""
    if paths := tuple(paths):
        from paceline.checkpoint.verified import read_run_config  # here: with it comes numpy

        folder = open_run(run)
        config, _ = read_run_config(folder, read_config, may_change=MAY_CHANGE_ON_RESUME)
        load_plugins_of(config, paths, folder.path, all_of_them=False)


def load_plugins_of(config: RunConfig, paths: Paths, where: Path, *, all_of_them: bool = True) -> None:
    """Load these files for the run in `where`: its plug-ins and no others. Hashes are compared before that."""
    wanted, read = {ref.blake2b: ref for ref in config.plugins}, {Path(path): _read(path) for path in paths}
    for path, (_, digest) in read.items():
        if digest not in wanted:
            had = ", ".join(map(str, config.plugins)) or "no plug-in"
            cure = "give the file as it was then, or start a new run"
            raise ConfigError(
                f"--plugin {path}: has the hash {digest[:12]}, but {where} was trained with {had}; {cure}"
            )
    given = {digest for _, digest in read.values()}
    missing = [ref for ref in not_loaded(config.plugins) if ref.blake2b not in given]
    if missing and all_of_them:
        raise ConfigError(f"{where}: was trained with the plug-in {missing[0]}; name that file with --plugin")
    for path, (content, digest) in read.items():
        _load(path, content, digest)


def with_plugins(config: RunConfig, plugins: Sequence[PluginRef]) -> RunConfig:
    """The config with these plug-ins besides those of its preset. Names are checked against them."""
    return replace(config, plugins=tuple({ref.blake2b: ref for ref in (*config.plugins, *plugins)}.values()))


def plugin_words(config: RunConfig) -> list[str]:
    """The flags that give the config's plug-ins to another process."""
    return [word for ref in config.plugins for word in ("--plugin", str(LOADED[ref.blake2b].path))]


def _read(path: str | Path) -> tuple[bytes, str]:
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"--plugin {path}: cannot be read ({error.strerror}); give a Python file") from None
    digest = new_digest()
    digest.update(content)
    return content, digest.hexdigest()


def _load(path: Path, content: bytes, digest: str) -> PluginRef:
    if digest in LOADED:
        return LOADED[digest].ref
    plugin = _executed(path, content, digest)
    for known in [known for known, one in LOADED.items() if one.path.resolve() == path.resolve()]:
        del LOADED[known]  # an older version of this file
    _check_names(path, plugin)
    LOADED[digest] = Loaded(PluginRef(name=path.name, blake2b=digest), path, plugin)
    return LOADED[digest].ref


def _executed(path: Path, content: bytes, digest: str) -> Plugin:
    module = types.ModuleType(f"paceline_plugin_{digest}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses and compilers look there
    try:
        exec(compile(content, str(path), "exec"), module.__dict__)
    except Exception as error:
        del sys.modules[module.__name__]
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = error.lineno if isinstance(error, SyntaxError) else [None, *lines][-1]
        said = " ".join(str(error).split())[:200]
        raise ConfigError(f"--plugin {path}: line {line}: {type(error).__name__}: {said}; mend the file") from error
    found = [value for value in vars(module).values() if isinstance(value, Plugin)]
    if len(found) != 1:
        raise ConfigError(f"--plugin {path}: has {len(found)} values of paceline.Plugin; it needs exactly one")
    return found[0]


def _check_names(path: Path, plugin: Plugin) -> None:
    own: dict[Kind, Iterable[str]] = {
        "activations": ACTIVATIONS,
        "loss_terms": own_loss_terms(),
        "rules": own_rules(),
        "rate_shapes": RATE_SHAPES,
        "presets": PRESETS,
    }
    for kind in get_args(Kind):
        table = getattr(plugin, kind)
        if not isinstance(table, Mapping):
            raise ConfigError(f"--plugin {path}: {kind} is no mapping of names; give a dict")
        for name, value in table.items():
            _check_entry(f"--plugin {path}: {kind} {name!r:.60}", kind, name, value, own[kind])
    known = {*PRESETS, *itertools.chain.from_iterable(one.plugin.presets for one in LOADED.values())}
    for name, (base, _) in plugin.presets.items():
        if base not in known:
            raise ConfigError(
                f"--plugin {path}: presets {name!r}: its base {base!r} is no preset that is known by then"
            )
        known.add(name)


def _check_entry(at: str, kind: Kind, name: Any, value: Any, own: Iterable[str]) -> None:
    if not (isinstance(name, str) and (name.replace("-", "_") if kind == "presets" else name).isidentifier()):
        raise ConfigError(f"{at} is no name; use letters, digits and _")
    if name in own:
        raise ConfigError(f"{at}: paceline has one of that name; choose another")
    if other := next((one.path for one in LOADED.values() if name in getattr(one.plugin, kind)), None):
        raise ConfigError(f"{at}: {other} has one of that name, too; choose another")
    if kind != "presets" and not callable(value):
        raise ConfigError(f"{at} is not a function or a class")
    pair = isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str) and callable(value[1])
    if kind == "presets" and not pair:
        raise ConfigError(f"{at} is not a pair of a preset's name and a function of its config")
