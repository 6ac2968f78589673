"""Losses of single tokens in rows of unequal length: what text files and multiple-choice tasks are judged by.

Rows of similar length share a pass, padded on the right, where no counted token sees it. Logits exist only for counted
tokens, a chunk at a time.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.core.units import BLOCK_TOKENS, round_up
from paceline.model.gpt import GPT
from paceline.model.loss import IGNORE_TARGET, HeadLoss, cap_logits
from paceline.model.masks import Windows, window_tensor
from paceline.text.tokenizer import Tokenizer

PASS_TOKENS = 8_192
"""Tokens of one pass, padding included; a longer row has a pass of its own."""
CHUNK_LOGITS = 1 << 24
"""Logits that exist at once: 64 MB of fp32."""
WHOLE_BLOCKS_FROM = 1_024
"""Longer passes are padded to whole blocks, which attention needs to work by chunks."""

Progress = Callable[[int, int], None]
"""(done, of how many)."""


@dataclass(frozen=True)
class Row:
    """Token ids, of which those from `counted_from` (1 or more) on are judged, each by all that stand before it."""

    ids: Sequence[int]
    counted_from: int


@dataclass(frozen=True)
class Score:
    losses: np.ndarray
    """Of each counted token, in nats, fp32."""
    likeliest: np.ndarray
    """Whether it was the token that the model found likeliest, bool."""

    @property
    def nats(self) -> float:
        return float(self.losses.sum(dtype=np.float64))


def pair_row(tokenizer: Tokenizer, context: str, continuation: str) -> Row:
    """A continuation judged by its context, cut as lm-evaluation-harness does, so that scores compare: the context's
    tokens are its own, without spaces at its end, and of the two encoded as one text all tokens after as many follow.
    (Where a token spans the border, that is not quite the text.) An empty context is a document's start."""
    whole, before = tokenizer.encode(context + continuation), tokenizer.encode(context.rstrip())
    return Row([*before, *whole[len(before) :]], len(before)) if before else Row([tokenizer.end_of_text, *whole], 1)


def cut_to(row: Row, most_tokens: int) -> Row:
    """The row without its oldest tokens, if the model would be given more than `most_tokens`."""
    surplus = max(0, len(row.ids) - 1 - most_tokens)
    return Row(row.ids[surplus:], max(1, row.counted_from - surplus))


def silent(done: int, total: int) -> None:
    """No progress is shown."""


def score_rows(model: GPT, rows: Sequence[Row], *, windows: Windows, progress: Progress = silent) -> list[Score]:
    """A score per row, in the order of the rows."""
    scores: dict[int, Score] = {}
    for group in _passes(rows):
        scores |= zip(group, score_pass(model, [rows[index] for index in group], windows), strict=True)
        progress(len(scores), len(rows))
    return [scores[index] for index in range(len(rows))]


def _passes(rows: Sequence[Row]) -> Iterator[list[int]]:
    """Indices of rows that share a pass, the longest first, so that a lack of memory shows at once."""
    order = sorted(range(len(rows)), key=lambda index: -len(rows[index].ids))
    while order:
        count = rows_of_a_pass(len(rows[order[0]].ids) - 1)
        yield order[:count]
        order = order[count:]


def rows_of_a_pass(tokens: int) -> int:
    """Rows of so many tokens that share one."""
    return max(1, PASS_TOKENS // _padded(tokens))


def _padded(tokens: int) -> int:
    return tokens if tokens <= WHOLE_BLOCKS_FROM else round_up(tokens, BLOCK_TOKENS)


@torch.no_grad()
def score_pass(model: GPT, rows: Sequence[Row], windows: Windows) -> list[Score]:
    """A score per row, in one pass."""
    device = model.embeddings.token.device
    longest = max(len(row.ids) for row in rows) - 1
    length = min(_padded(longest), max(longest, model.config.rotary.max_tokens))
    tokens = np.zeros((len(rows), length), dtype=np.int32)
    targets = np.full((len(rows), length), IGNORE_TARGET, dtype=np.int64)
    for number, row in enumerate(rows):
        end = len(row.ids) - 1
        tokens[number, :end] = row.ids[:-1]
        targets[number, row.counted_from - 1 : end] = row.ids[row.counted_from :]
    likeliest: list[Tensor] = []
    judged = copy.copy(model)  # the same weights under another head
    judged.loss = _watching(likeliest, model.config.vocab_size)
    inputs, wanted = torch.from_numpy(tokens).to(device), torch.from_numpy(targets).to(device)
    losses = judged(inputs, wanted, window_tensor(windows, device)).main
    found, hits = losses.cpu().numpy(), likeliest[0].view(targets.shape).cpu().numpy()
    counted = enumerate(slice(row.counted_from - 1, len(row.ids) - 1) for row in rows)
    return [Score(found[n, part].copy(), hits[n, part].copy()) for n, part in counted]  # a view would keep the pass


def _watching(found: list[Tensor], vocab_size: int) -> HeadLoss:
    """The head of `model.loss`, at counted tokens only, which also notes whether each was the likeliest."""

    def loss(x: Tensor, weight: Tensor, targets: Tensor, cap: float | None, shift: float) -> Tensor:
        losses = torch.zeros(targets.shape, device=x.device)
        likeliest = torch.zeros(targets.shape, dtype=torch.bool, device=x.device)
        counted = (targets != IGNORE_TARGET).nonzero()[:, 0]
        for part in counted.split(max(1, CHUNK_LOGITS // weight.size(0))):
            logits = cap_logits(x[part] @ weight.T, cap, shift)
            losses[part] = F.cross_entropy(logits, targets[part], reduction="none")
            likeliest[part] = logits[:, :vocab_size].argmax(-1) == targets[part]
        found.append(likeliest)
        return losses

    return loss
