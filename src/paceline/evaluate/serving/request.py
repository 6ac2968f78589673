"""A request of the completions protocol, checked field by field; unknown ones are refused. An error names the field."""

import json
import secrets
from dataclasses import dataclass, replace
from typing import Any

from paceline.evaluate.config import SamplingConfig
from paceline.text.tokenizer import Tokenizer

DEFAULT_NEW_TOKENS = 16
"""As in the protocol."""
MAX_TEMPERATURE = 2.0
MAX_LOGPROBS = 20
MAX_STOPS = 4
MAX_STOP_CHARACTERS = 256
SEEDS = 1 << 63
NEUTRAL = {"best_of": 1, "frequency_penalty": 0, "presence_penalty": 0, "logit_bias": {}, "suffix": ""}
"""Fields that are not built, with the value, besides null, that means no more than their absence."""
FIELDS = {
    "model", "prompt", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "n", "stream", "stream_options",
    "user", "logprobs", "echo", *NEUTRAL,
}  # fmt: skip


class RefusedError(Exception):
    """A request that is answered with an error."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What is asked for: `n` texts for each prompt."""

    prompts: tuple[list[int], ...]
    given: tuple[str, ...]
    """Each prompt as text, for `echo`."""
    echo_from: tuple[int | None, ...]
    """The first token of each prompt that `echo` gives: not an end-of-text that was put before it. None: no echo."""
    n: int
    new_tokens: int
    sampling: SamplingConfig
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    """At the end of a stream."""
    echo: bool
    logprobs: int | None
    """How many of the likeliest tokens are listed at each place."""

    @property
    def samplings(self) -> list[SamplingConfig]:
        """Of a prompt's texts. The first has the seed that was asked for, so that it is the text of `paceline sample`;
        then the next."""
        return [replace(self.sampling, seed=(self.sampling.seed + number) % SEEDS) for number in range(self.n)]


def parse_body(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError):  # broken UTF-8 is a ValueError, too
        raise RefusedError("the body is not JSON") from None
    if not isinstance(found, dict):
        raise RefusedError("the body is not a JSON object")
    return found


def _no_constant(name: str) -> None:
    raise ValueError(name)


def parse_completion(
    found: dict[str, Any], tokenizer: Tokenizer, *, model: str, max_tokens: int, max_choices: int
) -> Completion:
    """`max_tokens`: of prompt and text together; `max_choices`: texts of one request."""
    if unknown := sorted(found.keys() - FIELDS):
        raise RefusedError(f"{unknown[0][:80]!r} is not a field of this server", param=unknown[0][:80])
    for name, neutral in NEUTRAL.items():
        if found.get(name) not in (None, neutral):
            raise RefusedError(f"{name} is not supported here; leave it out", param=name)
    if found.get("model") not in (None, model):
        raise RefusedError(f"there is only the model {model!r} here", status=404, param="model", code="model_not_found")
    echo = _flag(found, "echo")
    new_tokens = _integer(found, "max_tokens", DEFAULT_NEW_TOKENS, 0 if echo else 1, max_tokens)
    n = _integer(found, "n", 1, 1, max_choices)
    asked = _prompts(found.get("prompt"))
    prompts = tuple(_tokens(prompt, tokenizer, max_tokens - new_tokens) for prompt in asked)
    if len(prompts) * n > max_choices:
        raise RefusedError(f"{len(prompts) * n} texts; at most {max_choices} in one request", param="prompt")
    options = {} if found.get("stream_options") is None else found["stream_options"]
    if not isinstance(options, dict):
        raise RefusedError("stream_options is not an object", param="stream_options")
    if unknown := sorted(options.keys() - {"include_usage"}):
        raise RefusedError(f"{unknown[0][:80]!r} in stream_options is not known here", param="stream_options")
    return Completion(
        prompts=prompts,
        given=tuple(
            one if isinstance(one, str) else tokenizer.decode_bytes(one).decode(errors="replace") for one in asked
        ),
        echo_from=tuple(int(isinstance(one, str)) if echo else None for one in asked),
        n=n,
        new_tokens=new_tokens,
        sampling=SamplingConfig(
            temperature=_number(found, "temperature", 1.0, 0.0, MAX_TEMPERATURE),
            top_p=_number(found, "top_p", 1.0, 0.0, 1.0, above=True),
            top_k=None if found.get("top_k") is None else _integer(found, "top_k", 1, 1, SEEDS - 1),
            seed=_integer(found, "seed", secrets.randbelow(SEEDS), 0, SEEDS - 1),
        ),
        stops=_stops(found.get("stop")),
        stream=_flag(found, "stream"),
        include_usage=_flag(options, "include_usage"),
        echo=echo,
        logprobs=None if found.get("logprobs") is None else _integer(found, "logprobs", 0, 0, MAX_LOGPROBS),
    )


