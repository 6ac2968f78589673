"""`paceline train`. torch is imported only once a run really starts."""

import contextlib
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from paceline.checkpoint.run_config import read_run_config
from paceline.checkpoint.run_folder import RunFolder, new_run, only_writer, open_run
from paceline.core.command_line import Bare, OptionalPreset, parse
from paceline.core.errors import ConfigError, PacelineError, RunError, naming_files
from paceline.core.schema import changes, from_dict
from paceline.core.units import human_seconds
from paceline.evaluate.config import SamplingConfig
from paceline.parallel.config import SlurmConfig
from paceline.parallel.voice import one_voice
from paceline.recipes.presets import preset
from paceline.recipes.scaling import parse_scale, scaled, with_steps
from paceline.report.facts import beside_bits_per_byte
from paceline.train.config import RunConfig

if TYPE_CHECKING:
    from paceline.data.tokenizer import Tokenizer
    from paceline.metrics.card import RunCard
    from paceline.train.run import Finished

HELP = """Train a preset and leave a run folder with a card, metrics, a checkpoint and a report.

example: paceline train demo --steps 200 --seed 1 --out runs/short"""

MAY_CHANGE_ON_RESUME = (
    *("train.", "guard.", "checkpoint.", "metrics.", "parallel."),
    *("data.dir", "batch.micro_tokens", "head."),
)
"""What a resumed run may do otherwise than before; everything else is part of what it computes."""

SAMPLE_TOKENS = 120
"""Length of the sample a run ends with."""


@dataclass(frozen=True, kw_only=True)
class TrainArgs:
    preset: OptionalPreset = "demo"
    """Which preset; `paceline presets` lists them."""
    scale: str = "1"
    """Shrink width, head width, vocabulary, batch and steps together: a number in (0, 1], or 1/16."""
    out: str | None = None
    """Run folder; runs/<preset> otherwise."""
    resume: str | None = None
    """Continue this run (a folder, a name under runs/, or `latest`) from its newest good checkpoint."""
    rewind: int | None = None
    """With --resume: go back to the newest good checkpoint of this step or before, and on with data that the run has
    not read yet, so that what made it fail is left out."""
    launch: Literal["local", "slurm"] = "local"
    """Where the run goes: here, or into a job of Slurm's (`--slurm.*`; needs `paceline[slurm]`)."""
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    finish: bool = True
    """End with a sample and a report page."""
    config: Bare[RunConfig]


def train(argv: Sequence[str]) -> int:
    with one_voice(), naming_files():
        base = base_config(argv)
        arguments = parse_arguments(argv, base)
        if arguments.launch == "slurm":
            return _submit(argv, arguments)
        folder, done = _resume(arguments, base) if arguments.resume is not None else _start(arguments)
    if done.parts.ranks.first:
        _conclude(folder, done, finish=arguments.finish)
    return done.exit_code


def _submit(argv: Sequence[str], arguments: TrainArgs) -> int:
    """The words were parsed here first: a mistake need not wait in a queue."""
    from paceline.commands.slurm import submit
    from paceline.parallel.share import share_of_batch

    config, slurm = arguments.config, arguments.slurm
    share_of_batch(config.batch, slurm.nodes * slurm.ranks_per_node, config.parallel.split_sequence)
    submit(argv, slurm, name=config.preset)
    return 0


def parse_arguments(argv: Sequence[str], base: RunConfig) -> TrainArgs:
    """The flags on top of `base`, which `base_config` made of the same words."""
    defaults = TrainArgs(preset=base.preset, config=base)
    arguments = parse(TrainArgs, argv, verb="train", description=HELP, default=defaults)
    if arguments.resume is not None:
        _check_only_resumed(argv, arguments, base)
    elif arguments.rewind is not None:
        raise ConfigError(f"--rewind {arguments.rewind} needs a run to go back in; name it with --resume")
    elif arguments.preset != base.preset:
        raise ConfigError(f"the preset {arguments.preset} goes first: paceline train {arguments.preset} --flags")
    return arguments


def _check_only_resumed(argv: Sequence[str], arguments: TrainArgs, run: RunConfig) -> None:
    """A run goes on as what it is, where it is."""
    if arguments.preset != run.preset:
        raise ConfigError(f"{arguments.preset}: --resume {arguments.resume} is a run of {run.preset}; leave it out")
    for flag in ("--scale", "--out"):
        if (value := _value_of(flag, argv)) is not None:
            raise ConfigError(f"{flag} {value}: --resume goes on in the run's own folder and size; leave it out")


def _start(arguments: TrainArgs) -> tuple[RunFolder, "Finished"]:
    from paceline.parallel.ranks import launch_name, ranks_from_environment
    from paceline.train.run import start_run

    ranks, name, launch = ranks_from_environment(), arguments.config.preset, launch_name()
    begin = partial(start_run, arguments.config, preset=preset(name), ranks=ranks, again=launch is not None)
    if not ranks.first:
        folder = RunFolder(Path(name))
        return folder, begin(folder)
    with new_run(name, arguments.out, launch=launch) as folder:  # the first alone writes
        return folder, begin(folder)


