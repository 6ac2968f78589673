"""Clients that send half a request or read no answer: they are cut off, and keep nobody out."""

import contextlib
import socket
import time
from collections.abc import Iterator

import pytest

from paceline.evaluate.config import ServeConfig
from paceline.evaluate.serving import app, connection
from serving.test_app import ask
from serving.tiny_server import Served, served

SMALL = ServeConfig(max_streams=1, max_queue=1)
HALF_HEADERS = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX-Slow: "
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HALF_BODY = POST + b"Content-Length: 100\r\n\r\n{"


@contextlib.contextmanager
def sent(server: Served, count: int, start: bytes) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        found = []
        for _ in range(count):
            found.append(stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=20)))
            found[-1].sendall(start)
        yield found


def is_closed_by_the_server(client: socket.socket) -> bool:
    """Waits until it is, at most the socket's 20 s."""
    with contextlib.suppress(ConnectionResetError):
        while client.recv(1 << 16):
            pass
    return True


def send_until_closed(client: socket.socket) -> None:
    end = time.monotonic() + 10
    with contextlib.suppress(ConnectionError):
        while time.monotonic() < end:
            client.sendall(b"x")
            time.sleep(0.01)
        pytest.fail("it is still open")


@pytest.mark.parametrize("start", [b"", HALF_HEADERS, HALF_BODY], ids=["nothing", "headers", "body"])
def test_a_hundred_half_sent_requests_keep_nobody_out(start: bytes) -> None:
    with served(SMALL) as server, sent(server, 100, start) as clients:
        assert ask(server, "POST", "/v1/completions", {"prompt": "x", "max_tokens": 3}).status == 200
        assert is_closed_by_the_server(clients[0])  # the oldest make room


def test_headers_have_a_time_limit_however_they_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEADERS_S", 0.3)
    with served(SMALL) as server, sent(server, 1, HALF_HEADERS) as (client,):
        send_until_closed(client)  # a byte at a time does not help


def test_a_second_request_of_a_connection_has_the_same_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEADERS_S", 0.3)
    with served(SMALL) as server, sent(server, 1, b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n") as (client,):
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")
        client.sendall(HALF_HEADERS)
        assert is_closed_by_the_server(client)


def test_an_answer_that_is_not_read_does_not_hold_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BODY_S", "END_S"):
        monkeypatch.setattr(app, name, 0)
    with served(ServeConfig(max_streams=1, timeout_s=0.3)) as server, sent(server, 1, b"") as (client,):
        client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2000)  # whose answers no buffer takes
        client.settimeout(20)
        send_until_closed(client)
