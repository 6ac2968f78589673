"""`paceline sample`, `serve` and `export`: what a trained run is used for."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from paceline.commands.output import say
from paceline.core.command_line import Bare, OptionalRun, Repeated, parse
from paceline.core.errors import UserError
from paceline.core.loopback import HOSTS, LOOPBACK
from paceline.core.output import loss_of
from paceline.evaluate.config import SamplingConfig, ServeConfig
from paceline.recipes.plugins import load_plugins_for
from paceline.settings.limits import PORT, Limited, at_least

SAMPLE_HELP = """Let a trained run continue a prompt, token by token.

example: paceline sample latest --prompt "Return the" --tokens 100 --temperature 0.7"""
SERVE_HELP = """Answer the OpenAI completions protocol with a trained run, and show a page to type into.

example: paceline serve latest --port 8009 --max-streams 32

Only this machine can reach it. From elsewhere, through a tunnel: ssh -L 8009:localhost:8009 HOST."""
EXPORT_HELP = """Write a trained run's model for other programs: for transformers, or as plain weights.

example: paceline export latest --to hf --out exported/demo"""


@dataclass(frozen=True, kw_only=True)
class TrainedRunArgs:
    run: OptionalRun = "latest"
    """A run's folder, its name under runs/, or `latest`."""
    plugin: Repeated[str] = ()
    """A plug-in that it was trained with, the same file; only one with the model's activation is needed."""


@dataclass(frozen=True, kw_only=True)
class SampleArgs(TrainedRunArgs, Limited, prefix="--"):
    prompt: str = ""
    """Text to continue; empty: the start of a document. `-` reads it from standard input."""
    tokens: Annotated[int, at_least(1)] = 200
    """How many new tokens at most; an end-of-text ends the sample."""
    stream: bool = True
    """Print each token as it comes."""
    sampling: Bare[SamplingConfig] = field(default_factory=SamplingConfig)


@dataclass(frozen=True, kw_only=True)
class ServeArgs(TrainedRunArgs, Limited, prefix="--"):
    port: Annotated[int, PORT] = 8009
    """0 takes any that is free."""
    host: str = LOOPBACK
    """The address to listen on, and a name that requests may use besides localhost. There is no password: another than
    the default lets in everybody who can reach it."""
    limits: Bare[ServeConfig] = field(default_factory=ServeConfig)


@dataclass(frozen=True, kw_only=True)
class ExportArgs(TrainedRunArgs):
    out: Path
    """Folder to make; it may exist if it is empty."""
    to: Literal["hf", "safetensors"] = "hf"
    """`hf`: what transformers loads with trust_remote_code=True: weights, config, tokenizer, code, model card.
    `safetensors`: weights under paceline's names and a JSON file of the architecture."""
    checkpoint: int | None = None
    """Step of the checkpoint; None: the newest."""


def sample(argv: Sequence[str]) -> int:
    arguments = parse(SampleArgs, argv, verb="sample", description=SAMPLE_HELP)
    from paceline.evaluate.generate import text_stream
    from paceline.evaluate.load import load_run

    try:
        prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    except UnicodeDecodeError as error:
        raise UserError(f"--prompt -: standard input is not valid text ({error.reason}); give UTF-8") from None
    load_plugins_for(arguments.run, arguments.plugin)
    run = load_run(arguments.run)
    model, sampling, windows = run.model, arguments.sampling, run.windows
    pieces = text_stream(model, run.tokenizer, prompt, sampling, windows=windows, new_tokens=arguments.tokens)
    first = next(pieces, "")  # before the echo, so that a prompt that is too long is answered with one line alone
    if not arguments.stream:
        first += "".join(pieces)
    print(prompt + first, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
        if loss_of(sys.stdout) is not None:
            return 0
    print()
    return 0


def serve(argv: Sequence[str]) -> int:
    arguments = parse(ServeArgs, argv, verb="serve", description=SERVE_HELP)
    try:
        from paceline.evaluate.serving.app import listen, make_app, make_engine, make_server, serve_until_interrupted
    except ImportError as error:
        if error.name not in ("starlette", "uvicorn"):
            raise
        raise UserError(f"paceline serve needs {error.name}: pip install 'paceline[serve]'") from None
    from paceline.evaluate.load import load_run
    from paceline.evaluate.serving.page import facts

    limits = arguments.limits
    load_plugins_for(arguments.run, arguments.plugin)
    with listen(arguments.host, arguments.port) as listening:
        run = load_run(arguments.run)
        name = run.folder.path.resolve().name
        if run.model.embeddings.token.device.type == "cuda":
            say(f"preparing the step of {limits.max_streams} streams")
        engine = make_engine(run.model, run.windows, limits)
        hosts = HOSTS | {arguments.host.lower()}
        app = make_app(engine, run.tokenizer, name, limits, about=facts(run), hosts=hosts)
        print(f"http://localhost:{listening.getsockname()[1]}/ serves {name}; Ctrl-C ends", flush=True)
        serve_until_interrupted(make_server(app, texts=engine.room, answer_s=limits.timeout_s), listening)
    return 0


def export(argv: Sequence[str]) -> int:
    arguments = parse(ExportArgs, argv, verb="export", description=EXPORT_HELP)
    from paceline.evaluate.export.export import check_free
    from paceline.evaluate.export.export import export as write_export
    from paceline.evaluate.load import read_saved

    check_free(arguments.out)  # before gigabytes are read
    load_plugins_for(arguments.run, arguments.plugin)
    saved = read_saved(arguments.run, step=arguments.checkpoint)
    write_export(saved, arguments.to, arguments.out)
    print(f"{saved.folder.path}, step {saved.checkpoint.step:,}: exported to {arguments.out}")
    return 0
