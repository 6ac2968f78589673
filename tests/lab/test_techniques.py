"""The table of techniques against the configs and presets it describes: it cannot drift away from them."""

import re

import pytest

from paceline.core.errors import ConfigError, UserError
from paceline.core.schema import changes, flatten, from_dict
from paceline.lab.technique import Technique, is_in, technique, techniques, with_values
from paceline.recipes.presets import preset
from paceline.recipes.records import PUBLIC
from paceline.settings.run import RunConfig

TECHNIQUES = techniques()
NEWEST = "r18-softcap"
NUMBERS_OF_A_RUN = {"preset", "steps", "optim.schedule.cooldown_steps"}
"""What changes with the length of a run and is no technique."""

each = pytest.mark.parametrize("one", TECHNIQUES.values(), ids=list(TECHNIQUES))
with_switch = pytest.mark.parametrize(
    "one",
    [one for one in TECHNIQUES.values() if one.switches],
    ids=[k for k, one in TECHNIQUES.items() if one.switches],
)


def shown_on(one: Technique) -> str:
    """The newest preset that has it."""
    return one.presets[-1] if one.presets else NEWEST


def switched_off(one: Technique, config: RunConfig) -> RunConfig:
    return with_values(config, {switch.field: switch.off for switch in one.switches})


def switched_on(one: Technique, config: RunConfig) -> RunConfig:
    return with_values(config, {switch.field: switch.on for switch in one.switches})


def test_keys_are_slugs_and_titles_are_unique() -> None:
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", key) for key in TECHNIQUES)
    assert len({one.title for one in TECHNIQUES.values()}) == len(TECHNIQUES)


def test_a_mistyped_key_is_answered_with_the_nearest() -> None:
    assert technique("softcap-15").record == 18
    with pytest.raises(UserError, match="did you mean softcap-15"):
        technique("softcap15")


# ---- against configs and presets


def records(*ranges: tuple[int, int]) -> tuple[str, ...]:
    return tuple(n for n, public in PUBLIC.items() if any(first <= public.record <= last for first, last in ranges))


@pytest.mark.parametrize(
    ("key", "presets"),
    [
        ("padded-tables", records((5, 16), (18, 18))),  # record 17 left the padding off
        ("fp32-rotation", records((4, 4), (17, 18))),
        ("qk-norm", records((5, 18))),  # after the rotation, too
        ("softcap", records((13, 18))),  # at 30, too
        ("value-two-scalars", records((15, 18))),  # only where values are mixed
        ("block-lists", records((13, 18))),  # no switch, and nothing to do without documents
        ("pinned-feed", records((4, 18))),  # no switch and always there
        ("gradient-clipping", ()),
    ],
)
def test_the_presets_that_have_it_are_computed(key: str, presets: tuple[str, ...]) -> None:
    assert technique(key).presets == presets


@pytest.mark.parametrize("one", [one for one in TECHNIQUES.values() if one.record], ids=lambda one: one.key)
def test_it_came_with_its_record(one: Technique) -> None:
    """The first preset of that record or a later one has it and the one before has not, unless all presets have it or
    there is no switch: then this package does for older records, too, what one record brought."""
    before, first = None, None
    for name, public in PUBLIC.items():
        before, first = first, name
        if public.record >= (one.record or 0):
            break
    assert first in one.presets
    assert before not in one.presets or not one.switches or len(one.presets) == len(PUBLIC)


@pytest.mark.parametrize(("key", "value"), [("record", "5"), ("colour", "red"), ("switches", [{"on": 1}])])
def test_a_mistake_in_the_table_is_named(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match="field" if key == "switches" else key):
        from_dict(Technique, {"key": "a", "topic": "b", "title": "c", key: value}, at="a")


@each
def test_every_field_exists(one: Technique) -> None:
    fields = {name for name, _ in flatten(preset("demo"))}
    assert {switch.field for switch in one.switches} | {given.field for given in one.given} <= fields


@with_switch
def test_off_and_on_are_accepted_and_mean_what_they_say(one: Technique) -> None:
    base = preset(shown_on(one))
    off, on = switched_off(one, base), switched_on(one, base)
    assert is_in(one, on)
    assert not is_in(one, off)
    assert {change.field for change in changes(off, on)} == {switch.field for switch in one.switches}
    if one.presets:
        assert on == base
    else:
        assert off == base


@with_switch
def test_other_values_that_count_as_on_occur_in_a_record_or_may_be_asked_for(one: Technique) -> None:
    for switch in one.switches:
        occurring = {dict(flatten(preset(name)))[switch.field] for name in one.presets}
        for value in set(switch.also_on) - occurring:
            assert is_in(one, with_values(preset(shown_on(one)), {switch.field: value}))


NEIGHBOURING = [(public.predecessor, name) for name, public in PUBLIC.items() if public.predecessor]


@pytest.mark.parametrize(("before", "after"), NEIGHBOURING)
def test_a_record_is_a_diff_of_techniques(before: str, after: str) -> None:
    """Every field that changed belongs to a technique that came or went."""
    moved = [one for one in TECHNIQUES.values() if (before in one.presets) != (after in one.presets)]
    explained = {switch.field for one in moved for switch in one.switches} | NUMBERS_OF_A_RUN
    changed = {change.field for change in changes(preset(before), preset(after))}
    assert changed <= explained, f"no technique explains {sorted(changed - explained)}"


def test_a_value_of_the_wrong_type_is_refused() -> None:
    with pytest.raises(UserError, match=r"model\.softcap"):
        with_values(preset("demo"), {"model.softcap": "low"})
