"""`paceline train`. torch is imported only once a run really starts."""

import contextlib
import itertools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast

import tyro

from paceline.analysis.facts import beside_bits_per_byte
from paceline.checkpoint.run_folder import RunFolder, new_run, only_writer, open_run
from paceline.core.command_line import ASKS_FOR_HELP, Bare, OptionalPreset, Repeated, parse
from paceline.core.errors import ConfigError, PacelineError, RunError, naming_files
from paceline.core.migrations import leaves
from paceline.core.schema import changes, to_dict
from paceline.core.units import human_seconds
from paceline.evaluate.config import SamplingConfig
from paceline.metrics.card import RunCard, read_card, write_card
from paceline.parallel.rank0_errors import rank0_errors
from paceline.recipes.plugins import load_plugins, load_plugins_of, with_plugins
from paceline.recipes.presets import preset
from paceline.recipes.scaling import parse_scale, scaled, with_steps
from paceline.settings.data import BUILTIN, NAMED_TOGETHER
from paceline.settings.idle import why_idle
from paceline.settings.parallel import SlurmConfig
from paceline.settings.plugins import PluginRef
from paceline.settings.run import MAY_CHANGE_ON_RESUME, RunConfig, read_config, say_once
from paceline.settings.schedule import windows_at

if TYPE_CHECKING:
    from paceline.text.tokenizer import Tokenizer
    from paceline.train.run import Finished

T = TypeVar("T")
HELP = """Train a preset and leave a run folder with a card, metrics, a checkpoint and a report.

example: paceline train demo --steps 200 --seed 1 --out runs/short"""
SAMPLE_TOKENS = 120  # length of the sample a run ends with


@dataclass(frozen=True, kw_only=True)
class PresetArgs:
    preset: OptionalPreset = "demo"
    """Which preset; `paceline presets` lists them."""
    scale: str = "1"
    """Shrink width, head width, vocabulary, batch and steps together: a number in (0, 1], or 1/16."""
    config_file: Annotated[str | None, tyro.conf.arg(name="config")] = None
    """Settings from a file, in place of a preset: a run's config.json, or a TOML with what differs from a preset."""
    like: str | None = None
    """Settings of this run (a folder, a name under runs/, or `latest`), in place of a preset."""
    plugin: Repeated[str] = ()
    """A Python file of yours with activations, loss terms, optimizer rules, rate shapes or presets (docs/plug-ins.md).
    It is executed. May be given several times."""


@dataclass(frozen=True, kw_only=True)
class TrainArgs(PresetArgs):
    out: str | None = None
    """Run folder; runs/<preset> otherwise."""
    init_from: str | None = None
    """Begin with the weights of this run (as evaluated) or export, if names and shapes fit; optimizer, schedule and
    data begin anew."""
    resume: str | None = None
    """Continue this run (a folder, a name under runs/, or `latest`) from its newest good checkpoint."""
    rewind: int | None = None
    """With --resume: go back to the newest good checkpoint of this step or before, and on with data that the run has
    not read yet, so that what made it fail is left out."""
    restart: bool = False
    """With --resume: begin anew at step 0. What the run has left is set aside in its folder, and the card counts it."""
    allow_other_data: bool = False
    """With --resume: go on even if the data are others than before. The card then has the fingerprints of both, and
    comparisons treat the run as another experiment."""
    launch: Literal["local", "slurm"] = "local"
    """Where the run goes: here, or into a job of Slurm's (`--slurm.*`; needs `paceline[slurm]`)."""
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    finish: bool = True
    """End with a sample and a report page."""
    config: Bare[RunConfig]


def train(argv: Sequence[str]) -> int:
    with rank0_errors(), naming_files():
        base = base_config(argv)
        arguments = parse_arguments(argv, base)
        if arguments.launch == "slurm":
            return _submit(argv, arguments)
        folder, done = _resume(arguments, base) if arguments.resume is not None else _start(arguments)
    if done.run.ranks.is_main:
        _conclude(folder, done, finish=arguments.finish)
    return done.exit_code


