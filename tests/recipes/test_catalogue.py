"""The presets as a list of facts, and the error for a name that is none of them."""

import json
from dataclasses import replace

import pytest

from paceline.core.errors import ConfigError
from paceline.recipes.catalogue import catalogue
from paceline.recipes.presets import PRESETS, preset
from paceline.settings.schedule import Stage


def test_every_preset_is_listed_once_with_its_sizes() -> None:
    entries = {entry.name: entry for entry in catalogue()}
    assert list(entries) == list(PRESETS)
    newest = entries["r18-softcap"]
    assert newest.tokens_per_step * newest.steps == newest.train_tokens
    assert (newest.parameters, newest.steps, newest.tokens_per_step) == (275_742_772, 1390, 524_288)
    assert newest.train_tokens == 728_760_320
    assert (newest.record, newest.predecessor, newest.public_minutes) == (18, "r17-sparse-values", 3.4)
    assert (entries["demo"].record, entries["demo"].predecessor, entries["demo"].changes) == (None, None, ())


def test_a_preset_in_stages_is_listed_with_its_mean_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    demo = preset("demo")
    stages = (Stage(share=0.5, batch_tokens=2 * demo.batch.tokens), Stage(share=0.5))
    monkeypatch.setitem(PRESETS, "demo", lambda: replace(demo, steps=100, stages=stages))
    entry = next(entry for entry in catalogue() if entry.name == "demo")
    assert entry.tokens_per_step == 1.5 * demo.batch.tokens
    assert entry.train_tokens == 100 * entry.tokens_per_step


def test_an_entry_lists_what_the_record_changed_but_not_its_name() -> None:
    entries = {entry.name: entry for entry in catalogue()}
    changed = {change.field: (change.before, change.after) for change in entries["r18-softcap"].changes}
    assert changed["model.softcap"] == (30.0, 15.0)
    assert changed["steps"] == (1490, 1390)
    assert "preset" not in changed


def test_the_catalogue_is_json() -> None:
    rows = json.loads(json.dumps([entry.as_json() for entry in catalogue()]))
    (newest,) = (row for row in rows if row["name"] == "r18-softcap")
    assert {"field": "model.softcap", "from": 30.0, "to": 15.0} in newest["changes"]


def test_summaries_are_one_sentence_on_one_line() -> None:
    for entry in catalogue():
        assert entry.summary
        assert "\n" not in entry.summary
        assert not entry.summary.endswith(".")


@pytest.mark.parametrize(
    ("typo", "near"),
    [("dmeo", "demo"), ("r18", "r18-softcap"), ("r17-sparse", "r17-sparse-values"), ("r04-mion", "r04-muon")],
)
def test_a_mistyped_preset_is_answered_with_the_nearest(typo: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"preset '{typo}' does not exist; did you mean {near}?"):
        preset(typo)


def test_an_unlike_name_is_answered_with_all_of_them() -> None:
    with pytest.raises(ConfigError, match=r"there are demo, r04-muon, .*, r18-softcap"):
        preset("")
