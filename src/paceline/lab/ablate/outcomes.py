"""What the folders of an ablation hold: which runs are finished, which wait, and which must not be counted. No torch.

A run counts if its config is the planned one, its card belongs to that config and says that it finished, its loss is a
number, and its data are those of the other runs. Anything else is named with its reason and never averaged in.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from paceline.checkpoint.run_folder import RunFolder
from paceline.core.errors import PacelineError
from paceline.core.schema import changes, from_dict
from paceline.lab.ablate.plan import Run
from paceline.metrics.card import CARD_FILE, RunCard, card_diff, read_card
from paceline.recipes.presets import preset
from paceline.train.config import RunConfig

State = Literal["waiting", "unfinished", "finished", "refused"]


@dataclass(frozen=True)
class Outcome:
    run: Run
    state: State
    card: RunCard | None = None
    reason: str | None = None
    """Why it is refused."""


def outcome_of(run: Run, folder: Path) -> Outcome:
    """The state of one planned run."""
    here = RunFolder(folder / run.name)
    if not here.config.exists():
        taken = (here.path / CARD_FILE).exists() or bool(here.checkpoints())
        return Outcome(run, "refused", reason="has no config.json") if taken else Outcome(run, "waiting")
    try:
        found = from_dict(RunConfig, here.read_config())
        if different := changes(run.config, found):
            first = different[0]
            return Outcome(run, "refused", reason=f"is another run: {first.field} is {first.after}, not {first.before}")
        if not (here.path / CARD_FILE).exists():
            return Outcome(run, "unfinished")
        return _judged(run, read_card(here.path))
    except PacelineError as error:
        return Outcome(run, "refused", reason=f"is damaged: {error}")


def _judged(run: Run, card: RunCard) -> Outcome:
    if card.diff != card_diff(preset(run.config.preset), run.config) or card.preset != run.config.preset:
        return Outcome(run, "refused", reason="has the card of another run")
    if not card.finished:
        return Outcome(run, "unfinished", card)
    if card.val_loss is None:
        return Outcome(run, "refused", card, "ended with a loss that is not a number")
    return Outcome(run, "finished", card)


def outcomes(runs: Iterable[Run], folder: Path) -> list[Outcome]:
    """Of every planned run. Finished ones on other data than most are refused."""
    found = [outcome_of(run, folder) for run in runs]
    data = Counter(one.card.data_fingerprint for one in found if one.state == "finished" and one.card)
    if len(data) <= 1:
        return found
    usual = data.most_common(1)[0][0]
    return [
        replace(one, state="refused", reason="was trained on other data than the others")
        if one.state == "finished" and one.card and one.card.data_fingerprint != usual
        else one
        for one in found
    ]


def strangers(runs: Iterable[Run], folder: Path) -> list[str]:
    """Folders with a run that is not in the plan."""
    planned = {run.name for run in runs}
    return sorted(path.parent.name for path in folder.glob(f"*/{CARD_FILE}") if path.parent.name not in planned)
