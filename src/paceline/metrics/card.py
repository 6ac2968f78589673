"""The run card: one small file that says what was run, on what, and what came out.

Reports, comparisons and boards read cards, the config beside them and the metrics, never a checkpoint. A card is
written, always whole, when a run starts, at its validations and at its end. Values not known yet are null.
"""

import json
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from paceline.core.environment import CodeVersion, code_version, environment
from paceline.core.errors import ConfigError, RunError
from paceline.core.files import write_json
from paceline.core.lock import one_at_a_time
from paceline.core.migrations import migrate_field
from paceline.core.schema import changes, from_dict, plain, read_json, to_dict
from paceline.metrics.flops import mean_flops_per_token, utilisation
from paceline.metrics.meter import Meter
from paceline.metrics.metrics_file import EvalMetrics, finite
from paceline.settings.plugins import PluginRef
from paceline.settings.run import RunConfig

CARD_FILE = "card.json"
CARD_LOCK = ".card.lock"
CARD_FORMAT = 1
REWOUND = "rewound; data go on at token"  # how the note of a rewind begins
POSITION_COLUMNS = ("first", "last", "inside_window", "tokens", "loss")  # meaning of a row of `Evaluation.positions`
LOSS_COLUMNS = ("step", "val_loss", "val_bpb", "train_s", "wall_s")  # meaning of a row of `RunCard.losses`


@dataclass(frozen=True, kw_only=True)
class FieldChange:
    """One field of the config that is not the preset's. Values are those of the file: no tuple, no dataclass."""

    field: str
    before: bool | int | float | str | list | dict | None
    after: bool | int | float | str | list | dict | None


@dataclass(frozen=True, kw_only=True)
class InitFrom:
    """Where a run's first weights came from (`--init-from`)."""

    name: str  # of the run or the export, without the way there
    step: int | None  # of the run's checkpoint
    fingerprint: str  # of the weights themselves: a run and its export have the same

    def __str__(self) -> str:
        return f"{self.name}{'' if self.step is None else f' at step {self.step:,}'} ({self.fingerprint[:12]})"


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What a checkpoint was worth on one thing, judged after training (`paceline evaluate`)."""

    kind: Literal["validation", "text", "hellaswag", "task"]
    name: str  # of the folder, the file or the task, without the way there
    step: int  # of the checkpoint
    made: str  # ISO 8601 with offset
    figures: dict  # name to number: loss, bits_per_byte, acc …
    of: dict  # what the figures stand for: how many tokens, bytes or examples, the file's hash, the settings
    positions: tuple[tuple[int | float | bool | None, ...], ...] = ()
    """A row per bucket of places in the document: POSITION_COLUMNS."""


def window_side(first: float, window: int | None, sequence: int | None) -> str:
    """Where a bucket of places lies that begins at this one, by the window and the sequence of an evaluation."""
    if sequence is not None and first >= sequence:
        return "next sequence"
    return "none" if window is None else "inside" if first < window else "beyond"


@dataclass(frozen=True, kw_only=True)
class RunCard:
    format: int = CARD_FORMAT
    name: str
    preset: str
    track: str | None
    seed: int
    finished: bool  # all steps done and the last validation made
    steps: int  # steps of the whole run
    steps_done: int
    skipped_steps: int = 0  # of those, steps that changed nothing, because their numbers were bad
    tokens: int  # training tokens read so far, those of steps that a rewind or a restart has left behind included
    rewinds: int = 0  # how often the run went back to an earlier step and on with other data (`--rewind`)
    restarts: int = 0  # how often it was begun anew in its folder (`--restart`)
    parameters: int
    val_loss: float | None = None  # newest validation, in nats per token
    val_bpb: float | None = None  # the same in bits per byte of text
    gzip_bpb: float | None = None  # what `gzip -9` needs for that text, known once a run has ended with a sample
    train_s: float | None = None
    """By the records' rule: from step `train.untimed_steps`, without validation and checkpoints."""
    wall_s: float | None = None  # since launch
    startup_s: float | None = None  # launch to first step
    first_steps_s: float | None = None  # the untimed steps, compilation included
    tokens_per_s: float | None = None  # over the timed steps
    mfu: float | None = None  # share of the GPUs' bf16 peak that the model's arithmetic used
    device: str | None = None  # what it ran on: cpu or cuda
    ranks: int = 1  # processes that shared every step
    peak_bytes: int | None = None  # allocated on the GPU; on a CPU the resident size of the process. Of the first rank
    data_fingerprint: str
    other_data: tuple[str, ...] = ()  # fingerprints of the data that it went on with after those (`--allow-other-data`)
    init_from: InitFrom | None = None  # None: it began with weights of its own
    extended: tuple[tuple[int, ...], ...] = ()
    """A row for each time that it was given more steps: the step reached, and the steps it was planned for by then."""
    diff: tuple[FieldChange, ...] = ()  # where the config differs from its preset
    plugins: tuple[PluginRef, ...] = ()  # files of the user's own that it was given
    code_version: CodeVersion
    environment: dict  # as `core.environment.environment` gives it
    started: str  # ISO 8601 with offset
    ended: str | None = None
    fit: dict | None = None  # how a step is cut (`parallel.memory_plans.MemoryPlan`); a resumed run goes on so
    notes: tuple[str, ...] = ()  # what was done otherwise than asked, for the reader of the figures
    losses: tuple[tuple[int | float | None, ...], ...] = ()  # a row per validation: LOSS_COLUMNS
    sample: str | None = None  # text the model wrote at the end
    evaluations: tuple[Evaluation, ...] = ()
    """Made after training; of those of one thing at one step under the same conditions, the newest."""

    @property
    def all_data(self) -> str:
        """The fingerprints of all data that it has seen: what runs must have in common to be compared."""
        return "+".join([self.data_fingerprint, *self.other_data])

    @property
    def validated_at(self) -> int | float | None:
        """Step of the newest validation: of a run that was stopped between two, before its last."""
        return self.losses[-1][0] if self.losses and self.losses[-1] else None

    @property
    def first_bpb(self) -> float | None:
        """Bits per byte before training, if it was validated then."""
        first = dict(zip(LOSS_COLUMNS, self.losses[0], strict=False)) if self.losses else {}
        return first.get("val_bpb") if first.get("step") == 0 else None


