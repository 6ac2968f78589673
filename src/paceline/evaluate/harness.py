"""Tasks of lm-evaluation-harness, run on our model in this process. The package is the extra `paceline[eval]`.

Names, data and metrics of a task are the harness's business; `harness_model.py` answers its three kinds of question.
"""

import contextlib
import difflib
import itertools
import numbers
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core.errors import ConfigError, UserError
from paceline.core.output import unchanged
from paceline.evaluate.config import SuiteConfig
from paceline.evaluate.load import LoadedRun
from paceline.evaluate.score import Progress, silent

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

BOOTSTRAP_DRAWS = 1_000
"""For the standard error of metrics that have no formula for it; the harness's 100,000 take minutes."""

UNFIT = {
    "UNSAFE_CODE": "runs code that the model writes, which paceline does not",
    "MULTIMODAL": "shows pictures to the model, which reads text only",
}
"""Marks of tasks that the harness would refuse as well, in the middle of the work."""


@dataclass(frozen=True)
class TaskResult:
    name: str
    figures: dict[str, float]
    """The harness's names, without its filter where that is `none`."""
    of: dict[str, Any]


def open_tasks(names: Sequence[str], folder: Path | None) -> "TaskManager":
    """The harness, once it has found and loaded every task: those that `folder` describes in YAML or, without one, all
    that come with it, which takes it some 13 s to look through."""
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"--tasks-dir {folder}: no such folder; name one that holds task files (.yaml)")
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise UserError(f"--tasks needs lm-evaluation-harness ({error}); pip install 'paceline[eval]'") from None
    with _named("--tasks-dir", folder):
        manager = TaskManager(include_path=folder, include_defaults=folder is None)
    for name in names:
        if not manager.match_tasks([name]):
            near, known = difflib.get_close_matches(name, manager.all_tasks, n=1), ", ".join(manager.all_tasks)
            there = f" in {folder}; there are {known or 'none'}" if folder else "; see `lm-eval ls tasks`"
            raise ConfigError(f"--tasks {name}: no such task{f'; did you mean {near[0]}?' if near else there}")
        with _named("--tasks", name):
            loaded = manager.load([name])["tasks"]
        for task, (mark, reason) in itertools.product(loaded.values(), UNFIT.items()):
            if getattr(task, mark, False):
                raise ConfigError(f"--tasks {name}: {reason}; choose another")
    return manager


@contextlib.contextmanager
def _named(flag: str, value: object) -> Iterator[None]:
    """Anything may go wrong in a task file or a download, with any exception: tell it in one line."""
    try:
        yield
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0][:200]
        what = f"{flag} {value}: could not be loaded ({type(error).__name__}: {reason})"
        raise ConfigError(f"{what}; mend the task, or connect if its data are to be downloaded") from None


def judge_tasks(
    run: LoadedRun, manager: "TaskManager", config: SuiteConfig, *, most_tokens: int, progress: Progress = silent
) -> list[TaskResult]:
    """A result per task; a group of tasks gives one for each member and, where it averages them, its own."""
    from lm_eval import simple_evaluate

    from paceline.evaluate.harness_model import HarnessModel

    bars = unchanged(sys.stderr)
    with contextlib.redirect_stdout(bars), contextlib.redirect_stderr(bars):  # standard output is the result's alone
        found = simple_evaluate(
            model=HarnessModel(run, most_tokens=most_tokens, progress=progress),
            tasks=list(config.tasks),
            task_manager=manager,
            num_fewshot=config.fewshot,
            limit=config.limit,
            bootstrap_iters=BOOTSTRAP_DRAWS,
            log_samples=False,
        )
    assert found is not None  # only another rank than the first gets nothing
    return [_result(found, name) for name in found["results"]]


def _result(found: Any, name: str) -> TaskResult:
    figures = {
        key.removesuffix(",none"): float(value)
        for key, value in found["results"][name].items()
        if "," in key and isinstance(value, numbers.Real)
    }
    of = {
        "examples": found.get("n-samples", {}).get(name, {}).get("effective"),
        "fewshot": found.get("n-shot", {}).get(name),
        "version": str(found.get("versions", {}).get(name)),
    }
    return TaskResult(name, figures, of)
