"""Going on with a run: which checkpoint, filling the parts from it, and where the data go on."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path

from paceline.checkpoint import store
from paceline.checkpoint.manifest import CONFIG, STATE
from paceline.checkpoint.run_folder import RunFolder
from paceline.core.errors import RunError
from paceline.core.random_states import of_rank, set_random_states
from paceline.core.schema import from_dict, read_json
from paceline.data.batches import Cursor, check_data, position_after_steps
from paceline.metrics.card import RunCard, read_card
from paceline.metrics.sinks import missing_lines
from paceline.parallel.memory_fit import plan_of
from paceline.settings.run import read_config
from paceline.settings.schedule import sequences_from
from paceline.train.assemble import Assembly, assemble_to_fit
from paceline.train.hooks import SavedState
from paceline.train.loop import Position
from paceline.train.run import Finished, Launch, first_card, train


@dataclass(frozen=True)
class Found:
    """The checkpoint that a run goes on from."""

    path: Path
    passed_over: list[str]
    cursor: Cursor | None
    """Where its data go on, if not where it stopped reading: after a rewind."""


def find(folder: RunFolder, rewind: int | None = None) -> Found | None:
    """None: nothing was saved yet."""
    if rewind is None and not folder.checkpoints():
        return None
    path, passed_over = _newest_with_metrics(folder, rewind)
    cursor = None if rewind is None else _read_saved(store.newest_good(folder, usable=_read_saved)[0]).cursor
    return Found(path, passed_over, cursor)


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
    return from_dict(SavedState, values, at=STATE)


def go_on(launch: Launch, found: Found) -> Finished:
    """Assemble a run, its steps cut as before if that still fits, fill it and train on."""
    ranks = launch.ranks
    card, trouble = ranks.from_first(lambda: _card_so_far(launch.folder))
    store.check_model(found.path, launch.config.model)
    run, fit = assemble_to_fit(launch.resolved, launch.machine, ranks, before=None if card is None else card.fit)
    position = _filled(run, found)
    notes = [*trouble, *(f"passed over {reason}" for reason in found.passed_over), f"resumed from {found.path.name}"]
    if position.rewound:
        notes.append(f"rewound; data go on at token {position.cursor.position:,}, after all that was read before")
    card = card or first_card(launch, run, fit)
    if plan_of(card.fit) != fit.plan:
        notes.append(f"cut otherwise than before: {fit}")
        card = replace(card, fit=asdict(fit.plan))
    for note in (*run.machine.lacks, *notes) if ranks.is_main else ():
        print(note)
    card = replace(card, notes=(*card.notes, *notes), ranks=ranks.world, finished=False, ended=None)
    return train(launch, run, fit, card, position)


def _card_so_far(folder: RunFolder) -> tuple[RunCard | None, list[str]]:
    """A card that cannot be read costs what only it knew, not the run."""
    try:
        return read_card(folder.path), []
    except RunError as error:
        return None, [f"a new card, since the old one is lost: {error}"]


def _filled(run: Assembly, found: Found) -> Position:
    """Fill a run from a checkpoint; where it goes on."""
    store.load_weights_into(found.path, dict(run.model.named_parameters()))
    saved = store.load(found.path, without=("model",))
    run.optimizer.load_state_dict(saved.optimizer)
    for name, buffer in run.model.state_buffers().items():
        buffer.copy_(saved.groups["buffers"][name])
    set_random_states(of_rank(saved.groups.get("random", {}), run.ranks.rank))
    state, config, data = _read_saved(found.path), run.config, run.data.train
    cursor = state.cursor if found.cursor is None else found.cursor
    if cursor.position is None:
        cursor = Cursor(position_after_steps(data, config.data, config.batch, cursor.step or 0))
    left = config.steps - saved.step
    check_data(data, config.data, config.batch, sequences_from(config, saved.step), left, cursor.position or 0)
    clocks = state.clocks
    if clocks.timed_tokens is None:  # an older checkpoint, whose steps were all of one size
        clocks = replace(clocks, timed_tokens=clocks.timed_steps * config.batch.tokens)
    return Position(saved.step, cursor, state.metrics_bytes, clocks, saved.groups, rewound=found.cursor is not None)
