"""Streams share a cache and a step, and nothing else: each gets the tokens it would get alone."""

import pytest
import torch
from torch import Tensor

from paceline.evaluate.config import SamplingConfig
from paceline.evaluate.decode_graph import DecodeGraph
from paceline.evaluate.generate import generate
from paceline.evaluate.serving.batcher import Batcher, Event, Stream
from serving.tiny_server import MAX_TOKENS, WINDOWS, tiny_model

NEVER = float("inf")
GREEDY = SamplingConfig(temperature=0.0)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def batcher(slots: int = 3, clock: Clock | None = None, graph: type[DecodeGraph] | None = None) -> Batcher:
    clock = clock or Clock()
    return Batcher(tiny_model(), windows=WINDOWS, slots=slots, max_tokens=MAX_TOKENS, clock=clock, decode_graph=graph)


def stream(seed: int, *, length: int = 5, new_tokens: int = 8, greedy: bool = False, deadline: float = NEVER) -> Stream:
    prompt = torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    sampling = GREEDY if greedy else SamplingConfig(seed=seed, temperature=1.0, top_k=None)
    return Stream(sampling, [256, *prompt], new_tokens, deadline)


def run_out(batch: Batcher) -> list[Event]:
    events = []
    while not batch.idle:
        events += batch.step()
    return events


def tokens_of(stream: Stream, events: list[Event]) -> list[int]:
    return [event.token for event in events if event.stream is stream and event.token is not None]


def alone(stream: Stream) -> list[int]:
    found = generate(tiny_model(), stream.prompt, stream.sampling, windows=WINDOWS, new_tokens=stream.new_tokens)
    return list(found)


@pytest.mark.parametrize("graph", [None, DecodeGraph], ids=["feed", "graph"])
def test_every_stream_gets_the_tokens_it_would_get_alone(graph: type[DecodeGraph] | None) -> None:
    """Eight texts over three slots, of prompts below and beyond a piece and the window, greedy and drawn."""
    lengths = [3, 300, 40, 1, 600, 129, 10, 255]
    streams = [stream(seed, length=n, new_tokens=20 + 5 * seed, greedy=seed % 2 == 0) for seed, n in enumerate(lengths)]
    batch, events = batcher(graph=graph), []
    for new in streams:
        batch.add(new)
        events += [event for _ in range(3) for event in batch.step()]
    events += run_out(batch)
    for one in streams:
        assert tokens_of(one, events) == alone(one)
        ends = [event.finish for event in events if event.stream is one and event.finish]
        assert ends == ["length" if len(alone(one)) == one.new_tokens else "stop"]


def test_a_long_prompt_delays_the_others_by_a_piece_at_a_time() -> None:
    batch = batcher()
    first, long = stream(1, new_tokens=30), stream(2, length=900)
    batch.add(first)
    batch.step()
    batch.add(long)
    for _ in range(3):
        assert [event.stream for event in batch.step()] == [first]
    assert not long.begun


def test_who_comes_first_begins_first_whatever_slot_becomes_free() -> None:
    batch = batcher(slots=2)
    waits = stream(9)
    batch.add(stream(0, new_tokens=1))
    batch.add(waits)
    batch.add(stream(1, new_tokens=1))  # gets the lower slot, which is free after the first step
    begun = [{event.stream for event in batch.step()} for _ in range(2)]
    assert waits in begun[1]


def test_a_late_stream_ends_whether_it_writes_or_waits() -> None:
    clock = Clock()
    batch = batcher(slots=1, clock=clock)
    writes, waits, stays = (stream(n, new_tokens=50, deadline=d) for n, d in enumerate([5.0, 5.0, 100.0]))
    for one in (writes, waits, stays):
        batch.add(one)
    batch.step()
    clock.now = 5.0
    late = [event.stream for event in batch.step() if event.finish == "timeout"]
    assert late == [writes, waits]
    assert batch.streams == [stays]


@pytest.mark.parametrize("graph", [None, DecodeGraph], ids=["feed", "graph"])
def test_a_dropped_stream_leaves_its_slot_to_the_next_and_no_trace(graph: type[DecodeGraph] | None) -> None:
    batch = batcher(slots=1, graph=graph)
    dropped, waiting, next_one = stream(1, length=400, new_tokens=50), stream(2), stream(3, greedy=True)
    for one in (dropped, waiting, next_one):
        batch.add(one)
    for _ in range(4):
        batch.step()
    batch.drop(dropped)
    batch.drop(waiting)
    assert tokens_of(next_one, run_out(batch)) == alone(next_one)
    batch.drop(next_one)  # has ended: nothing happens


def test_after_a_failure_the_next_stream_is_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batcher(slots=1)
    lost, after = [stream(1), stream(2)], stream(3)
    for one in lost:
        batch.add(one)
    batch.step()

    def broken(*_: object, **__: object) -> Tensor:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(batch.decoder, "feed", broken)
        with pytest.raises(RuntimeError):
            batch.step()
    assert [(event.stream, event.finish) for event in batch.fail()] == [(one, "error") for one in lost]
    batch.add(after)
    assert tokens_of(after, run_out(batch)) == alone(after)
