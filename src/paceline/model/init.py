"""Initial weights. Each parameter is drawn on the CPU from a generator keyed by (seed, its name).

So the same seed gives the same start on any device, and switching a technique on or off leaves every other parameter's
start as it was, which pairs the arms of an ablation.
"""

import hashlib
import math
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from paceline.model.config import ModelConfig
from paceline.model.dtypes import torch_dtype

OUTPUT_MATRICES = ("attention.output", "mlp.down")


def initialise(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """The draws run side by side: each has its own generator, and a generator draws on one core only."""
    named = dict(model.named_parameters())
    with ThreadPoolExecutor() as pool:
        starts = pool.map(lambda name: _start(name, named[name], config, seed), named)
    for parameter, start in zip(named.values(), starts, strict=True):
        parameter.data = start


@torch.no_grad()
def _start(name: str, parameter: Tensor, config: ModelConfig, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(_key(seed, name))
    fresh = torch.empty(parameter.shape)
    if name.startswith("embeddings."):
        if config.embedding_init == "normal" or not name.endswith("token"):
            fresh.normal_(generator=generator)
        else:
            _uniform(fresh, config.width, generator)
        return fresh.to(torch_dtype(config.precision.embeddings))
    if parameter.dim() == 1:
        return _scalars(name, fresh).to(torch_dtype(config.precision.scalars))
    zero = (
        config.head_init == "zeros" if name == "head" else config.zero_init_outputs and name.endswith(OUTPUT_MATRICES)
    )
    if zero:
        return fresh.zero_()
    _uniform(fresh, parameter.size(1), generator)
    return fresh.bfloat16().float() if config.precision.round_matrices_at_init else fresh


def _uniform(weight: Tensor, fan_in: int, generator: torch.Generator) -> None:
    """U(±1/sqrt(fan in)), the start of a linear layer."""
    bound = 1.0 / math.sqrt(fan_in)
    weight.uniform_(-bound, bound, generator=generator)


def _scalars(name: str, fresh: Tensor) -> Tensor:
    if name.endswith("x0_mix"):
        return fresh.copy_(torch.tensor([1.0, 0.0]))
    return fresh.fill_(1.0 if name == "skip_weights" else 0.5)


def _key(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # torch seeds are signed
