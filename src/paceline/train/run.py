"""A run from its folder's first file to its finished card. Of several ranks only rank 0 writes."""

import errno
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import torch

from paceline.checkpoint.run_folder import RunFolder
from paceline.core.environment import code_digest
from paceline.core.errors import ConfigError, PacelineError
from paceline.core.files import make_room, write_json
from paceline.core.output import tell
from paceline.core.schema import flatten, to_dict
from paceline.core.signals import StopRequest, stop_on_signals
from paceline.metrics.card import FieldChange, RunCard, card_diff, ended, judged, new_card, write_card
from paceline.metrics.console import ConsoleSink
from paceline.metrics.deferred import DeferredMetrics
from paceline.metrics.memory import peak_bytes
from paceline.metrics.meter import Meter, MeterState, seconds_since_launch
from paceline.metrics.metrics_file import read_metrics
from paceline.metrics.sinks import CallbackSink, FanOut, JsonlSink, OnMetrics, Sink
from paceline.metrics.trackers import Tracked, check_installed, trackers
from paceline.parallel.machine import Machine, inspect_machine
from paceline.parallel.memory_fit import Fit
from paceline.parallel.ranks import SINGLE_PROCESS, Ranks
from paceline.parallel.rendezvous import joined
from paceline.settings.run import RunConfig
from paceline.settings.schedule import tokens_before
from paceline.train.assemble import Assembly, assemble_to_fit
from paceline.train.gradient_step import GradientStep
from paceline.train.hooks import CheckpointHook, EvaluationHook, MetricsHook, SavedState
from paceline.train.loop import BEGINNING, Hook, Loop, Position

if TYPE_CHECKING:
    from paceline.train.average import AverageHook
    from paceline.train.on_step import OnStep

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)  # nothing more can be written


@dataclass(frozen=True)
class Finished:
    card: RunCard
    run: Assembly
    exit_code: int  # 0, or 128 + the signal that ended the run early


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a launch may be given beside the config."""

    preset: RunConfig | None = None  # what the card's diff is taken against; None: the config itself
    init_from: str | None = None  # the run or export whose weights a run begins with
    again: bool = False  # a launch that restarts itself may have filled the folder before: then go on from there
    rewind: int | None = None  # resume at this step or before, with the data that come after all that was read
    restart: bool = False  # begin anew in the run's folder, with what is there set aside
    allow_other_data: bool = False  # resume on data of another fingerprint; the card then has both
    on_metrics: OnMetrics | None = None  # rank-0 callback that replaces console output
    on_step: "tuple[OnStep, Container[int] | None] | None" = None  # called between steps, and at which; None: at all
    age: Callable[[], float] = seconds_since_launch  # seconds since the launch


PLAIN = Options()


@dataclass(frozen=True)
class Launch:
    config: RunConfig  # as it was asked for
    resolved: RunConfig  # as this machine can carry it out
    machine: Machine
    folder: RunFolder
    ranks: Ranks
    stop: StopRequest
    options: Options

    @property
    def diff(self) -> tuple[FieldChange, ...]:
        return card_diff(self.options.preset or self.config, self.config)


def start_run(
    config: RunConfig, folder: RunFolder, ranks: Ranks = SINGLE_PROCESS, options: Options = PLAIN
) -> Finished:
    """Train from step 0. `folder` is rank 0's."""
    with _launched(config, folder, ranks, options) as launch:
        return _go_on_or_begin(launch) if options.again else begin(launch)


def resume_run(
    config: RunConfig, folder: RunFolder, ranks: Ranks = SINGLE_PROCESS, options: Options = PLAIN
) -> Finished:
    """Go on from the newest good checkpoint, or from the start if there is none yet, or that is asked for."""
    with _launched(config, folder, ranks, options) as launch:
        if options.restart:
            from paceline.train.resume import set_aside

            return begin(launch, lambda: set_aside(launch))
        return _go_on_or_begin(launch)


