"""Our own measurements, read from benchmarks/results: runs of records side by side, and ablations.

A record changes many switches at once. Two runs that differ in a technique, and otherwise in as little as possible,
bound its effect and do not isolate it; an ablation does. New files of the same shape are found by their names.
"""

import functools
import json
import re
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from paceline.core.errors import PacelineError
from paceline.core.migrations import migrate_flags
from paceline.lab.ablate.effects import LEVEL
from paceline.lab.technique import Technique, flag_words, techniques
from paceline.recipes.records import PUBLIC
from page_text import ROOT

FOLDER = ROOT / "benchmarks" / "results"
GPU_RUN = re.compile(r"h200-r(\d\d)-\d+\.json")
"""A whole record on one H200 for so many steps."""
CPU_PRESETS = "presets-cpu-scale16.json"
"""Every record at a sixteenth on a CPU."""
ABLATION = re.compile(r".*-ablation-.*\.json")
"""An `ablation.json` of `paceline ablate`."""
Columns = dict[str, tuple[str, int]]
"""Heading to key and decimal places."""
GPU_COLUMNS: Columns = {
    "validation loss": ("val_loss", 4),
    "bits per byte": ("val_bpb", 4),
    "train s": ("train_s", 1),
    "s until the clock starts": ("first_steps_s", 1),
    "peak GiB": ("peak_gib", 1),
}
CPU_COLUMNS: Columns = {
    "first train loss": ("first_train_loss", 3),
    "last train loss": ("last_train_loss", 3),
    "validation loss": ("val_loss", 3),
    "s a step, median": ("median_step_s", 2),
    "fastest": ("fastest_step_s", 2),
}
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


@dataclass(frozen=True, kw_only=True)
class Sentence:
    """A measurement in words. Its numbers come from its files: `{0[val_loss]:.4f}` is a value of the first."""

    said: str
    files: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.said.format(*map(read, self.files))


# ---- runs of records side by side


@dataclass(frozen=True)
class Run:
    preset: str
    file: str
    command: str
    note: str | None
    alike: tuple[Any, ...]
    """Runs that agree in this differ in their preset alone."""
    loss: str
    cells: tuple[str, ...]


@dataclass(frozen=True)
class Series:
    setting: str
    columns: tuple[str, ...]
    runs: tuple[Run, ...]


def all_series(folder: Path = FOLDER) -> list[Series]:
    files = {name: read(name, folder) for name in names(folder)}
    gpu = [_run(_preset_of(name), name, file, file, GPU_COLUMNS) for name, file in files.items() if GPU_RUN.match(name)]
    cpu = files.get(CPU_PRESETS, {"presets": []})
    small = [_run(values["preset"], CPU_PRESETS, cpu, values, CPU_COLUMNS) for values in cpu["presets"]]
    found = (
        Series("One H200, one seed each", tuple(GPU_COLUMNS), tuple(gpu)),
        Series("A sixteenth of the size on two CPU threads, one seed each", tuple(CPU_COLUMNS), tuple(small)),
    )
    return [series for series in found if series.runs]


def _preset_of(name: str) -> str:
    record = int(name[len("h200-r") :][:2])
    found = [preset for preset, result in PUBLIC.items() if result.record == record]
    if not found:
        raise PacelineError(f"{name}: there is no preset of record {record}")
    return found[0]


def _run(preset: str, name: str, file: dict[str, Any], values: dict[str, Any], columns: Columns) -> Run:
    """`values` are the run's own in `file`. A dash for what was not measured."""
    if missing := sorted({key for key, _ in columns.values()} - values.keys()):
        raise PacelineError(f"{name}: {', '.join(missing)} is not there; write null for what was not measured")
    cells = tuple("–" if values[key] is None else f"{values[key]:.{places}f}" for key, places in columns.values())
    words = file["command"].replace("PRESET", preset).split()
    command = " ".join(migrate_flags(words, warn=lambda _: None))  # with today's names
    flags = command.split()[3:]  # after `paceline train PRESET`
    alike = (values["steps"], values.get("seed"), values.get("data_fingerprint"), *flags)
    loss = cells[list(columns).index("validation loss")]
    return Run(preset, name, command, file.get("note"), alike, loss, cells)


Pair = tuple[Series, Run, Run]
"""Two runs of a series, in the order of their records."""


def pairs(technique: Technique, folder: Path = FOLDER) -> list[Pair]:
    """For each series the two comparable runs nearest to each other of which one has the technique."""
    return [pair for series in all_series(folder) if (pair := _nearest(technique, series))]


def _nearest(technique: Technique, series: Series) -> Pair | None:
    """Not among runs whose flags set a switch of the technique: their preset does not show whether they had it."""
    set_by_flag = {flag_words(switch.field, on)[0] for switch in technique.switches for on in (True, False)}
    runs = [run for run in series.runs if not set_by_flag & set(run.command.split())]
    found = [
        (series, first, second)
        for first, second in combinations(sorted(runs, key=lambda run: RANK[run.preset]), 2)
        if first.alike == second.alike and (first.preset in technique.presets) != (second.preset in technique.presets)
    ]
    return min(found, key=_distance, default=None)


