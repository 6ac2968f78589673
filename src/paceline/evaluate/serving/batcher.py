"""Many texts at once over one cache: streams join and leave between two steps.

A step feeds one piece of one new prompt and one token of every text that has begun. With a `DecodeGraph` it launches
the next token of every text before it reads the one before; a text then gets its tokens one step later, and one that
has ended makes one token more, which is forgotten. Everything here belongs to one thread, that of `engine.py`.
"""

import functools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from paceline.core.probe import compiler
from paceline.evaluate.decode import PIECE_TOKENS, Decoder
from paceline.evaluate.decode_graph import DecodeGraph, Ids
from paceline.evaluate.inference_model import prepared
from paceline.evaluate.sampling import Writing, choose
from paceline.evaluate.serving.logprobs import Scored, Scores
from paceline.model.gpt import GPT
from paceline.model.masks import Windows

Finish = Literal["stop", "length", "timeout", "error"]


@dataclass(eq=False)
class Stream(Writing):
    """One text of a request."""

    prompt: list[int]
    new_tokens: int
    """At most. 0: the prompt is only read."""
    deadline: float
    """On the batcher's clock."""
    slot: int | None = None
    fed: int = 0
    """Tokens of the prompt that are in the cache."""
    last: int = 0
    """The token to feed next, once the whole prompt is in the cache."""
    made: int = 0
    logprobs: int | None = None
    """How many of the likeliest tokens are reported at each place; None: nothing is, not even its own token."""
    echo_from: int | None = None
    """The prompt's first token that is reported, too; None: none is."""

    @property
    def begun(self) -> bool:
        return self.fed == len(self.prompt)


@dataclass(frozen=True)
class Event:
    """What a step did for a stream: a token, or its end."""

    stream: Stream
    token: int | None = None
    finish: Finish | None = None
    scored: tuple[Scored, ...] = ()
    """Of a stream that asks for `logprobs`: its token, also an end-of-text that ends it; or tokens of its prompt."""


