"""What ablations say of a technique, in words: the rows of its card and the cell of the index. No torch.

Every difference is with the technique minus without it, so below zero having it lowers the loss. The direction is named
only where a difference is told apart from noise.
"""

from collections.abc import Sequence
from typing import Any

from paceline.lab.pages import paragraphs, result_links, table
from paceline.lab.results import Ablated
from paceline.recipes.records import PUBLIC

NOISE = "not told apart from noise"

INTRO = (
    "Isolated by our own `paceline ablate`: two runs a seed that differ in it, and in what its row names beside it. "
    "Every difference is with it minus without it, also where it was left out: below zero, having it lowers the loss. "
    "The 95 % interval is of a row by itself; p and what follows from it are after Holm's correction for all parts of "
    "the series, so a row whose interval leaves out zero may still not be told apart from noise."
)


def isolated(found: Sequence[Ablated], root: str) -> str | None:
    """The comparisons as a table for a page from which `root` leads to the repository; None if there are none."""
    if not found:
        return None
    headings = ("size", "it was", "seeds", "loss, with it - without it", "p", "having it", "s a step", "file")
    rows = [(*_cells(one), result_links([one.file], root)) for one in found]
    return paragraphs(INTRO, table(headings, rows), *_notes(found))


def _cells(one: Ablated) -> tuple[str, ...]:
    p = one.loss["p_holm"]
    cells = (f"{one.size}, {one.steps} steps", _done(one), str(one.seeds), _interval(one.loss, 4))
    return *cells, "–" if p is None else f"{p:.2g}", verdict(one), _interval(one.step_s, 3)


def _done(one: Ablated) -> str:
    """left out of `r18-softcap`, as in `r17-sparse-values`"""
    like = f", as in `{one.other}`" if one.other in PUBLIC else ""  # else the same preset without it
    return f"{'added to' if one.added else 'left out of'} `{one.preset}`{_company(one)}{like}"


def _company(one: Ablated) -> str:
    """What cannot be told from the technique in this comparison."""
    named = {"together with": one.beside, "in place of": one.instead_of}
    return "".join(f", {how} {', '.join(f'`{key}`' for key in keys)}" for how, keys in named.items() if keys)


def verdict(one: Ablated) -> str:
    """What having the technique does to the loss."""
    if one.loss["mean"] == one.loss["low"] == one.loss["high"] == 0:
        return "the same loss to the last bit"
    if one.noise:
        return NOISE
    return "lowers the loss" if one.loss["mean"] < 0 else "raises the loss"


def telling(found: Sequence[Ablated]) -> Ablated | None:
    """The comparison that says most: of those at the largest size one of the technique alone, with the smallest p."""
    return min(found, key=_weight, default=None)


def _weight(one: Ablated) -> tuple[bool, bool, bool, float]:
    p = one.loss["p_holm"]
    return one.indicative is not None, bool(one.beside + one.instead_of), one.noise, 1.0 if p is None else p


def in_short(one: Ablated) -> str:
    """lowers the loss: -0.0476 [-0.0620, -0.0331] (full size, H200, 38 steps)"""
    change = "" if one.noise else f": {_interval(one.loss, 4)}"
    return f"{verdict(one)}{_company(one)}{change} ({one.size}, {one.steps} steps)"


def _interval(values: dict[str, Any] | None, digits: int) -> str:
    if values is None:
        return "–"
    mean = f"{values['mean']:+.{digits}f}"
    return mean if values["low"] is None else f"{mean} [{values['low']:+.{digits}f}, {values['high']:+.{digits}f}]"


def _notes(found: Sequence[Ablated]) -> list[str]:
    """What a reader of the numbers should know, once for each text, with the files it is about."""
    files_by_text: dict[str, dict[str, None]] = {}
    for one in found:
        reach = f"Indicative only ({one.indicative}): it settles nothing about the full size."
        if text := " ".join(filter(None, (one.note, one.indicative and reach))):
            files_by_text.setdefault(text, {})[f"`{one.file}`"] = None
    return [f"{', '.join(files)}: {text}" for text, files in files_by_text.items()]
