"""The reference: every command with its options, every setting of a run, what `import paceline` gives.

Types and defaults come from the objects. The text under a field and the head of a function come from the source, since
Python keeps neither.
"""

import ast
import dataclasses
import importlib
import inspect
import itertools
import textwrap
import types
import typing
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import MISSING, dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin
from unittest import mock

from paceline import library
from paceline.analysis.ablation import Ablation, Effect
from paceline.cli import VERBS
from paceline.core.command_line import Bare, Hidden, Positional
from paceline.evaluate.config import SamplingConfig
from paceline.lab.compare.compare import Comparison
from paceline.metrics.card import RunCard
from paceline.settings.run import RunConfig
from paceline.text.manifest import DatasetManifest
from page_text import linked, paragraphs, table

POSITIONAL, BARE, HIDDEN = (set(kind[int].__metadata__) for kind in (Positional, Bare, Hidden))
ALSO = (RunCard, SamplingConfig, DatasetManifest, Comparison, Ablation, Effect)
"""Classes that `library.py` mentions and does not export."""


@dataclass(frozen=True)
class Field:
    """One field of a dataclass."""

    name: str
    hint: Any
    """Its type, without marks for the command line."""
    marks: frozenset[Any]
    default: Any
    """The value, or MISSING."""
    text: str
    """The string below it, on one line; empty if there is none."""

    @property
    def cells(self) -> tuple[str, str, str]:
        return type_in_words(self.hint), default_in_words(self.default), escaped(self.text)


def fields_of(cls: Any, made: Any = MISSING) -> list[Field]:
    """In declaration order, those of the bases first. `made`: the instance that is the default of a nested class."""
    hints, texts = typing.get_type_hints(cls, include_extras=True), _texts(cls)
    found = []
    for field in dataclasses.fields(cls):
        hint, *marks = get_args(h) if get_origin(h := hints[field.name]) is Annotated else (h,)
        own = field.default if field.default_factory is MISSING else field.default_factory()
        default = own if made is MISSING else getattr(made, field.name)
        found.append(Field(field.name, hint, frozenset(marks), default, texts.get(field.name, "")))
    return found


