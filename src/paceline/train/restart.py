"""Beginning a run anew in its own folder: what it has left is set aside, what it has spent stays on its clocks.

The order of the renames lets a kill between any two of them be noticed: the card, which shows that steps were made, is
only copied, and the new run's first file stands in `checkpoints` before that card is replaced.
"""

import contextlib
import itertools
import os
import shutil
from dataclasses import replace
from pathlib import Path

from paceline.checkpoint.run_folder import SET_ASIDE
from paceline.core.errors import RunError
from paceline.core.files import sync_folder
from paceline.core.output import tell
from paceline.metrics.card import read_card
from paceline.metrics.meter import MeterState
from paceline.metrics.recovery import readable
from paceline.settings.run import RunConfig
from paceline.settings.schedule import tokens_before
from paceline.train.loop import History, Position
from paceline.train.run import Launch


def set_aside(launch: Launch) -> Position:
    """Move the run's files into a folder of their own and begin at step 0, with what was read and how long it took."""
    folder = launch.folder
    position = _spent(launch.resolved, folder.path)
    aside = next(path for n in itertools.count(1) if not (path := folder.path / f"{SET_ASIDE}{n}").exists())
    aside.mkdir()
    for path in (folder.beginning.parent, folder.metrics, folder.report):
        if os.path.lexists(path):
            path.rename(aside / path.name)
    for path in (folder.path / "card.json", folder.config):
        if path.is_file():
            shutil.copy2(path, aside)
    sync_folder(folder.path)
    tell(f"begins anew; what was there is in {aside}")
    return position


def _spent(config: RunConfig, folder: Path) -> Position:
    """As far as the card and the metrics tell: what cannot be read counts as nothing."""
    last = next(reversed(readable(folder / "metrics.jsonl")), None)
    known = [(last.tokens, last.train_s, last.wall_s)] if last else []
    history = History(restarts=1)
    with contextlib.suppress(RunError):
        card = read_card(folder)
        known.append((card.tokens, card.train_s or 0.0, card.wall_s or 0.0))
        history = History(rewinds=card.rewinds, restarts=card.restarts + 1)
    tokens, train_s, wall_s = map(max, zip((0, 0.0, 0.0), *known, strict=True))
    timed = max(0, int(tokens) - tokens_before(config, min(config.train.untimed_steps, config.steps)))
    clocks = MeterState(train_s=train_s, wall_s=wall_s, timed_tokens=timed)
    return Position(clocks=clocks, history=replace(history, tokens=int(tokens)))
