"""The protocol's answers as JSON values."""

import time
from dataclasses import dataclass, field
from typing import Any

from paceline.evaluate.serving.request import RefusedError


@dataclass
class Answers:
    """Of one request: they share a name, a time and the count of tokens."""

    name: str
    model: str
    prompt_tokens: int
    made_tokens: int = 0
    created: int = field(default_factory=lambda: int(time.time()))

    def completion(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """A whole answer, or one event of a stream."""
        head = {"id": self.name, "object": "text_completion", "created": self.created, "model": self.model}
        return {**head, "choices": choices}

    def usage(self) -> dict[str, int]:
        total = self.prompt_tokens + self.made_tokens
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.made_tokens, "total_tokens": total}


def choice(index: int, text: str, finish: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish}


def model_card(name: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "paceline"}


def error(refusal: RefusedError) -> dict[str, Any]:
    kind = "invalid_request_error" if refusal.status < 500 else "server_error"
    return {"error": {"message": str(refusal), "type": kind, "param": refusal.param, "code": refusal.code}}
