"""paceline from Python: shards from text, configs from presets, runs with a callback, text from them, comparisons.

The command line does the same with the same names. Mistakes raise `PacelineError` with the line that the command would
print. torch is imported when a run starts or writes.
"""

import math
import time
import warnings
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from paceline.checkpoint.run_folder import new_run, open_run
from paceline.core.errors import ConfigError, PacelineError, RunError
from paceline.core.schema import flatten
from paceline.core.threads import limit_openmp_spin
from paceline.evaluate.config import SamplingConfig
from paceline.lab.technique import with_values
from paceline.metrics.card import RunCard, read_card
from paceline.metrics.metrics_file import EvalMetrics, StepMetrics, read_metrics
from paceline.metrics.sinks import OnMetrics
from paceline.recipes.plugins import load_plugins, load_plugins_for, with_plugins
from paceline.recipes.presets import PRESETS, preset
from paceline.recipes.scaling import parse_scale, scaled, with_steps
from paceline.settings.data import NAMED_TOGETHER
from paceline.settings.plugins import Plugin, not_loaded
from paceline.settings.run import RunConfig
from paceline.text.config import PrepareConfig

if TYPE_CHECKING:
    from paceline.analysis.ablation import Ablation
    from paceline.evaluate.load import LoadedRun
    from paceline.lab.compare.compare import Comparison
    from paceline.text.manifest import DatasetManifest
    from paceline.train.on_step import OnStep

__all__ = [
    "EvalMetrics", "PacelineError", "Plugin", "Run", "RunConfig", "StepMetrics",
    "ablate", "compare", "configure", "load", "prepare", "presets", "pretrain",
]  # fmt: skip
"""The one list of what `import paceline` gives."""


def prepare(
    *inputs: str | Path,
    out: str | Path,
    tokenizer: str = "gpt2",
    val_share: float = 0.005,
    field: str = "text",
    document_separator: str | None = None,
    on_bad_text: Literal["error", "replace", "skip-line"] = "error",
    skip_bad: bool = False,
    encoding: str = "utf-8",
    ids_of: str | None = None,
    overwrite: bool = False,
    workers: int = 1,
) -> "DatasetManifest":
    """Text to shards in the folder `out`, for {"data.dir": out}: files (.txt, .md, .jsonl, .json, .csv, packed or not,
    .parquet, .arrow) or folders of them; with `ids_of`, files of token ids. `tokenizer` is gpt2, bytes, bpe-N for one
    of N tokens trained on this text, or a folder that has one. The others are the flags of `paceline data prepare`.

    Warns if more than 1 % of the text is lost. Called again it finds all done, or goes on; `overwrite` begins anew.
    With more than one worker, each process imports the calling script again, which must then keep what it does under
    `if __name__ == "__main__":`."""
    from paceline.text.prepare import prepare as prepared

    config = PrepareConfig(
        inputs=tuple(map(str, inputs)),
        out=str(out),
        tokenizer=tokenizer,
        val_share=val_share,
        field=field,
        document_separator=document_separator,
        on_bad_text=on_bad_text,
        skip_bad=skip_bad,
        encoding=encoding,
        ids_of=ids_of,
        overwrite=overwrite,
        workers=workers,
    )
    manifest = prepared(config)
    if manifest.lost_much:
        warnings.warn(manifest.lost_much, stacklevel=2)
    return manifest


def presets() -> list[str]:
    """The names that `configure` knows."""
    return list(PRESETS)