def _submit(argv: Sequence[str], arguments: TrainArgs) -> int:
    from paceline.commands.slurm import submit
    from paceline.parallel.batch_split import rank_batch

    config, slurm = arguments.config, arguments.slurm  # checked here: a mistake need not wait in a queue
    rank_batch(config.batch, slurm.nodes * slurm.ranks_per_node, config.parallel.context_parallel)
    submit(argv, slurm, name=config.preset)
    return 0


def parse_arguments(argv: Sequence[str], base: RunConfig, *, verb: str = "train", description: str = HELP) -> TrainArgs:
    """The flags on top of `base`, as `base_config` gives it. A resumed run keeps preset, size and folder."""
    arguments = parse_on_preset(TrainArgs, argv, base, verb=verb, description=description)
    rewind, restart = arguments.rewind, arguments.restart
    if arguments.resume is None:
        if rewind is not None:
            raise ConfigError(f"--rewind {rewind} needs a run to go back in; name it with --resume")
        if restart or arguments.allow_other_data:
            flag = "--restart" if restart else "--allow-other-data"
            raise ConfigError(f"{flag} concerns a run that is there; name it with --resume")
        return arguments
    if restart and rewind is not None:
        raise ConfigError(f"--restart begins at step 0, --rewind {rewind} goes back less far; give one of them")
    for flag in ("--scale", "--out", "--config", "--like"):
        if (value := _value_of(flag, argv)) is not None:
            raise ConfigError(f"{flag} {value}: --resume goes on in the run's own folder and size; leave it out")
    return arguments


def parse_on_preset(cls: type[T], argv: Sequence[str], base: RunConfig, *, verb: str, description: str) -> T:
    """Arguments of a verb with a `preset` and a `config`, on top of `base`, which `base_config` made of `argv`."""
    make: Any = cls
    arguments: Any = parse(cls, argv, verb=verb, description=description, default=make(preset=base.preset, config=base))
    if (given := arguments.preset) != base.preset:
        if (run := getattr(arguments, "resume", None)) is not None:
            raise ConfigError(f"{given}: --resume {run} is a run of {base.preset}; leave it out")
        if (where := getattr(arguments, "like", None) or getattr(arguments, "config_file", None)) is not None:
            raise ConfigError(f"{given}: {where} has settings of {base.preset}; leave it out")
        raise ConfigError(f"the preset {given} goes first: paceline {verb} {given} --flags")
    if getattr(arguments, "resume", None) is None:
        from paceline.text.identity import check_identity

        check_identity(arguments.config)
    if os.environ.get("RANK", "0") == "0":
        for line in without_effect(base, arguments):
            print(f"paceline: {line}", file=sys.stderr)
    return cast(T, arguments)


def without_effect(base: RunConfig, arguments: Any) -> list[str]:
    """A line for each setting that was given and does nothing beside the others."""
    settings = dict(leaves(to_dict(arguments.config)))
    given = [(change, why_idle(change.field, settings)) for change in changes(base, arguments.config)]
    if getattr(arguments, "launch", "slurm") == "local":
        slurm = [(change, "--launch slurm") for change in changes(SlurmConfig(), arguments.slurm)]
        given += [(replace(change, field=f"slurm.{change.field}"), words) for change, words in slurm]
    return [
        f"--{change.field.replace('_', '-')} {change.after} has no effect here; it takes {words}"
        for change, words in given
        if words
    ]


def _start(arguments: TrainArgs) -> tuple[RunFolder, "Finished"]:
    from paceline.parallel.ranks import launch_name, ranks_from_environment
    from paceline.text.dataset import check_folder
    from paceline.train.run import Options, start_run

    ranks, name, launch = ranks_from_environment(), arguments.config.preset, launch_name()
    elsewhere = contextlib.nullcontext(RunFolder(Path(name)))  # rank 0 alone writes
    with new_run(name, arguments.out, launch=launch) if ranks.is_main else elsewhere as folder:
        if (where := arguments.config.data.dir) != BUILTIN:
            check_folder(Path(where))  # before ranks compare settings, which follow the data
        options = Options(preset=preset(name), init_from=arguments.init_from, again=launch is not None)
        return folder, start_run(arguments.config, folder, ranks, options)


