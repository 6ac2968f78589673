"""Going on with a run: which checkpoint, filling the parts from it, and where the data go on; or beginning it anew in
its own folder."""

import contextlib
import itertools
import os
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from paceline.checkpoint import store
from paceline.checkpoint.manifest import CONFIG, STATE
from paceline.checkpoint.run_folder import SET_ASIDE, RunFolder, step_of
from paceline.checkpoint.verified import check_seen
from paceline.core.errors import ConfigError, RunError
from paceline.core.files import sync_folder
from paceline.core.migrations import leaves
from paceline.core.output import tell
from paceline.core.random_states import of_rank, set_random_states
from paceline.core.schema import from_dict, read_json, to_dict
from paceline.data.batches import Cursor, check_data, position_after_steps
from paceline.metrics.card import REWOUND, RunCard, read_card
from paceline.metrics.meter import MeterState
from paceline.metrics.metrics_file import Metrics, readable, rebuild
from paceline.metrics.sinks import missing_lines
from paceline.parallel.memory_fit import plan_of
from paceline.settings.run import RunConfig, read_config
from paceline.settings.schedule import sequences_from, tokens_before
from paceline.train.assemble import Assembly, assemble_to_fit
from paceline.train.hooks import SavedState
from paceline.train.loop import BEGINNING, History, Position
from paceline.train.run import Finished, Launch, first_card, train


@dataclass(frozen=True)
class Found:
    """The checkpoint that a run goes on from."""

    path: Path
    passed_over: list[str]
    newest: Path | None = None  # after a rewind: the checkpoint whose data and clocks it goes on from
    last: Metrics | None = None  # after a rewind: the newest record of what the run has read


def find(folder: RunFolder, rewind: int | None = None) -> Found | None:
    """None: nothing was saved yet."""
    check_seen(folder)
    if rewind is None and not folder.checkpoints():
        return None
    path, passed_over = _newest_with_metrics(folder, rewind)
    if rewind is None:
        return Found(path, passed_over)
    newest = store.newest_good(folder, usable=_read_saved)[0]
    return Found(path, passed_over, newest, next(reversed(readable(folder.metrics)), None))


def first_position(folder: RunFolder) -> Position:
    """Where a run without a checkpoint begins, as its folder says."""
    if not folder.beginning.is_file():  # of an older version
        return BEGINNING
    state = _parsed(read_json(folder.beginning), at=str(folder.beginning))
    return Position(clocks=state.clocks, history=state.history)


def _newest_with_metrics(folder: RunFolder, until: int | None) -> tuple[Path, list[str]]:
    """The newest good checkpoint up to which the metrics are there. If every one lacks some, the newest good one, for
    which `JsonlSink` will raise."""

    def usable(checkpoint: Path) -> None:
        if (missing := missing_lines(folder.metrics, _read_saved(checkpoint).metrics_bytes)) is not None:
            raise RunError(f"{folder.metrics.name} {missing}")

    try:
        return store.newest_good(folder, usable=usable, until=until)
    except RunError:
        return store.newest_good(folder, usable=_read_saved, until=until)


def _read_saved(checkpoint: Path) -> SavedState:
    """A checkpoint's state; an error of ours if that, or the config beside it, is not what a version of ours wrote."""
    if (checkpoint / CONFIG).exists():  # format 1 had none
        read_config(read_json(checkpoint / CONFIG), at=CONFIG)
    values = read_json(checkpoint / STATE)
    cursor = values.get("cursor") if isinstance(values, dict) else None
    if isinstance(cursor, dict) and "step" in cursor and "position" not in cursor:  # formats 1 and 2 counted steps
        values = {**values, "cursor": {**cursor, "position": None}}
    return _parsed(values, at=STATE)


def _parsed(values: object, *, at: str) -> SavedState:
    state = from_dict(SavedState, values, at=at)
    for name, value in leaves(to_dict(replace(state, evaluations=()))):
        if isinstance(value, int | float) and not 0 <= value < 2**63:
            raise RunError(f"{at}: {name} is {value}, which no run of ours has; it is damaged")
    return state


def go_on(launch: Launch, found: Found) -> Finished:
    """Assemble a run, its steps cut as before if that still fits, fill it and train on."""
    ranks = launch.ranks
    card, trouble = ranks.from_first(lambda: _card_so_far(launch.folder))
    store.check_model(found.path, launch.config.model)
    run, fit = assemble_to_fit(launch.resolved, launch.machine, ranks, before=None if card is None else card.fit)
    state = _read_saved(found.path)
    position = _filled(run, found, state)
    history, other = _compared(run, position, card, launch.options.allow_other_data)
    history, longer = _extended(launch.config, found.path, history)
    position = replace(position, history=history)
    lost = ranks.from_first(lambda: rebuild(launch.folder.metrics, state.metrics_bytes, state.evaluations))
    notes = [*trouble, *(f"passed over {reason}" for reason in found.passed_over), f"resumed from {found.path.name}"]
    notes += [note for note in (lost, *other, longer) if note]
    if position.rewound:
        notes.append(f"{REWOUND} {position.cursor.position:,}, after all that was read before")
    card = replace(card or first_card(launch, run, fit), diff=launch.diff, steps=launch.config.steps, ranks=ranks.world)
    if plan_of(card.fit) != fit.plan:
        notes.append(f"cut otherwise than before: {fit}")
        card = replace(card, fit=asdict(fit.plan))
    for note in (*run.machine.lacks, *notes) if ranks.is_main else ():
        tell(note)
    card = replace(card, notes=(*card.notes, *notes), finished=False, ended=None)
    if ranks.is_main:  # what was given anew is kept for the next time
        launch.folder.write_config(to_dict(launch.config))
    return train(launch, run, fit, card, position)


