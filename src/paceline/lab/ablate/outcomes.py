"""What the folders of an ablation hold: which runs are finished, which wait, and which must not be counted. No torch.

By the rules of `analysis/groups.py`: a run counts if its config is the planned experiment, its card belongs to that
config, its last loss may be averaged, and its data and device are those of most runs.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from paceline.analysis.groups import card_facts, experiment_settings, why_left_out
from paceline.analysis.runs import StoredRun, read_config, read_run, settings_of
from paceline.checkpoint.run_folder import RunFolder
from paceline.core.errors import PacelineError
from paceline.lab.ablate.arms import Run
from paceline.metrics.card import CARD_FILE, RunCard

State = Literal["waiting", "unfinished", "finished", "refused"]


@dataclass(frozen=True)
class Outcome:
    run: Run
    state: State
    card: RunCard | None = None
    reason: str | None = None  # why it is refused


def outcome_of(run: Run, folder: Path) -> Outcome:
    here = RunFolder(folder / run.name)
    has_card = (here.path / CARD_FILE).exists()
    if not here.config.exists():
        taken = has_card or bool(here.checkpoints())
        return Outcome(run, "refused", reason="has no config.json") if taken else Outcome(run, "waiting")
    try:
        planned, (there, _) = settings_of(run.config), read_config(here.path)
        for name in ("seed", *experiment_settings({**planned, **there})):
            if (value := there.get(name)) != planned.get(name):
                return Outcome(run, "refused", reason=f"is another run: {name} is {value}, not {planned.get(name)}")
        return _judged(run, read_run(here.path)) if has_card else Outcome(run, "unfinished")
    except PacelineError as error:
        return Outcome(run, "refused", reason=f"is damaged: {error}")


def _judged(run: Run, stored: StoredRun) -> Outcome:
    card = stored.card
    alike = (card.preset, card.seed) == (run.config.preset, run.config.seed)
    if not alike or any(stored.config.get(change.field) != change.after for change in card.diff):
        return Outcome(run, "refused", reason="has the card of another run")
    if not card.finished:
        return Outcome(run, "unfinished", card)
    why = why_left_out(stored)
    return Outcome(run, "refused" if why else "finished", card, why)


def outcomes(runs: Iterable[Run], folder: Path) -> list[Outcome]:
    """Of every planned run. Finished ones on other data or another device than most are refused."""
    found = [outcome_of(run, folder) for run in runs]
    facts = Counter(tuple(card_facts(one.card).items()) for one in found if one.state == "finished" and one.card)
    usual = dict(facts.most_common(1)[0][0]) if facts else {}
    for index, one in enumerate(found):
        known = card_facts(one.card) if one.state == "finished" and one.card else {}
        if name := next((name for name, value in known.items() if value != usual[name]), None):
            why = f"its {name} is {known[name]}, that of most runs {usual[name]}"
            found[index] = replace(one, state="refused", reason=why)
    return found