def configure(
    name: str = "demo",
    changes: Mapping[str, Any] | None = None,
    *,
    scale: float | str = 1.0,
    plugins: Sequence[str | Path] = (),
) -> RunConfig:
    """The preset `name`, shrunk to `scale` (a number in (0, 1], or "1/16"), with these settings changed. `plugins` are
    files of yours, which are executed and whose names it may use (docs/plug-ins.md).

    `changes` goes from dotted names to values: {"model.softcap": None, "seed": 3}; a folder may be a Path.
    "steps" scales the schedule, as --steps does. With "data.dir" the result has the vocabulary of the data there, but
    for what `changes` state. `dataclasses.replace` works on the result, too. Raises PacelineError for a name or value
    that cannot be."""
    _expect(name, str, "the name of a preset", '"demo"')
    settings = {} if changes is None else changes
    _expect(settings, Mapping, "a mapping of settings", '{"seed": 3}')
    brought = load_plugins(_files(plugins))
    config = with_plugins(scaled(preset(name), parse_scale(str(scale))), brought)
    left = {field: str(value) if isinstance(value, Path) else value for field, value in settings.items()}
    known = {field for field, _ in flatten(config)}
    if unknown := [field for field in left if field not in known]:
        raise ConfigError(f"{unknown[0]}: no such setting; `paceline train {name} --help` lists them")
    if isinstance(steps := left.get("steps"), int) and steps > 0:
        config = with_steps(config, steps)
    if left.keys().isdisjoint(("data.dir", *NAMED_TOGETHER)) and not Path(config.data.dir).is_dir():
        return with_values(config, left)  # no data but the preset's own: numpy need not be imported
    from paceline.text.identity import check_identity, following

    config = with_values(following(config, left), left)
    check_identity(config)
    return config


def pretrain(
    config: RunConfig,
    *,
    out: str | Path | None = None,
    init_from: str | Path | None = None,
    on_metrics: OnMetrics | None = None,
    on_step: "OnStep | None" = None,
    on_step_at: Container[int] | None = None,
) -> "Run":
    """Train `config` from step 0 in this process and return the run, in the folder `out` or a new one in `runs/`. With
    `init_from` it begins with the weights of that run or export.

    `on_metrics` gets every record that goes into metrics.jsonl, of a step or of a validation, soon after it was made,
    in place of the lines that are printed otherwise. `on_step` gets a `StepView` of model and optimizer, which it may
    only look at, after every number of updates in `on_step_at`, such as range(0, 311, 50); None: after every step, and
    before the first. If one of them returns True the run stops well, with a checkpoint; what it raises ends the run and
    is raised here."""
    _expect(config, RunConfig, "a config", 'configure("demo")')
    for name, function in (("on_metrics", on_metrics), ("on_step", on_step)):
        if function is not None and not callable(function):
            raise ConfigError(f"{name} {function!r:.40} cannot be called; give a function of one record")
    if on_step_at is not None:
        _expect(on_step_at, Container, "a collection of steps", "range(0, 311, 50)")
    if missing := not_loaded(config.plugins):
        why = "is not loaded, or was changed since"
        raise ConfigError(f"the plug-in {missing[0]} {why}; configure(..., plugins=[FILE])")
    limit_openmp_spin()
    from paceline.text.identity import check_identity
    from paceline.train.run import Options, start_run

    check_identity(config)

    began = time.perf_counter()
    options = Options(
        preset=preset(config.preset),
        on_metrics=on_metrics,
        age=lambda: time.perf_counter() - began,
        init_from=None if init_from is None else str(init_from),
        on_step=None if on_step is None else (on_step, on_step_at),
    )
    with new_run(config.preset, None if out is None else str(out)) as folder:
        start_run(config, folder, options=options)
    return Run(folder.path)


def load(where: str | Path = "latest", *, plugins: Sequence[str | Path] = ()) -> "Run":
    """A run by its folder, its name under runs/, or "latest". Raises PacelineError if there is none. `plugins` are
    those that it was trained with, the same files; predicting needs only one with the model's activation."""
    _expect(where, str | Path, "the folder of a run", '"runs/demo"')
    load_plugins_for(where, _files(plugins))
    return Run(open_run(where).path)


def compare(runs: "Sequence[Run | str | Path]", *, target: float | None = None) -> "Comparison":
    """What finished runs show and what is noise, as `paceline compare` does it: groups of runs that differ in the seed
    only, and the difference of each two. `target`: a loss to test each mean against. Each look is noted beside the
    runs. Needs paceline[report]."""
    if isinstance(runs, str) or not isinstance(runs, Iterable):
        raise ConfigError(f'{runs!r:.40} is not a list of runs; give one such as ["runs/a", "runs/b"]')
    if target is not None and not (isinstance(target, Real) and math.isfinite(target)):
        raise ConfigError(f"target {target!r:.40} is not a loss; give a number such as 3.28")
    if not runs:
        raise ConfigError("no run was given to compare; give some, of two seeds or more")
    from paceline.lab.compare.compare import compare as compared

    return compared([one.folder if isinstance(one, Run) else load(one).folder for one in runs], target=target)