def _prompts(found: Any) -> list[Any]:
    """A text, tokens, or a list of either."""
    if isinstance(found, str):
        return [found]
    if isinstance(found, list) and found:
        if all(isinstance(part, str | list) for part in found):
            return found
        if all(_is_integer(part) for part in found):
            return [found]
    raise RefusedError("prompt is not a text, a list of token ids, or a list of such", param="prompt")


def _tokens(prompt: Any, tokenizer: Tokenizer, limit: int) -> list[int]:
    """The prompt after an end-of-text, which begins a document, as in `paceline sample`; token ids as they are."""
    if isinstance(prompt, str):
        if len(prompt) > limit * max(map(len, tokenizer.token_bytes)):  # to cut a text into tokens takes a while
            raise _too_long(f"more than {limit:,}", limit)
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise RefusedError("prompt holds half of a character (a lone surrogate)", param="prompt") from None
        tokens = [tokenizer.end_of_text, *tokenizer.encode(prompt)]
    elif prompt and all(_is_integer(token) and 0 <= token < tokenizer.vocab_size for token in prompt):
        tokens = prompt
    else:
        raise RefusedError(f"prompt is not a list of token ids below {tokenizer.vocab_size:,}", param="prompt")
    if len(tokens) > limit:
        raise _too_long(f"{len(tokens):,}", limit)
    return tokens


def _too_long(count: str, limit: int) -> RefusedError:
    message = f"the prompt has {count} tokens; with this max_tokens there is room for {limit:,}"
    return RefusedError(message, param="prompt", code="context_length_exceeded")


def _stops(found: Any) -> tuple[str, ...]:
    stops = [] if found is None else [found] if isinstance(found, str) else found
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise RefusedError(f"stop is not a text or a list of up to {MAX_STOPS}", param="stop")
    for stop in stops:
        if not isinstance(stop, str) or not 0 < len(stop) <= MAX_STOP_CHARACTERS:
            raise RefusedError(f"stop: every text has 1 to {MAX_STOP_CHARACTERS} characters", param="stop")
    return tuple(stops)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _integer(found: dict[str, Any], name: str, default: int, low: int, high: int) -> int:
    value = default if found.get(name) is None else found[name]
    if not _is_integer(value) or not low <= value <= high:
        raise RefusedError(f"{name} is not a whole number from {low} to {high}", param=name)
    return int(value)


def _number(found: dict[str, Any], name: str, default: float, low: float, high: float, *, above: bool = False) -> float:
    """`above`: the lower bound itself is refused."""
    value = default if found.get(name) is None else found[name]
    if not (_is_integer(value) or isinstance(value, float)) or not low <= value <= high or (above and value == low):
        raise RefusedError(f"{name} is not a number {'above' if above else 'from'} {low:g} up to {high:g}", param=name)
    return float(value)


def _flag(found: dict[str, Any], name: str) -> bool:
    value = found.get(name)
    if value is not None and not isinstance(value, bool):
        raise RefusedError(f"{name} is neither true nor false", param=name)
    return bool(value)
