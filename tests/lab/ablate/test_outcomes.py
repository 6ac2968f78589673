"""Which runs count: finished ones of the plan, whole and on the same data. Others are named."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from lab.ablate.pretended import card_of, small_plan, write_all, write_run
from paceline.checkpoint.run_folder import RunFolder
from paceline.core.schema import to_dict
from paceline.lab.ablate.outcomes import Outcome, outcome_of, outcomes
from paceline.lab.technique import with_values
from paceline.metrics.card import CARD_FILE, write_card

PLAN = small_plan(only="softcap-15", seeds=2)
RUN, OTHER = PLAN.runs[0], PLAN.runs[1]


def test_the_states_of_a_run(tmp_path: Path) -> None:
    assert outcome_of(RUN, tmp_path) == Outcome(RUN, "waiting")
    write_run(RUN, tmp_path, 6.0, finished=False)
    assert outcome_of(RUN, tmp_path).state == "unfinished"
    (tmp_path / RUN.name / CARD_FILE).unlink()  # killed before its first card
    assert outcome_of(RUN, tmp_path).state == "unfinished"
    write_run(RUN, tmp_path, 6.0)
    assert outcome_of(RUN, tmp_path).state == "finished"


def damaged_card(folder: Path) -> None:
    (folder / RUN.name / CARD_FILE).write_text("{")


def old_card(folder: Path) -> None:
    (folder / RUN.name / CARD_FILE).write_text('{"format": 0}')


def another_config(folder: Path) -> None:
    RunFolder(folder / RUN.name).write_config(to_dict(OTHER.config))


def another_seed(folder: Path) -> None:
    RunFolder(folder / RUN.name).write_config(to_dict(replace(RUN.config, seed=7)))


def card_of_another(folder: Path) -> None:
    write_card(folder / RUN.name, card_of(OTHER, 6.0))


def no_config(folder: Path) -> None:
    (folder / RUN.name / "config.json").unlink()


def no_number(folder: Path) -> None:
    write_run(RUN, folder, None)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (damaged_card, "is damaged"),
        (old_card, "card format 0"),
        (another_config, "is another run: model."),
        (another_seed, "is another run: seed is 7, not 0"),
        (card_of_another, "has the card of another run"),
        (no_config, "has no config.json"),
        (no_number, "diverged: its last loss is not finite"),
    ],
)
def test_a_run_that_must_not_count_is_refused_with_its_reason(
    spoil: Callable[[Path], None], why: str, tmp_path: Path
) -> None:
    write_run(RUN, tmp_path, 6.0)
    spoil(tmp_path)
    found = outcome_of(RUN, tmp_path)
    assert found.state == "refused"
    assert why in (found.reason or "")


def test_a_run_on_other_data_is_refused(tmp_path: Path) -> None:
    write_all(PLAN, tmp_path, lambda run: 6.0)
    write_run(OTHER, tmp_path, 6.0, data_fingerprint="another corpus")
    found = outcomes(PLAN.runs, tmp_path)
    assert [one.run for one in found if one.state != "finished"] == [OTHER]
    assert found[1].reason == "its data fingerprint is another corpus, that of most runs data"


def test_a_run_on_another_device_is_refused(tmp_path: Path) -> None:
    write_all(PLAN, tmp_path, lambda run: 6.0)
    write_run(OTHER, tmp_path, 6.0, device="cuda")
    assert outcomes(PLAN.runs, tmp_path)[1].reason == "its device is cuda, that of most runs cpu"


def test_a_run_counts_with_settings_that_make_no_other_experiment(tmp_path: Path) -> None:
    write_run(RUN, tmp_path, 6.0)
    RunFolder(tmp_path / RUN.name).write_config(to_dict(with_values(RUN.config, {"train.threads": 3})))
    assert outcome_of(RUN, tmp_path).state == "finished"
