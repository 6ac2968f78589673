"""Random documents and windows for the mask tests, and the records' rules in words as the judge."""

from typing import NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from paceline.model.masks import MaskRule

B = 128
UNITS = ("none", "tokens", "tokens_in_blocks", "blocks")


def rule_of(unit: str, *, by_document: bool) -> MaskRule:
    return MaskRule(
        by_document=by_document,
        window_in_tokens=unit in ("tokens", "tokens_in_blocks"),
        window_in_blocks=unit in ("blocks", "tokens_in_blocks"),
    )


class Case(NamedTuple):
    unit: str
    documents: np.ndarray | None  # (sequences, tokens)
    tokens: int
    window: int

    @property
    def rule(self) -> MaskRule:
        return rule_of(self.unit, by_document=self.documents is not None)

    def arguments(self) -> tuple[MaskRule, Tensor | None, int, Tensor]:
        documents = None if self.documents is None else torch.from_numpy(self.documents)
        return self.rule, documents, self.tokens, torch.tensor(self.window, dtype=torch.int32)


def expected(case: Case) -> np.ndarray:
    """The records' rules in words: not later, same document, window counted in tokens, in blocks or in both."""
    q, k = np.ogrid[: case.tokens, : case.tokens]
    ok = k <= q
    if case.unit in ("tokens", "tokens_in_blocks"):
        ok &= q - k < case.window
    if case.unit in ("blocks", "tokens_in_blocks"):
        ok &= q // B - k // B < -(-case.window // B)
    if case.documents is None:
        return ok[None]
    return np.stack([ok & (row[:, None] == row[None, :]) for row in case.documents])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Up to four blocks; documents that like to begin at, before or after a block's edge, or cover several blocks."""
    tokens = B * draw(st.integers(1, 4))
    near_edge = st.builds(lambda block, by: B * block + by, st.integers(0, 3), st.sampled_from([-1, 0, 1]))
    border = (near_edge | st.integers(0, tokens - 1)).filter(lambda at: 0 <= at < tokens)
    rows = draw(st.lists(st.lists(border, max_size=6), min_size=1, max_size=2))
    documents = np.zeros((len(rows), tokens), dtype=np.int32)
    for row, borders in zip(documents, rows, strict=True):
        row[list(set(borders))] = 1
        row[:] = row.cumsum()
    window = draw(st.integers(1, tokens + B) | st.integers(1, 5).map(lambda blocks: B * blocks))
    return Case(draw(st.sampled_from(UNITS)), draw(st.sampled_from([documents, None])), tokens, window)
