"""The server: the completions protocol and a page to type into, for this machine's user.

A request that ends early, by its client's leaving or by any error, leaves its `Reply`, and that frees its slots. A body
must call itself JSON: a page of another site can only send such a one after asking, and is never allowed to.
"""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.core.errors import UserError
from paceline.core.loopback import HOSTS, headers, host_of
from paceline.data.tokenizer import Tokenizer
from paceline.evaluate.config import SamplingConfig
from paceline.evaluate.serving.answers import Answers, choice, error, model_card
from paceline.evaluate.serving.batcher import Stream, make_batcher
from paceline.evaluate.serving.config import ServeConfig
from paceline.evaluate.serving.engine import BrokenError, BusyError, Engine, Reply
from paceline.evaluate.serving.page import page, policy
from paceline.evaluate.serving.request import Completion, RefusedError, parse_body, parse_completion
from paceline.evaluate.serving.text import TextStream
from paceline.model.gpt import GPT

BODY_S = 10.0
"""A client has so long to send its request."""
GONE = 499
"""The status of a request whose client has left; nobody reads it."""
Piece = tuple[int, str, str | None]
"""(choice, text that follows, why it ended)"""


@dataclass(frozen=True)
class Server:
    """A run behind its routes."""

    name: str
    tokenizer: Tokenizer
    engine: Engine
    limits: ServeConfig
    started: int

    @property
    def max_tokens(self) -> int:
        """Of prompt and text together."""
        return self.engine.batcher.decoder.max_tokens

    async def models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [model_card(self.name, self.started)]})

    async def model(self, request: Request) -> Response:
        if request.path_params["name"] != self.name:
            raise RefusedError(f"there is only the model {self.name!r} here", status=404, code="model_not_found")
        return JSONResponse(model_card(self.name, self.started))

    async def page(self, _: Request) -> Response:
        return HTMLResponse(page(self.name, self.max_tokens))

    async def completions(self, request: Request) -> Response:
        arrived = self.engine.batcher.clock()
        body = parse_body(await self._body(request))
        asked = await asyncio.to_thread(self._parse, body)  # a long prompt takes a while to cut into tokens
        reply = self._open(asked, deadline=arrived + self.limits.timeout_s)
        answers = Answers(f"cmpl-{secrets.token_hex(12)}", self.name, sum(map(len, asked.prompts)))
        pieces = self._pieces(reply, asked, answers)
        if asked.stream:
            return _Events(reply, pieces, answers, include_usage=asked.include_usage)
        with reply:
            whole = await _while_connected(request.receive, _collected(pieces, len(reply.streams)))
        if whole is None:
            return Response(status_code=GONE)
        return JSONResponse({**answers.completion(whole), "usage": answers.usage()})

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

    def _parse(self, body: dict[str, Any]) -> Completion:
        return parse_completion(
            body, self.tokenizer, model=self.name, max_tokens=self.max_tokens, max_choices=self.engine.room
        )

    def _open(self, asked: Completion, *, deadline: float) -> Reply:
        streams = [
            Stream(prompt, asked.new_tokens, _seeded(asked, number), deadline)
            for prompt in asked.prompts
            for number in range(asked.n)
        ]
        try:
            return self.engine.open(streams)
        except BusyError:
            raise RefusedError(
                "too many requests are waiting; try again", status=429, code="rate_limit_exceeded"
            ) from None
        except BrokenError:
            raise RefusedError("the server's device failed; it must be started anew", status=503) from None

    async def _pieces(self, reply: Reply, asked: Completion, answers: Answers) -> AsyncIterator[Piece]:
        """Text as it comes, of all choices, each with an end."""
        number = {stream: index for index, stream in enumerate(reply.streams)}
        texts = {stream: TextStream(self.tokenizer, asked.stops) for stream in reply.streams}
        while texts:
            event = await reply.events.get()
            if (text := texts.get(event.stream)) is None:
                continue  # made before the engine heard of the stop
            if event.finish == "timeout":
                raise RefusedError(f"not done within {self.limits.timeout_s:g} s", status=504, code="timeout")
            if event.finish == "error":
                raise RefusedError("the server failed; its log says why", status=500)
            answers.made_tokens += event.token is not None
            piece = text.end() if event.token is None else text.push(event.token)
            finish = "stop" if text.stopped else event.finish
            if finish is not None:
                del texts[event.stream]
                self.engine.drop(event.stream)
            if piece or finish:
                yield number[event.stream], piece, finish


