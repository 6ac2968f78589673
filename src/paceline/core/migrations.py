"""Settings that had another name, or are gone: configs, cards and command lines of older versions still work. No torch.

The fields of a renamed group move with it. A setting that was removed had changed no result, so it is dropped.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

RENAMED: dict[str, str] = {
    "attention.heads": "qkv.backend",
    "guard": "bad_steps",
    "head": "lm_head",
    "metrics.instruments": "metrics.diagnostics",
    "model.head_init": "model.lm_head_init",
    "model.head_multiple": "model.lm_head_multiple",
    "model.rotary.turning_share": "model.rotary.rotary_fraction",
    "model.tied_head": "model.tied_lm_head",
    "optim.adam.head_lr": "optim.adam.lm_head_lr",
    "parallel.fully_shard": "parallel.fsdp",
    "parallel.shard_adam": "parallel.zero1",
    "parallel.split_sequence": "parallel.context_parallel",
    "train.fast_paths": "train.custom_kernels",
    "train.free_steps": "train.untimed_steps",
}
"""Old dotted name, of a field or of a group of fields, to today's."""
FROM_ENVIRONMENT = {"attention.fa3_library": "PACELINE_FA3_LIBRARY"}
"""Removed settings that were paths to code, to the variable that gives them: a config never says what is loaded."""
REMOVED: dict[str, str] = {
    **{name: f"set {variable} in the environment" for name, variable in FROM_ENVIRONMENT.items()},
    "optim.adam.grouping": "every group has a rule of its own, which gives the same numbers",
    "parallel.broadcast_buffers": "no buffer of a model ever changes",
}
"""Old dotted name to what a user should know."""


def migrate_field(name: str) -> str | None:
    """Today's name of a dotted field; None: it is gone."""
    if name in REMOVED:
        return None
    for old, new in RENAMED.items():
        if name == old or name.startswith(f"{old}."):
            return new + name[len(old) :]
    return name


def migrate_config(values: Any, warn: Callable[[str], None] = lambda _: None) -> Any:
    """A config of any version, nested as its file has it, under today's names. What is no config stays as it is.
    `warn` gets one line for each path to code that it holds, which is ignored."""
    if not isinstance(values, dict):
        return values
    found: dict[str, Any] = {}
    for name, value in leaves(values):
        if value is not None and (variable := FROM_ENVIRONMENT.get(name)) is not None:
            warn(f"the config's {name} {value!r:.200} is not loaded; if you trust it, set {variable}")
        if (today := migrate_field(name)) is not None:
            *path, leaf = today.split(".")
            part = found
            for step in path:
                part = part.setdefault(step, {})
            part[leaf] = value
    return found


def leaves(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value that is no object, with its dotted name."""
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def migrate_flags(words: Sequence[str], warn: Callable[[str], None]) -> list[str]:
    """A command line with today's flags; `warn` gets one line for each old one."""
    found: list[str] = []
    dropping = False
    for word in words:
        if not word.startswith("--"):
            found += [] if dropping else [word]
            continue
        flag, equals, value = word.partition("=")
        group, dot, leaf = flag.removeprefix("--").rpartition(".")
        field = (group + dot + leaf.removeprefix("no-")).replace("-", "_")  # train.fast_paths
        today = migrate_field(field)
        dropping = today is None and not equals
        if today is None:
            warn(f"{flag} is gone and has no effect: {REMOVED[field]}")
        elif today == field:
            found.append(word)
        else:
            group, dot, name = today.replace("_", "-").rpartition(".")
            renamed = f"--{group}{dot}{'no-' if leaf.startswith('no-') else ''}{name}"
            warn(f"{flag} is now {renamed}")
            found.append(renamed + equals + value)
    return found
