"""Our own measurements as the cards show them, read from benchmarks/results when the pages are made. No torch.

A record changes many switches at once. Two runs that differ in a technique and otherwise in as little as possible give
bounds for it, not its worth, and the text says so. New files of the same shape are found by their names.
"""

import functools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import paceline
from paceline.core.errors import PacelineError
from paceline.core.schema import changes
from paceline.lab.technique import Measurement, Technique
from paceline.lab.techniques import TECHNIQUES
from paceline.recipes.presets import preset
from paceline.recipes.records import PUBLIC

FOLDER = Path(paceline.__file__).parents[2] / "benchmarks" / "results"
"""In a checkout; an installed package has no results."""
GPU_RUN = re.compile(r"h200-r(\d\d)-\d+\.json")
"""A whole record on one H200 for so many steps."""
ABLATION = re.compile(r".*-ablation-.*\.json")
"""An `ablation.json` of `paceline ablate`."""
CPU_PRESETS = "presets-cpu-scale16.json"
"""Every record at a sixteenth on a CPU."""


@dataclass(frozen=True)
class Arm:
    """What one run of a record says."""

    preset: str
    group: tuple[Any, ...]
    """Runs of one group differ in their preset alone."""
    file: str
    values: tuple[str, ...]
    """Cells under the series' columns."""
    note: str | None
    """What a reader of the numbers should know."""
    flags: tuple[str, ...]
    """What its command says after the preset."""


@dataclass(frozen=True)
class Series:
    """Runs to compare with each other, and how to say what they are."""

    setting: str
    columns: tuple[str, ...]
    arms: tuple[Arm, ...]
    command: Callable[[Arm], str]


@dataclass(frozen=True)
class Pair:
    """Two runs of a series of which one has a technique and the other does not."""

    series: Series
    without: Arm
    having: Arm

    @property
    def arms(self) -> tuple[Arm, Arm]:
        """In the order of their records."""
        first, second = sorted((self.without, self.having), key=lambda arm: RANK[arm.preset])
        return first, second

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(arm.file for arm in self.arms))

    @property
    def notes(self) -> list[str]:
        """Said once if both have the same."""
        first, second = self.arms
        if first.note == second.note:
            return [first.note] if first.note else []
        return [f"`{arm.preset}`: {arm.note}" for arm in self.arms if arm.note]


RANK = {name: place for place, name in enumerate(PUBLIC)}


class _Object(dict[str, Any]):
    """A JSON object in which a format string, `{0[original][266]}`, finds the key "266"."""

    def __missing__(self, key: str | int) -> Any:
        if isinstance(key, int):
            return self[str(key)]
        raise KeyError(key)


@functools.cache
def read(name: str, folder: Path = FOLDER) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((folder / name).read_text(encoding="utf-8"), object_hook=_Object)
    except (OSError, ValueError) as error:
        raise PacelineError(f"{folder / name}: not a result file: {error}") from None
    return found


def names(folder: Path = FOLDER) -> list[str]:
    return sorted(path.name for path in folder.glob("*.json"))


def told(measurement: Measurement) -> str:
    """The sentence with the numbers of its files: `{0[val_loss]:.4f}` is a value of the first of them."""
    return measurement.in_words(measurement.said.format(*map(read, measurement.files)))


def looked_up(file: str, at: str, folder: Path = FOLDER) -> Any:
    """The value at a path such as `effects/softcap-15/leave-one-out/loss`. In a list, a step of the path picks the
    entries of which it is a value, and its last step the only one left."""
    found: Any = read(file, folder)
    for step in at.split("/"):
        if isinstance(found, list):
            found = [entry for entry in found if step in entry.values()]
            found = found[0] if len(found) == 1 else found
        elif isinstance(found, dict) and step in found.values():
            continue  # one of several names that pick an entry, and no other was left
        else:
            found = found[step] if isinstance(found, dict) and step in found else None
        if not found and found != 0:
            raise PacelineError(f"{file}: nothing at {at}")
    return found


# ---- series of runs


