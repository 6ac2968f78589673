"""Arms and runs of an ablation, decided before the first of them starts. No torch.

full      the newer preset               without X  full, with the part X as the predecessor has it
base      its predecessor                with X     base, with the part X as the newer preset has it

Every arm is run with the same seeds, so that arms can be compared seed by seed. Runs are ordered by seed, then by arm:
whatever changes on the machine while they run meets all arms alike, and a series that is stopped early has whole seeds.
"""

import functools
import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from paceline.core.command_line import Hidden
from paceline.core.errors import ConfigError, UserError
from paceline.core.files import write_json
from paceline.core.schema import Change, changes, flatten, plain, read_json
from paceline.lab.ablate.parts import Part, idle, judged_alike, parts_of, picked
from paceline.lab.technique import flag_words
from paceline.recipes.plugins import plugin_words
from paceline.recipes.presets import preset
from paceline.recipes.scaling import parse_scale, scaled, with_steps
from paceline.settings.data import NAMED_TOGETHER
from paceline.settings.limits import Limited, at_least
from paceline.settings.run import RunConfig

PLAN_FILE = "plan.json"
FORMAT = 1
Kind = Literal["full", "base", "without", "with"]


class Arm(NamedTuple):
    name: str
    kind: Kind
    part: Part | None
    config: RunConfig  # with the first seed


class Run(NamedTuple):
    name: str  # of its folder
    arm: str
    seed: int
    config: RunConfig
    words: tuple[str, ...]  # what follows `paceline train`, without the folder


@dataclass(frozen=True, kw_only=True)
class Choice(Limited, prefix="--"):
    """What is asked of a diff."""

    seeds: Annotated[int, at_least(1)] = 3
    """Runs of every arm, with --seed and the numbers that follow it."""
    only: str | None = None
    """Parts of the diff to look at, with commas between; None: all."""
    add: bool = True
    """Runs of the predecessor with one part added."""
    leave_out: bool = True
    """Runs of the preset with one part left out."""
    base: bool = True
    """Runs of the predecessor itself, which the waterfall begins with; added parts need them in any case."""
    scale: str = "1"
    """Shrink width, head width, vocabulary, batch and steps together: a number in (0, 1], or 1/16."""
    device: Hidden[str] = "cpu"
    """What the runs will use: cpu or cuda."""
    ranks: Hidden[int] = 1
    """Processes of each run."""

    def check(self) -> None:
        parse_scale(self.scale)


@dataclass(frozen=True)
class Plan:
    base: RunConfig
    full: RunConfig
    choice: Choice
    parts: tuple[Part, ...]  # asked for and able to act on this machine, also if no arm of theirs is possible
    arms: tuple[Arm, ...]
    left_out: tuple[tuple[str, str], ...]  # name of an arm, or of a part with all its arms, and why it is not run
    whole: bool  # no part of the diff that can act is missing

    @property
    def names(self) -> tuple[str, str]:
        older, newer = self.base.preset, self.full.preset
        return (f"{newer} without these" if older == newer else older), newer

    @property
    def seeds(self) -> list[int]:
        return [self.full.seed + number for number in range(self.choice.seeds)]

    @functools.cached_property
    def runs(self) -> list[Run]:
        return [self._run(arm.name, replace(arm.config, seed=seed)) for seed in self.seeds for arm in self.arms]

    def _run(self, arm: str, config: RunConfig) -> Run:
        """From the preset that it was made of or, if that takes a setting that is no flag, from the other one."""
        scale = self.choice.scale
        starts = [replace(config, preset=name) for name in (config.preset, self.base.preset, self.full.preset)]
        config = next((one for one in starts if not any(change.nested for change in _differing(one, scale))), config)
        return Run(f"{arm}-seed-{config.seed}", arm, config.seed, config, _words(config, scale))

    def as_json(self) -> dict[str, Any]:
        """What decides the runs; a folder that was begun with another one is refused."""
        return {
            "format": FORMAT,
            "preset": self.full.preset,
            "against": self.base.preset,
            "runs": [{"folder": run.name, "train": list(run.words)} for run in self.runs],
            **({"plugins": plain(self.full.plugins)} if self.full.plugins else {}),
        }


