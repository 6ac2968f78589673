"""Next-token logits with a key/value cache, and without one as the definition.

The cache keeps keys, values and document ids at their true positions, and the mask comes from `masks.allowed` with
those positions; so windows, blocks and documents mean the same as in training, also past the window.
"""

import torch
from torch import Tensor

from paceline.core.errors import UserError
from paceline.kernels.attention import attend_dense
from paceline.model.gpt import GPT
from paceline.model.masks import MaskRule, allowed, document_ids


class Decoder:
    """A model with a cache for `batch` sequences of up to `max_tokens`. `feed` extends all of them by equally many."""

    def __init__(self, model: GPT, *, window: int, max_tokens: int, batch: int = 1) -> None:
        c, device = model.config, model.embeddings.token.device
        check_length(model, max_tokens)
        self.model, self.rule, self.length = model, MaskRule.of(c), 0
        self.window = torch.tensor(window, device=device)
        self.positions = torch.arange(max_tokens, device=device)
        self.documents = torch.zeros(batch, max_tokens, dtype=torch.int32, device=device)
        self.cache: dict[int, tuple[Tensor, Tensor]] = {}
        self.shape = (batch, max_tokens, c.kv_heads, c.head_dim)

    @torch.no_grad()
    def feed(self, tokens_BT: Tensor) -> Tensor:
        """Append tokens; the logits that follow the last of them, (B, head rows) fp32."""
        start, end = self.length, self.length + tokens_BT.size(1)
        if end > self.positions.numel():
            raise UserError(
                f"{end:,} tokens do not fit a cache of {self.positions.numel():,}; ask for fewer new tokens"
            )
        opened = self.documents[:, start - 1 : start] if start else 0
        self.documents[:, start:end] = document_ids(tokens_BT, self.model.end_of_text) + opened
        mask = self._mask(start, end)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self._slots(layer, k)
            keys[:, start:end], values[:, start:end] = k, v
            return attend_dense(q, keys[:, :end], values[:, :end], mask, scale=self.model.config.head_dim**-0.5)

        x = self.model.stream(tokens_BT, attend, start=start)
        self.length = end
        return self.model.head_of(x[:, -1:])[:, 0]

    def _mask(self, start: int, end: int) -> Tensor:
        q, k = self.positions[start:end, None], self.positions[None, :end]
        q_doc, k_doc = self.documents[:, start:end, None], self.documents[:, None, :end]
        return allowed(self.rule, q, k, q_doc, k_doc, self.window).view(-1, end - start, end)

    def _slots(self, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
        if layer not in self.cache:
            self.cache[layer] = (like.new_zeros(self.shape), like.new_zeros(self.shape))
        return self.cache[layer]


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
