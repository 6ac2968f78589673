"""Log-probabilities are those of the model, token by token, as clients that score texts read them."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch

from paceline.evaluate.config import SamplingConfig, ServeConfig
from paceline.evaluate.decode_graph import DecodeGraph
from paceline.evaluate.score import Row, score_pass
from paceline.evaluate.serving.batcher import Stream
from paceline.evaluate.serving.logprobs import Logprobs, Scored
from paceline.model.masks import window_tensor
from serving.test_app import ask
from serving.test_batcher import batcher, run_out
from serving.tiny_server import TOKENIZER, WINDOWS, Served, served, tiny_model

EOT = TOKENIZER.end_of_text
TEXT = "Return of the naïve café " * 30
"""Longer than a piece of a prompt and than the window."""


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(ServeConfig(max_streams=4, max_tokens=2000)) as found:
        yield found


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}v1", api_key="none", max_retries=0) as found:
        yield found
    server.settle()


def logprobs_of(tokens: list[int]) -> torch.Tensor:
    """(T, vocabulary), by a whole forward pass: row i is about token i + 1."""
    with torch.no_grad():
        logits = tiny_model().logits(torch.tensor([tokens]), window_tensor(WINDOWS, torch.device("cpu")))
    return logits[0, :, : TOKENIZER.vocab_size].float().log_softmax(-1)


def test_an_echoed_prompt_has_the_log_probabilities_of_a_whole_pass(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=TEXT, max_tokens=0, echo=True, logprobs=3)
    choice, tokens = answer.choices[0], [EOT, *TEXT.encode()]
    assert (choice.text, choice.finish_reason) == (TEXT, "length")
    found, expected = choice.logprobs, logprobs_of(tokens)[:-1]
    assert found is not None
    assert found.token_logprobs == pytest.approx(
        expected.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist(), abs=1e-4
    )
    likeliest = expected.topk(3).values
    for place, (top, own) in enumerate(zip(found.top_logprobs, found.token_logprobs, strict=True)):
        values = sorted(top.values(), reverse=True)
        assert values[:3] == pytest.approx(likeliest[place].tolist(), abs=1e-4)
        assert top[found.tokens[place]] == own
    assert found.text_offset[:3] == [0, 1, 2]
    at = TEXT.index("ï")
    assert found.tokens[TEXT.encode().index("ï".encode())] == "bytes:\\xc3"
    assert found.text_offset.count(at) == 2  # its bytes begin at the character


def test_token_ids_are_echoed_as_they_are_and_the_first_has_nothing_before_it(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt=[82, 101], max_tokens=4, echo=True, logprobs=0, temperature=0
    )
    found = answer.choices[0].logprobs
    assert found is not None
    assert answer.choices[0].text.startswith("Re")
    assert found.tokens[:2] == ["R", "e"]
    assert found.token_logprobs[0] is None
    assert found.top_logprobs[0] is None
    assert len(found.tokens) == 6
    assert all(len(top) == 1 for top in found.top_logprobs[1:])


@pytest.mark.parametrize("stream", [False, True])
def test_made_tokens_have_theirs_whole_and_streamed(client: openai.OpenAI, stream: bool) -> None:
    asked: dict[str, Any] = {
        "model": "tiny",
        "prompt": "Return",
        "max_tokens": 12,
        "logprobs": 2,
        "seed": 3,
        "echo": True,
    }
    choices = [client.completions.create(**asked).choices[0]]
    if stream:
        choices = [piece.choices[0] for piece in client.completions.create(**asked, stream=True)]
    parts = [choice.logprobs for choice in choices if choice.logprobs]
    tokens = [name for part in parts for name in part.tokens]
    values = [value for part in parts for value in part.token_logprobs]
    whole = client.completions.create(**asked).choices[0]
    assert (tokens, values) == (whole.logprobs.tokens, whole.logprobs.token_logprobs)
    assert "".join(choice.text for choice in choices) == whole.text
    ids = [
        EOT,
        *b"Return",
        *(
            int(name[8:], 16) if name.startswith("bytes:") else ord(name)
            for name in tokens[6:]
            if name != "<|endoftext|>"
        ),
    ]
    rows = score_pass(tiny_model(), [Row(ids, 1)], WINDOWS)
    assert values[: len(ids) - 1] == pytest.approx((-rows[0].losses).tolist(), abs=1e-4)


def test_lm_eval_s_client_of_completions_reads_the_scores(server: Served) -> None:
    """Its request and its reading of the answer, of `local-completions`."""
    harness = pytest.importorskip("lm_eval.models.openai_completions").LocalCompletionsAPI
    contexts, continuations = [b"Return the", b"a"], [b" value", b"bcdefg"]
    prompts = [[*before, *after] for before, after in zip(contexts, continuations, strict=True)]
    one = harness.__new__(harness)
    one.model = "tiny"
    payload = one._create_payload(prompts, generate=False, seed=1234)
    answer = json.loads(ask(server, "POST", "/v1/completions", payload).read())
    found = harness.parse_logprobs(answer, ctxlens=[len(before) for before in contexts])
    rows = [Row(prompt, len(before)) for prompt, before in zip(prompts, contexts, strict=True)]
    for (nats, is_greedy), score in zip(found, score_pass(tiny_model(), rows, WINDOWS), strict=True):
        assert nats == pytest.approx(-score.nats, abs=1e-4)
        assert is_greedy == bool(score.likeliest.all())


@pytest.mark.parametrize("graph", [None, DecodeGraph], ids=["feed", "graph"])
def test_the_step_of_all_texts_scores_those_who_ask(graph: type[DecodeGraph] | None) -> None:
    batch = batcher(graph=graph)
    asks = Stream(SamplingConfig(temperature=1.0, top_k=None, seed=1), [EOT, 97, 98], 30, float("inf"), logprobs=2)
    others = [Stream(SamplingConfig(seed=n), [EOT, 99], 30, float("inf")) for n in range(2)]
    for one in (others[0], asks, others[1]):
        batch.add(one)
    events = run_out(batch)
    assert not any(event.scored for event in events if event.stream is not asks)
    scored = [one for event in events if event.stream is asks for one in event.scored]
    made = [event.token for event in events if event.stream is asks and event.token is not None]
    assert [one.token for one in scored][: len(made)] == made
    expected = logprobs_of([*asks.prompt, *(one.token for one in scored)])[2:-1]
    for row, one in zip(expected, scored, strict=True):
        assert one.logprob == pytest.approx(float(row[one.token]), abs=1e-4)
        assert [value for _, value in one.likeliest] == pytest.approx(row.topk(2).values.tolist(), abs=1e-4)


def test_an_end_of_text_is_scored_too_so_that_clients_may_drop_the_last_token() -> None:

    batch = batcher()
    one = Stream(SamplingConfig(temperature=0.0), [EOT, 97], 5, float("inf"), logprobs=1)
    batch.add(one)
    first = next(event.token for event in batch.step() if event.token is not None)
    batch.drop(one)
    batch.model = type("Model", (), {"end_of_text": first})()  # the token that it makes first ends the text
    again = Stream(SamplingConfig(temperature=0.0), [EOT, 97], 5, float("inf"), logprobs=1)
    batch.add(again)
    [event] = batch.step()
    assert (event.finish, [score.token for score in event.scored]) == ("stop", [first])


def test_a_token_is_named_by_its_text_or_its_bytes() -> None:
    found = Logprobs(TOKENIZER, 1)
    found.add(
        [
            Scored(97),
            Scored(0xC3, -1.0, ((98, -0.5), (99, -2.0))),
            Scored(0xA9, -1.5),
            Scored(EOT, -3.0),
            Scored(98, -1),
        ]
    )
    taken = found.take()
    assert taken["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", "<|endoftext|>", "b"]
    assert taken["text_offset"] == [0, 1, 1, 2, 2]
    assert taken["top_logprobs"][1] == {"b": -0.5, "bytes:\\xc3": -1.0}
    assert found.take()["tokens"] == []


def test_chat_is_refused_with_a_reason(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="send the text to /v1/completions"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hello"}])
