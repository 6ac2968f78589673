"""Validation loss: the mean over all tokens of the first whole sequences, without autograd, in the run's precision.

Ranks take a share each and add up; the result is that of one process up to the order of a sum in fp64.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.data.corpus import IGNORED_TARGET, Batch
from paceline.parallel.ranks import ALONE, Ranks

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Validation:
    loss: float
    """Mean over tokens, in nats."""
    bits_per_byte: float | None
    """Total loss in bits over the bytes of the text predicted; end-of-text has none. None without a tokenizer."""
    tokens: int


@torch.no_grad()
def validate(
    forward: Callable[[Tensor, Tensor, Tensor], Tensor],
    batches: Iterable[Batch],
    window: Tensor,
    token_bytes: np.ndarray | None,
    ranks: Ranks = ALONE,
    *,
    device: torch.device = CPU,
    give_up: Callable[[], bool] = lambda: False,
) -> Validation | None:
    """`batches` are this rank's, as many as any other's, if need be by empty ones; `token_bytes` the length in bytes of
    each token id. Sums are kept in fp64 on the device, which is the model's; one wait at the end. None: `give_up`,
    which is asked before each batch and answers the same to all ranks, said so."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    tokens, text_bytes = 0, 0.0 if token_bytes is not None else math.nan  # nan: unknown on one rank is unknown
    for batch in batches:
        if give_up():
            return None
        if not batch.targets.size:
            continue
        inputs = torch.from_numpy(batch.tokens).to(device)
        targets = torch.from_numpy(batch.targets).to(device)
        total += forward(inputs, targets, window).sum(dtype=torch.float64)
        counted = batch.targets[batch.targets != IGNORED_TARGET]
        tokens += counted.size
        text_bytes += 0 if token_bytes is None else int(token_bytes[counted].sum())
    counts = torch.tensor([tokens, text_bytes], dtype=torch.float64, device=device)
    nats, all_tokens, all_bytes = ranks.sum_(torch.cat([total[None], counts])).tolist()
    bits = nats / math.log(2) / all_bytes if all_bytes > 0 else None
    return Validation(loss=nats / all_tokens, bits_per_byte=bits, tokens=int(all_tokens))
