"""A track's leaderboard: recipes by the train time in which they reach the target, each with its evidence.

A row is one recipe on one kind of hardware by one version of the code; its runs are seeds. The time is that of the
first validation at which the mean loss is at most the target with p < 0.01, the records' rule; as every validation
tried is one more chance, the k-th one's p is multiplied by k. Rows that reach the target without that proof come after
those with it, and rows that miss it last. A run that broke a rule of the track, or read other data, is refused by name.
"""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from paceline.analysis.facts import code
from paceline.analysis.groups import Group, groups_of
from paceline.analysis.runs import LeftOut, StoredRun, read_runs, validations
from paceline.analysis.statistics import mean_at_most
from paceline.checkpoint.run_folder import SET_ASIDE
from paceline.core.errors import RunError, UserError
from paceline.core.schema import changes
from paceline.lab.compare.compare import RECORDS_LEVEL
from paceline.metrics.card import CARD_FILE

Standing = Literal["proven", "not proven", "missed"]
STANDINGS: tuple[Standing, ...] = ("proven", "not proven", "missed")


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What runs of a track have in common; without it their times mean different things."""

    data_fingerprint: str
    one_pass: bool  # no shard is read twice
    validation_tokens: int
    untimed_steps: int  # before the train clock starts


class Track(NamedTuple):
    target: float
    rules: Rules


TRACKS = {
    "en-140M": Track(
        target=3.3128,  # where the original script of record 18 ends (benchmarks/results/h200-track-r18-reference.json)
        rules=Rules(
            data_fingerprint="8b3e36db60605fdcd34001ee45338525",
            one_pass=True,
            validation_tokens=10_485_760,
            untimed_steps=10,
        ),
    )
}


@dataclass(frozen=True, kw_only=True)
class Row:
    standing: Standing
    train_s: float  # mean train time at `step`
    step: int  # the validation that counts: the first to reach the target, or the last
    loss: float  # mean at that step
    stdev: float | None
    p: float | None  # of a mean above the target, times the validations tried; None with one seed
    recipe: str
    hardware: str
    code: str
    seeds: list[int]
    runs: list[str]


@dataclass(frozen=True, kw_only=True)
class Board:
    track: str
    target: float
    rules: Rules
    rows: list[Row]
    refused: list[LeftOut]
    remarks: list[str]


def board(
    folders: Sequence[Path], *, track: str | None = None, target: float | None = None, remade: bool = False
) -> Board:
    """The board of the runs anywhere below these folders; `track` None: the one that all of them name."""
    cards = (path for folder in folders for path in sorted(folder.rglob(CARD_FILE)))
    found, damaged = read_runs(card.parent for card in cards if not card.parent.name.startswith(SET_ASIDE))
    name = track or _only_track(found, folders)
    runs = [run for run in found if run.card.track == name]
    others = len(found) - len(runs)
    remarks = [f"{others} runs of other tracks, or of none, are not shown"] if others else []
    known = TRACKS.get(name)
    goal = target if target is not None else known.target if known else None
    if goal is None:
        raise UserError(f"track {name!r} has no target of its own; say --target LOSS")
    if known is None:
        remarks.append(f"track {name!r} has no rules on record, so those of most of its runs are taken")
    counted = Counter(kept for run in runs if (kept := _rules_of(run)) is not None)
    if known is None and not counted:
        raise RunError("no run of this track can be shown: none has a config.json that says by which rules it ran")
    rules = known.rules if known else counted.most_common(1)[0][0]
    breaches = {run: _breach(run, rules) for run in runs}
    broken = [LeftOut(run=run.label, why=why) for run, why in breaches.items() if why]
    groups = groups_of((run for run, why in breaches.items() if not why), by_machine=True, remade=remade)
    rows = [_row(group, goal) for group in groups if group.runs]
    return Board(
        track=name,
        target=goal,
        rules=rules,
        rows=sorted(rows, key=lambda row: (STANDINGS.index(row.standing), row.train_s)),
        refused=[*damaged, *broken, *(item for group in groups for item in group.left_out)],
        remarks=remarks,
    )


def _only_track(found: Sequence[StoredRun], folders: Sequence[Path]) -> str:
    names = sorted({run.card.track for run in found if run.card.track is not None})
    where = ", ".join(map(str, folders))
    if not names:
        raise RunError(f"{where}: no run names a track; train one with --track NAME")
    if len(names) > 1:
        raise UserError(f"{where}: has runs of {len(names)} tracks ({', '.join(names)}); choose one with --track")
    return names[0]


def _rules_of(run: StoredRun) -> Rules | None:
    """What the run did, from its card and config; None if the config does not say it."""
    config = run.config
    try:
        return Rules(
            data_fingerprint=run.card.all_data,
            one_pass=config["data.one_pass"],
            validation_tokens=config["evaluate.tokens"],
            untimed_steps=config["train.untimed_steps"],
        )
    except KeyError:
        return None


def _breach(run: StoredRun, rules: Rules) -> str:
    """Every rule that was not kept, with both values, or a head start; empty if all were."""
    if (found := _rules_of(run)) is None:
        return "its config.json does not say by which rules it ran; the file is damaged"
    if broken := changes(rules, found):
        named = [(change.field.replace("_", " "), change) for change in broken]
        return "; ".join(f"{name} is {change.after}, the track's is {change.before}" for name, change in named)
    origin = run.card.init_from
    return "" if origin is None else f"began with the weights of {origin}; a track's runs begin with none"


def _row(group: Group, target: float) -> Row:
    tables = [validations(run.card) for run in group.runs]
    steps = sorted(set.intersection(*(set(table) for table in tables)))
    losses = {step: [table[step].loss for table in tables] for step in steps}
    reached = [step for step in steps if statistics.fmean(losses[step]) <= target]
    proofs = [(step, _p(losses[step], target, tries)) for tries, step in enumerate(reached, start=1)]
    proven = [(step, p) for step, p in proofs if p is not None and p < RECORDS_LEVEL]
    step, p = (proven or proofs or [(steps[-1], _p(losses[steps[-1]], target, 1))])[0]
    return Row(
        standing="proven" if proven else "not proven" if reached else "missed",
        train_s=statistics.fmean(table[step].train_s for table in tables),
        step=step,
        loss=statistics.fmean(losses[step]),
        stdev=statistics.stdev(losses[step]) if len(tables) > 1 else None,
        p=p,
        recipe=group.recipe,
        hardware=group.first.hardware,
        code=code(group.first.card),
        seeds=group.seeds,
        runs=[run.label for run in group.runs],
    )


def _p(losses: Sequence[float], target: float, tries: int) -> float | None:
    return min(1.0, tries * mean_at_most(losses, target)) if len(losses) > 1 else None