def make_plan(base: RunConfig, full: RunConfig, choice: Choice) -> Plan:
    """`base` and `full` as `paceline train` would run them, at the same number of steps."""
    base = judged_alike(base, full)
    every = parts_of(base, full)
    if not every:
        raise UserError(f"{base.preset} and {full.preset} do not differ here, so there is nothing to take apart")
    if len(every) == 1 and choice.leave_out:  # the predecessor is the preset without it, and with it the preset
        choice = replace(choice, base=False, add=False)
    reasons = {part.key: idle(part, full, device=choice.device, ranks=choice.ranks) for part in every}
    wanted = picked(every, choice.only)
    parts = [part for part in wanted if reasons[part.key] is None]
    arms = [Arm("full", "full", None, full)]
    if choice.base or choice.add:
        arms.append(Arm("base", "base", None, base))
    left_out = [(part.key, why) for part in wanted if (why := reasons[part.key]) is not None]
    kinds: dict[Kind, bool] = {"without": choice.leave_out, "with": choice.add}
    for part, kind in itertools.product(parts, [kind for kind, wanted in kinds.items() if wanted]):
        name = f"{kind}-{part.key}"
        try:
            arms.append(Arm(name, kind, part, part.without(full) if kind == "without" else part.alone(base)))
        except ConfigError as error:
            left_out.append((name, str(error)))
    whole = len(parts) == sum(why is None for why in reasons.values())
    return Plan(base, full, choice, tuple(parts), tuple(arms), tuple(left_out), whole)


def _words(config: RunConfig, scale: str) -> tuple[str, ...]:
    """The command that makes this config: a preset, shrunk and shortened, and a flag for all that differs then."""
    flags = [word for change in _differing(config, scale) for word in flag_words(change.field, change.after)]
    given = ("--scale", scale, "--steps", str(config.steps), *plugin_words(config), *flags)
    return (config.preset, *given, "--no-finish")


def _differing(config: RunConfig, scale: str) -> list[Change]:
    start = with_steps(scaled(preset(config.preset), parse_scale(scale)), config.steps)
    found = [change for change in changes(start, config) if change.field != "plugins"]
    if not {change.field for change in found}.isdisjoint(NAMED_TOGETHER):  # what is not stated would follow the data
        found = [change for change in found if change.field not in NAMED_TOGETHER]
        values = [(name, value) for name, value in flatten(config) if name in NAMED_TOGETHER]
        found += [Change(field=name, before=value, after=value) for name, value in values]
    return found


def keep_plan(plan: Plan, folder: Path) -> None:
    """Write the plan into the folder, or make sure that it is the one that the folder was begun with."""
    path = folder / PLAN_FILE
    if not path.exists():
        if folder.is_dir() and any(not child.name.startswith(".") for child in folder.iterdir()):
            raise UserError(f"--out {folder}: holds other things and no {PLAN_FILE}; choose another folder")
        write_json(path, plan.as_json())
    elif (there := read_json(path)) != plan.as_json():
        differs = _difference(there, plan)
        raise UserError(f"--out {folder}: {differs}; choose another folder, or the same flags")


def _difference(there: Any, plan: Plan) -> str:
    """Where a plan that was kept and this one part, in a few words."""
    try:
        kept = [" ".join(map(str, run["train"])) for run in there["runs"]]
    except (TypeError, KeyError):
        return f"its {PLAN_FILE} is not a plan of ours"
    if len(kept) != len(plan.runs):
        return f"was begun with {len(kept)} runs, this command has {len(plan.runs)}"
    for old, new in zip(kept, (" ".join(run.words) for run in plan.runs), strict=True):
        if old != new:
            return f"was begun with `paceline train {old}` where this command has `paceline train {new}`"
    if there.get("plugins", []) != plan.as_json().get("plugins", []):
        return "was begun with other plug-ins, or another version of them"
    return "was begun with other names of folders"
