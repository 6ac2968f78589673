"""`paceline sample RUN`."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.core.command_line import Bare, OptionalRun, parse
from paceline.core.errors import ConfigError, UserError
from paceline.evaluate.config import SamplingConfig

if TYPE_CHECKING:
    from paceline.evaluate.load import LoadedRun

HELP = """Let a trained run continue a prompt, token by token.

example: paceline sample latest --prompt "Return the" --tokens 100 --temperature 0.7"""


@dataclass(frozen=True, kw_only=True)
class SampleArgs:
    run: OptionalRun = "latest"
    """A run's folder, its name under runs/, or `latest`."""
    prompt: str = ""
    """Text to continue; empty: the start of a document. `-` reads it from standard input."""
    tokens: int = 200
    """How many new tokens at most; an end-of-text ends the sample."""
    stream: bool = True
    """Print each token as it comes."""
    sampling: Bare[SamplingConfig] = field(default_factory=SamplingConfig)


def sample(argv: Sequence[str]) -> int:
    arguments = parse(SampleArgs, argv, verb="sample", description=HELP)
    if arguments.tokens < 1:
        raise ConfigError(f"--tokens {arguments.tokens} must be at least 1")
    from paceline.evaluate.load import load_run

    prompt = _from_standard_input() if arguments.prompt == "-" else arguments.prompt
    _write(load_run(arguments.run), prompt, arguments)
    return 0


def _from_standard_input() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise UserError(f"--prompt -: standard input is not valid text ({error.reason}); give UTF-8") from None


def _write(run: "LoadedRun", prompt: str, arguments: SampleArgs) -> None:
    from paceline.evaluate.generate import text_stream

    pieces = text_stream(
        run.model, run.tokenizer, prompt, arguments.sampling, window=run.window, new_tokens=arguments.tokens
    )
    first = next(pieces, "")  # before the echo, so that a prompt that is too long is answered with one line alone
    if not arguments.stream:
        first += "".join(pieces)
    print(prompt + first, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()
