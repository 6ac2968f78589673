"""The table of techniques against the configs, presets, code and tests it speaks of: it cannot drift away from them."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.commands import train
from paceline.core.errors import UserError
from paceline.core.schema import changes, flatten
from paceline.lab.claims import Claim, claims
from paceline.lab.results import looked_up, read, told
from paceline.lab.technique import Figure, Technique, command, is_in, switched_off, switched_on, with_values
from paceline.lab.techniques import TECHNIQUES, TOPICS, technique
from paceline.lab.totals import NEIGHBOURS, TOTALS, whole_record
from paceline.recipes.presets import preset
from paceline.recipes.records import PUBLIC

SOURCE = Path(paceline.__file__).parent
ROOT = Path(__file__).parents[2]
RECORDS = list(PUBLIC)
NUMBERS_OF_A_RUN = {"preset", "steps", "optim.schedule.cooldown_steps"}
"""What changes with the length of a run and is no technique."""

each = pytest.mark.parametrize("one", TECHNIQUES.values(), ids=list(TECHNIQUES))
with_switch = pytest.mark.parametrize(
    "one",
    [one for one in TECHNIQUES.values() if one.switches],
    ids=[k for k, one in TECHNIQUES.items() if one.switches],
)


def test_keys_are_unique_slugs() -> None:
    assert len(TECHNIQUES) == sum(map(len, TOPICS.values()))
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", key) for key in TECHNIQUES)
    assert len({one.title for one in TECHNIQUES.values()}) == len(TECHNIQUES)


def test_a_mistyped_key_is_answered_with_the_nearest() -> None:
    assert technique("softcap-15").record == 18
    with pytest.raises(UserError, match="did you mean softcap-15"):
        technique("softcap15")


# ---- against configs and presets


@each
def test_the_presets_that_have_it_are_those_named(one: Technique) -> None:
    assert one.presets == tuple(name for name in RECORDS if is_in(one, preset(name)))


@each
def test_every_field_exists(one: Technique) -> None:
    fields = {name for name, _ in flatten(preset("demo"))}
    assert {switch.field for switch in one.switches} | {given.field for given in one.given} <= fields


@with_switch
def test_off_and_on_are_accepted_and_mean_what_they_say(one: Technique) -> None:
    base = preset(one.shown_on)
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
            assert is_in(one, with_values(preset(one.shown_on), {switch.field: value}))


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


def sampled() -> list[Any]:
    """Every fifth by default: building the parser takes most of a test's time, and it is the same for all."""
    switched = [one for one in TECHNIQUES.values() if one.switches]
    return [pytest.param(one, id=one.key, marks=pytest.mark.slow if n % 5 else ()) for n, one in enumerate(switched)]


@pytest.mark.parametrize("one", sampled())
def test_the_command_trains_what_the_switch_says(one: Technique, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[Any] = []

    def stop(arguments: train.TrainArgs) -> None:
        parsed.append(arguments.config)
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "_start", stop)
    program, verb, *words = (command(one) or "").split()
    assert (program, verb) == ("paceline", "train")
    with pytest.raises(KeyboardInterrupt):
        train.train(words)
    change = switched_off if one.presets else switched_on
    assert parsed == [change(one, preset(one.shown_on))]


def test_without_a_switch_there_is_no_command() -> None:
    assert command(TECHNIQUES["block-lists"]) is None


# ---- against code, tests and results


