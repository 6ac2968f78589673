"""Tokens to text as it may be shown: whole characters, and nothing that may yet turn out to be a stop string."""

import codecs

from paceline.data.tokenizer import Tokenizer


class TextStream:
    def __init__(self, tokenizer: Tokenizer, stops: tuple[str, ...]) -> None:
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
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            return text[: min(found)]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` with which `stop` could begin."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