def ablate(
    config: RunConfig,
    against: RunConfig,
    *,
    seeds: int = 3,
    add: bool = True,
    leave_out: bool = True,
    out: str | Path | None = None,
    jobs: int | None = None,
) -> "Ablation":
    """Take the difference between two configs apart: train `config`, `against`, `config` without each part, and with
    `add` `against` with each part alone, over several seeds, and say what each part does.

    A part is a technique that one of the two has, with its settings; steps and validations are those of `config`. Runs
    are processes, `jobs` at a time (None: one, or one for each GPU), in the folder `out`; called again with the same
    configs it goes on where it was. Raises PacelineError if a run did not come to its end; what the others say is in
    the folder. Needs paceline[report]."""
    from paceline.lab.ablate.ablation_text import console_for
    from paceline.lab.ablate.arms import Choice, make_plan
    from paceline.lab.ablate.local import device_of, jobs_at_a_time, run_ablation
    from paceline.lab.ablate.outcomes import outcomes

    for one in (config, against):
        _expect(one, RunConfig, "a config", 'configure("demo")')
    choice = Choice(seeds=seeds, add=add, leave_out=leave_out, device=device_of(config))
    plan = make_plan(with_steps(against, config.steps), config, choice)
    folder = Path(out or f"runs/ablate-{config.preset}")
    found = run_ablation(plan, folder, jobs=jobs_at_a_time(plan, jobs), console=console_for(json=False))
    if isinstance(found, int):
        raise RunError(f"{folder}: stopped; the same call goes on where it was")
    if found.not_counted:
        first, count = found.not_counted[0], len(found.not_counted)
        refused = [str(folder / one.run.name) for one in outcomes(plan.runs, folder) if one.state == "refused"]
        cure = f"delete {', '.join(refused)}, then " if refused else ""  # what is there is never overwritten
        why = f"{count} runs did not count, the first {first.run}: {first.why}"
        raise RunError(f"{folder}: {why}; {cure}the same call tries them again")
    return found


def _files(plugins: Sequence[str | Path]) -> Sequence[str | Path]:
    if isinstance(plugins, str | Path):
        raise ConfigError(f"plugins {plugins!s:.60} is no list of files; give one such as [{str(plugins)!r:.60}]")
    return plugins


def _expect(value: Any, kind: Any, what: str, example: str) -> None:
    if not isinstance(value, kind):
        raise ConfigError(f"{value!r:.40} is not {what}; give one such as {example}")


@dataclass(frozen=True)
class Run:
    """A run's folder, finished or not. What is read from it is read when it is asked for."""

    folder: Path
    device: str = "auto"
    """Where `generate` computes: auto, cpu or cuda."""

    @property
    def card(self) -> RunCard:
        """What was run, on what, and what came out."""
        return read_card(self.folder)

    @property
    def steps(self) -> list[StepMetrics]:
        return read_metrics(self.folder)[0]

    @property
    def evaluations(self) -> list[EvalMetrics]:
        return read_metrics(self.folder)[1]

    def generate(self, prompt: str = "", *, tokens: int = 200, sampling: SamplingConfig | None = None) -> str:
        """The prompt and what follows it, by the newest good checkpoint; `tokens` new ones at most."""
        return prompt + "".join(self.stream(prompt, tokens=tokens, sampling=sampling))

    def stream(self, prompt: str = "", *, tokens: int = 200, sampling: SamplingConfig | None = None) -> Iterator[str]:
        """What follows the prompt, in pieces of whole characters, as they come."""
        if tokens < 1:
            raise ConfigError(f"{tokens} tokens cannot be written; ask for at least 1")
        from paceline.evaluate.generate import text_stream

        model, tokenizer, windows = self.loaded.model, self.loaded.tokenizer, self.loaded.windows
        return text_stream(model, tokenizer, prompt, sampling or SamplingConfig(), windows=windows, new_tokens=tokens)

    @cached_property
    def loaded(self) -> "LoadedRun":
        """Model, tokenizer, window and step of the newest good checkpoint when this was first asked for."""
        from paceline.evaluate.load import load_run

        return load_run(str(self.folder), device=self.device)
