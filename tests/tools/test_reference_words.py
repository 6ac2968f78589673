"""What is read from a class or a function, in words that a table of markdown can hold."""

from dataclasses import MISSING, dataclass, field
from functools import cached_property
from typing import Literal

from paceline.core.command_line import Positional
from reference_pages import about, default_in_words, escaped, fields_of, head, public_members, type_in_words


@dataclass(frozen=True, kw_only=True)
class Base:
    """A base."""

    width: int
    """Of one
    row."""
    bare: bool = False


@dataclass(frozen=True, kw_only=True)
class Derived(Base):
    name: Positional[str] = "a"
    """Which one."""
    rows: tuple[int, ...] = field(default_factory=lambda: (1, 2))
    mode: Literal["auto", "cpu"] | None = None

    @cached_property
    def area(self) -> int:
        """Width times rows."""
        return self.width * len(self.rows)

    def scaled(
        self,
        by: int,
    ) -> "Derived":
        return Derived(width=self.width * by)


def test_fields_carry_text_default_and_type_also_from_a_base() -> None:
    width, bare, name, rows, mode = fields_of(Derived)
    assert (width.text, width.default) == ("Of one row.", MISSING)
    assert (bare.text, bare.default) == ("", False)
    assert (name.text, name.hint, bool(name.marks)) == ("Which one.", str, True)
    assert (rows.default, mode.default) == ((1, 2), None)


def test_a_part_has_the_defaults_of_the_instance_that_stands_for_it() -> None:
    width, *_ = fields_of(Derived, Derived(width=7))
    assert width.default == 7
    assert default_in_words(2.0**-23) == "`1.1920928955078125e-07`"


def test_a_text_that_dataclass_made_up_is_none() -> None:
    assert about(Base) == "A base."
    assert about(Derived) == ""


def test_heads_end_before_the_body_and_members_include_properties() -> None:
    area, scaled = public_members(Derived)
    assert head(area) == "@cached_property\ndef area(self) -> int"
    assert head(scaled) == 'def scaled(\n    self,\n    by: int,\n) -> "Derived"'


def test_types_and_defaults_in_words() -> None:
    hints = {one.name: type_in_words(one.hint) for one in fields_of(Derived)}
    assert hints["mode"] == "`auto` or `cpu` or `None`"
    assert hints["rows"] == "any number of `int`"
    assert [default_in_words(v) for v in (MISSING, (), (1, 2), 2.0**-23, "", None)] == [
        "–", "none", "`1` `2`", "`1.1920928955078125e-07`", "empty", "`None`",
    ]  # fmt: skip


def test_a_tag_is_escaped_outside_of_code_only() -> None:
    assert escaped("runs/<name>, `runs/<name>`") == "runs/&lt;name>, `runs/<name>`"
