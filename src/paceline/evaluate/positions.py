"""Loss by place in the document, inside the model's window and beyond.

A token's place is the number of text tokens of its document before it. Up to the window a layer sees all of them, where
windows are counted in blocks all but up to 127. A token of a text past its first sequence is given part of the text
before it only, so it is neither inside nor beyond.
"""

import torch
from torch import Tensor

from paceline.metrics.card import window_side

FIRST_EDGE = 16
"""Buckets end at 16, 32, 64 … tokens, then at the window, then at twice the window and so on."""

Rows = tuple[tuple[int | float | bool | None, ...], ...]
"""As `metrics.card.POSITION_COLUMNS` says."""

OF_ANOTHER_SEQUENCE = -1
"""Place of a token whose document began before its sequence, so that the model was not given its start."""


def bucket_edges(longest: int, *ends: int | None) -> list[int]:
    """Where buckets end, for places below `longest`, those of `ends` that are known among them; the last edge is
    `longest` or the first beyond it."""
    known = sorted(end for end in ends if end is not None)
    edges = [min([FIRST_EDGE, *known])]
    while edges[-1] < longest:
        edges.append(next((end for end in known if edges[-1] < end < 2 * edges[-1]), 2 * edges[-1]))
    return edges


def places_in_sequence(tokens_BT: Tensor, end_of_text: int) -> Tensor:
    """(B, T): the place of the token that *follows* each, from the sequence alone."""
    index = torch.arange(tokens_BT.size(-1), device=tokens_BT.device)
    opened = torch.where(tokens_BT == end_of_text, index, OF_ANOTHER_SEQUENCE).cummax(dim=-1).values
    return torch.where(opened >= 0, index - opened, OF_ANOTHER_SEQUENCE)


class LossByPlace:
    """Sums over buckets, kept on the device in fp64; `rows` waits for them."""

    def __init__(self, longest: int, window: int | None, device: torch.device, *, sequence: int | None = None) -> None:
        """`sequence`: tokens that the model is given at most, if that is less than `longest`."""
        self.edges, self.window, self.sequence = bucket_edges(longest, window, sequence), window, sequence
        self._edges = torch.tensor(self.edges, device=device)
        self._nats = torch.zeros(len(self.edges) + 1, dtype=torch.float64, device=device)
        self._tokens = torch.zeros_like(self._nats)

    def add(self, losses: Tensor, places: Tensor) -> None:
        """Both of one shape; places below 0 are left out."""
        known = places.flatten() >= 0
        bucket = torch.bucketize(places.flatten(), self._edges, right=True)
        bucket = torch.where(known, bucket, len(self.edges))  # a last slot that nobody reads
        self._nats.index_add_(0, bucket, losses.flatten().double())
        self._tokens.index_add_(0, bucket, known.double())

    def rows(self) -> Rows:
        """Without empty buckets."""
        found: list[tuple[int | float | bool | None, ...]] = []
        ends = zip([0, *self.edges], self.edges, self._nats.tolist(), self._tokens.tolist(), strict=False)
        for first, edge, nats, tokens in ends:
            inside = window_side(first, self.window, self.sequence) in ("inside", "none")
            found += [(first, edge - 1, inside, int(tokens), nats / tokens)] if tokens else []
        return tuple(found)
