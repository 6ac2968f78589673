"""What code says about itself: a dataclass's fields, a function's head, the text below each.

Types and defaults come from the objects. The text under a field and the head of a function come from the source, since
Python keeps neither.
"""

import ast
import dataclasses
import inspect
import itertools
import textwrap
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

NO_DEFAULT = "–"


@dataclass(frozen=True, kw_only=True)
class Described:
    """One field of a dataclass."""

    name: str
    hint: Any
    """Its type, without marks for the command line."""
    marks: tuple[Any, ...]
    """Those marks (`paceline.core.command_line`)."""
    default: Any
    """The value, or MISSING."""
    text: str
    """What stands below it, on one line; empty if nothing does."""


def described(cls: type, made: Any = MISSING) -> list[Described]:
    """Every field of a dataclass in declaration order, those of its bases first. `made`: the instance that stands as a
    default where the class is a part of another one."""
    hints, texts = typing.get_type_hints(cls, include_extras=True), _texts(cls)
    return [
        Described(
            name=field.name,
            hint=_bare(hints[field.name]),
            marks=_marks(hints[field.name]),
            default=_default(field) if made is MISSING else getattr(made, field.name),
            text=texts.get(field.name, ""),
        )
        for field in dataclasses.fields(cls)
    ]


def _default(field: dataclasses.Field) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _bare(hint: Any) -> Any:
    return _bare(get_args(hint)[0]) if get_origin(hint) is Annotated else hint


def _marks(hint: Any) -> tuple[Any, ...]:
    return tuple(hint.__metadata__) if get_origin(hint) is Annotated else ()


def _texts(cls: type) -> dict[str, str]:
    """The string that follows each annotated name in the class's source, bases included."""
    found: dict[str, str] = {}
    for one in reversed(cls.__mro__[:-1]):
        body = _parsed(one).body
        for node, after in itertools.pairwise(body):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and (text := _string(after)):
                found[node.target.id] = one_line(text)
    return found


def _parsed(thing: Any) -> Any:
    """The syntax tree of a class or function."""
    return ast.parse(textwrap.dedent(inspect.getsource(thing))).body[0]


def _string(node: ast.stmt) -> str | None:
    value = node.value if isinstance(node, ast.Expr) else None
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None


def about(cls: type) -> str:
    """The class's own text, or nothing: `dataclass` makes one up from the fields."""
    text = cls.__doc__ or ""
    return "" if text.startswith(f"{cls.__name__}(") else text


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


def one_line(text: str) -> str:
    return " ".join(text.split())


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
        return NO_DEFAULT
    if isinstance(value, tuple):
        return " ".join(map(default_in_words, value)) or "none"
    return f"`{value}`" if str(value) else "empty"


def source_of(cls: type) -> str:
    """Path of the file that defines it, from the folder of the package's source."""
    return Path(*cls.__module__.split(".")).with_suffix(".py").as_posix()


def escaped(text: str) -> str:
    """For markdown: `<` outside of code, where it would begin a tag."""
    parts = text.split("`")
    return "`".join(part if n % 2 else part.replace("<", "&lt;") for n, part in enumerate(parts))