def _go_on_or_begin(launch: Launch) -> Finished:
    """Every rank reads the checkpoint from rank 0's folder."""
    from paceline.train.resume import find, first_position, go_on

    folder, found = launch.ranks.from_first(lambda: (launch.folder, find(launch.folder, launch.options.rewind)))
    launch = replace(launch, folder=folder)
    return begin(launch, lambda: first_position(folder)) if found is None else go_on(launch, found)


@contextmanager
def _launched(config: RunConfig, folder: RunFolder, ranks: Ranks, options: Options) -> Iterator[Launch]:
    """Joins the ranks, honours signals, and reports a full disk in one line."""
    check_installed(config.metrics)
    resolved, machine = inspect_machine(config, ranks)
    with joined(ranks, machine.device, agreed_facts(config), config.parallel), stop_on_signals() as stop:
        try:
            yield Launch(config, resolved, machine, folder, ranks, stop, options)
        except OSError as error:
            if error.errno not in DISK_ERRORS:
                raise
            intact, then = "", "run the same command again"
            if folder.config.exists():
                intact, then = "what was saved is intact: ", f"continue with --resume {folder.path}"
            at = f"{error.filename or folder.path}: cannot be written ({error.strerror})"
            raise PacelineError(f"{at}; {intact}{make_room(error)}{then}") from error


def agreed_facts(config: RunConfig) -> dict[str, str]:
    """What ranks must agree on. Each may find the data at a place of its own."""
    settings = {f"--{name}": str(value) for name, value in flatten(config) if name not in ("data.dir", "plugins")}
    settings["--plugin"] = ", ".join(map(str, config.plugins)) or "none"
    return {"the code's digest": code_digest(), "torch": torch.__version__, **settings}


def begin(launch: Launch, before: Callable[[], Position] = lambda: BEGINNING) -> Finished:
    """From step 0. `before`, called on rank 0 before the first file is written, says what the run has behind it."""
    origin, notes = None, tuple[str, ...]()
    if launch.options.init_from is None:
        run, fit = assemble_to_fit(launch.resolved, launch.machine, launch.ranks)
    else:
        from paceline.train.warm_start import assemble_filled

        run, fit, origin, notes = assemble_filled(launch)
    position = launch.ranks.from_first(before)
    began, data = position.history.init_from, run.data
    if began is not None and (origin is None or origin.fingerprint != began.fingerprint):
        cure = "name the same ones by --init-from, or start a new run"
        raise ConfigError(f"{launch.folder.path}: it begins with the weights of {began}, and has no checkpoint; {cure}")
    train_data, val_data = (data.train.fingerprint,), (data.val.fingerprint,)
    history = replace(position.history, data=train_data, val_data=val_data, init_from=origin)
    position = replace(position, history=history)
    if launch.ranks.is_main:
        told = [str(fit)] if launch.options.on_metrics is None and fit.key is not None else []
        for line in (*run.machine.lacks, *notes, *told):
            tell(line)
        launch.folder.write_config(to_dict(launch.config))
        if run.tokenizer is not None:
            run.tokenizer.save(launch.folder.path)
        clocks = position.clocks or MeterState()
        state = SavedState(cursor=position.cursor, metrics_bytes=0, clocks=clocks, history=history)
        write_json(launch.folder.beginning, to_dict(state))
    card = first_card(launch, run, fit)
    return train(launch, run, fit, replace(card, notes=(*card.notes, *notes)), position)


