"""A run from its folder's first file to its finished card. Of several ranks only the first writes."""

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from paceline.checkpoint import store
from paceline.checkpoint.manifest import CONFIG, STATE
from paceline.checkpoint.random_states import of_rank, set_random_states
from paceline.checkpoint.run_folder import RunFolder
from paceline.core.environment import code_digest, code_version, environment
from paceline.core.errors import PacelineError, RunError
from paceline.core.files import make_room
from paceline.core.schema import flatten, from_dict, read_json, to_dict
from paceline.data.batches import check_one_pass
from paceline.metrics.card import RunCard, card_diff, read_card, write_card
from paceline.metrics.console import ConsoleSink
from paceline.metrics.flops import mean_flops_per_token, utilisation
from paceline.metrics.memory import peak_bytes
from paceline.metrics.meter import Meter, seconds_since_launch
from paceline.metrics.records import EvalRecord, read_metrics
from paceline.metrics.sinks import CallbackSink, FanOut, JsonlSink, OnRecord, Sink, fan_out, missing_lines
from paceline.metrics.trackers import Tracked, check_installed, trackers
from paceline.parallel.meeting import joined
from paceline.parallel.ranks import ALONE, Ranks
from paceline.train.assemble import Machine, Parts, inspect_machine
from paceline.train.config import RunConfig
from paceline.train.diagnosis import diagnose
from paceline.train.fit import assemble_to_fit, is_out_of_memory, out_of_memory
from paceline.train.loop import BEGINNING, Outcome, Position, SavedState, Trainer
from paceline.train.stop import StopRequest, stop_on_signals

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
"""Of an error that means that the disk takes no more."""


@dataclass(frozen=True)
class Finished:
    card: RunCard
    parts: Parts
    exit_code: int
    """0, or 128 + the signal that ended the run early."""


@dataclass(frozen=True)
class _Launch:
    """What a launch was given."""

    config: RunConfig
    """As it was asked for."""
    resolved: RunConfig
    """As this machine can carry it out."""
    machine: Machine
    folder: RunFolder
    preset: RunConfig
    """What the card's diff is taken against."""
    ranks: Ranks
    stop: StopRequest
    on_record: OnRecord | None = None
    """Whom the first rank tells besides files, in place of the console."""
    age: Callable[[], float] = seconds_since_launch
    """Seconds since the launch."""


@dataclass(frozen=True)
class _Found:
    """The checkpoint that a run goes on from."""

    path: Path
    passed_over: list[str]
    data_step: int | None
    """Where its data go on, if not where it stopped reading: after a rewind."""


def start_run(
    config: RunConfig,
    folder: RunFolder,
    *,
    preset: RunConfig,
    ranks: Ranks = ALONE,
    again: bool = False,
    on_record: OnRecord | None = None,
    age: Callable[[], float] = seconds_since_launch,
) -> Finished:
    """Train from step 0. `preset` is what the card's diff is taken against. `folder` is the first rank's word. `again`:
    a launch that restarts itself may have filled it before; then go on from what it has saved, if anything.
    `on_record` and `age` are for a process that does more than this run; see `_Launch`."""
    with _launched(config, folder, preset, ranks) as launch:
        launch = replace(launch, on_record=on_record, age=age)
        if not again:
            return _begin(launch)
        folder, found = ranks.from_first(lambda: (folder, _find(folder)))
        return _begin_or_go_on(replace(launch, folder=folder), found)


def resume_run(
    config: RunConfig,
    folder: RunFolder,
    ranks: Ranks = ALONE,
    *,
    preset: RunConfig | None = None,
    rewind: int | None = None,
) -> Finished:
    """Go on from the newest good checkpoint of a run, as if it had not stopped; from the start, if it was stopped
    before its first. Every rank reads it from `folder`. `rewind`: from the newest of this step or before, and with the
    data that come after all that the run has read."""
    with _launched(config, folder, preset or config, ranks) as launch:
        return _begin_or_go_on(launch, ranks.from_first(lambda: _find(folder, rewind)))


@contextmanager
def _launched(config: RunConfig, folder: RunFolder, preset: RunConfig, ranks: Ranks) -> Iterator[_Launch]:
    """Ranks are joined, signals are heard, and a disk that takes no more is told in one line."""
    check_installed(config.metrics)
    resolved, machine = inspect_machine(config, ranks)
    with joined(ranks, machine.device, agreed_facts(config), config.parallel), stop_on_signals() as stop:
        try:
            yield _Launch(config, resolved, machine, folder, preset, ranks, stop)
        except OSError as error:
            if error.errno not in DISK_ERRORS:
                raise
            begun = folder.config.exists()
            then = f"continue with --resume {folder.path}" if begun else "run the same command again"
            raise PacelineError(
                f"{error.filename or folder.path}: cannot be written ({error.strerror}); "
                f"{'what was saved is intact: ' if begun else ''}{make_room(error)}{then}"
            ) from error


