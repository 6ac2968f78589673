"""The presets at a size for tests, and models whose every weight matters."""

from dataclasses import replace

import torch
from torch import Tensor

from paceline.model.gpt import GPT
from paceline.model.masks import window_tensor
from paceline.recipes.presets import PRESETS
from paceline.recipes.records import RECORDS as ALL_RECORDS
from paceline.settings.model import ModelConfig, PrecisionConfig

RECORDS = list(ALL_RECORDS)
WINDOWED = [name for name in RECORDS if PRESETS[name]().model.window.unit != "none"]
END_OF_TEXT = 7


def small(name: str, *, head_dim: int = 8, vocab_size: int = 300) -> ModelConfig:
    """A record's model with its layers, maps, rules and storage formats, narrow, its products in fp32."""
    model = PRESETS[name]().model
    width = model.num_heads * head_dim
    rotary = replace(model.rotary, max_tokens=8192)
    precision = replace(model.precision, compute="fp32")
    sizes = {"width": width, "head_dim": head_dim, "vocab_size": vocab_size}
    if model.ngrams.tables:
        sizes |= {"candidates": vocab_size, "ngrams": replace(model.ngrams, bigram_rows=500, trigram_rows=500)}
    return replace(model, **sizes, rotary=rotary, precision=precision)


def in_fp32(config: ModelConfig) -> ModelConfig:
    """The same function with every number in fp32, for gradients and bit-equal comparisons."""
    rotary = replace(config.rotary, frequency_dtype="fp32", table_dtype="fp32")
    return replace(config, precision=PrecisionConfig(), rotary=rotary)


def shaken(config: ModelConfig, *, seed: int = 0) -> GPT:
    """A model without the zeros of its start: every parameter reaches the loss. Scalars are multiples of 1/64, exact in
    bf16 together with their complement to 1."""
    model = GPT(config, end_of_text=END_OF_TEXT)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.randint(16, 49, parameter.shape, generator=generator) / 64)
            else:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise * (0.12 if name.startswith("blocks.") else 1.0))
    return model


def windows(*tokens: int) -> Tensor:
    """What a forward pass takes: the window of each kind, in tokens."""
    return window_tensor(tokens, torch.device("cpu"))


def random_tokens(*shape: int, vocab_size: int = 300, seed: int = 0, document_every: int = 60) -> Tensor:
    """Token ids in which an end-of-text comes about every `document_every` tokens."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(8, vocab_size, shape, generator=generator)
    opens = torch.rand(shape, generator=generator) < 1 / document_every
    return tokens.masked_fill(opens, END_OF_TEXT)