def card_diff(preset: Any, config: Any) -> tuple[FieldChange, ...]:
    """Where `config` differs from `preset`, as the card keeps it."""
    return tuple(
        FieldChange(field=change.field, before=plain(change.before), after=plain(change.after))
        for change in changes(preset, config)
        if change.field != "plugins"  # a field of the card
    )


def new_card(folder: Path, config: RunConfig, *, parameters: int, data_fingerprint: str, device: str) -> RunCard:
    """Of a run that begins in this folder."""
    return RunCard(
        name=folder.resolve().name,
        preset=config.preset,
        track=config.track,
        seed=config.seed,
        finished=False,
        steps=config.steps,
        steps_done=0,
        tokens=0,
        parameters=parameters,
        data_fingerprint=data_fingerprint,
        plugins=config.plugins,
        code_version=code_version(),
        environment=environment(),
        started=now(),
        device=device,
    )


def judged(card: RunCard, found: list[EvalMetrics], meter: Meter) -> RunCard:
    """With the validations so far."""
    if not found:
        return card
    newest = found[-1]
    return replace(
        card,
        val_loss=newest.val_loss,
        val_bpb=newest.val_bpb,
        steps_done=newest.step,
        tokens=newest.tokens,
        train_s=meter.train_s,
        wall_s=meter.wall_s,
        losses=tuple((e.step, e.val_loss, e.val_bpb, e.train_s, e.wall_s) for e in found),
    )


def ended(card: RunCard, config: RunConfig, meter: Meter, *, step: int, tokens: int) -> RunCard:
    """Of a launch that came to this step."""
    rate, gpu = meter.mean_tokens_per_s, str(card.environment.get("gpu", "")) or None
    return replace(
        card,
        finished=step == config.steps,
        steps_done=step,
        tokens=tokens,
        train_s=meter.train_s,
        wall_s=meter.wall_s,
        startup_s=meter.startup_s,
        first_steps_s=meter.first_steps_s,
        tokens_per_s=rate,
        mfu=utilisation(mean_flops_per_token(config), rate, gpu, gpus=card.ranks),
        ended=now(),
    )


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def write_card(folder: Path, card: RunCard) -> None:
    """Replace the folder's card, wholly or not at all; evaluations that other processes have put on it stay."""
    with one_at_a_time(folder / CARD_LOCK):
        try:
            known = read_card(folder).evaluations
        except RunError:  # the first card, or a damaged one
            known = ()
        _replace(folder, card, (*card.evaluations, *known))


def _replace(folder: Path, card: RunCard, evaluations: tuple[Evaluation, ...]) -> None:
    """With these evaluations; of those of one thing under the same conditions, the last."""
    newest = dict[str, Evaluation]()
    for each in evaluations:
        key = json.dumps([each.kind, each.name, each.step, each.of], sort_keys=True)
        newest.pop(key, None)
        newest[key] = each
    write_json(folder / CARD_FILE, finite(to_dict(replace(card, evaluations=tuple(newest.values())))))


def read_card(folder: Path) -> RunCard:
    """The card of the run in `folder`, or a RunError that names the file and what is wrong with it."""
    path = folder / CARD_FILE
    if not path.is_file():
        raise RunError(f"{path}: does not exist, so this is not the folder of a run; give one such as runs/demo")
    try:
        values = read_json(path)
        found = values.get("format") if isinstance(values, dict) else None
        if found != CARD_FORMAT:
            cure = f"this version reads {CARD_FORMAT}; use the version that wrote it"
            raise RunError(f"{path}: has card format {found!r}, {cure}")
        card = from_dict(RunCard, values)
    except ConfigError as error:
        raise RunError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from None
    today = [(migrate_field(change.field), change) for change in card.diff]  # None: a setting that is gone
    noted = sum(note.startswith(REWOUND) for note in card.notes)  # all that older versions kept of it
    diff = tuple(replace(change, field=name) for name, change in today if name is not None)
    return replace(card, diff=diff, rewinds=max(card.rewinds, noted))


def add_evaluation(folder: Path, evaluation: Evaluation) -> None:
    """Put it on the folder's card, in place of an older one of the same thing under the same conditions."""
    with one_at_a_time(folder / CARD_LOCK):
        card = read_card(folder)
        _replace(folder, card, (*card.evaluations, evaluation))