def _resume(arguments: TrainArgs, before: RunConfig) -> tuple[RunFolder, "Finished"]:
    from paceline.parallel.ranks import launch_name, ranks_from_environment
    from paceline.train.run import Options, resume_run

    assert arguments.resume is not None
    if (arguments.restart or arguments.rewind is not None) and launch_name() is not None:
        flag = "--restart" if arguments.restart else f"--rewind {arguments.rewind}"
        raise ConfigError(f"{flag}: torchrun's --max-restarts would repeat it at every restart; leave one of them out")
    folder = open_run(arguments.resume)
    for change in changes(before, arguments.config):
        if not change.field.startswith(MAY_CHANGE_ON_RESUME):
            differs = f"differs from the run's {change.before}"
            raise ConfigError(f"--{change.field} {change.after} {differs}; start a new run")
    config, ranks = arguments.config, ranks_from_environment()
    with only_writer(folder.path) if ranks.is_main else contextlib.nullcontext():
        with contextlib.suppress(RunError):  # without a card the remaining steps are made, if there are any
            again = arguments.rewind is not None or arguments.restart
            card = read_card(folder.path)
            unsaved = folder.beginning.is_file()
            if not again and card.finished and (unsaved or card.steps >= config.steps):
                cure = "give it more with --steps N, or start another with `paceline train`"
                if unsaved:
                    cure = "it has no checkpoint, as --checkpoint.at-end saves; start another, or --restart"
                raise ConfigError(f"--resume {folder.path}: this run is finished; {cure}")
            if arguments.restart and card.init_from is not None and arguments.init_from is None:
                cure = "name them by --init-from, or start a new run"
                raise ConfigError(f"--restart: the run began with the weights of {card.init_from}; {cure}")
        if arguments.init_from is not None and not arguments.restart and folder.checkpoints():
            begun = f"{folder.path} has begun; start a new run, or --restart"
            raise ConfigError(f"--init-from {arguments.init_from}: {begun}")
        same = {name: getattr(arguments, name) for name in ("init_from", "rewind", "restart", "allow_other_data")}
        return folder, resume_run(config, folder, ranks, Options(preset=preset(config.preset), **same))


def _conclude(folder: RunFolder, done: "Finished", *, finish: bool) -> None:
    """Sample, what gzip makes of the text, report and a last line. A failure here costs the page, not the run."""
    card = done.card
    if finish and card.finished and (tokenizer := done.run.tokenizer) is not None:
        try:
            card = replace(card, gzip_bpb=_gzip_bpb(done, tokenizer))
            card = replace(card, sample=_sample(folder, done, tokenizer))
            print(f"\n{card.sample}\n")
        except (PacelineError, RuntimeError) as error:  # memory may be short beside all that training holds
            print(f"no sample: {str(error).splitlines()[0]}")
        with _failing_in_one_line("the sample is not on the card"):
            write_card(folder.path, card)
    state, go_on = "finished", ""
    if not card.finished:
        state, go_on = f"stopped after step {card.steps_done}", f"; continue with --resume {folder.path}"
    print(f"{folder.path}: {state}{_validated(card)}, {human_seconds(card.wall_s or 0)} since launch{go_on}")
    if finish:
        from paceline.report.page import write_report

        with _failing_in_one_line("no report"):
            write_report([folder.path], folder.report)
            print(f"report: {folder.report}")


@contextlib.contextmanager
def _failing_in_one_line(what: str) -> Iterator[None]:
    try:
        with naming_files():
            yield
    except PacelineError as error:
        print(f"{what}: {error}")


def _validated(card: RunCard) -> str:
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
    from paceline.evaluate.validation import gzip_bits_per_byte, validation_batches

    data, config = done.run.data, done.run.config
    batches = validation_batches(data.val, config.batch.sequence_tokens, config.evaluate.tokens, micro_sequences=1)
    return gzip_bits_per_byte(batches, tokenizer)


