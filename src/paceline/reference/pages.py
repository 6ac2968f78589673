"""The reference: `python -m paceline.reference.pages` writes it, `--check` compares.

docs/reference/commands.md, every verb with its options · settings.md, every setting of a run · python.md, what
`import paceline` gives. All of it is read from the argument classes, the configs and `library.py`; nobody edits it.
"""

import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

from paceline import library
from paceline.cli import VERBS
from paceline.core.command_line import Bare, Hidden, Positional
from paceline.data.manifest import DatasetManifest
from paceline.evaluate.config import SamplingConfig
from paceline.lab.ablate.effects import Effect
from paceline.lab.ablate.result import Ablation
from paceline.lab.compare.compare import Comparison
from paceline.lab.pages import PagesOf, paragraphs, table
from paceline.metrics.card import RunCard
from paceline.reference.commands import COMMANDS
from paceline.reference.described import (
    Described,
    about,
    default_in_words,
    described,
    escaped,
    head,
    one_line,
    public_members,
    source_of,
    type_in_words,
)
from paceline.train.config import RunConfig

POSITIONAL, BARE, HIDDEN = (set(kind[int].__metadata__) for kind in (Positional, Bare, Hidden))
ALSO = (RunCard, SamplingConfig, DatasetManifest, Comparison, Ablation, Effect)
"""Classes that `library.py` speaks of and does not export."""


def texts() -> dict[str, str]:
    return {
        "reference/commands.md": commands_page(),
        "reference/settings.md": settings_page(),
        "reference/python.md": python_page(),
    }


# ---- settings


def settings_page() -> str:
    intro = (
        "Everything that makes up a run, as `config.json` in its folder holds it. On the command line a setting is a "
        "flag with hyphens for underscores, `--model.num-layers 8`; a switch is `--model.unet-skips` or "
        '`--model.no-unet-skips`. In Python it is a dotted name, `paceline.configure("demo", '
        '{"model.num_layers": 8})`. A default of – is stated by every preset; presets change many others, and '
        "`paceline diff demo r18-softcap` shows in what two of them differ."
    )
    return paragraphs("# Settings", intro, *_sections(RunConfig, ""))


def _sections(cls: Any, prefix: str, made: Any = dataclasses.MISSING) -> Iterator[str]:
    """The leaves of a config as a table, then a section for each config inside it."""
    fields = [field for field in described(cls, made) if not HIDDEN & set(field.marks)]
    leaves = [field for field in fields if not dataclasses.is_dataclass(field.hint)]
    rows = [
        (f"`{prefix}{f.name}`", type_in_words(f.hint), default_in_words(f.default), escaped(f.text)) for f in leaves
    ]
    source = f"[{source_of(cls)}](../../src/{source_of(cls)})"
    yield paragraphs(
        f"## {prefix.removesuffix('.') or 'The run'}",
        f"{escaped(one_line(about(cls)))} Defined in {source}.".strip(),
        table(("setting", "type", "default", "what it does"), rows),
    )
    for field in fields:
        if dataclasses.is_dataclass(field.hint):
            yield from _sections(field.hint, f"{prefix}{field.name}.", field.default)


# ---- commands


def commands_page() -> str:
    intro = (
        "`--help` behind a verb prints the same. The exit code is 0 on success, 1 on a failure and 2 on a mistake in "
        "what was asked, told in one line. An option whose default is – must be given."
    )
    rows = [(f"[`{name}`](#paceline-{name.replace(' ', '-')})", verb.summary) for name, verb in VERBS.items()]
    return paragraphs("# Commands", intro, table(("verb", "what it does"), rows), *map(_command, VERBS))


def _command(name: str) -> str:
    cls, text = COMMANDS[name]
    takes_config = any(field.hint is RunConfig for field in described(cls))
    settings = "Every [setting](settings.md) is a flag, too." if takes_config else None
    shown = table(("option", "value", "default", "what it does"), _options(cls, ""))
    return paragraphs(f"## paceline {name}", *map(_help_paragraph, text.split("\n\n")), shown, settings)


def _help_paragraph(text: str) -> str:
    example = text.removeprefix("example: ")
    return f"```\n{example}\n```" if example != text else escaped(one_line(text))


def _options(cls: Any, prefix: str, made: Any = dataclasses.MISSING) -> Iterator[tuple[str, str, str, str]]:
    """A row for each option, those of a nested class with its name before theirs, unless it is bare."""
    for field in described(cls, made):
        if dataclasses.is_dataclass(field.hint):
            inner = prefix if BARE & set(field.marks) else f"{prefix}{field.name}."
            if field.hint is not RunConfig:
                yield from _options(field.hint, inner, field.default)
        else:
            value = "" if field.hint is bool else type_in_words(field.hint)
            yield _flag(field, prefix), value, default_in_words(field.default), escaped(field.text)


def _flag(field: Described, prefix: str) -> str:
    if POSITIONAL & set(field.marks):
        return f"`{field.name.upper()}`"
    name = field.name.replace("_", "-")
    both = field.hint is bool
    return f"`--{prefix}{name}`" + (f" or `--{prefix}no-{name}`" if both else "")


# ---- Python


def python_page() -> str:
    intro = (
        "What `import paceline` gives; [From Python](../library.md) shows it at work. Importing it is quick: torch is "
        "loaded when a run starts or writes."
    )
    named = [getattr(library, name) for name in library.__all__]
    functions = sorted((f for f in named if not isinstance(f, type)), key=lambda f: f.__code__.co_firstlineno)
    classes = sorted((c for c in named if isinstance(c, type)), key=lambda c: c.__module__ != library.__name__)
    return paragraphs("# Python", intro, *map(_function, functions), *map(_class, classes), *map(_class, ALSO))


def _function(function: Any) -> str:
    return paragraphs(f"## {function.__name__}", *_head_and_text(function))


def _head_and_text(function: Any) -> tuple[str, str]:
    return f"```py\n{head(function)}\n```", _paragraphs_of(function.__doc__)


def _class(cls: type) -> str:
    heading, source = f"## {cls.__name__}", f"Defined in [{source_of(cls)}](../../src/{source_of(cls)})."
    if cls is RunConfig:
        return paragraphs(heading, "A whole run as one frozen value; its fields are the [settings](settings.md).")
    return paragraphs(heading, _paragraphs_of(about(cls)), source, _fields(cls), *_members(cls))


def _fields(cls: type) -> str | None:
    if not dataclasses.is_dataclass(cls):
        return None
    rows = [
        (f"`{field.name}`", type_in_words(field.hint), default_in_words(field.default), escaped(field.text))
        for field in described(cls)
    ]
    return table(("field", "type", "default", "what it is"), rows)


def _members(cls: type) -> Iterator[str]:
    """What a class of `library.py` can do; of the others only the fields are part of the interface."""
    for function in public_members(cls) if cls.__module__ == library.__name__ else ():
        yield paragraphs(f"### {cls.__name__}.{function.__name__}", *_head_and_text(function))


def _paragraphs_of(text: str | None) -> str:
    return paragraphs(*(escaped(one_line(part)) for part in (text or "").split("\n\n")))


WRITTEN = PagesOf(
    module="paceline.reference.pages",
    about="Write the reference of commands, settings and Python names.",
    source="the code that it describes",
    folder="reference",
    texts=texts,
)

if __name__ == "__main__":
    sys.exit(WRITTEN.exit_code(sys.argv[1:]))
