"""What finished runs say: each group with its spread and noise floor, against a target and against the other groups.

Groups with other data or of another track have losses that mean something else, so they are not compared; this, and
whatever else a reader must know before believing a number, is said in remarks.
"""

import itertools
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import RunError
from paceline.lab.compare.groups import (
    Found,
    Group,
    LeftOut,
    code,
    grouped,
    hardware,
    read_cards,
    recipe_key,
    that_count,
)  # fmt: skip
from paceline.lab.compare.looks import Book, read_looks
from paceline.lab.compare.verdicts import PAIR_LEVEL, PairAnswer, TargetAnswer, against, pairwise
from paceline.lab.statistics import smallest_effect
from paceline.metrics.card import CARD_FILE


@dataclass(frozen=True, kw_only=True)
class GroupAnswer:
    label: str
    recipe: str
    hardware: list[str]
    code: list[str]
    runs: list[str]
    seeds: list[int]
    mean: float
    stdev: float | None
    noise_floor: float | None
    """Difference to another group of as many runs that a test at 0.05 finds in 4 of 5 cases."""
    target: TargetAnswer | None
    """None without a target, or with one run, which shows no spread."""
    remarks: list[str]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    target_loss: float | None
    groups: list[GroupAnswer]
    pairs: list[PairAnswer]
    left_out: list[LeftOut]
    remarks: list[str]


def compare(folders: Sequence[Path], *, target: float | None = None, planned: int | None = None) -> Comparison:
    """Compare the runs in these folders and note beside them that somebody has looked."""
    found, damaged = read_cards(folders)
    usable, useless = that_count(found)
    groups, repeated = grouped(usable)
    left_out = [*damaged, *useless, *repeated]
    if not groups:
        reasons = "; ".join(f"{item.run}: {item.why}" for item in left_out)
        raise RunError(f"none of the runs can be compared ({reasons})")
    beside = min(run.folder.parent for group in groups for run in group.runs)
    book = Book(read_looks(beside), planned)
    labels = {group.key: label for group, label in zip(groups, _letters(), strict=False)}
    pairs, remarks = pairwise(groups, labels, book)
    neighbours, _ = that_count(read_cards(path.parent for path in sorted(beside.glob(f"*/{CARD_FILE}")))[0])
    answers = [_group(group, labels[group.key], target, book, neighbours) for group in groups]
    remarks += book.written(beside)
    return Comparison(target_loss=target, groups=answers, pairs=pairs, left_out=left_out, remarks=remarks)


def _group(group: Group, label: str, target: float | None, book: Book, neighbours: Sequence[Found]) -> GroupAnswer:
    n, stdev = len(group.runs), group.stdev
    answer, remarks = None, [*_mixture(group), *_missing(group, neighbours)]
    if stdev is None:
        remarks.append("one seed only: its spread is not known, so nothing can be tested")
    elif target is not None:
        question = book.look(f"{group.key} at most {target!r}", n, book.planned)
        remarks += question.remarks(n, book.planned)
        answer = against(target, group, stdev, question)
    cards = [found.card for found in group.runs]
    return GroupAnswer(
        label=label,
        recipe=group.recipe,
        hardware=sorted({hardware(card) for card in cards}),
        code=sorted({code(card) for card in cards}),
        runs=[found.folder.name for found in group.runs],
        seeds=group.seeds,
        mean=group.mean,
        stdev=stdev,
        noise_floor=None if stdev is None else smallest_effect(stdev, n, alpha=PAIR_LEVEL, test="welch"),
        target=answer,
        remarks=remarks,
    )


def _mixture(group: Group) -> list[str]:
    """What differs inside a group besides the seed."""
    cards = [found.card for found in group.runs]
    told = []
    if len(versions := sorted({code(card) for card in cards})) > 1:
        told.append(
            f"made by {len(versions)} versions of the code ({', '.join(versions)}), which may compute differently"
        )
    if len(machines := sorted({hardware(card) for card in cards})) > 1:
        told.append(f"made on {len(machines)} kinds of hardware ({'; '.join(machines)})")
    if skipped := sum(card.skipped_steps for card in cards):
        told.append(f"{skipped} steps with bad numbers were skipped")
    return told


def _missing(group: Group, neighbours: Sequence[Found]) -> list[str]:
    """Finished runs of further seeds that lie beside these and were not given: choosing among results is a bias."""
    names = [
        run.folder.name for run in neighbours if recipe_key(run.card) == group.key and run.card.seed not in group.seeds
    ]
    return [f"not given, though of this recipe and finished: {', '.join(names)}"] if names else []


def _letters() -> Iterator[str]:
    """A, B, … Z, AA, AB, …"""
    for length in itertools.count(1):
        yield from map("".join, itertools.product(string.ascii_uppercase, repeat=length))