def _card_so_far(folder: RunFolder) -> tuple[RunCard | None, list[str]]:
    """A card that cannot be read costs what only it knew, not the run."""
    try:
        return read_card(folder.path), []
    except RunError as error:
        return None, [f"a new card, since the old one is lost: {error}"]


def _compared(run: Assembly, position: Position, card: RunCard | None, allowed: bool) -> tuple[History, list[str]]:
    """The run's history with the data that it goes on with, and a note on each that is other than before."""
    history, notes = position.history, list[str]()
    before = {
        "training data": history.data or (() if card is None else (card.data_fingerprint,)),
        "validation data": history.val_data,
    }
    now = {"training data": run.data.train.fingerprint, "validation data": run.data.val.fingerprint}
    for name, fingerprint in now.items():
        if before[name] and before[name][-1] != fingerprint:
            notes.append(f"other {name} from step {position.step} on: {fingerprint} instead of {before[name][-1]}")
            before[name] += (fingerprint,)
    if notes and not allowed:
        cure = "give the folder of the run's own, or go on with --allow-other-data, which the card will show"
        raise ConfigError(f"--data.dir {run.config.data.dir}: {'; '.join(notes)} (fingerprints); {cure}")
    return replace(
        history,
        data=before["training data"] or (now["training data"],),
        val_data=before["validation data"] or (now["validation data"],),
        rewinds=max(history.rewinds, 0 if card is None else card.rewinds + position.rewound),
        restarts=max(history.restarts, 0 if card is None else card.restarts),
    ), notes


def _extended(config: RunConfig, found: Path, history: History) -> tuple[History, str | None]:
    """The history of a run that has more steps from here on than when the checkpoint was saved, with a note."""
    has_config = (found / CONFIG).exists()  # format 1 had none
    planned, saved_step = read_config(read_json(found / CONFIG), at=CONFIG) if has_config else config, step_of(found)
    if planned.steps == config.steps:
        return history, None
    read = tokens_before(planned, saved_step) - tokens_before(config, saved_step)  # stages and their batches move
    extended = (*history.extended, (saved_step, planned.steps))
    steps = f"extended at step {saved_step:,} from {planned.steps:,} to {config.steps:,} steps"
    return replace(history, extended=extended, tokens=history.tokens + read), f"{steps}, whose schedule it follows now"


def _filled(run: Assembly, found: Found, state: SavedState) -> Position:
    """Fill a run from a checkpoint; where it goes on."""
    store.load_weights_into(found.path, dict(run.model.named_parameters()))
    saved = store.load(found.path, without=("model",))
    run.optimizer.load_state_dict(saved.groups["optimizer"])
    store.check_fits("buffers", saved.groups.get("buffers", {}), buffers := run.model.state_buffers())
    for name, buffer in buffers.items():
        buffer.copy_(saved.groups["buffers"][name])
    set_random_states(of_rank(saved.groups.get("random", {}), run.ranks.rank))
    config, data = run.config, run.data.train
    newest = state if found.newest is None else _read_saved(found.newest)
    cursor, clocks, history = newest.cursor, newest.clocks, newest.history
    if cursor.position is None:
        cursor = Cursor(position_after_steps(data, config.data, config.batch, cursor.step or 0))
    left = config.steps - saved.step
    check_data(data, config.data, config.batch, sequences_from(config, saved.step), left, cursor.position or 0)
    if clocks.timed_tokens is None:  # an older checkpoint, whose steps were all of one size
        clocks = replace(clocks, timed_tokens=clocks.timed_steps * config.batch.tokens)
    if rewound := found.newest is not None:
        clocks, history = _left_behind(config, found, clocks, history, saved.step)
    return Position(saved.step, cursor, state.metrics_bytes, clocks, saved.groups, rewound, history)


def _left_behind(
    config: RunConfig, found: Found, clocks: MeterState, history: History, step: int
) -> tuple[MeterState, History]:
    """After a rewind to `step`: everything that was read before it counts, and the time that it took."""
    assert found.newest is not None
    read = tokens_before(config, step_of(found.newest)) + history.tokens
    if (last := found.last) is not None and last.tokens > read:  # after the newest checkpoint
        timed = (clocks.timed_tokens or 0) + last.tokens - read
        clocks = replace(clocks, train_s=last.train_s, wall_s=last.wall_s, timed_tokens=timed)
        read = last.tokens
    return clocks, replace(history, rewinds=history.rewinds + 1, tokens=read - tokens_before(config, step))


def set_aside(launch: Launch) -> Position:
    """Move the run's files into a folder of their own and begin at step 0, with what was read and how long it took. A
    kill between any two renames is noticed: the card, which shows that steps were made, is only copied, and the new
    run's first file stands in `checkpoints` before that card is replaced."""
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