def agreed_facts(config: RunConfig) -> dict[str, str]:
    """What ranks must agree on. Each may find the data at a place of its own."""
    settings = {f"--{name}": str(value) for name, value in flatten(config) if name != "data.dir"}
    return {"the code's digest": code_digest(), "torch": torch.__version__, **settings}


def _find(folder: RunFolder, rewind: int | None = None) -> _Found | None:
    """None: nothing was saved yet."""
    if rewind is None and not folder.checkpoints():
        return None
    path, passed_over = _newest_with_metrics(folder, rewind)
    data_step = None if rewind is None else _read_saved(store.newest_good(folder, usable=_read_saved)[0]).cursor.step
    return _Found(path, passed_over, data_step)


def _newest_with_metrics(folder: RunFolder, until: int | None) -> tuple[Path, list[str]]:
    """The newest good checkpoint up to which the metrics are there. If every one lacks some, the newest good one, for
    which `JsonlSink` will say so."""

    def usable(checkpoint: Path) -> None:
        if (missing := missing_lines(folder.metrics, _read_saved(checkpoint).metrics_bytes)) is not None:
            raise RunError(f"{folder.metrics.name} {missing}")

    try:
        return store.newest_good(folder, usable=usable, until=until)
    except RunError:
        return store.newest_good(folder, usable=_read_saved, until=until)


def _read_saved(checkpoint: Path) -> SavedState:
    """A checkpoint's state; an error of ours if that, or the config beside it, is not what this version writes."""
    if (checkpoint / CONFIG).exists():  # format 1 had none
        from_dict(RunConfig, read_json(checkpoint / CONFIG), at=CONFIG)
    return from_dict(SavedState, read_json(checkpoint / STATE), at=STATE)


def _begin_or_go_on(launch: _Launch, found: _Found | None) -> Finished:
    return _begin(launch) if found is None else _go_on(launch, found)


def _begin(launch: _Launch) -> Finished:
    parts = assemble_to_fit(launch.resolved, launch.machine, launch.ranks)
    if launch.ranks.first:
        _say(parts, launch)
        launch.folder.write_config(to_dict(launch.config))
        if parts.tokenizer is not None:
            parts.tokenizer.save(launch.folder.path)
    return _train(launch, parts, _first_card(launch, parts), BEGINNING)


def _say(parts: Parts, launch: _Launch) -> None:
    """What a person may wish to change and, where there is a console, how a step is cut to fit into memory."""
    cut = launch.on_record is None and parts.fit is not None and parts.fit.key is not None
    for line in (*parts.machine.lacks, *([str(parts.fit)] if cut else [])):
        print(line)


def _go_on(launch: _Launch, found: _Found) -> Finished:
    """Assemble the parts of a run, its steps cut as before if that still fits, fill them and train on."""
    ranks = launch.ranks
    card, trouble = ranks.from_first(lambda: _card_so_far(launch.folder))
    parts = assemble_to_fit(launch.resolved, launch.machine, ranks, before=None if card is None else card.fit)
    position = _filled(parts, found)
    notes = [*trouble, *(f"passed over {reason}" for reason in found.passed_over), f"resumed from {found.path.name}"]
    if position.rewound:
        notes.append(f"rewound; data go on at step {position.data_step}, after all that was read before")
    card = card or _first_card(launch, parts)
    if (fit := parts.fit) is not None and asdict(fit.rung) != card.fit:
        notes.append(f"cut otherwise than before: {fit}")
        card = replace(card, fit=asdict(fit.rung))
    for note in (*parts.machine.lacks, *notes) if ranks.first else ():
        print(note)
    card = replace(card, notes=(*card.notes, *notes), ranks=ranks.world, finished=False, ended=None)
    return _train(launch, parts, card, position)


def _card_so_far(folder: RunFolder) -> tuple[RunCard | None, list[str]]:
    """A card that cannot be read costs what only it knew, not the run."""
    try:
        return read_card(folder.path), []
    except RunError as error:
        return None, [f"a new card, since the old one is lost: {error}"]


def _filled(parts: Parts, found: _Found) -> Position:
    """Fill the parts from a checkpoint; where the run goes on."""
    store.load_weights_into(found.path, dict(parts.model.named_parameters()))
    saved = store.load(found.path, groups=("optimizer", "random", "guard"))
    parts.optimizer.load_state_dict(saved.optimizer)
    set_random_states(of_rank(saved.random, parts.ranks.rank))
    state = _read_saved(found.path)
    data_step = state.cursor.step if found.data_step is None else found.data_step
    if (config := parts.config).data.one_pass:
        check_one_pass(parts.data.train, config.data, config.batch, config.steps + data_step - saved.step)
    return Position(
        step=saved.step,
        data_step=data_step,
        metrics_bytes=state.metrics_bytes,
        clocks=state.clocks,
        guard=saved.guard,
        rewound=found.data_step is not None,
    )