def train(launch: Launch, run: Assembly, fit: Fit, card: RunCard, position: Position) -> Finished:
    """The loop with its hooks, from a position to the end, and the card that says how it went."""
    config, ranks, folder, history = run.config, run.ranks, launch.folder, position.history
    same = {name: getattr(history, name) for name in ("rewinds", "restarts", "init_from", "extended")}
    other_data = (*history.data[1:], *history.val_data[1:])
    card = replace(card, data_fingerprint=history.data[0], other_data=other_data, **same)
    wait, age_s = torch.cuda.synchronize if run.machine.device.type == "cuda" else lambda: None, launch.options.age()
    meter = Meter(untimed_steps=config.train.untimed_steps, resumed=position.clocks, already_s=age_s, wait=wait)
    log = JsonlSink(folder.metrics, position=position.metrics_bytes) if ranks.is_main else None
    sink = _sinks(launch, log, card, position.step)

    def write(card: RunCard) -> RunCard:
        card = replace(card, notes=(*card.notes, *sink.dropped))
        if ranks.is_main:
            write_card(folder.path, card)
        return card

    write(card)
    loop = Loop(run, GradientStep(run, launch.stop), meter, launch.stop, position)
    bad_steps = loop.gradient.bad_steps
    deferred = DeferredMetrics(sink)
    loop.evaluations = ranks.from_first(lambda: read_metrics(folder.path)[1] if position.metrics_bytes else [])
    average, on_step = _optional_hooks(launch, loop)
    shipped = average[0].shipped if average else nullcontext
    evaluation = EvaluationHook(loop, deferred, sink, lambda: write(judged(card, loop.evaluations, meter)), shipped)
    checkpoints = CheckpointHook(loop, folder, deferred, log, to_dict(launch.config))
    loop.hooks = (*average, MetricsHook(loop, deferred), evaluation, *on_step, bad_steps, checkpoints)
    for hook in loop.hooks:
        if state := position.states.get(hook.name, {}):
            from paceline.checkpoint.store import check_fits

            check_fits(hook.name, state, hook.state())
        hook.load(state)
    try:
        with checkpoints.saver:
            checkpoints.settle_in()
            step = loop()
            meter.stop()
            deferred.flush()
            ended_early = step < config.steps
            if step != checkpoints.saved_step and (ended_early or config.checkpoint.at_end):  # the same on every rank
                checkpoints.save(step)
    except Exception as error:
        from paceline.train.memory_trial import is_out_of_memory, out_of_memory

        if not is_out_of_memory(error):
            raise
        raise out_of_memory(run, fit) from error
    finally:
        sink.close()
    bad_steps.wait()
    skipped, device = bad_steps.skipped, str(run.machine.device)
    card = judged(replace(card, skipped_steps=skipped, peak_bytes=peak_bytes(device)), loop.evaluations, meter)
    card = ended(card, config, meter, step=step, tokens=loop.tokens_after(step))
    left = write(card)
    if bad_steps.exhausted and not card.finished:
        from paceline.train.bad_step_report import bad_step_report

        card = replace(card, notes=(*card.notes, bad_step_report(loop, bad_steps)))
        write(card)
        raise PacelineError(f"{card.notes[-1]}; go on with --resume {folder.path}, or from earlier with --rewind STEP")
    return Finished(left, run, 0 if card.finished else launch.stop.exit_code)


def _optional_hooks(launch: Launch, loop: Loop) -> "tuple[list[AverageHook], list[Hook]]":
    average, on_step = list["AverageHook"](), list[Hook]()
    if loop.run.config.optim.average.on:
        from paceline.train.average import AverageHook

        average.append(AverageHook(loop.run))
    if launch.options.on_step is not None:
        from paceline.train.on_step import OnStepHook

        on_step.append(OnStepHook(loop, *launch.options.on_step))
    return average, on_step


def _sinks(launch: Launch, log: JsonlSink | None, card: RunCard, start: int) -> FanOut:
    """Where metrics go from step `start` on; nowhere from ranks that write nothing."""
    if log is None:
        return FanOut([])
    config, folder = launch.config, launch.folder.path
    run = Tracked(folder=folder, name=card.name, started=card.started, start_step=start, settings=to_dict(config))
    if launch.options.on_metrics is None:
        last: Sink = ConsoleSink(steps=config.steps, tokens=tokens_before(config, config.steps), start_step=start)
    else:
        last = CallbackSink(launch.options.on_metrics, launch.stop.ask)
    return FanOut([log, *trackers(config.metrics, run), last])


def first_card(launch: Launch, run: Assembly, fit: Fit) -> RunCard:
    card = new_card(
        launch.folder.path,
        launch.config,
        parameters=sum(parameter.numel() for parameter in run.model.parameters()),
        data_fingerprint=run.data.train.fingerprint,
        device=run.machine.device.type,
    )
    return replace(card, diff=launch.diff, ranks=run.ranks.world, fit=asdict(fit.plan), notes=run.machine.notes)
