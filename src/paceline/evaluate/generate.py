"""Turning logits into text: temperature, top-k, top-p, and a stream of tokens from a seed."""

import codecs
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from paceline.data.tokenizer import Tokenizer
from paceline.evaluate.config import SamplingConfig
from paceline.evaluate.decode import Decoder, check_length, logits_without_cache
from paceline.model.gpt import GPT

COLDEST = 1e-6
"""A lower temperature is greedy: logits divided by it would leave fp32."""


def choose(logits_V: Tensor, config: SamplingConfig, generator: torch.Generator) -> int:
    """One token id from the logits of one position."""
    if config.temperature < COLDEST:
        return int(logits_V.argmax())
    logits, ids = likeliest(logits_V.float() / config.temperature, config.top_k)
    probabilities = logits.softmax(0)
    before = probabilities.cumsum(0) - probabilities  # mass of the likelier tokens
    keep = before < config.top_p
    keep[0] = True  # also where top_p rounds to 0
    draw = torch.multinomial((probabilities * keep).cpu(), 1, generator=generator)
    return int(ids[draw])


def likeliest(logits_V: Tensor, top_k: int | None) -> tuple[Tensor, Tensor]:
    """Logits and ids of the `top_k` likeliest tokens, the likeliest first, of equals the lower id first. To sort all
    of a vocabulary takes longer than a layer of the demo, so only what reaches the least of them is sorted."""
    if top_k is None or top_k >= logits_V.numel():
        return torch.sort(logits_V, descending=True, stable=True)
    ids = (logits_V >= logits_V.topk(top_k).values[-1]).nonzero()[:, 0]
    logits, order = torch.sort(logits_V[ids], descending=True, stable=True)
    return logits[:top_k], ids[order[:top_k]]


def generate(
    model: GPT, prompt: list[int], config: SamplingConfig, *, window: int, new_tokens: int, cached: bool = True
) -> Iterator[int]:
    """Up to `new_tokens` ids that follow the prompt, ending before an end-of-text. Draws come from a CPU generator of
    their own, so a seed gives the same text on any device with the same logits."""
    check_length(model, len(prompt) + new_tokens)
    device = model.embeddings.token.device
    generator = torch.Generator().manual_seed(config.seed)
    following = _cached(model, window, len(prompt) + new_tokens) if cached else _uncached(model, window)
    tokens = torch.tensor([prompt], device=device)
    for _ in range(new_tokens):
        logits = following(tokens)[0, : model.config.vocab_size]  # padding columns are no tokens
        token = choose(logits, config, generator)
        if token == model.end_of_text:
            return
        yield token
        tokens = torch.tensor([[token]], device=device)


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
