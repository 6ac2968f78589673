"""How many keys attention works on for a query, windows and documents considered. No torch.

Kernels work on whole blocks of 128 keys and leave out those that window or documents hide, so the work is counted in
visited blocks. Lengths of documents are taken as log-normal: with a mean of 650 tokens and the spread below, 2 / 7 / 14
blocks of window give 2.00 / 5.39 / 8.34 visited ones, and 10 M tokens of English text 2.00 / 5.27 / 8.31.
"""

import functools
import math
import statistics
from collections.abc import Iterable

from paceline.core.units import BLOCK_TOKENS
from paceline.settings.model import ModelConfig, WindowKind
from paceline.settings.run import RunConfig
from paceline.settings.schedule import tokens_by_windows

DOCUMENT_TOKENS = 650.0  # mean length of a document: English web pages and articles, GPT-2's tokens
LOG_SPREAD = 1.5  # standard deviation of the logarithm of the length


def mean_visited_keys(run: RunConfig, steps: Iterable[int], document_tokens: float) -> dict[WindowKind, float]:
    """By window kind, averaged over the tokens of these steps, in which windows and batches may change."""
    tokens, length = tokens_by_windows(run, steps), run.batch.sequence_tokens

    def visited(kind: WindowKind) -> float:
        widths = [(dict(windows).get(kind, 0), n) for windows, n in tokens.items()]
        return sum(visited_keys(run.model, width, length, document_tokens) * n for width, n in widths) / tokens.total()

    return {kind: visited(kind) for kind in {shape.window for shape in run.model.attending}}


def visited_keys(model: ModelConfig, window_tokens: int, sequence_tokens: int, document_tokens: float) -> float:
    """At one window, averaged over the queries of a sequence."""
    blocks, reach = -(-sequence_tokens // BLOCK_TOKENS), -(-window_tokens // BLOCK_TOKENS)
    if model.window.unit == "tokens":  # reaches into one block more
        reach = 1 + -(-(window_tokens - 1) // BLOCK_TOKENS)
    reach = blocks if model.window.unit == "none" else min(blocks, reach)
    return BLOCK_TOKENS * _visited_blocks(blocks, reach, document_tokens if model.document_mask else math.inf)


@functools.cache
def _visited_blocks(blocks: int, reach: int, document_tokens: float) -> float:
    """All but the first k blocks have a block k back; visited if the first query's document began there or before."""
    return sum((1 - back / blocks) * _share_older((back - 1) * BLOCK_TOKENS, document_tokens) for back in range(reach))


def _share_older(age_tokens: int, document_tokens: float) -> float:
    """Share of positions whose document began more than so many tokens before: E[max(0, length - age)] / mean."""
    if age_tokens <= 0 or document_tokens == math.inf:
        return 1.0
    above = (math.log(document_tokens / age_tokens) + LOG_SPREAD**2 / 2) / LOG_SPREAD
    share_below = statistics.NormalDist().cdf
    return share_below(above) - age_tokens / document_tokens * share_below(above - LOG_SPREAD)