def all_series(folder: Path = FOLDER) -> list[Series]:
    return [series for series in (_gpu_series(folder), _cpu_series(folder)) if series.arms]


def _gpu_series(folder: Path) -> Series:
    found = {name: read(name, folder) for name in names(folder) if GPU_RUN.fullmatch(name)}
    columns = ("validation loss", "bits per byte", "train s", "s until the clock starts", "peak GiB")
    return Series(
        setting="one H200, one seed each",
        columns=columns,
        arms=tuple(_gpu_arm(name, values) for name, values in found.items()),
        command=lambda arm: str(read(arm.file, folder)["command"]),
    )


def _gpu_arm(name: str, run: dict[str, Any]) -> Arm:
    digits = {"val_loss": 4, "val_bpb": 4, "train_s": 1, "first_steps_s": 1, "peak_gib": 1}
    cells = _cells(name, run, digits)
    flags = tuple(str(run["command"]).split()[3:])  # after `paceline train PRESET`
    group = (run["steps"], run["seed"], run["data_fingerprint"], flags)
    return Arm(_preset_of(name), group, name, cells, run.get("note"), flags)


def _cells(name: str, values: dict[str, Any], digits: dict[str, int]) -> tuple[str, ...]:
    """Each value with so many digits; a dash for one that was not measured."""
    if missing := sorted(digits.keys() - values.keys()):
        raise PacelineError(f"{name}: {', '.join(missing)} is not there; write null for what was not measured")
    return tuple("–" if values[key] is None else f"{values[key]:.{places}f}" for key, places in digits.items())


def _preset_of(name: str) -> str:
    match = GPU_RUN.fullmatch(name)
    record = match and int(match[1])
    try:
        return next(key for key, result in PUBLIC.items() if result.record == record)
    except StopIteration:
        raise PacelineError(f"{name}: there is no preset of record {record}") from None


def _cpu_series(folder: Path) -> Series:
    file: dict[str, Any] = {"presets": [], "command": ""}
    if CPU_PRESETS in names(folder):
        file = read(CPU_PRESETS, folder)
    columns = ("first train loss", "last train loss", "validation loss", "s a step, median", "fastest")
    digits = {"first_train_loss": 3, "last_train_loss": 3, "val_loss": 3, "median_step_s": 2, "fastest_step_s": 2}

    def arm(one: dict[str, Any]) -> Arm:
        return Arm(one["preset"], (one["steps"],), CPU_PRESETS, _cells(CPU_PRESETS, one, digits), file["note"], ())

    setting = "a sixteenth of the size on two CPU threads, one seed each"
    arms = tuple(map(arm, file["presets"]))
    return Series(setting, columns, arms, lambda arm: str(file["command"]).replace("PRESET", arm.preset))


# ---- what they say of a technique


def pairs(technique: Technique, folder: Path = FOLDER) -> list[Pair]:
    """For each series the two comparable runs nearest to each other of which one has the technique."""
    found = [_nearest(technique, series) for series in all_series(folder)]
    return [pair for pair in found if pair is not None]


def _nearest(technique: Technique, series: Series) -> Pair | None:
    arms = [arm for arm in series.arms if not _overridden(technique, arm)]
    candidates = [
        Pair(series, *sorted(two, key=lambda arm: arm.preset in technique.presets))
        for two in combinations(arms, 2)
        if two[0].group == two[1].group and len({arm.preset in technique.presets for arm in two}) == 2
    ]
    return min(candidates, key=_distance, default=None)


def _overridden(technique: Technique, arm: Arm) -> bool:
    """Whether a flag of the run sets a switch of the technique, so that the preset does not tell if it had it."""
    return any(
        f"--{flag}" in arm.flags
        for switch in technique.switches
        for room, _, leaf in [switch.field.replace("_", "-").rpartition(".")]
        for flag in (f"{room}.{leaf}", f"{room}.no-{leaf}")
    )


def _distance(pair: Pair) -> tuple[int, int]:
    """Records between the two; of equally near pairs the newest."""
    first, second = (RANK[arm.preset] for arm in pair.arms)
    return second - first, -second


