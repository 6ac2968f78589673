"""A stream of tokens, and of text, from a prompt and a seed."""

import codecs
import itertools
from collections.abc import Iterator, Sequence

import torch

from paceline.core.errors import UserError
from paceline.evaluate.config import SamplingConfig
from paceline.evaluate.decode import Decoder, check_length
from paceline.evaluate.decode_graph import DecodeGraph
from paceline.evaluate.inference_model import prepared
from paceline.evaluate.sampling import Writing, choose
from paceline.model.gpt import GPT
from paceline.model.masks import Windows
from paceline.text.tokenizer import Tokenizer

LONG_ENOUGH = 64
"""Tokens for which recording a graph pays: 0.1 s on an H200 once its libraries are loaded."""


def generate(
    model: GPT, prompt: list[int], config: SamplingConfig, *, windows: Windows, new_tokens: int
) -> Iterator[int]:
    """Up to `new_tokens` ids that follow the prompt, ending before an end-of-text. A seed gives the
    same text on any device with the same logits."""
    check_length(model, len(prompt) + new_tokens)
    by_graph = model.embeddings.token.device.type == "cuda" and new_tokens >= LONG_ENOUGH
    tokens = (_by_decode_graph if by_graph else _one_by_one)(model, prompt, Writing(config), windows, new_tokens)
    return itertools.takewhile(lambda token: token != model.end_of_text, tokens)


def _one_by_one(model: GPT, prompt: list[int], text: Writing, windows: Windows, new_tokens: int) -> Iterator[int]:
    decoder, new = Decoder(model, windows=windows, max_tokens=len(prompt) + new_tokens), prompt
    for _ in range(new_tokens):
        logits = decoder.feed(torch.tensor([new], device=decoder.device))
        token = choose(logits[0], text.sampling, text.generator)
        yield token
        new = [token]


def _by_decode_graph(model: GPT, prompt: list[int], text: Writing, windows: Windows, new_tokens: int) -> Iterator[int]:
    """The same with the next step launched before a token is known here."""
    decoder = Decoder(prepared(model), windows=windows, max_tokens=len(prompt) + new_tokens)
    graph = DecodeGraph(decoder)
    logits = decoder.feed(torch.tensor([prompt], device=decoder.device))
    token = choose(logits[0], text.sampling, text.generator)
    graph.begin(0, token)
    for _ in range(new_tokens - 1):
        launched = graph.launch([text])
        yield token
        (token,) = launched.wait()
    yield token


class TextStream:
    """Tokens to text as it may be shown: whole characters, and nothing that may yet turn out to be a stop string."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        """`stops`: the text ends before the first of these that is complete."""
        self._tokenizer, self._stops = tokenizer, stops
        self._characters = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """What may be shown after this token, beyond what was shown before."""
        return self._show(self._characters.decode(self._tokenizer.decode_bytes([token])))

    def end(self) -> str:
        """The rest, when no token will follow."""
        shown = self._show(self._characters.decode(b"", final=True))
        rest, self._held = ("" if self.stopped else self._held), ""
        return shown + rest

    def _show(self, new: str) -> str:
        if self.stopped:
            return ""
        text = self._held + new
        if found := [at for stop in self._stops if (at := text.find(stop)) >= 0]:
            self.stopped = True
            return text[: min(found)]
        end = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[end:]
        return text[:end]


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` with which `stop` could begin."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


def text_stream(
    model: GPT, tokenizer: Tokenizer, prompt: str, config: SamplingConfig, *, windows: Windows, new_tokens: int
) -> Iterator[str]:
    """What follows the prompt, in pieces of whole characters: a token may end inside one."""
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise UserError("the prompt is not valid text: some of its bytes are not UTF-8, or half a character") from None
    ids, text = [tokenizer.end_of_text, *tokenizer.encode(prompt)], TextStream(tokenizer)
    for token in generate(model, ids, config, windows=windows, new_tokens=new_tokens):
        if piece := text.push(token):
            yield piece
    yield text.end()


def sample_text(
    model: GPT, tokenizer: Tokenizer, prompt: str, config: SamplingConfig, *, windows: Windows, new_tokens: int
) -> str:
    """The prompt and what follows it."""
    return prompt + "".join(text_stream(model, tokenizer, prompt, config, windows=windows, new_tokens=new_tokens))
