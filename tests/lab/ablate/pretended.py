"""Runs that were never made: their folders with config and card, and children that write such folders."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.checkpoint.run_folder import RunFolder
from paceline.core.environment import CodeVersion
from paceline.core.schema import to_dict
from paceline.lab.ablate.arms import Choice, Plan, Run, make_plan
from paceline.lab.ablate.schedule import Child
from paceline.metrics.card import RunCard, card_diff, write_card
from paceline.recipes.presets import preset
from paceline.recipes.scaling import scaled, with_steps
from paceline.settings.run import RunConfig

STEPS = 20


def small(name: str, steps: int = STEPS) -> RunConfig:
    return with_steps(scaled(preset(name), 1 / 16), steps)


def small_plan(preset_name: str = "r18-softcap", against: str = "r17-sparse-values", **choice: Any) -> Plan:
    return make_plan(small(against), small(preset_name), Choice(scale="1/16", **choice))


def card_of(run: Run, loss: float | None, **changes: Any) -> RunCard:
    config = run.config
    curve = ((0, 8.0, None, 0.0, 1.0), (10, 7.0, None, 9.0, 10.0), (config.steps, loss, None, 20.0, 30.0))
    values: dict[str, Any] = {
        "name": run.name,
        "preset": config.preset,
        "track": None,
        "seed": config.seed,
        "finished": True,
        "steps": config.steps,
        "steps_done": config.steps,
        "tokens": 1,
        "parameters": 1,
        "val_loss": loss,
        "train_s": 20.0,
        "wall_s": 30.0,
        "device": "cpu",
        "peak_bytes": 2**30,
        "data_fingerprint": "data",
        "diff": card_diff(preset(config.preset), config),
        "code_version": CodeVersion(version="0"),
        "environment": {"cpu": "a CPU", "cores": 2},
        "started": "2026-01-01T00:00:00+00:00",
        "losses": curve,
    }
    return RunCard(**{**values, **changes})


def write_run(run: Run, folder: Path, loss: float | None, **changes: Any) -> None:
    here = RunFolder(folder / run.name)
    here.path.mkdir(parents=True, exist_ok=True)
    here.write_config(to_dict(run.config))
    write_card(here.path, card_of(run, loss, **changes))


def write_all(plan: Plan, folder: Path, loss: Callable[[Run], float], **changes: Any) -> None:
    for run in plan.runs:
        write_run(run, folder, loss(run), **changes)


@dataclass
class Pretender:
    """A launch whose children end after some polls, with the code that `codes` has for their run."""

    folder: Path
    runs: Mapping[str, Run]
    codes: Mapping[str, int] = field(default_factory=dict)
    polls: int = 2
    started: list[tuple[Sequence[str], int]] = field(default_factory=list)
    """Words and place of every child."""
    alive: list["PretendedChild"] = field(default_factory=list)
    most_at_a_time: int = 0

    def __call__(self, words: Sequence[str], log: Path, place: int) -> Child:
        run = self.runs[log.stem]
        log.write_text(f"some words\npaceline: no luck with {run.name}\n")
        self.started.append((words, place))
        child = PretendedChild(self, run, self.polls)
        self.alive.append(child)
        self.most_at_a_time = max(self.most_at_a_time, len(self.alive))
        return child


@dataclass
class PretendedChild:
    owner: Pretender
    run: Run
    polls_left: int
    asked: int = 0
    killed: bool = False

    def poll(self) -> int | None:
        self.polls_left -= 1
        if self.polls_left > 0:
            return None
        if self in self.owner.alive:
            self.owner.alive.remove(self)
            code = self.owner.codes.get(self.run.name, 0)
            write_run(self.run, self.owner.folder, 6.0, finished=code == 0)
        return self.owner.codes.get(self.run.name, 0)

    def ask_to_stop(self) -> None:
        self.asked += 1

    def kill(self) -> None:
        self.killed = True