def _sample(folder: RunFolder, done: "Finished", tokenizer: "Tokenizer") -> str:
    from paceline.evaluate.generate import sample_text

    run, model = done.run, done.run.model
    if run.sync.forward_is_collective or run.config.optim.average.on:  # no whole model here, or not the shipped one
        from paceline.evaluate.load import load_run

        model = load_run(str(folder.path), device=run.config.train.device).model
    windows = tuple(windows_at(run.config, run.config.steps).values())
    return sample_text(model, tokenizer, "", SamplingConfig(), windows=windows, new_tokens=SAMPLE_TOKENS)


def _beginning(argv: Sequence[str], plugins: Sequence[PluginRef]) -> RunConfig:
    """The preset that is named, or what a file or another run has."""
    named = argv[0] if argv and not argv[0].startswith("-") else "demo"
    path, run = _value_of("--config", argv), _value_of("--like", argv)
    if path is not None and run is not None:
        raise ConfigError(f"--config {path} and --like {run} exclude each other; give one of them")
    if path is None and run is None:
        return preset(named)
    from paceline.recipes.config_file import config_in

    file = Path(path) if path is not None else open_run(str(run)).config
    return config_in(file, named, lambda config, stated: _following(config, argv, stated), plugins)


def _following(config: RunConfig, argv: Sequence[str], stated: Mapping[str, Any]) -> RunConfig:
    """With the vocabulary of its data, but for help."""
    if not ASKS_FOR_HELP.isdisjoint(argv):
        return config
    from paceline.text.identity import following

    names = ("data.dir", "data.train", *NAMED_TOGETHER)  # what the flags say of the data and their vocabulary
    flags = ((name, spelled) for name in names for spelled in (name, name.replace("_", "-")))
    given = {name: value for name, spelled in flags if (value := _value_of(f"--{spelled}", argv)) is not None}
    return following(config, {**stated, **given}, say_once)


def base_config(argv: Sequence[str]) -> RunConfig:
    """What the flags change: a preset at its size, with the vocabulary of its data, or the run that is resumed."""
    if ASKS_FOR_HELP.isdisjoint(argv) and (run := _value_of("--resume", argv)) is not None:
        from paceline.checkpoint.verified import read_run_config

        folder = open_run(run)
        config, trouble = read_run_config(folder, read_config, may_change=MAY_CHANGE_ON_RESUME)
        if trouble is not None and os.environ.get("RANK", "0") == "0":
            print(trouble)
        load_plugins_of(config, _values_of("--plugin", argv), folder.path)
        return _extended(with_plugins(config, ()), folder, argv)
    brought = load_plugins(_values_of("--plugin", argv))
    config = beginning = with_plugins(_beginning(argv, brought), brought)
    if (scale := _value_of("--scale", argv)) is not None:
        config = scaled(config, parse_scale(scale))
    from_file = _value_of("--config", argv) or _value_of("--like", argv)  # which has followed its data
    if from_file is None or config is not beginning:
        config = _following(config, argv, {})
    with contextlib.suppress(ValueError):  # not a number: the parser will say so
        if (steps := int(_value_of("--steps", argv) or 0)) > 0:
            config = with_steps(config, steps)
    return config


def _extended(config: RunConfig, folder: RunFolder, argv: Sequence[str]) -> RunConfig:
    """The config of a resumed run with the steps that are asked for, or that its card says it is being extended to."""
    planned, wanted = config.steps, _value_of("--steps", argv)
    if wanted is not None:
        if wanted.isdecimal() and int(wanted) < planned:
            raise ConfigError(f"--steps {wanted}: {folder.path} has {planned:,} steps, and can only be given more")
        return with_steps(config, int(wanted)) if wanted.isdecimal() else config  # the parser will say so
    with contextlib.suppress(RunError):
        card = read_card(folder.path)
        if card.extended and card.steps > planned:  # it has saved nothing since
            return with_steps(config, card.steps)
    return config


def _value_of(flag: str, argv: Sequence[str]) -> str | None:
    return next(reversed(_values_of(flag, argv)), None)


def _values_of(flag: str, argv: Sequence[str]) -> list[str]:
    """All values given to a flag, in either spelling. tyro reads it again; here it decides the defaults."""
    values = list[str]()
    for word, following in itertools.pairwise((*argv, "")):
        if word == flag:
            values.append(following)
        elif word.startswith(f"{flag}="):
            values.append(word.split("=", 1)[1])
    return values