def _seeded(asked: Completion, number: int) -> SamplingConfig:
    s = asked.sampling
    return SamplingConfig(temperature=s.temperature, top_k=s.top_k, top_p=s.top_p, seed=asked.seed_of(number))


async def _collected(pieces: AsyncIterator[Piece], count: int) -> list[dict[str, Any]]:
    texts, ends = [""] * count, [""] * count
    async for index, piece, finish in pieces:
        texts[index] += piece
        ends[index] = finish or ""
    return [choice(index, text, ends[index]) for index, text in enumerate(texts)]


class _Events(Response):
    """A stream of server-sent events."""

    media_type = "text/event-stream"

    def __init__(self, reply: Reply, pieces: AsyncIterator[Piece], answers: Answers, *, include_usage: bool) -> None:
        self.reply, self.pieces, self.answers, self.include_usage = reply, pieces, answers, include_usage
        self.status_code, self.background = 200, None
        self.init_headers()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self.reply:
            await _while_connected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events():
            await send({"type": "http.response.body", "body": b"data: " + event + b"\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncIterator[bytes]:
        try:
            async for index, piece, finish in self.pieces:
                yield _json(self.answers.completion([choice(index, piece, finish)]))
        except RefusedError as refusal:  # the status has been sent: the error is the last event
            yield _json(error(refusal))
            return
        if self.include_usage:
            yield _json({**self.answers.completion([]), "usage": self.answers.usage()})
        yield b"[DONE]"


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, Any]) -> Any:
    """What `work` returns, or None if the client leaves before; then it is cancelled."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        leaving.cancel()


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


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


async def _refuse(_: Request, refusal: Exception) -> Response:
    assert isinstance(refusal, RefusedError)
    return JSONResponse(error(refusal), refusal.status, headers={"Retry-After": "1"} if refusal.status == 429 else {})


async def _refuse_http(request: Request, found: Exception) -> Response:
    assert isinstance(found, HTTPException)
    message = f"{request.method} {request.url.path[:80]}: {found.detail}"
    return JSONResponse(error(RefusedError(message)), found.status_code, headers=found.headers)


async def _gone(_: Request, __: Exception) -> Response:
    return Response(status_code=GONE)


def make_engine(model: GPT, window: int, limits: ServeConfig) -> Engine:
    max_tokens, positions = limits.max_tokens, model.config.rotary.max_tokens
    if max_tokens is None:
        max_tokens = positions
    elif max_tokens > positions:
        raise UserError(f"--max-tokens {max_tokens:,}: the model has positions for {positions:,}; lower it")
    batcher = make_batcher(model, window=window, slots=limits.max_streams, max_tokens=max_tokens)
    return Engine(batcher, room=limits.max_streams + limits.max_queue)


def make_app(
    engine: Engine, tokenizer: Tokenizer, name: str, limits: ServeConfig, *, hosts: frozenset[str] = HOSTS
) -> ASGIApp:
    """`name`: what the model is called; `hosts`: what this server may be called."""
    server = Server(name, tokenizer, engine, limits, int(time.time()))

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        engine.start()
        yield
        await asyncio.to_thread(engine.stop)

    routes = [
        Route("/", server.page),
        Route("/v1/models", server.models),
        Route("/v1/models/{name}", server.model),
        Route("/v1/completions", server.completions, methods=["POST"]),
    ]
    handlers = {RefusedError: _refuse, HTTPException: _refuse_http, ClientDisconnect: _gone}
    return _Guard(Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers), hosts)