def switches_between(pair: Pair) -> int:
    first, second = pair.arms
    ignored = {"preset", "steps"}
    return sum(change.field not in ignored for change in changes(preset(first.preset), preset(second.preset)))


@dataclass(frozen=True)
class Ablated:
    """One comparison of an ablation that isolates a technique, or the part of a diff that it is in.

    Differences are with the technique minus without it, whether it was left out or added. A file has them with the part
    minus without it, and the part of a technique that a record dropped is `no-KEY`: its signs are turned here.
    """

    file: str
    size: str
    """`full size, H200`, or the scale and `CPU`; of what is no record its preset."""
    steps: int
    added: bool
    """To the preset; or left out of it."""
    preset: str
    other: str
    """The preset whose values the technique's switches then have."""
    beside: tuple[str, ...]
    """Techniques that came and went with it."""
    instead_of: tuple[str, ...]
    """Techniques that went as it came."""
    seeds: int
    loss: dict[str, Any]
    step_s: dict[str, Any] | None
    noise: bool
    indicative: str | None
    note: str | None


def ablated(technique: Technique, folder: Path = FOLDER) -> list[Ablated]:
    """What ablations say of a technique, full size first and then in the order of their files."""
    found = [
        _ablated(technique.key, name, run, effect)
        for name in names(folder)
        if ABLATION.fullmatch(name)
        for run in [read(name, folder)]
        for effect in run["effects"]
        if technique.key in _came_by_key(effect)
    ]
    return sorted(found, key=lambda one: one.indicative is not None)


def _ablated(key: str, name: str, run: dict[str, Any], effect: dict[str, Any]) -> Ablated:
    came = _came_by_key(effect)
    it_came, leaves = came[key], effect["kind"] == "leave-one-out"
    others = {other: how for other, how in came.items() if other != key}
    changed, other = ("preset", "against") if leaves else ("against", "preset")
    return Ablated(
        file=name,
        size=_size(run),
        steps=run["steps"],
        added=leaves != it_came,  # leaving out that it went puts it back
        preset=run[changed],
        other=run[other],
        beside=tuple(other for other, how in others.items() if how == it_came),
        instead_of=tuple(other for other, how in others.items() if how != it_came),
        seeds=effect["n"],
        loss=effect["loss"] if it_came else _turned(effect["loss"]),
        step_s=effect["step_s"] if it_came or effect["step_s"] is None else _turned(effect["step_s"]),
        noise=effect["noise"],
        indicative=run["why_indicative"],
        note=run.get("note"),
    )


def _size(run: dict[str, Any]) -> str:
    """Of the model and the machine, as `paceline ablate` names them."""
    on_cpu = " cores of " in run["hardware"]
    machine = "CPU" if on_cpu else run["hardware"].partition(" x ")[2].removeprefix("NVIDIA ")
    if run["preset"] not in PUBLIC:
        return f"{run['preset']}, {machine}"
    full = run["why_indicative"] in (None, "CPU")
    return f"{'full size' if full else run['scale'] or 'not full size'}, {machine}"


def _came_by_key(effect: dict[str, Any]) -> dict[str, bool]:
    """The techniques of an effect's part, and whether the part is that they came, or that they went (`no-KEY`)."""
    keys = effect["technique"].split("+")
    went = {key for key in keys if key.startswith("no-") and key not in TECHNIQUES}
    return {key.removeprefix("no-") if key in went else key: key not in went for key in keys}


def _turned(values: dict[str, Any]) -> dict[str, Any]:
    """A difference taken the other way round."""
    ends = {"mean": "mean", "low": "high", "high": "low"}
    return {**values, **{end: None if values[of] is None else 0 - values[of] for end, of in ends.items()}}


def files_of(technique: Technique) -> list[str]:
    """Every result file that the technique's card draws on."""
    listed: Sequence[Sequence[str]] = [
        *(measurement.sources for measurement in technique.measurements),
        *(pair.files for pair in pairs(technique)),
        *((row.file,) for row in ablated(technique)),
    ]
    return list(dict.fromkeys(name for files in listed for name in files))