def defined_in(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """Functions, classes and assigned names of one level."""
    found: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = node
        elif isinstance(node, ast.Assign):
            found |= {target.id: node for target in node.targets if isinstance(target, ast.Name)}
    return found


def resolves(path: Path, symbol: str) -> bool:
    body = ast.parse(path.read_text(encoding="utf-8")).body
    *outer, last = symbol.split(".")
    for name in outer:
        node = defined_in(body).get(name)
        if not isinstance(node, ast.ClassDef):
            return False
        body = node.body
    return last in defined_in(body)


@each
def test_code_is_where_the_table_says(one: Technique) -> None:
    assert one.code
    for reference in one.code:
        file, _, symbol = reference.partition(":")
        assert (SOURCE / file).is_file(), reference
        assert resolves(SOURCE / file, symbol), f"{reference} is not there"


@each
def test_tests_are_where_the_table_says(one: Technique) -> None:
    assert one.tests
    for reference in one.tests:
        file, _, name = reference.partition("::")
        assert name.startswith("test_")
        assert resolves(ROOT / "tests" / file, name), f"{reference} is not there"


def numbers_in(value: Any) -> Iterator[float]:
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from numbers_in(item)
    elif isinstance(value, int | float):
        yield float(value)


def test_a_number_of_a_claim_is_in_the_file_it_names() -> None:
    """Each number with a decimal point is one of the file's, rounded as it is written. Claims are printed where there
    are no files, so they do not read theirs."""
    measured = [claim.measured for claim in claims() if claim.measured]
    assert measured
    for one in measured:
        assert "{" not in one.said
        known = [number for name in one.sources for number in numbers_in(read(name))]
        for text in re.findall(r"\d+\.(?:\d+)", one.said):
            digits = len(text.partition(".")[2])
            assert text in {f"{number:.{digits}f}" for number in known}, f"{text} is not in {one.files}"


FIGURES = [(claim, figure) for claim in claims() if claim.measured for figure in claim.measured.figures]


@pytest.mark.parametrize(("claim", "figure"), FIGURES, ids=[f"{figure.file} {figure.at}" for _, figure in FIGURES])
def test_a_figure_of_a_claim_is_what_stands_at_its_place(claim: Claim, figure: Figure) -> None:
    """Four digits of it; a difference with its interval and its number of pairs."""
    found = looked_up(figure.file, figure.at)
    values = found if isinstance(found, dict) else {"mean": found, "low": None, "high": None}
    for written, name in ((figure.value, "mean"), (figure.low, "low"), (figure.high, "high")):
        assert written == (None if values[name] is None else float(f"{values[name]:.4g}")), f"{claim.claim}: {name}"
    effect, _, _ = figure.at.rpartition("/")
    if effect.startswith("effects/"):
        assert figure.n == looked_up(figure.file, effect)["n"]


@pytest.mark.parametrize(("claim", "figure"), FIGURES, ids=[f"{figure.file} {figure.at}" for _, figure in FIGURES])
def test_a_figure_from_a_small_run_is_marked_and_settles_nothing(claim: Claim, figure: Figure) -> None:
    assert claim.measured is not None
    why = read(figure.file).get("why_indicative")
    assert why is None or (claim.measured.indicative or "").startswith(why)


def test_enough_claims_have_a_measurement_with_an_interval() -> None:
    assert len({claim.claim for claim, figure in FIGURES if figure.low is not None}) >= 25


def test_a_technique_reads_its_numbers_from_the_files() -> None:
    measured = [each for one in TECHNIQUES.values() for each in one.measurements]
    assert measured
    for one in measured:
        assert not re.search(r"\d\.\d", re.sub(r"\{[^}]*\}", "", one.said)), f"{one.said}: a number written by hand"
        assert "{" not in told(one)


# ---- against the public results


def test_totals_are_those_of_the_presets() -> None:
    for name, public in PUBLIC.items():
        total = TOTALS[public.record]
        assert (total.steps, total.val_loss) == (preset(name).steps, public.val_loss)
        assert total.train_s == pytest.approx((total.steps - 10) * total.step_ms / 1000, rel=0.001)  # ten are free
        assert total.train_s / 60 == pytest.approx(public.minutes, rel=0.02)


def test_a_whole_record_is_told_against_its_direct_predecessor_only() -> None:
    assert {after: before for after, before in NEIGHBOURS.items() if after - before == 1} == NEIGHBOURS
    assert "1,490 → 1,390 steps" in (whole_record(18) or "")
    assert whole_record(13) is None, "record 12 is not a preset"