def _distance(pair: Pair) -> tuple[int, int]:
    """Records between the two; of equally near pairs the newest."""
    first, second = (RANK[run.preset] for run in pair[1:])
    return second - first, -second


# ---- ablations


@dataclass(frozen=True)
class Effect:
    """One comparison of an ablation that isolates a technique, or the part of a diff that it is in.

    Differences are with the technique minus without it, whether it was left out or added. A file has them with the part
    minus without it, and the part of a technique that a record dropped is `no-KEY`: its signs are turned here.
    """

    file: str
    setting: str
    """`full size, H200, 38 steps`, or the scale and `CPU`; of what is no record its preset."""
    done: str
    """left out of `r18-softcap`, as in `r17-sparse-values`"""
    company: str
    """What came or went with it, so that its own effect is not known: `, together with …, in place of …`."""
    n: int
    """Pairs of runs."""
    loss: dict[str, Any]
    step_s: dict[str, Any] | None
    reach: str
    """That it settles nothing about the full size, and why; empty if it does."""
    note: str | None


def effects(technique: Technique, folder: Path = FOLDER) -> list[Effect]:
    """Full size first, then in the order of their files."""
    found = [
        _effect(technique.key, name, run, one)
        for name in names(folder)
        if ABLATION.fullmatch(name)
        for run in [read(name, folder)]
        for one in run["effects"]
        if technique.key in _came_by_key(one)
    ]
    return sorted(found, key=lambda effect: bool(effect.reach))


def _effect(key: str, name: str, run: dict[str, Any], one: dict[str, Any]) -> Effect:
    came, why = _came_by_key(one), run["why_indicative"]
    leaves = one["kind"] == "leave-one-out"
    changed, other = (run["preset"], run["against"]) if leaves else (run["against"], run["preset"])
    added = leaves != came[key]  # leaving out that it went puts it back
    like = f", as in `{other}`" if other in PUBLIC else ""  # else the same preset without it
    beside = [f"`{k}`" for k, how in came.items() if k != key and how == came[key]]
    instead = [f"`{k}`" for k, how in came.items() if how != came[key]]
    named = {"together with": beside, "in place of": instead}
    company = "".join(f", {how} {', '.join(keys)}" for how, keys in named.items() if keys)
    return Effect(
        file=name,
        setting=f"{size_of(run)}, {run['steps']} steps",
        done=f"{'added to' if added else 'left out of'} `{changed}`{company}{like}",
        company=company,
        n=one["n"],
        loss=one["loss"] if came[key] else _turned(one["loss"]),
        step_s=one["step_s"] if came[key] or one["step_s"] is None else _turned(one["step_s"]),
        reach=f"Indicative only ({why}): it settles nothing about the full size." if why else "",
        note=run.get("note"),
    )


def _came_by_key(one: dict[str, Any]) -> dict[str, bool]:
    """The techniques of an effect's part, and whether the part is that they came, or that they went (`no-KEY`)."""
    keys = one["technique"].split("+")
    went = {key for key in keys if key.startswith("no-") and key not in techniques()}
    return {key.removeprefix("no-") if key in went else key: key not in went for key in keys}


def _turned(values: dict[str, Any]) -> dict[str, Any]:
    """A difference taken the other way round."""
    ends = {"mean": "mean", "low": "high", "high": "low"}
    return {**values, **{end: None if values[of] is None else 0 - values[of] for end, of in ends.items()}}


def size_of(run: dict[str, Any]) -> str:
    """Of the model and the machine, as `paceline ablate` names them."""
    on_cpu = " cores of " in run["hardware"]
    machine = "CPU" if on_cpu else run["hardware"].partition(" x ")[2].removeprefix("NVIDIA ")
    if run["preset"] not in PUBLIC:
        return f"{run['preset']}, {machine}"
    full = run["why_indicative"] in (None, "CPU")
    return f"{'full size' if full else run['scale'] or 'not full size'}, {machine}"


def significant(values: dict[str, Any]) -> bool:
    """After Holm's correction for all effects of its series."""
    return values["p_holm"] is not None and values["p_holm"] < LEVEL


def judged(values: dict[str, Any], what: str = "the loss", among: str = "") -> str:
    """What a difference says of `what`, as the predicate of a sentence; `among`: ` for 11 effects`."""
    if values["low"] is None:
        return f"was compared once, so its effect on {what} has no interval"
    if values["mean"] == values["low"] == values["high"] == 0:
        return f"changes no bit of {what}"
    if values["low"] <= 0 <= values["high"]:
        return f"has no measurable effect on {what} (interval includes 0)"
    found = f"{'lowers' if values['mean'] < 0 else 'raises'} {what}"
    return found if significant(values) else f"{found}, but not significantly after Holm's correction{among}"
