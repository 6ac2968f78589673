"""Next-token logits with a key/value cache; `GPT.logits` is the definition.

The cache is a pool of slots, one per sequence. A slot is a ring of cells that holds what the window can reach and one
piece of new tokens, however long the sequence grows. Every cell carries its true position and document, from which
`masks.allowed` makes the mask, so windows, blocks and documents mean the same as in training.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from paceline.core.errors import UserError
from paceline.core.units import BLOCK_TOKENS, round_up
from paceline.kernels.attention import attend_dense
from paceline.model.attention import attention_of
from paceline.model.gpt import GPT
from paceline.model.masks import MaskRule, Windows, allowed, document_ids, window_tensor
from paceline.model.ops import torch_dtype
from paceline.model.previous import offset_keys
from paceline.settings.model import LayerConfig, WindowKind

PIECE_TOKENS = 256
"""A longer prompt is fed in pieces of so many tokens; a ring has room for one beside what the window reaches."""
NOWHERE = 1 << 40
"""The position of an empty cell: after every query, so that none sees it."""


@dataclass(frozen=True)
class Place:
    """Where B pieces of T tokens are put, and what they see."""

    first: int
    """The slot of the first piece; the others follow it."""
    cells: Tensor
    """(B, T), counted through all slots."""
    mask: Tensor
    """(B, T, cells of a ring that may hold something) bool."""


AttendOver = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(q, k, v, keys, values) -> attended values (B, T, H, D): puts k and v (B, T, H_kv, D) into a layer's caches `keys`
and `values` (slots, cells, H_kv, D), then attends with q (B, T, H, D)."""
PlanOver = Callable[[Place, float], AttendOver]
"""(place, scale of the scores) -> how all layers of this pass attend: the back end."""


def plan_plainly(place: Place, scale: float) -> AttendOver:
    """The plain twin: a write, then `attend_dense`."""
    batch, _, used = place.mask.shape
    rows, cells = slice(place.first, place.first + batch), place.cells.flatten()

    def attend(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        for cache, new in ((keys, k), (values, v)):
            cache.flatten(0, 1).index_copy_(0, cells, new.flatten(0, 1))  # faster than cache[i, j] =
        return attend_dense(q, keys[rows, :used], values[rows, :used], place.mask, scale=scale)

    return attend


class Decoder:
    """A model with a cache for `slots` sequences of up to `max_tokens`."""

    def __init__(self, model: GPT, *, windows: Windows, max_tokens: int, slots: int = 1) -> None:
        c, device = model.config, model.embeddings.token.device
        check_length(model, max_tokens)
        self.model, self.rule, self.max_tokens, self.device = model, MaskRule.of(c), max_tokens, device
        kinds: list[WindowKind] = list(c.windows) or ["short"]
        self.windows = dict(zip(kinds, window_tensor(windows, device).unbind(), strict=True))
        reach = round_up(max(windows), BLOCK_TOKENS) if windows else max_tokens
        self.cells = min(max_tokens, reach + PIECE_TOKENS)
        self.lengths = [0] * slots
        self.positions = torch.full((slots, self.cells), NOWHERE, device=device)
        self.documents = torch.zeros(slots, self.cells, dtype=torch.int32, device=device)
        self.tokens = torch.zeros(slots, self.cells, dtype=torch.long, device=device)
        rooms = {layer.index: layer.attention for layer in c.layers if layer.attention is not None}
        put = partial(torch.zeros, dtype=torch_dtype(c.precision.compute), device=device)
        self.keys = {index: put(slots, self.cells, s.kv_heads, s.qk_dim) for index, s in rooms.items()}
        self.values = {index: put(slots, self.cells, s.kv_heads, s.v_dim) for index, s in rooms.items()}
        self.raw_keys = {i: torch.zeros_like(self.keys[i]) for i, s in rooms.items() if s.key_offset}
        """Before they were offset."""

    def free(self, slot: int) -> None:
        """Make a slot ready for another sequence. Old keys stay and are never seen."""
        self.lengths[slot] = 0
        self.positions[slot] = NOWHERE

    @torch.inference_mode()
    def feed(self, tokens_BT: Tensor, *, first: int = 0, live: Sequence[bool] | None = None) -> Tensor:
        """Append T tokens to B slots from `first` on; the logits that follow the last of them, (B, vocabulary) fp32."""
        return self.logits_of(self.stream(tokens_BT, first=first, live=live)[:, -1:])[:, 0]

    @torch.inference_mode()
    def logits_of(self, x: Tensor) -> Tensor:
        return self.model.head_of(x)[..., : self.model.config.vocab_size]  # padding columns are no tokens

    @torch.inference_mode()
    def stream(self, tokens_BT: Tensor, *, first: int = 0, live: Sequence[bool] | None = None) -> Tensor:
        """Append T tokens to B slots from `first` on; the stream after the last piece of them.

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
        return x

    def append(
        self, tokens_BT: Tensor, starts_B: Tensor, *, first: int, used: int, plan: PlanOver = plan_plainly
    ) -> Tensor:
        """The stream (B, T, width) of at most a piece of tokens, at positions from `starts_B` on, in slots from `first`
        on; their keys and values are in the cache afterwards. `used`: how many cells of a ring may hold something.
        Asks the device for nothing, so that it may be recorded."""
        (batch, count), device, rows = tokens_BT.shape, tokens_BT.device, slice(first, first + tokens_BT.size(0))
        starts, slots = starts_B[:, None], torch.arange(first, first + batch, device=device)[:, None]
        queries = starts + torch.arange(count, device=device)
        cells = queries % self.cells
        opened = self.documents[slots, (starts - 1) % self.cells] * (starts > 0)
        documents = document_ids(tokens_BT, self.model.end_of_text) + opened
        self.positions[slots, cells] = queries
        self.documents[slots, cells] = documents
        self.tokens[slots, cells] = tokens_BT
        back = starts + torch.arange(-2, 0, device=device)  # not from a list: a captured graph takes no copy of one
        before = torch.where(back >= 0, self.tokens[slots, back % self.cells], -1)
        seen_at, seen_in = self.positions[rows, None, :used], self.documents[rows, None, :used]
        made: dict[tuple[WindowKind, float], AttendOver] = {}

        def attend(layer: LayerConfig, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            s = attention_of(layer)
            if (s.window, s.scale) not in made:
                window = self.windows[s.window]
                mask = allowed(self.rule, queries[:, :, None], seen_at, documents[:, :, None], seen_in, window)
                made[s.window, s.scale] = plan(Place(first, slots * self.cells + cells, mask), s.scale)
            if s.key_offset:
                raw = self.raw_keys[layer.index]
                raw[slots, cells] = k
                first_k = torch.where((starts > 0)[..., None, None], raw[slots, (starts - 1) % self.cells], k[:, :1])
                k = offset_keys(k, self.model.config.rotary.pairs(s.qk_dim), first_k)
            return made[s.window, s.scale](q, k, v, self.keys[layer.index], self.values[layer.index])

        return self.model.stream(tokens_BT, attend, queries, before)


def check_length(model: GPT, tokens: int) -> None:
    limit = model.config.rotary.max_tokens
    if tokens > limit:
        sizes = f"prompt and new tokens come to {tokens:,}, but the model has positions for {limit:,}"
        raise UserError(f"{sizes}; shorten the prompt or lower --tokens")
