"""How many keys attention works on for a query, windows and documents considered. No torch.

Kernels work on whole blocks of 128 keys and leave out those that window or documents hide, so the work is counted in
visited blocks. Lengths of documents are taken as log-normal: with a mean of 650 tokens and the spread below, 2 / 7 / 14
blocks of window give 2.00 / 5.39 / 8.34 visited ones, and 10 M tokens of English text 2.00 / 5.27 / 8.31.
"""

import functools
import math
from collections import Counter

from paceline.core.units import BLOCK_TOKENS
from paceline.metrics.flops import sampled_steps
from paceline.model.config import ModelConfig

DOCUMENT_TOKENS = 650.0
"""Mean length of a document: English web pages and articles, GPT-2's tokens."""
LOG_SPREAD = 1.5
"""Standard deviation of the logarithm of the length."""


def mean_visited_keys(model: ModelConfig, *, sequence_tokens: int, steps: int, document_tokens: float) -> float:
    """Over a run in which the window grows; of a very long one, over an even sample of its steps."""
    sample = sampled_steps(steps)
    windows = Counter(model.window.tokens_at(step, steps) for step in sample)
    visited = {w: visited_keys(model, w, sequence_tokens, document_tokens) for w in windows}
    return sum(visited[window] * count for window, count in windows.items()) / len(sample)


def visited_keys(model: ModelConfig, window_tokens: int, sequence_tokens: int, document_tokens: float) -> float:
    """At one window, averaged over the queries of a sequence."""
    blocks = -(-sequence_tokens // BLOCK_TOKENS)
    reach = blocks if model.window.unit == "none" else min(blocks, _blocks_in(model.window.unit, window_tokens))
    return BLOCK_TOKENS * _visited_blocks(blocks, reach, document_tokens if model.document_mask else math.inf)


def _blocks_in(unit: str, window_tokens: int) -> int:
    """Blocks that some query of a block sees. A window counted in tokens reaches into one more."""
    return -(-window_tokens // BLOCK_TOKENS) if unit != "tokens" else 1 + -(-(window_tokens - 1) // BLOCK_TOKENS)


@functools.cache
def _visited_blocks(blocks: int, reach: int, document_tokens: float) -> float:
    """Block k back exists for all but the first k blocks, and is visited if the document of the first query began in
    it or earlier."""
    return sum((1 - back / blocks) * _share_older((back - 1) * BLOCK_TOKENS, document_tokens) for back in range(reach))


def _share_older(age_tokens: int, document_tokens: float) -> float:
    """Share of positions whose document began more than so many tokens before: E[max(0, length - age)] / mean."""
    if age_tokens <= 0 or document_tokens == math.inf:
        return 1.0
    above = (math.log(document_tokens / age_tokens) + LOG_SPREAD**2 / 2) / LOG_SPREAD
    return _normal(above) - age_tokens / document_tokens * _normal(above - LOG_SPREAD)


def _normal(z: float) -> float:
    return (1 + math.erf(z / math.sqrt(2))) / 2
