"""From logits to a token: temperature, top-k, top-p, and one uniform number.

`choose` is the definition, for one text. `draw_few`, `draw_all` and `draw_sorted` do the same for many texts at once
without asking the device for anything; which of them a text needs follows from its settings (`kind_of`), since to sort
a vocabulary takes longer than a layer. A draw goes along the candidates, the likeliest first, until their probabilities
add up to a share of the whole, which is one number of the text's own generator. So a seed gives the same text on any
device with the same logits.
"""

import random
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from paceline.core.errors import RunError
from paceline.evaluate.config import SamplingConfig

COLDEST = 1e-6
"""A lower temperature is greedy: logits divided by it would leave fp32."""
FEW = 64
"""Up to so many candidates are found without sorting the vocabulary."""
Kind = Literal["greedy", "few", "all", "sorted"]


@dataclass(eq=False)
class Writing:
    """A text in the making: its settings, and random numbers of its own."""

    sampling: SamplingConfig
    generator: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.generator = random.Random(self.sampling.seed)


def kind_of(config: SamplingConfig, vocab_size: int) -> Kind:
    if config.temperature < COLDEST:
        return "greedy"
    if config.top_k is not None and config.top_k <= min(FEW, vocab_size):
        return "few"
    unlimited = config.top_p == 1.0 and (config.top_k is None or config.top_k >= vocab_size)
    return "all" if unlimited else "sorted"


def choose(logits_V: Tensor, config: SamplingConfig, generator: random.Random) -> int:
    """One token id from the logits of one position."""
    if bool(logits_V.isnan().any()):
        raise RunError("the model's scores of the next token are no numbers: weights or sums are not finite")
    kind = kind_of(config, logits_V.numel())
    if kind == "greedy":
        return int(logits_V.argmax())
    scaled = logits_V.float() / config.temperature
    if kind == "all":  # any order will do, so why sort
        return _along(scaled.softmax(0), generator.random())
    logits, ids = likeliest(scaled, config.top_k)
    probabilities = logits.softmax(0)
    if config.top_p < 1.0:
        before = probabilities.cumsum(0) - probabilities  # mass of the likelier tokens
        kept = max(1, int((before < config.top_p).sum()))  # also where top_p rounds to 0
        probabilities = probabilities[:kept]
    return int(ids[_along(probabilities, generator.random())])


def _along(probabilities: Tensor, uniform: float) -> int:
    """The candidate at which they add up to more than that share of their sum."""
    shares = probabilities.cumsum(0)
    at = int(torch.searchsorted(shares, uniform * shares[-1], right=True))
    return min(at, shares.numel() - 1)  # a share just below 1 may round to it


def likeliest(logits_V: Tensor, top_k: int | None) -> tuple[Tensor, Tensor]:
    """Logits and ids of the `top_k` likeliest tokens, the likeliest first, of equals the lower id first. Only what
    reaches the least of them is sorted."""
    if top_k is None or top_k >= logits_V.numel():
        return torch.sort(logits_V, descending=True, stable=True)
    ids = (logits_V >= logits_V.topk(top_k).values[-1]).nonzero()[:, 0]
    logits, order = torch.sort(logits_V[ids], descending=True, stable=True)
    return logits[:top_k], ids[order[:top_k]]


@dataclass(frozen=True)
class Dials:
    """The settings of B texts, (B,) fp32 each."""

    temperature: Tensor
    """0: greedy."""
    top_k: Tensor
    top_p: Tensor
    uniform: Tensor
    """In [0, 1), from each text's own generator."""


def draw_few(logits_BV: Tensor, dials: Dials) -> Tensor:
    """(B,) ids for texts of the kinds `few` and `greedy`. Of equal logits any may count as the likelier."""
    logits, ids = logits_BV.topk(min(FEW, logits_BV.size(1)), dim=1)
    return torch.where(dials.temperature < COLDEST, logits_BV.argmax(1), _draw_ordered(logits, ids, dials))


def draw_sorted(logits_BV: Tensor, dials: Dials) -> Tensor:
    """(B,) ids for texts of the kind `sorted`."""
    logits, ids = logits_BV.sort(dim=1, descending=True, stable=True)
    return _draw_ordered(logits, ids, dials)


def draw_all(logits_BV: Tensor, dials: Dials) -> Tensor:
    """(B,) ids for texts of the kind `all`."""
    shares = (logits_BV / _divisor(dials)).softmax(1).cumsum(1)
    return (shares <= dials.uniform[:, None] * shares[:, -1:]).sum(1).clamp(max=logits_BV.size(1) - 1)


def _draw_ordered(logits_BC: Tensor, ids_BC: Tensor, dials: Dials) -> Tensor:
    rank = torch.arange(logits_BC.size(1), device=logits_BC.device)
    within = rank < dials.top_k.clamp(min=1)[:, None]  # whose draw is not used keeps a candidate, too
    probabilities = (logits_BC / _divisor(dials)).masked_fill(~within, -torch.inf).softmax(1)
    before = probabilities.cumsum(1) - probabilities
    keep = within & ((before < dials.top_p[:, None]) | (rank == 0))
    shares = (probabilities * keep).cumsum(1)
    at = (shares <= dials.uniform[:, None] * shares[:, -1:]).sum(1)
    return ids_BC.gather(1, torch.minimum(at, keep.sum(1) - 1)[:, None])[:, 0]


def _divisor(dials: Dials) -> Tensor:
    """Of greedy texts, whose draw is not used, any that divides."""
    return torch.where(dials.temperature < COLDEST, 1.0, dials.temperature)[:, None]
