"""`paceline serve RUN`."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.core.command_line import Bare, OptionalRun, parse
from paceline.core.errors import ConfigError, UserError
from paceline.core.loopback import HOSTS, LOOPBACK
from paceline.evaluate.serving.config import ServeConfig

HELP = """Answer the OpenAI completions protocol with a trained run, and show a page to type into.

example: paceline serve latest --port 8009 --max-streams 32

Only this machine can reach it. From elsewhere, through a tunnel: ssh -L 8009:localhost:8009 HOST."""


@dataclass(frozen=True, kw_only=True)
class ServeArgs:
    run: OptionalRun = "latest"
    """A run's folder, its name under runs/, or `latest`."""
    port: int = 8009
    """0 takes any that is free."""
    host: str = LOOPBACK
    """The address to listen on, and a name that requests may use besides localhost. There is no password: another than
    the default lets in everybody who can reach it."""
    limits: Bare[ServeConfig] = field(default_factory=ServeConfig)

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port {self.port} is outside [0, 65535]")


def serve(argv: Sequence[str]) -> int:
    arguments = parse(ServeArgs, argv, verb="serve", description=HELP)
    try:
        from paceline.evaluate.serving.app import make_app, make_engine
        from paceline.evaluate.serving.listen import listen, serve_until_interrupted
    except ImportError as error:
        if error.name not in ("starlette", "uvicorn"):
            raise
        raise UserError(f"paceline serve needs {error.name}: pip install 'paceline[serve]'") from None
    from paceline.evaluate.load import load_run

    limits = arguments.limits
    with listen(arguments.host, arguments.port) as listening:
        run = load_run(arguments.run)
        name = run.folder.path.resolve().name
        if run.model.embeddings.token.device.type == "cuda":
            print(f"preparing the step of {limits.max_streams} streams", file=sys.stderr, flush=True)
        engine = make_engine(run.model, run.window, limits)
        app = make_app(engine, run.tokenizer, name, limits, hosts=HOSTS | {arguments.host.lower()})
        print(f"http://localhost:{listening.getsockname()[1]}/ serves {name}; Ctrl-C ends", flush=True)
        serve_until_interrupted(app, listening, texts=engine.room)
    return 0
