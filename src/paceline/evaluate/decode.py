"""Next-token logits with a key/value cache, and without one as the definition.

The cache is a pool of slots, one per sequence, each at a length of its own. A slot is a ring of cells that holds what
the window can reach and one piece of new tokens, however long the sequence grows: with the demo's window 1.1 MiB a
layer instead of 6. Every cell carries its true position and document, and the mask comes from `masks.allowed` with
those; so windows, blocks and documents mean the same as in training, also past the window.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from paceline.core.errors import UserError
from paceline.core.units import BLOCK_TOKENS, round_up
from paceline.kernels.attention import attend_dense
from paceline.model.attention import Turn
from paceline.model.dtypes import torch_dtype
from paceline.model.gpt import GPT
from paceline.model.masks import MaskRule, allowed, document_ids

PIECE_TOKENS = 256
"""A longer prompt is fed in pieces of so many tokens; a ring has room for one beside what the window reaches."""
NOWHERE = 1 << 40
"""The position of an empty cell: after every query, so that none sees it."""


class AttendOver(Protocol):
    """As `attend_dense`: who computes attention over the cache."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *, scale: float) -> Tensor: ...


class Decoder:
    """A model with a cache for `slots` sequences of up to `max_tokens`."""

    def __init__(self, model: GPT, *, window: int, max_tokens: int, slots: int = 1) -> None:
        c, device = model.config, model.embeddings.token.device
        check_length(model, max_tokens)
        self.model, self.rule, self.max_tokens = model, MaskRule.of(c), max_tokens
        self.window = torch.tensor(window, device=device)
        reach = max_tokens if c.window.unit == "none" else round_up(window, BLOCK_TOKENS)
        self.cells = min(max_tokens, reach + PIECE_TOKENS)
        self.lengths = [0] * slots
        self.positions = torch.full((slots, self.cells), NOWHERE, device=device)
        self.documents = torch.zeros(slots, self.cells, dtype=torch.int32, device=device)
        shape, dtype = (slots, self.cells, c.kv_heads, c.head_dim), torch_dtype(c.precision.compute)
        attending = [layer for layer in range(c.num_layers) if layer not in c.attentionless]
        self.keys, self.values = (
            {layer: torch.zeros(shape, dtype=dtype, device=device) for layer in attending} for _ in range(2)
        )

    def free(self, slot: int) -> None:
        """Make a slot ready for another sequence. Old keys stay and are never seen."""
        self.lengths[slot] = 0
        self.positions[slot] = NOWHERE

    @torch.inference_mode()
    def feed(self, tokens_BT: Tensor, *, first: int = 0, live: Sequence[bool] | None = None) -> Tensor:
        """Append T tokens to B slots from `first` on; the logits that follow the last of them, (B, head rows) fp32.

        A slot that is not `live` is computed along with its neighbours, which is cheaper than copying theirs together,
        but does not advance: what it wrote lies where its own next token will overwrite it before any query sees it."""
        rows = range(first, first + tokens_BT.size(0))
        living = [slot for slot, lives in zip(rows, live or [True] * len(rows), strict=True) if lives]
        end = max(self.lengths[slot] for slot in living) + tokens_BT.size(1)
        if end > self.max_tokens:
            raise UserError(f"{end:,} tokens do not fit a cache of {self.max_tokens:,}; ask for fewer new tokens")
        for piece in tokens_BT.split(PIECE_TOKENS, dim=1):
            starts = self.lengths[rows.start : rows.stop]
            used = min(self.cells, max(starts) + piece.size(1))
            x = self.append(piece, torch.tensor(starts, device=piece.device), first=first, used=used)
            for slot in living:
                self.lengths[slot] += piece.size(1)
        return self.model.head_of(x[:, -1:])[:, 0]

    def append(
        self, tokens_BT: Tensor, starts_B: Tensor, *, first: int, used: int, attend_over: AttendOver = attend_dense
    ) -> Tensor:
        """The stream (B, T, width) of at most a piece of tokens, at positions from `starts_B` on, in slots from `first`
        on; their keys and values are in the cache afterwards. `used`: how many cells of a ring may hold something.
        Asks the device for nothing, so that it may be recorded."""
        (batch, count), device, rows = tokens_BT.shape, tokens_BT.device, slice(first, first + tokens_BT.size(0))
        starts = starts_B[:, None]
        queries = starts + torch.arange(count, device=device)
        opened = self.documents[rows].gather(1, (starts - 1) % self.cells) * (starts > 0)
        documents = document_ids(tokens_BT, self.model.end_of_text) + opened
        ring = torch.arange(0, batch * self.cells, self.cells, device=device)[:, None]
        cells = (ring + queries % self.cells).flatten()

        def write(cache: Tensor, new: Tensor) -> Tensor:
            """`new` (B, T, ...) into its cells; what queries may see, (B, used, ...)."""
            cache[rows].flatten(0, 1).index_copy_(0, cells, new.flatten(0, 1))  # a view, and faster than cache[i, j] =
            return cache[rows, :used]

        positions, in_documents = write(self.positions, queries), write(self.documents, documents)
        q, k, q_doc, k_doc = queries[:, :, None], positions[:, None], documents[:, :, None], in_documents[:, None]
        mask = allowed(self.rule, q, k, q_doc, k_doc, self.window)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = write(self.keys[layer], k), write(self.values[layer], v)
            return attend_over(q, keys, values, mask, scale=self.model.config.head_dim**-0.5)

        turn = Turn(self.model.rotary_cos[queries], self.model.rotary_sin[queries])
        return self.model.stream(tokens_BT, attend, turn)


@torch.no_grad()
def logits_without_cache(model: GPT, tokens_BT: Tensor, *, window: int) -> Tensor:
    """The same logits by a whole forward pass: the definition that the cache must equal."""
    return model.logits(tokens_BT, torch.tensor(window, device=tokens_BT.device))[:, -1]


def check_length(model: GPT, tokens: int) -> None:
    limit = model.config.rotary.max_tokens
    if tokens > limit:
        raise UserError(
            f"prompt and new tokens come to {tokens:,}, but the model has positions for {limit:,}; "
            f"shorten the prompt or lower --tokens"
        )
