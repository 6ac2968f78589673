"""Log-probabilities of tokens, of the prompt's with `echo`: what clients that score texts ask a server for.

They are the model's own, of its logits before temperature, top-k and top-p. A token is named by its text or, where its
bytes are no text by themselves, as `bytes:\\xe2\\x82`.
"""

import codecs
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from paceline.text.tokenizer import END_OF_TEXT, Tokenizer


@dataclass(frozen=True)
class Scored:
    token: int
    logprob: float | None = None
    """Given all that stands before it; None: nothing does."""
    likeliest: tuple[tuple[int, float], ...] = ()
    """(token, logprob) at its place, the likeliest first."""


class Scores:
    """Of K tokens; on the device until `read` asks for them."""

    def __init__(self, logits_KV: Tensor, ids_K: Tensor, most: int) -> None:
        """`most`: how many of the likeliest tokens are kept."""
        logprobs = logits_KV.float().log_softmax(-1)
        self._ids, self._own = ids_K.clone(), logprobs.gather(1, ids_K[:, None])[:, 0]
        self._values, self._likeliest = logprobs.topk(min(most, logprobs.size(1)))

    def read(self) -> list[Scored]:
        rows = zip(self._likeliest.tolist(), self._values.tolist(), strict=True)
        likeliest = [tuple(zip(*row, strict=True)) for row in rows]
        found = zip(self._ids.tolist(), self._own.tolist(), likeliest, strict=True)
        return [Scored(*one) for one in found]


class Logprobs:
    """The protocol's `logprobs` of one choice, as it grows."""

    def __init__(self, tokenizer: Tokenizer, most: int) -> None:
        self._tokenizer, self._most = tokenizer, most
        self._characters = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._length, self._new = 0, [[], [], [], []]  # type: tuple[int, list[list[Any]]]

    def add(self, scored: Iterable[Scored]) -> None:
        for one in scored:
            own = {} if one.logprob is None else {self._name(one.token): one.logprob}
            likeliest = {self._name(token): value for token, value in one.likeliest[: self._most]}
            top = None if one.logprob is None else likeliest | own
            for column, value in zip(self._new, (self._name(one.token), one.logprob, top, self._length), strict=True):
                column.append(value)
            self._length += len(self._characters.decode(self._tokenizer.decode_bytes([one.token])))

    def take(self) -> dict[str, list[Any]]:
        """What was added since the last time."""
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        taken, self._new = dict(zip(names, self._new, strict=True)), [[], [], [], []]
        return taken

    def _name(self, token: int) -> str:
        if token == self._tokenizer.end_of_text:
            return END_OF_TEXT
        found = self._tokenizer.decode_bytes([token])
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)
