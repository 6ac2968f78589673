"""A port, and uvicorn on it until Ctrl-C."""

import contextlib
import socket

import uvicorn
from starlette.types import ASGIApp

from paceline.core.errors import UserError

END_S = 3
"""Requests have so long to end after Ctrl-C."""
SPARE_CONNECTIONS = 64
"""Beyond one for every text: browsers open some that they do not use."""


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens already. Port 0: any that is free."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--host {host} --port {port}: cannot be listened on ({reason}); choose another") from None


def serve_until_interrupted(app: ASGIApp, listening: socket.socket, *, texts: int) -> None:
    """`texts`: how many may be written or wait at the same time."""
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=texts + SPARE_CONNECTIONS,
        timeout_graceful_shutdown=END_S,
    )
    with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises the signal again when it is done
        uvicorn.Server(config).run(sockets=[listening])