def _train(launch: _Launch, parts: Parts, card: RunCard, position: Position) -> Finished:
    config, ranks, folder = parts.config, parts.ranks, launch.folder
    meter = Meter(
        free_steps=config.train.free_steps,
        tokens_per_step=config.batch.tokens,
        resumed=position.clocks,
        already_s=launch.age(),
        wait=_waiter(parts.machine),
    )
    log = JsonlSink(folder.metrics, position=position.metrics_bytes) if ranks.first else None
    sink = _sinks(launch, log, card, position)
    trainer = Trainer(
        parts,
        folder,
        meter,
        log,
        sink,
        position=position,
        evaluations=ranks.from_first(lambda: read_metrics(folder.path)[1] if position.metrics_bytes else []),
        asked=to_dict(launch.config),
        stop=launch.stop,
    )

    def write(card: RunCard) -> None:
        if ranks.first:
            write_card(folder.path, card)

    write(card)
    try:
        outcome = trainer.run(lambda _: write(_judged(card, trainer.evaluations, meter)))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise out_of_memory(parts) from error
    finally:
        sink.close()
    card = _last_card(card, outcome, meter, parts)
    if trainer.guard.exhausted and not card.finished:
        card = replace(card, notes=(*card.notes, diagnose(trainer)))
        write(card)
        raise PacelineError(f"{card.notes[-1]}; go on with --resume {folder.path}, or from earlier with --rewind STEP")
    write(card)
    return Finished(card, parts, 0 if card.finished else launch.stop.exit_code)


def _sinks(launch: _Launch, log: JsonlSink | None, card: RunCard, position: Position) -> FanOut:
    """Where records go; nowhere from ranks that write nothing."""
    if log is None:
        return fan_out([])
    config = launch.config
    run = Tracked(
        folder=launch.folder.path,
        name=card.name,
        started=card.started,
        start_step=position.step,
        settings=to_dict(config),
    )
    if launch.on_record is None:
        told: Sink = ConsoleSink(steps=config.steps, start_step=position.step)
    else:
        told = CallbackSink(launch.on_record, launch.stop.ask)
    return fan_out([log, *trackers(config.metrics, run), told])


def _waiter(machine: Machine) -> Callable[[], object]:
    return torch.cuda.synchronize if machine.device.type == "cuda" else lambda: None


def _first_card(launch: _Launch, parts: Parts) -> RunCard:
    config = launch.config
    return RunCard(
        name=launch.folder.path.resolve().name,
        preset=config.preset,
        track=config.track,
        seed=config.seed,
        finished=False,
        steps=config.steps,
        steps_done=0,
        tokens=0,
        parameters=sum(parameter.numel() for parameter in parts.model.parameters()),
        data_fingerprint=parts.data.train.fingerprint,
        diff=card_diff(launch.preset, config),
        code_version=code_version(),
        environment=environment(),
        started=_now(),
        device=parts.machine.device.type,
        ranks=parts.ranks.world,
        fit=None if parts.fit is None else asdict(parts.fit.rung),
        notes=parts.machine.notes,
    )


def _judged(card: RunCard, records: list[EvalRecord], meter: Meter) -> RunCard:
    """The card with the newest validation on top."""
    rows = tuple((r.step, r.val_loss, r.val_bpb, r.train_s, r.wall_s) for r in records)
    newest = records[-1]
    return replace(
        card,
        val_loss=newest.val_loss,
        val_bpb=newest.val_bpb,
        steps_done=newest.step,
        tokens=newest.tokens,
        train_s=meter.train_s,
        wall_s=meter.wall_s,
        losses=rows,
    )


def _last_card(card: RunCard, outcome: Outcome, meter: Meter, parts: Parts) -> RunCard:
    config = parts.config
    if outcome.evaluations:
        card = _judged(card, list(outcome.evaluations), meter)
    rate = meter.mean_tokens_per_s
    flops = mean_flops_per_token(config.model, sequence_tokens=config.batch.sequence_tokens, steps=config.steps)
    return replace(
        card,
        finished=outcome.steps_done == config.steps,
        steps_done=outcome.steps_done,
        tokens=outcome.steps_done * config.batch.tokens,
        train_s=meter.train_s,
        wall_s=meter.wall_s,
        startup_s=meter.startup_s,
        first_steps_s=meter.first_steps_s,
        tokens_per_s=rate,
        mfu=utilisation(flops, rate, str(card.environment.get("gpu", "")) or None, gpus=card.ranks),
        peak_bytes=peak_bytes(str(parts.machine.device)),
        skipped_steps=outcome.skipped_steps,
        ended=_now(),
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
