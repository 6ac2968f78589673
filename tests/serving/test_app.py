"""The server as its users meet it: the openai client, broken and abandoned requests, other sites."""

import asyncio
import json
import socket
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.evaluate.config import SamplingConfig, ServeConfig
from paceline.evaluate.generate import text_stream
from serving.tiny_server import TOKENIZER, WINDOWS, Served, served, tiny_model

LIMITS = ServeConfig(max_streams=4, max_queue=4, max_tokens=6000, max_body_bytes=20_000, timeout_s=60)
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(LIMITS) as found:
        yield found


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}v1", api_key="none", max_retries=0) as found:
        yield found
    server.settle()


def written(prompt: str, sampling: SamplingConfig, new_tokens: int) -> str:
    """As `paceline sample` writes."""
    return "".join(text_stream(tiny_model(), TOKENIZER, prompt, sampling, windows=WINDOWS, new_tokens=new_tokens))


def ask(server: Served, method: str, path: str, body: Any = None, headers: dict[str, str] = JSON) -> HTTPResponse:
    connection = HTTPConnection("127.0.0.1", server.port, timeout=20)
    connection.request(method, path, body if isinstance(body, bytes | None) else json.dumps(body), headers)
    return connection.getresponse()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_whole_and_streamed_texts_are_those_of_sample(client: openai.OpenAI, temperature: float) -> None:
    expected = written("Return", SamplingConfig(temperature=temperature, top_k=20, top_p=0.9, seed=3), 40)
    asked: dict[str, Any] = {
        "model": "tiny", "prompt": "Return", "max_tokens": 40, "temperature": temperature, "top_p": 0.9, "seed": 3,
        "extra_body": {"top_k": 20},
    }  # fmt: skip
    whole = client.completions.create(**asked)
    pieces = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert whole.choices[0].text == expected
    assert "".join(piece.choices[0].text for piece in pieces[:-1]) == expected
    assert pieces[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert pieces[-1].usage == whole.usage
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == 7  # the bytes, and the end-of-text before them


def test_several_prompts_and_texts_come_in_order_each_with_its_seed(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=["a", "b"], n=2, max_tokens=20, seed=5)
    expected = [
        written(prompt, SamplingConfig(temperature=1.0, top_k=None, seed=seed), 20)
        for prompt in ("a", "b")
        for seed in (5, 6)
    ]
    assert [choice.text for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    text = written("x", SamplingConfig(temperature=0.0), 60)
    stop = text[10:12]
    answer = client.completions.create(model="tiny", prompt="x", max_tokens=60, temperature=0, stop=[stop])
    assert answer.choices[0].text == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_concurrent_streams_get_the_texts_they_would_get_alone(server: Served) -> None:
    """Eight at once over four slots, greedy, of unequal length."""

    async def one(client: openai.AsyncOpenAI, number: int) -> str:
        stream = await client.completions.create(
            model="tiny", prompt="y" * (1 + 40 * number), max_tokens=20 + number, temperature=0, stream=True
        )
        return "".join([piece.choices[0].text async for piece in stream])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client, number) for number in range(8)))

    expected = [written("y" * (1 + 40 * number), SamplingConfig(temperature=0.0), 20 + number) for number in range(8)]
    assert asyncio.run(all_of_them()) == expected


def test_the_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "paceline"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_mistakes_have_the_statuses_that_the_client_knows(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="room for 5,950") as long:
        client.completions.create(model="tiny", prompt="x" * 5_950, max_tokens=50)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")


def test_where_there_is_no_room_a_request_is_told_to_come_again(client: openai.OpenAI) -> None:
    with client.completions.create(model="tiny", prompt=["x"] * 8, max_tokens=5000, temperature=0, stream=True):
        with pytest.raises(openai.RateLimitError):
            client.completions.create(model="tiny", prompt="x")
        assert client.models.list().data


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status"),
    [
        ("POST", "/v1/completions", b"{", JSON, 400),
        ("POST", "/v1/completions", [], JSON, 400),
        ("POST", "/v1/completions", {"prompt": 5}, JSON, 400),
        ("POST", "/v1/completions", {"prompt": "x" * 20_000}, JSON, 413),
        ("POST", "/v1/completions", {"prompt": "x"}, {"Content-Type": "text/plain"}, 415),
        ("GET", "/v1/completions", None, {}, 405),
        ("POST", "/v1/chat/completions", {}, JSON, 404),
        ("GET", "/../etc/passwd", None, {}, 404),
        ("GET", "/", None, {"Host": "evil.example"}, 403),
        ("POST", "/v1/completions", {"prompt": "x"}, {**JSON, "Host": "localhost.evil.example:80"}, 403),
        ("GET", "/v1/models", None, {"Host": "localhost:1"}, 200),
    ],
)
def test_every_answer_has_its_status_and_is_json(
    server: Served, method: str, path: str, body: Any, headers: dict[str, str], status: int
) -> None:
    answer = ask(server, method, path, body, headers)
    assert answer.status == status
    found = json.loads(answer.read())
    assert status == 200 or found["error"]["message"]
    assert "frame-ancestors 'none'" in (answer.headers["Content-Security-Policy"] or "")


def test_a_request_that_takes_too_long_is_answered_and_its_slot_is_free() -> None:
    with served(ServeConfig(timeout_s=0.05)) as server:
        asked = {"prompt": "x", "max_tokens": 5000, "temperature": 0}
        whole = ask(server, "POST", "/v1/completions", asked)
        assert (whole.status, json.loads(whole.read())["error"]["code"]) == (504, "timeout")
        streamed = ask(server, "POST", "/v1/completions", {**asked, "stream": True}).read().decode()
        assert json.loads(streamed.strip().splitlines()[-1].removeprefix("data: "))["error"]["code"] == "timeout"
        server.settle()


@pytest.mark.parametrize("stream", [True, False])
def test_an_abandoned_request_gives_its_slots_back(server: Served, stream: bool) -> None:
    body = json.dumps({"prompt": ["x"] * 8, "max_tokens": 5000, "temperature": 0, "stream": stream}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        while not (streams := server.batcher.streams):
            pass
        if stream:
            connection.recv(100)
    server.settle()
    assert all(one.made < one.new_tokens for one in streams)
    assert ask(server, "POST", "/v1/completions", {"prompt": "x"}).status == 200


@given(st.binary(max_size=200))
@settings(max_examples=25)
def test_bytes_that_are_no_request_do_not_take_it_down(server: Served, noise: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(noise)
    assert ask(server, "GET", "/v1/models").status == 200


VALUES = st.none() | st.booleans() | st.integers(-2, 2**64) | st.floats() | st.text(max_size=5) | st.just([0, 97])
REQUESTS = st.fixed_dictionaries(
    {"prompt": st.text(max_size=20) | st.lists(st.integers(0, 256), max_size=9), "max_tokens": st.integers(1, 9)},
    optional=dict.fromkeys(("temperature", "top_p", "top_k", "seed", "stop", "n", "stream", "logprobs"), VALUES),
)


@given(REQUESTS)
@settings(max_examples=50)
def test_any_settings_are_answered_or_refused(server: Served, asked: dict[str, Any]) -> None:
    answer = ask(server, "POST", "/v1/completions", asked)
    assert answer.status in (200, 400)
    assert b"server_error" not in answer.read()
