"""The server: the completions protocol and a page to type into, for this machine's user, until Ctrl-C.

A request that ends, however it does, closes its `Reply`, and that frees its slots. A body must call itself JSON, which
a page of another site may not send.
"""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.core.errors import UserError
from paceline.core.loopback import HOSTS, headers, host_of
from paceline.evaluate.config import ServeConfig
from paceline.evaluate.serving.answers import Answer, error, model_card
from paceline.evaluate.serving.batcher import Stream, make_batcher
from paceline.evaluate.serving.connection import Connection
from paceline.evaluate.serving.engine import Engine
from paceline.evaluate.serving.page import page, policy
from paceline.evaluate.serving.request import RefusedError, parse_body, parse_completion
from paceline.model.gpt import GPT
from paceline.model.masks import Windows
from paceline.text.tokenizer import Tokenizer

BODY_S = 10.0
"""A client has so long to send its request."""
END_S = 3
"""Requests have so long to end after Ctrl-C."""
SPARE_CONNECTIONS = 64
"""Beyond one for every text: browsers open some that they do not use."""
GONE = 499
"""The status of a request whose client has left; nobody reads it."""


@dataclass(frozen=True)
class Server:
    """A run behind its routes."""

    name: str
    tokenizer: Tokenizer
    engine: Engine
    limits: ServeConfig
    started: int
    about: str
    """What the page says of the run."""

    @property
    def max_tokens(self) -> int:
        """Of prompt and text together."""
        return self.engine.batcher.decoder.max_tokens

    async def models(self, request: Request) -> Response:
        """All, or the one that the path names."""
        card, name = model_card(self.name, self.started), request.path_params.get("name")
        if name not in (None, self.name):
            raise RefusedError(f"there is only the model {self.name!r} here", status=404, code="model_not_found")
        return JSONResponse({"object": "list", "data": [card]} if name is None else card)

    async def page(self, _: Request) -> Response:
        return HTMLResponse(page(self.name, self.max_tokens, self.about))

    async def completions(self, request: Request) -> Response:
        arrived = self.engine.batcher.clock()
        body = parse_body(await self._body(request))
        sizes = {"max_tokens": self.max_tokens, "max_choices": self.engine.room}
        # in a thread, because a long prompt takes a while to cut into tokens
        asked = await asyncio.to_thread(parse_completion, body, self.tokenizer, model=self.name, **sizes)
        limit_s = self.limits.timeout_s
        streams = [
            Stream(sampling, prompt, asked.new_tokens, arrived + limit_s, logprobs=asked.logprobs, echo_from=first)
            for prompt, first in zip(asked.prompts, asked.echo_from, strict=True)
            for sampling in asked.samplings
        ]
        answer = Answer(self.name, self.tokenizer, asked, self.engine.open(streams), limit_s)
        if asked.stream:
            return _Events(answer)
        with contextlib.closing(answer.reply):
            whole = await _while_connected(request.receive, answer.whole())
        return Response(status_code=GONE) if whole is None else JSONResponse(whole)

    async def chat(self, _: Request) -> Response:
        reason = "there are no chat completions: the model continues texts and was taught no form of a conversation"
        raise RefusedError(f"{reason}; send the text to /v1/completions", status=404, code="not_supported")

    async def _body(self, request: Request) -> bytes:
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise RefusedError("send the header Content-Type: application/json", status=415)
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_S):
                async for part in request.stream():
                    body += part
                    if len(body) > self.limits.max_body_bytes:
                        raise RefusedError(f"the body is larger than {self.limits.max_body_bytes:,} bytes", status=413)
        except TimeoutError:
            raise RefusedError(f"the body did not arrive within {BODY_S:g} s", status=408) from None
        return bytes(body)


class _Events(StreamingResponse):
    """A stream of server-sent events that ends when its client leaves."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.events(), media_type="text/event-stream")
        self.reply = answer.reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.closing(self.reply):
            await _while_connected(receive, self.stream_response(send))


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, Any]) -> Any:
    """What `work` returns, or None if the client leaves before; then it is cancelled."""

    async def leave() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(leave())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        leaving.cancel()


class _Guard:
    """Around the whole application: other hosts are refused, and every answer carries the headers of a careful one."""

    def __init__(self, app: ASGIApp, hosts: frozenset[str]) -> None:
        self.app, self.hosts = app, hosts
        self.headers = [(name.lower().encode(), value.encode()) for name, value in headers(policy()).items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *self.headers]
            await send(message)

        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        host = dict(scope["headers"]).get(b"host", b"").decode("latin-1")
        refusal = RefusedError("paceline serve answers to localhost only", status=403)
        app = self.app if host_of(host) in self.hosts else JSONResponse(error(refusal), refusal.status)
        await app(scope, receive, guarded)


async def _refuse(request: Request, found: Exception) -> Response:
    if isinstance(found, HTTPException):
        message = f"{request.method} {request.url.path[:80]}: {found.detail}"
        return JSONResponse(error(RefusedError(message)), found.status_code, headers=found.headers)
    if not isinstance(found, RefusedError):
        return Response(status_code=GONE)
    return JSONResponse(error(found), found.status, headers={"Retry-After": "1"} if found.status == 429 else {})


def make_engine(model: GPT, windows: Windows, limits: ServeConfig) -> Engine:
    positions = model.config.rotary.max_tokens
    max_tokens = limits.max_tokens or positions
    if max_tokens > positions:
        raise UserError(f"--max-tokens {max_tokens:,}: the model has positions for {positions:,}; lower it")
    batcher = make_batcher(model, windows=windows, slots=limits.max_streams, max_tokens=max_tokens)
    return Engine(batcher, room=limits.max_streams + limits.max_queue)


def make_app(
    engine: Engine,
    tokenizer: Tokenizer,
    name: str,
    limits: ServeConfig,
    *,
    about: str = "",
    hosts: frozenset[str] = HOSTS,
) -> ASGIApp:
    """`name`: what the model is called; `about`: what the page says of it; `hosts`: what this server may be called."""
    server = Server(name, tokenizer, engine, limits, int(time.time()), about)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        engine.start()
        yield
        await asyncio.to_thread(engine.stop)

    routes = [
        Route("/", server.page),
        Route("/v1/models", server.models),
        Route("/v1/models/{name}", server.models),
        Route("/v1/completions", server.completions, methods=["POST"]),
        Route("/v1/chat/completions", server.chat, methods=["POST"]),
    ]
    handlers = dict.fromkeys((RefusedError, HTTPException, ClientDisconnect), _refuse)
    return _Guard(Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers), hosts)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens already. Port 0: any that is free."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--host {host} --port {port}: cannot be listened on ({reason}); choose another") from None


def make_server(app: ASGIApp, *, texts: int, answer_s: float) -> uvicorn.Server:
    """`texts`: how many may be written or wait at the same time; `answer_s`: how long one may take."""

    class LimitedConnection(Connection):
        most = texts + SPARE_CONNECTIONS
        request_s = BODY_S + answer_s + END_S

    quiet: dict[str, Any] = {"log_level": "warning", "access_log": False, "server_header": False}
    config = uvicorn.Config(
        app, http=LimitedConnection, ws="none", lifespan="on", timeout_graceful_shutdown=END_S, **quiet
    )
    return uvicorn.Server(config)


def serve_until_interrupted(server: uvicorn.Server, listening: socket.socket) -> None:
    with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises the signal again when it is done
        server.run(sockets=[listening])