def _texts(cls: type) -> dict[str, str]:
    """The comment behind each annotated name in the class's source, or the string that follows it; bases included."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        lines = inspect.getsource(base).splitlines()
        for node, after in itertools.pairwise([*_parsed(base).body, None]):
            match node, after:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = one_line(text)
                case ast.AnnAssign(target=ast.Name(id=name), end_lineno=int(end)), _ if "  # " in lines[end - 1]:
                    text = lines[end - 1].partition("  # ")[2]
                    found[name] = text[:1].upper() + text[1:].rstrip(".") + "."
    return found


def _parsed(thing: Any) -> Any:
    """The syntax tree of a class or function."""
    return ast.parse(textwrap.dedent(inspect.getsource(thing))).body[0]


# ---- docs/reference/settings.md


def settings(page: str) -> str:
    return paragraphs(*_sections(RunConfig, "", page))


def _sections(cls: Any, prefix: str, page: str, made: Any = MISSING) -> Iterator[str]:
    """The leaves of a config as a table, then a section for each config inside it."""
    shown = [field for field in fields_of(cls, made) if field.name != "preset"]
    nested = [field for field in shown if dataclasses.is_dataclass(field.hint)]
    rows = [_setting(f"{prefix}{field.name}", field) for field in shown if field not in nested]
    yield paragraphs(
        f"## {prefix.removesuffix('.') or 'The run'}",
        f"{prose(about(cls))} {_defined(cls, page)}".strip(),
        table(("setting", "type", "default", "what it does"), rows),
    )
    for field in nested:
        yield from _sections(field.hint, f"{prefix}{field.name}.", page, field.default)


def _setting(name: str, field: Field) -> tuple[str, ...]:
    kind, default, text = field.cells
    return f"`{name}`", kind, default, f"{text} No flag." if HIDDEN & field.marks else text


# ---- docs/reference/commands.md


def commands(_: str) -> str:
    rows = [(f"[`{name}`](#paceline-{name.replace(' ', '-')})", verb.summary) for name, verb in VERBS.items()]
    return paragraphs(table(("verb", "what it does"), rows), *map(_command, VERBS))


def arguments_of(verb: str) -> tuple[type, str]:
    """The class and the help text that a verb hands to tyro."""
    module, function = VERBS[verb].run.split(":")
    run = getattr(importlib.import_module(f"paceline.{module}"), function)
    with mock.patch("tyro.cli", side_effect=SystemExit) as parser, suppress(SystemExit):
        run(["--help"])
    return parser.call_args.args[0], parser.call_args.kwargs["description"]


def _command(name: str) -> str:
    cls, text = arguments_of(name)
    every = "Every [setting](settings.md) is a flag, too." if any(f.hint is RunConfig for f in fields_of(cls)) else None
    options = table(("option", "value", "default", "what it does"), _options(cls, ""))
    return paragraphs(f"## paceline {name}", *map(_help_paragraph, text.split("\n\n")), options, every)


def _help_paragraph(text: str) -> str:
    example = text.removeprefix("example: ")
    return f"```\n{example}\n```" if example != text else prose(text)


def _options(cls: Any, prefix: str, made: Any = MISSING) -> Iterator[tuple[str, ...]]:
    """A row for each option, those of a nested class with its name before theirs, unless it is bare."""
    for field in fields_of(cls, made):
        if HIDDEN & field.marks:
            continue
        if not dataclasses.is_dataclass(field.hint):
            kind, *rest = field.cells
            yield _flag(field, prefix), "" if field.hint is bool else kind, *rest
        elif field.hint is not RunConfig:
            yield from _options(field.hint, prefix if BARE & field.marks else f"{prefix}{field.name}.", field.default)


def _flag(field: Field, prefix: str) -> str:
    if POSITIONAL & field.marks:
        return f"`{field.name.upper()}`"
    stated = next((name for mark in field.marks if (name := getattr(mark, "name", None))), field.name)
    name = stated.replace("_", "-")
    return f"`--{prefix}{name}`" + (f" or `--{prefix}no-{name}`" if field.hint is bool else "")


# ---- docs/reference/python.md


def python_names(page: str) -> str:
    named = [getattr(library, name) for name in library.__all__]
    functions = sorted((f for f in named if not isinstance(f, type)), key=lambda f: f.__code__.co_firstlineno)
    classes = sorted((c for c in named if isinstance(c, type)), key=lambda c: c.__module__ != library.__name__)
    return paragraphs(
        *(_function(f"## {f.__name__}", f) for f in functions), *(_class(cls, page) for cls in (*classes, *ALSO))
    )


def _function(heading: str, function: Callable[..., Any]) -> str:
    return paragraphs(heading, f"```py\n{head(function)}\n```", prose(function.__doc__ or ""))


def _class(cls: Any, page: str) -> str:
    heading = f"## {cls.__name__}"
    if cls is RunConfig:
        return paragraphs(heading, "A whole run as one frozen value; its fields are the [settings](settings.md).")
    rows = [(f"`{field.name}`", *field.cells) for field in (fields_of(cls) if dataclasses.is_dataclass(cls) else ())]
    fields = table(("field", "type", "default", "what it is"), rows) if rows else None
    ours = public_members(cls) if cls.__module__ == library.__name__ else ()  # of others only the fields are promised
    members = [_function(f"### {cls.__name__}.{function.__name__}", function) for function in ours]
    return paragraphs(heading, prose(about(cls)), _defined(cls, page), fields, *members)


def head(function: Callable[..., Any]) -> str:
    """A function's source down to the colon before its body, decorators included."""
    lines = textwrap.dedent(inspect.getsource(function)).splitlines()
    return "\n".join(lines[: _parsed(function).body[0].lineno - 1]).removesuffix(":")


def public_members(cls: type) -> Iterator[Callable[..., Any]]:
    """The functions behind what a class defines for its users: methods and properties, cached or not."""
    for name, member in vars(cls).items():
        function = getattr(member, "fget", None) or getattr(member, "func", None) or member
        if not name.startswith("_") and inspect.isfunction(function):
            yield function


# ---- in words


def about(cls: type) -> str:
    """The class's own text, or nothing: `dataclass` makes one up from the fields."""
    text = cls.__doc__ or ""
    return "" if text.startswith(f"{cls.__name__}(") else text


def _defined(cls: type, page: str) -> str:
    file = f"{cls.__module__.replace('.', '/')}.py"
    return f"Defined in {linked(file, f'src/{file}', page)}."


def one_line(text: str) -> str:
    return " ".join(text.split())


def prose(text: str) -> str:
    """Paragraphs of a docstring, each on one line."""
    return paragraphs(*(escaped(one_line(part)) for part in text.split("\n\n")))


def type_in_words(hint: Any) -> str:
    """`int`, or `auto`, `cpu` or `cuda`; never with a bar, which would end the cell of a table."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(map(type_in_words, arguments))
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin is tuple:
        return f"any number of {type_in_words(arguments[0])}"
    return "`None`" if hint is type(None) else f"`{getattr(hint, '__name__', hint)}`"


def default_in_words(value: Any) -> str:
    if value is MISSING:
        return "–"
    if isinstance(value, tuple):
        return " ".join(map(default_in_words, value)) or "none"
    return f"`{value}`" if str(value) else "empty"


def escaped(text: str) -> str:
    """For Markdown: `<` outside of code, where it would begin a tag."""
    parts = text.split("`")
    return "`".join(part if n % 2 else part.replace("<", "&lt;") for n, part in enumerate(parts))
