"""One parameter's state of one kind (momentum, a moment), under one name in a checkpoint however it is kept."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)  # itself alone: tensors do not compare to one truth value
class Slot:
    pieces: list[Tensor]
    """Buffers that follow each other by rows, in stacks of different shapes perhaps."""
    table: Tensor | None = None
    """The parameter, if only `rows` of its state are kept here and other processes have the rest: the pieces then are
    those rows."""
    rows: slice | None = None

    @property
    def shape(self) -> torch.Size:
        """Of the whole."""
        if self.table is not None:
            return self.table.shape
        first = self.pieces[0]
        return first.shape if len(self.pieces) == 1 else torch.Size([sum(map(len, self.pieces)), *first.shape[1:]])

    @property
    def dtype(self) -> torch.dtype:
        return self.pieces[0].dtype

    def kept(self) -> Tensor:
        """What is here, as one tensor; of one piece, the buffer itself."""
        return self.pieces[0] if len(self.pieces) == 1 else torch.cat(self.pieces)

    def fill(self, whole: Tensor) -> None:
        """Take what is kept here from the whole, into the buffers."""
        kept = whole if self.rows is None else whole[self.rows]
        if len(self.pieces) == 1:
            self.pieces[0].copy_(kept)
            return
        for piece, part in zip(self.pieces, kept.split([len(piece) for piece in self.pieces]), strict=True):
            piece.copy_(part)
