"""The protocol's answers, of a completion whole or event by event."""

import json
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from paceline.evaluate.generate import TextStream
from paceline.evaluate.serving.engine import Reply
from paceline.evaluate.serving.logprobs import Logprobs
from paceline.evaluate.serving.request import Completion, RefusedError
from paceline.text.tokenizer import Tokenizer

Piece = tuple[int, str, str | None, dict[str, list[Any]] | None]
"""(choice, text that follows, why it ended, log-probabilities of its tokens)"""


@dataclass
class Answer:
    """To one request. Reading it whole or as events writes the text."""

    model: str
    tokenizer: Tokenizer
    asked: Completion
    reply: Reply
    timeout_s: float

    def __post_init__(self) -> None:
        name, created = f"cmpl-{secrets.token_hex(12)}", int(time.time())
        self.head = {"id": name, "object": "text_completion", "created": created, "model": self.model}
        self.made_tokens = 0

    async def whole(self) -> dict[str, Any]:
        choices = [_choice(index, "", None, None) for index in range(len(self.reply.streams))]
        for choice in choices:
            choice["logprobs"] = None if self.asked.logprobs is None else defaultdict(list)
        async for index, piece, finish, added in self.pieces():
            choices[index]["text"] += piece
            choices[index]["finish_reason"] = finish
            for name, values in (added or {}).items():
                choices[index]["logprobs"][name] += values
        return {**self.head, "choices": choices, "usage": self.usage()}

    async def events(self) -> AsyncIterator[bytes]:
        """Server-sent ones."""
        try:
            async for piece in self.pieces():
                yield _event({**self.head, "choices": [_choice(*piece)]})
        except RefusedError as refusal:  # the status has been sent: the error is the last event
            yield _event(error(refusal))
            return
        if self.asked.include_usage:
            yield _event({**self.head, "choices": [], "usage": self.usage()})
        yield b"data: [DONE]\n\n"

    async def pieces(self) -> AsyncIterator[Piece]:
        """Text as it comes, of all choices, each with an end."""
        number = {stream: index for index, stream in enumerate(self.reply.streams)}
        texts = {stream: TextStream(self.tokenizer, self.asked.stops) for stream in self.reply.streams}
        most = self.asked.logprobs
        logprobs = {} if most is None else {stream: Logprobs(self.tokenizer, most) for stream in texts}
        if self.asked.echo:
            for index in range(len(texts)):
                yield index, self.asked.given[index // self.asked.n], None, None
        while texts:
            event = await self.reply.events.get()
            if (text := texts.get(event.stream)) is None:
                continue  # made before the engine knew of the stop
            if (tokens := logprobs.get(event.stream)) is not None:
                tokens.add(event.scored)
            if event.finish == "timeout":
                raise RefusedError(f"not done within {self.timeout_s:g} s", status=504, code="timeout")
            if event.finish == "error":
                raise RefusedError("the server failed; its log says why", status=500)
            self.made_tokens += event.token is not None
            piece = text.end() if event.token is None else text.push(event.token)
            finish = "stop" if text.stopped else event.finish
            if finish is not None:
                del texts[event.stream]
                self.reply.engine.drop(event.stream)
            if piece or finish:
                yield number[event.stream], piece, finish, None if tokens is None else tokens.take()

    def usage(self) -> dict[str, int]:
        given, made = sum(map(len, self.asked.prompts)), self.made_tokens
        return {"prompt_tokens": given, "completion_tokens": made, "total_tokens": given + made}


def _choice(index: int, text: str, finish: str | None, logprobs: dict[str, list[Any]] | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}


def _event(value: Any) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def model_card(name: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "paceline"}


def error(refusal: RefusedError) -> dict[str, Any]:
    kind = "invalid_request_error" if refusal.status < 500 else "server_error"
    return {"error": {"message": str(refusal), "type": kind, "param": refusal.param, "code": refusal.code}}