class Batcher:
    def __init__(
        self,
        model: GPT,
        *,
        windows: Windows,
        slots: int,
        max_tokens: int,
        clock: Callable[[], float] = time.monotonic,
        decode_graph: Callable[[Decoder], DecodeGraph] | None = None,
    ) -> None:
        """`decode_graph` makes the step of texts that have begun; without it `Decoder.feed` and `choose` do."""
        self.model, self.clock = model, clock
        self.decoder = Decoder(model, windows=windows, max_tokens=max_tokens, slots=slots)
        self.decode_graph = None if decode_graph is None else decode_graph(self.decoder)
        self.in_flight: tuple[Ids, list[Stream | None], Scores | None] | None = None
        """Launched and not yet read: ids, whose they are, and scores of all if somebody asks for them."""
        self.waiting: deque[Stream] = deque()
        self.slots: list[Stream | None] = [None] * slots
        self.starting: deque[Stream] = deque()
        """Those with a slot whose prompt is not yet in the cache, in order of arrival."""

    @property
    def streams(self) -> list[Stream]:
        """Those that have a slot."""
        return [stream for stream in self.slots if stream is not None]

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.streams

    def add(self, stream: Stream) -> None:
        self.waiting.append(stream)

    def drop(self, stream: Stream) -> None:
        """Forget a stream, wherever it is; nothing happens if it has ended."""
        if stream.slot is not None:
            self.decoder.free(stream.slot)
            self.slots[stream.slot] = None
            stream.slot = None
            if stream in self.starting:
                self.starting.remove(stream)
        elif stream in self.waiting:
            self.waiting.remove(stream)

    def step(self) -> list[Event]:
        """One token for every text that has begun, one piece of a prompt for one that has not."""
        now = self.clock()
        late = [stream for stream in [*self.streams, *self.waiting] if stream.deadline <= now]
        events = [self._end(stream, "timeout") for stream in late]
        self._admit()
        if any(stream.begun for stream in self.streams):
            events += self._feed_tokens() if self.decode_graph is None else self._feed_graph(self.decode_graph)
        if self.starting:
            events += self._feed_prompt(self.starting[0])
        return events

    def fail(self) -> list[Event]:
        """End everything after an error nobody foresaw."""
        self.in_flight = None
        return [self._end(stream, "error") for stream in [*self.streams, *self.waiting]]

    def _admit(self) -> None:
        for slot, taken in enumerate(self.slots):  # the lowest first: a step computes all up to the highest
            if taken is None and self.waiting:
                stream = self.waiting.popleft()
                self.slots[slot], stream.slot = stream, slot
                self.starting.append(stream)

    def _feed_prompt(self, stream: Stream) -> list[Event]:
        assert stream.slot is not None
        piece = stream.prompt[stream.fed : stream.fed + PIECE_TOKENS]
        x = self.decoder.stream(torch.tensor([piece], device=self.decoder.device), first=stream.slot)
        events = self._prompt_scores(stream, x[0])
        stream.fed += len(piece)
        if not stream.begun:
            return events
        self.starting.popleft()
        if stream.new_tokens == 0:
            return [*events, self._end(stream, "length")]
        events += self._draw(stream, self.decoder.logits_of(x[:, -1:])[0, 0])
        if self.decode_graph is not None and stream.slot is not None:
            self.decode_graph.begin(stream.slot, stream.last)
        return events

    def _prompt_scores(self, stream: Stream, x_TD: Tensor) -> list[Event]:
        """Of the tokens that follow those of this piece, in the prompt."""
        if stream.logprobs is None or stream.echo_from is None:
            return []
        first = [Scored(stream.prompt[0])] if stream.fed == stream.echo_from else []  # nothing stands before it
        following = stream.prompt[stream.fed + 1 : stream.fed + 1 + len(x_TD)]
        ids = torch.tensor(following, dtype=torch.long, device=x_TD.device)
        scores = Scores(self.decoder.logits_of(x_TD[None, : len(following)])[0], ids, stream.logprobs)
        return [Event(stream, scored=(*first, *scores.read()))]

    def _feed_tokens(self) -> list[Event]:
        live = [stream is not None and stream.begun for stream in self.slots]
        rows = len(live) - live[::-1].index(True)
        tokens = [[0 if stream is None else stream.last] for stream in self.slots[:rows]]
        logits = self.decoder.feed(torch.tensor(tokens, device=self.decoder.device), live=live[:rows])
        texts = [(stream, logits[row]) for row, stream in enumerate(self.slots[:rows]) if stream and live[row]]
        return [event for stream, row in texts for event in self._draw(stream, row)]

    def _feed_graph(self, graph: DecodeGraph) -> list[Event]:
        """Launch the next tokens, then tell of those before. Who has ended or left meanwhile is passed over."""
        ids, whose, scores = self.in_flight or (None, [None] * len(self.slots), None)
        live = [  # one in flight may be a text's last
            stream if stream and stream.begun and stream.made + (stream is last) < stream.new_tokens else None
            for stream, last in zip(self.slots, whose, strict=True)
        ]
        self.in_flight = (graph.launch(live), live, self._scores(graph, live)) if any(live) else None
        tokens = [] if ids is None else ids.wait()
        scored = [None] * len(tokens) if scores is None else scores.read()
        events: list[Event] = []
        for stream, token, score in zip(whose, tokens, scored, strict=False):
            if stream and stream.slot is not None:
                events += self._continue(stream, token, score)
        return events

    @staticmethod
    def _scores(graph: DecodeGraph, live: list[Stream | None]) -> Scores | None:
        """Of the tokens that were just launched."""
        asked = [stream.logprobs for stream in live if stream and stream.logprobs is not None]
        return Scores(graph.logits, graph.tokens, max(asked)) if asked else None

    def _draw(self, stream: Stream, logits_V: Tensor) -> list[Event]:
        token, score = choose(logits_V, stream.sampling, stream.generator), None
        if stream.logprobs is not None:
            [score] = Scores(logits_V[None], torch.tensor([token], device=logits_V.device), stream.logprobs).read()
        return self._continue(stream, token, score)

    def _continue(self, stream: Stream, token: int, score: Scored | None) -> list[Event]:
        """The next token of one text, and its end if that is due: as `generate`, which ends before an end-of-text."""
        scored = () if score is None or stream.logprobs is None else (score,)
        if token == self.model.end_of_text:
            return [self._end(stream, "stop", scored)]
        stream.last, stream.made = token, stream.made + 1
        made = Event(stream, token=token, scored=scored)
        return [made, self._end(stream, "length")] if stream.made == stream.new_tokens else [made]

    def _end(self, stream: Stream, finish: Finish, scored: tuple[Scored, ...] = ()) -> Event:
        self.drop(stream)
        return Event(stream, finish=finish, scored=scored)


def make_batcher(model: GPT, *, windows: Windows, slots: int, max_tokens: int, compiled: bool = True) -> Batcher:
    """On a GPU with a CUDA graph of the step, which is `compiled` first where that is possible and takes a while."""
    device = model.embeddings.token.device.type
    if device != "cuda":
        return Batcher(model, windows=windows, slots=slots, max_tokens=max_tokens)
    graph = functools.partial(DecodeGraph, compiled=compiled and compiler(device).usable)
    return Batcher(prepared(model), windows=windows, slots=slots, max_tokens=max_tokens, decode_graph=graph)
