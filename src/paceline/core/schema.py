"""Configuration dataclasses as JSON, as dotted names, and as differences. No torch.

A config is a tree of frozen dataclasses whose leaves are int, float, bool, str, None, literals and tuples of those.
Reading is strict: an unknown key or a value of the wrong type is an error that names the dotted field.
"""

import dataclasses
import functools
import itertools
import json
import re
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from paceline.core.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Change:
    field: str
    before: Any
    after: Any

    @property
    def nested(self) -> bool:
        """A value is a dataclass or a tuple of them: presets and config files alone say it, no flag."""
        values = (one if isinstance(one, tuple) else (one,) for one in (self.before, self.after))
        return any(map(dataclasses.is_dataclass, itertools.chain(*values)))


def to_dict(config: Any) -> dict[str, Any]:
    """The config as plain JSON values; tuples become lists."""
    return {field.name: plain(getattr(config, field.name)) for field in dataclasses.fields(config)}


def plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, tuple | list) else value


def from_dict(cls: type[T], data: Any, *, at: str = "") -> T:
    """Build `cls` from what `to_dict` gave. Missing keys take the default where there is one."""
    if not isinstance(data, dict):
        raise ConfigError(f"{at or cls.__name__}: expected an object, got {_show(data)}")
    hints = _hints(typing.cast(Any, cls))
    fields = {field.name: field for field in dataclasses.fields(typing.cast(Any, cls))}
    if unknown := sorted(set(data) - set(fields)):
        raise ConfigError(f"{_join(at, unknown[0])}: unknown key; {cls.__name__} has {', '.join(sorted(fields))}")
    values = {name: _typed(hints[name], value, _join(at, name)) for name, value in data.items()}
    try:
        return cls(**values)
    except TypeError as error:  # a key without a default is missing
        raise ConfigError(f"{at or cls.__name__}: {error}") from None


_hints = functools.cache(typing.get_type_hints)  # evaluating them takes as long as all the rest of reading a config


def _typed(hint: Any, value: Any, at: str) -> Any:
    """`value` as `hint` says, or a ConfigError naming the field. bool is not an int here; an int is a float."""
    origin, arguments = get_origin(hint), get_args(hint)
    if dataclasses.is_dataclass(hint):
        return from_dict(typing.cast(type, hint), value, at=at)
    if origin in (Union, types.UnionType):
        errors = []
        for choice in arguments:
            try:
                return _typed(choice, value, at)
            except ConfigError as error:
                errors.append(error)
        raise errors[0]
    if origin is Literal:
        if any(value == choice and type(value) is type(choice) for choice in arguments):
            return value
        raise ConfigError(f"{at}: {_show(value)} is not one of {', '.join(map(str, arguments))}")
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{at}: expected a list, got {_show(value)}")
        return tuple(_typed(arguments[0], item, f"{at}[{index}]") for index, item in enumerate(value))
    if hint is float and type(value) is int and abs(value) < 2**63:  # beyond that an int is no number we write
        return float(value)
    if type(value) is (type(None) if hint is None else hint):
        return value
    raise ConfigError(f"{at}: expected {getattr(hint, '__name__', hint)}, got {_show(value)}")


def flatten(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf as (dotted name, value), in declaration order."""
    for field in dataclasses.fields(config):
        name, value = _join(prefix, field.name), getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from flatten(value, name)
        else:
            yield name, value


def changes(before: Any, after: Any, prefix: str = "") -> list[Change]:
    """The leaves in which two configs of one type differ; an optional sub-config of one side only is a leaf. A record
    is this list."""
    found = list[Change]()
    for field in dataclasses.fields(after):
        name, old, new = _join(prefix, field.name), getattr(before, field.name), getattr(after, field.name)
        if dataclasses.is_dataclass(old) and dataclasses.is_dataclass(new):
            found += changes(old, new, name)
        elif old != new:
            found.append(Change(field=name, before=old, after=new))
    return found


def stated(value: Any, show: Callable[[Any], str] = str, between: str = "; ") -> str:
    """A leaf as `show` has it, and of a dataclass what is not its default: `layers 3, 10: window long, key_offset`."""
    if isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
        return between.join(stated(one, show) for one in value)
    if not dataclasses.is_dataclass(value):
        return show(value)
    heads, others = list[str](), list[str]()
    for field in dataclasses.fields(value):
        found = getattr(value, field.name)
        words = field.name if found is True else f"{field.name} {show(found)}"
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if default is dataclasses.MISSING:
            heads.append(words)
        elif found != default:
            others.append(words)
    return ": ".join(", ".join(part) for part in (heads, others) if part)


MAX_JSON_BYTES = 32 << 20  # larger than any file of ours; one of nothing but empty lists takes 0.8 GiB once it is read


def read_json(path: Path) -> Any:
    """The file's JSON, or a ConfigError that names the file and the place. NaN and infinity are no JSON."""
    try:
        if (size := path.stat().st_size) > MAX_JSON_BYTES:
            raise ConfigError(f"{path}: {size:,} bytes, more than any JSON file of ours; the file is not what it seems")
        return parse_json(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # also a number of 5,000 digits, or brackets a thousand deep
        raise ConfigError(f"{path}: not valid JSON ({error}); the file is damaged or half-written") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None


def parse_json(text: str) -> Any:
    """Raises ValueError for NaN and infinity, and for half of a character, which can neither be printed nor written."""
    value = json.loads(text, parse_constant=_refuse_constant)
    if SURROGATE.search(text):
        json.dumps(value, ensure_ascii=False).encode()
    return value


SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is not a number")


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
