"""Command lines from dataclasses: flags set fields, and every mistake is one line that says where and what."""

from dataclasses import dataclass, field
from typing import Literal

import pytest

from paceline.core.command_line import Bare, Hidden, Positional, parse
from paceline.core.errors import ConfigError, UserError


@dataclass(frozen=True, kw_only=True)
class Part:
    width: int = 8
    """How wide."""

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ConfigError(f"--part.width {self.width} must be at least 1")


@dataclass(frozen=True, kw_only=True)
class Nested:
    seed: int = 0
    part: Part = field(default_factory=Part)


@dataclass(frozen=True, kw_only=True)
class Arguments:
    what: Positional[str] = "demo"
    """Which one."""
    steps: int = 10
    """How many steps."""
    cap: float | None = 15.0
    kind: Literal["none", "plain"] = "plain"
    fast: bool = False
    layers: tuple[int, ...] = ()
    secret: Hidden[str] = "kept"
    config: Bare[Nested] = field(default_factory=Nested)


def parsed(*argv: str, default: Arguments | None = None) -> Arguments:
    return parse(Arguments, argv, verb="try", description="Tries.\n\nexample: paceline try", default=default)


def mistake(*argv: str) -> str:
    with pytest.raises(UserError) as caught:
        parsed(*argv)
    text = str(caught.value)
    assert "\n" not in text
    assert "│" not in text
    assert "\x1b" not in text
    return text


def test_flags_set_fields_in_either_spelling() -> None:
    found = parsed(
        "other", "--steps", "3", "--cap=2.5", "--fast", "--layers", "1", "-2", "--part.width", "4", "--seed", "9"
    )
    nested = Nested(seed=9, part=Part(width=4))
    assert found == Arguments(what="other", steps=3, cap=2.5, fast=True, layers=(1, -2), config=nested)


def test_nothing_given_leaves_the_defaults_it_is_handed() -> None:
    assert parsed() == Arguments()
    base = Arguments(what="r18", steps=7, cap=None, fast=True, layers=(7,), secret="s")
    assert parsed(default=base) == base
    changed = parsed("--no-fast", "--layers", default=base)
    assert (changed.fast, changed.layers, changed.steps, changed.secret) == (False, (), 7, "s")


@pytest.mark.parametrize("word", ["None", "none"])
def test_an_optional_value_is_switched_off_by_none(word: str) -> None:
    assert parsed("--cap", word).cap is None


def test_none_may_be_a_choice() -> None:
    assert parsed("--kind", "none").kind == "none"


def test_help_goes_to_standard_output_and_exits_0(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed("--help")
    assert ended.value.code in (0, None)
    said = capsys.readouterr()
    assert said.err == ""
    for word in ("Tries.", "example: paceline try", "--steps", "How many steps.", "--part.width", "How wide."):
        assert word in said.out
    assert "secret" not in said.out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--step", "3"), ("--step", "did you mean --steps?")),
        (("--steps", "many"), ("--steps", "'many'")),
        (("--steps", "1.5"), ("--steps", "'1.5'")),
        (("--steps",), ("--steps", "issing")),
        (("--cap", "high"), ("--cap", "'high'")),
        (("--kind", "fancy"), ("--kind", "'fancy'", "plain")),
        (("--layers", "1", "x"), ("--layers", "'x'")),
        (("one", "--fast", "maybe"), ("maybe",)),
        (("one", "two"), ("two",)),
        (("--secret", "told"), ("--secret",)),
        (("--part.width", "wide"), ("--part.width", "'wide'")),
    ],
)
def test_a_mistake_is_one_line_that_names_flag_and_value(argv: tuple[str, ...], words: tuple[str, ...]) -> None:
    text = mistake(*argv)
    assert text.startswith("paceline try: ")
    assert text.endswith("; see --help")
    for word in words:
        assert word in text


def test_the_message_of_a_config_that_refuses_is_shown_as_it_is() -> None:
    assert mistake("--part.width", "0") == "--part.width 0 must be at least 1"
