"""A run from its folder's first file to its finished card. Of several ranks only the first writes."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from paceline.checkpoint import store
from paceline.checkpoint.run_folder import RunFolder
from paceline.core.environment import code_digest, code_version, environment
from paceline.core.schema import flatten, from_dict, to_dict
from paceline.metrics.card import RunCard, card_diff, read_card, write_card
from paceline.metrics.console import ConsoleSink
from paceline.metrics.flops import mean_flops_per_token, utilisation
from paceline.metrics.memory import peak_bytes
from paceline.metrics.meter import Meter, MeterState, seconds_since_launch
from paceline.metrics.records import EvalRecord, read_metrics
from paceline.metrics.sinks import JsonlSink, fan_out
from paceline.parallel.meeting import joined
from paceline.parallel.ranks import ALONE, Ranks
from paceline.train.assemble import Machine, Parts, inspect_machine
from paceline.train.config import RunConfig
from paceline.train.fit import assemble_to_fit, is_out_of_memory, out_of_memory
from paceline.train.loop import Outcome, Trainer
from paceline.train.stop import StopRequest, stop_on_signals


@dataclass(frozen=True)
class Finished:
    card: RunCard
    parts: Parts
    exit_code: int
    """0, or 128 + the signal that ended the run early."""


def start_run(
    config: RunConfig, folder: RunFolder, *, preset: RunConfig, ranks: Ranks = ALONE, again: bool = False
) -> Finished:
    """Train from step 0. `preset` is what the card's diff is taken against. `folder` is the first rank's word. `again`:
    a launch that restarts itself may have filled it before; then go on from what it has saved, if anything."""
    resolved, machine = inspect_machine(config, ranks)
    with joined(ranks, machine.device, agreed_facts(config), config.parallel):
        if again:
            folder, found = ranks.from_first(
                lambda: (folder, store.newest_good(folder) if folder.checkpoints() else None)
            )
            if found is not None:
                return _go_on(_assemble_again(resolved, machine, folder, ranks), folder, *found)
        parts = assemble_to_fit(resolved, machine, ranks)
        if ranks.first:
            _say(parts)
            folder.write_config(to_dict(config))
            if parts.tokenizer is not None:
                parts.tokenizer.save(folder.path)
        return _train(parts, folder, _first_card(config, folder, parts, preset), _Position())


def resume_run(config: RunConfig, folder: RunFolder, ranks: Ranks = ALONE) -> Finished:
    """Go on from the newest good checkpoint of a run, as if it had not stopped. Every rank reads it from `folder`."""
    resolved, machine = inspect_machine(config, ranks)
    with joined(ranks, machine.device, agreed_facts(config), config.parallel):
        found = ranks.from_first(lambda: store.newest_good(folder))
        return _go_on(_assemble_again(resolved, machine, folder, ranks), folder, *found)


def _assemble_again(config: RunConfig, machine: Machine, folder: RunFolder, ranks: Ranks) -> Parts:
    """The parts of a run that goes on: its steps are cut as before, if that still fits."""
    return assemble_to_fit(config, machine, ranks, before=ranks.from_first(lambda: read_card(folder.path).fit))


def _say(parts: Parts) -> None:
    """What this machine lacks, and how a step is cut because of its memory."""
    for line in (*parts.machine.lacks, *([] if parts.fit is None or parts.fit.key is None else [str(parts.fit)])):
        print(line)


def agreed_facts(config: RunConfig) -> dict[str, str]:
    """What ranks must agree on. Each may find the data at a place of its own."""
    settings = {f"--{name}": str(value) for name, value in flatten(config) if name != "data.dir"}
    return {"the code's digest": code_digest(), "torch": torch.__version__, **settings}


def _go_on(parts: Parts, folder: RunFolder, checkpoint: Path, passed_over: list[str]) -> Finished:
    """Fill `parts` from a checkpoint and train on."""
    saved = store.load(checkpoint)
    parts.tables.load_weights(parts.model, saved.model)
    parts.optimizer.load_state_dict(saved.optimizer)
    notes = [*(f"passed over {reason}" for reason in passed_over), f"resumed from {checkpoint.name}"]
    card = read_card(folder.path)
    if (fit := parts.fit) is not None and asdict(fit.rung) != card.fit:
        notes.append(f"cut otherwise than before: {fit}")
        card = replace(card, fit=asdict(fit.rung))
    for note in (*parts.machine.lacks, *notes) if parts.ranks.first else ():
        print(note)
    position = _Position(
        step=saved.step,
        metrics_bytes=int(saved.state["metrics_bytes"]),
        clocks=from_dict(MeterState, saved.state["clocks"]),
    )
    card = replace(card, notes=(*card.notes, *notes), ranks=parts.ranks.world, ended=None)
    return _train(parts, folder, card, position)


@dataclass(frozen=True)
class _Position:
    """Where a run goes on."""

    step: int = 0
    metrics_bytes: int = 0
    clocks: MeterState | None = None


def _train(parts: Parts, folder: RunFolder, card: RunCard, position: _Position) -> Finished:
    config, device, ranks = parts.config, parts.machine.device, parts.ranks
    meter = Meter(
        free_steps=config.train.free_steps,
        tokens_per_step=config.batch.tokens,
        resumed=position.clocks,
        already_s=seconds_since_launch(),
        wait=_waiter(parts.machine),
    )
    log = JsonlSink(folder.metrics, position=position.metrics_bytes) if ranks.first else None
    evaluations = ranks.from_first(lambda: read_metrics(folder.path)[1] if position.metrics_bytes else [])
    sink = fan_out([log, ConsoleSink(steps=config.steps, start_step=position.step)] if log else [])
    trainer = Trainer(parts, folder, meter, log, sink, start=position.step, evaluations=evaluations)

    def write(card: RunCard) -> None:
        if ranks.first:
            write_card(folder.path, card)

    write(card)
    with stop_on_signals() as stop:
        try:
            outcome = trainer.run(stop, lambda _: write(_judged(card, trainer.evaluations, meter)))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise out_of_memory(parts) from error
        finally:
            sink.close()
    card = _last_card(card, outcome, meter, parts, str(device))
    write(card)
    return Finished(card, parts, _exit_code(stop, card))


def _exit_code(stop: StopRequest, card: RunCard) -> int:
    return 0 if card.finished else stop.exit_code


def _waiter(machine: Machine) -> Callable[[], object]:
    return torch.cuda.synchronize if machine.device.type == "cuda" else lambda: None


def _first_card(config: RunConfig, folder: RunFolder, parts: Parts, preset: RunConfig) -> RunCard:
    return RunCard(
        name=folder.path.resolve().name,
        preset=config.preset,
        track=config.track,
        seed=config.seed,
        finished=False,
        steps=config.steps,
        steps_done=0,
        tokens=0,
        parameters=sum(parameter.numel() for parameter in parts.model.parameters()),
        data_fingerprint=parts.data.train.fingerprint,
        diff=card_diff(preset, config),
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


def _last_card(card: RunCard, outcome: Outcome, meter: Meter, parts: Parts, device: str) -> RunCard:
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
        peak_bytes=peak_bytes(device),
        ended=_now(),
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