def _resume(arguments: TrainArgs, before: RunConfig) -> tuple[RunFolder, "Finished"]:
    from paceline.parallel.ranks import ranks_from_environment
    from paceline.train.run import resume_run

    assert arguments.resume is not None
    folder = open_run(arguments.resume)
    for change in changes(before, arguments.config):
        if not change.field.startswith(MAY_CHANGE_ON_RESUME):
            raise ConfigError(
                f"--{change.field} {change.after} differs from the run's {change.before}; start a new run"
            )
    config, ranks = arguments.config, ranks_from_environment()
    with only_writer(folder.path) if ranks.first else contextlib.nullcontext():
        if arguments.rewind is None and _is_finished(folder):
            raise ConfigError(f"--resume {folder.path}: this run is finished; start another with `paceline train`")
        return folder, resume_run(config, folder, ranks, preset=preset(config.preset), rewind=arguments.rewind)


def _is_finished(folder: RunFolder) -> bool:
    """A run that lost its card is asked for the rest of its steps, of which there may be none."""
    from paceline.metrics.card import read_card

    try:
        return read_card(folder.path).finished
    except RunError:
        return False


def _conclude(folder: RunFolder, done: "Finished", *, finish: bool) -> None:
    """Sample, what gzip makes of the text, report and a last word. A failure here costs the page, not the run."""
    from paceline.metrics.card import write_card

    card = done.card
    if finish and card.finished and done.parts.tokenizer is not None:
        try:
            card = replace(card, gzip_bpb=_gzip_bpb(done, done.parts.tokenizer))
            card = replace(card, sample=_sample(folder, done, done.parts.tokenizer))
            said = f"\n{card.sample}\n"
        except (PacelineError, RuntimeError) as error:  # memory may be short beside all that training holds
            said = f"no sample: {str(error).splitlines()[0]}"
        print(said)
        try:
            with naming_files():
                write_card(folder.path, card)
        except PacelineError as error:
            print(f"the sample is not on the card: {error}")
    state, go_on = "finished", ""
    if not card.finished:
        state, go_on = f"stopped after step {card.steps_done}", f"; continue with --resume {folder.path}"
    print(f"{folder.path}: {state}{_validated(card)}, {human_seconds(card.wall_s or 0)} since launch{go_on}")
    if finish:
        _report(folder)


def _validated(card: "RunCard") -> str:
    """The newest validation, with its step if others followed. That of step 0 says nothing about the training."""
    if card.val_loss is None or card.validated_at == 0:
        return ""
    last = card.validated_at in (card.steps_done, None)
    name = "validation loss" if last else f"last validated at step {card.validated_at}:"
    if card.val_bpb is None:
        return f", {name} {card.val_loss:.4f}"
    beside = "" if card.gzip_bpb is None else f"; {beside_bits_per_byte(card)}"
    return f", {name} {card.val_loss:.4f} ({card.val_bpb:.3f} bits per byte{beside})"


def _gzip_bpb(done: "Finished", tokenizer: "Tokenizer") -> float | None:
    from paceline.data.batches import validation_batches
    from paceline.evaluate.gzipped import gzip_bits_per_byte

    data, config = done.parts.data, done.parts.config
    batches = validation_batches(data.val, config.batch.sequence_tokens, config.evaluate.tokens, micro_sequences=1)
    return gzip_bits_per_byte(batches, tokenizer)


def _sample(folder: RunFolder, done: "Finished", tokenizer: "Tokenizer") -> str:
    from paceline.evaluate.generate import sample_text
    from paceline.evaluate.load import load_run

    parts = done.parts
    model = parts.model
    if parts.tables.passes_together:  # this rank alone has no whole model
        model = load_run(str(folder.path), device=parts.config.train.device).model
    window = parts.config.model.window.tokens_at(1, 1)
    return sample_text(model, tokenizer, "", SamplingConfig(), window=window, new_tokens=SAMPLE_TOKENS)


def _report(folder: RunFolder) -> None:
    from paceline.report.page import write_report

    try:
        with naming_files():
            write_report([folder.path], folder.report)
        print(f"report: {folder.report}")
    except PacelineError as error:
        print(f"no report: {error}")


def base_config(argv: Sequence[str]) -> RunConfig:
    """What the flags change: the preset scaled to --scale and --steps, or the run that is resumed."""
    if (run := _value_of("--resume", argv)) is not None:
        config, trouble = read_run_config(
            open_run(run), lambda found: from_dict(RunConfig, found), may_change=MAY_CHANGE_ON_RESUME
        )
        if trouble is not None and os.environ.get("RANK", "0") == "0":
            print(trouble)
        return config
    config = preset(argv[0] if argv and not argv[0].startswith("-") else "demo")
    if (scale := _value_of("--scale", argv)) is not None:
        config = scaled(config, parse_scale(scale))
    with contextlib.suppress(ValueError):  # not a number: the parser will say so
        if (steps := int(_value_of("--steps", argv) or 0)) > 0:
            config = with_steps(config, steps)
    return config


def _value_of(flag: str, argv: Sequence[str]) -> str | None:
    """The last value given to a flag, in either spelling. tyro reads it again; here it decides the defaults."""
    value = None
    for word, following in itertools.zip_longest(argv, argv[1:]):
        if word == flag:
            value = following
        elif word.startswith(f"{flag}="):
            value = word.split("=", 1)[1]
    return value
