"""A stream of tokens, and of text, from a prompt and a seed."""

import codecs
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.errors import UserError
from paceline.data.tokenizer import Tokenizer
from paceline.evaluate.config import SamplingConfig
from paceline.evaluate.decode import Decoder, check_length, logits_without_cache
from paceline.evaluate.draw import choose
from paceline.evaluate.prepare import prepared
from paceline.evaluate.steady import Steady
from paceline.model.gpt import GPT

LONG_ENOUGH = 64
"""Tokens for which recording a graph pays: 0.1 s on an H200 once its libraries are loaded."""


def generate(
    model: GPT, prompt: list[int], config: SamplingConfig, *, window: int, new_tokens: int, cached: bool = True
) -> Iterator[int]:
    """Up to `new_tokens` ids that follow the prompt, ending before an end-of-text. A seed gives the
    same text on any device with the same logits."""
    check_length(model, len(prompt) + new_tokens)
    if cached and model.embeddings.token.device.type == "cuda" and new_tokens >= LONG_ENOUGH:
        tokens = _steadily(model, prompt, Writing(config, random.Random(config.seed)), window, new_tokens)
    else:
        tokens = _one_by_one(model, prompt, Writing(config, random.Random(config.seed)), window, new_tokens, cached)
    return itertools.takewhile(lambda token: token != model.end_of_text, tokens)


@dataclass(frozen=True)
class Writing:
    """A text in the making: its settings and its random numbers."""

    sampling: SamplingConfig
    generator: random.Random


def _one_by_one(
    model: GPT, prompt: list[int], text: Writing, window: int, new_tokens: int, cached: bool
) -> Iterator[int]:
    device = model.embeddings.token.device
    following = _cached(model, window, len(prompt) + new_tokens) if cached else _uncached(model, window)
    tokens = torch.tensor([prompt], device=device)
    for _ in range(new_tokens):
        logits = following(tokens)[0, : model.config.vocab_size]  # padding columns are no tokens
        token = choose(logits, text.sampling, text.generator)
        yield token
        tokens = torch.tensor([[token]], device=device)


def _steadily(model: GPT, prompt: list[int], text: Writing, window: int, new_tokens: int) -> Iterator[int]:
    """The same with the next step launched before a token is known here."""
    decoder = Decoder(prepared(model), window=window, max_tokens=len(prompt) + new_tokens)
    steady = Steady(decoder)
    logits = decoder.feed(torch.tensor([prompt], device=decoder.window.device))[0, : model.config.vocab_size]
    token = choose(logits, text.sampling, text.generator)
    steady.begin(0, token)
    for _ in range(new_tokens - 1):
        launched = steady.launch([text])
        yield token
        (token,) = launched.wait()
    yield token


def _cached(model: GPT, window: int, max_tokens: int) -> Callable[[Tensor], Tensor]:
    return Decoder(model, window=window, max_tokens=max_tokens).feed


def _uncached(model: GPT, window: int) -> Callable[[Tensor], Tensor]:
    seen: list[Tensor] = []

    def following(tokens: Tensor) -> Tensor:
        seen.append(tokens)
        return logits_without_cache(model, torch.cat(seen, dim=1), window=window)

    return following


def text_stream(
    model: GPT, tokenizer: Tokenizer, prompt: str, config: SamplingConfig, *, window: int, new_tokens: int
) -> Iterator[str]:
    """What follows the prompt, in pieces of whole characters: a token may end inside one."""
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise UserError("the prompt is not valid text: some of its bytes are not UTF-8, or half a character") from None
    ids = [tokenizer.end_of_text, *tokenizer.encode(prompt)]
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token in generate(model, ids, config, window=window, new_tokens=new_tokens):
        if piece := decoder.decode(tokenizer.decode_bytes([token])):
            yield piece
    yield decoder.decode(b"", final=True)


def sample_text(
    model: GPT, tokenizer: Tokenizer, prompt: str, config: SamplingConfig, *, window: int, new_tokens: int
) -> str:
    """The prompt and what follows it."""
    return prompt + "".join(text_stream(model, tokenizer, prompt, config, window=window, new_tokens=new_tokens))
