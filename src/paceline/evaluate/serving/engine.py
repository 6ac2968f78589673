"""The thread that owns the model, and the replies it fills for an event loop.

Commands go in through a queue; what a step made comes out in one call to the loop, which also decides who may enter,
so no lock is needed.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from paceline.evaluate.serving.batcher import Batcher, Event, Stream
from paceline.evaluate.serving.request import RefusedError

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Reply:
    """The streams of one request. Closing it, for whatever reason, ends those that still run."""

    engine: "Engine"
    streams: list[Stream]
    events: "asyncio.Queue[Event]" = field(default_factory=asyncio.Queue)

    def close(self) -> None:
        for stream in self.streams:
            self.engine.drop(stream)


class Engine:
    def __init__(self, batcher: Batcher, *, room: int) -> None:
        """`room`: streams that may be written or wait at the same time."""
        self.batcher, self.room = batcher, room
        self.replies: dict[Stream, Reply] = {}
        """Of every stream that has not ended; touched by the event loop only."""
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="paceline-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped = threading.Event()
        self._broken = False
        """Touched by the event loop only."""

    def start(self) -> None:
        """From the event loop that receives the events."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        self._commands.put(self._stopped.set)
        self._thread.join()

    def open(self, streams: list[Stream]) -> Reply:
        """Put streams in line, or refuse them if there is no room for all."""
        if self._broken:
            raise RefusedError("the server's device failed; it must be started anew", status=503)
        if len(self.replies) + len(streams) > self.room:
            raise RefusedError("too many requests are waiting; try again", status=429, code="rate_limit_exceeded")
        reply = Reply(self, streams)
        for stream in streams:
            self.replies[stream] = reply
            self._commands.put(lambda stream=stream: self.batcher.add(stream))  # type: ignore[misc]
        return reply

    def drop(self, stream: Stream) -> None:
        if self.replies.pop(stream, None) is not None:
            self._commands.put(lambda: self.batcher.drop(stream))

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                for command in self._due():
                    command()
                if events := self._step():
                    self._call(self._deliver, events)
        except Exception:  # not even cleaning up after a failed step works
            log.exception("the device cannot be used any more; start the server anew")
            self._call(self._give_up)

    def _due(self) -> Iterator[Callable[[], None]]:
        """Commands that have come; while there is nothing else to do, waits for one."""
        if self.batcher.idle:
            yield self._commands.get()
        while not self._commands.empty():
            yield self._commands.get()

    def _step(self) -> list[Event]:
        try:
            return self.batcher.step()
        except Exception:  # a bug, or a device out of memory: these texts are lost, the server is not
            log.exception("a step failed; its requests are answered with status 500")
            return self.batcher.fail()

    def _call(self, function: Callable[..., None], *given: object) -> None:
        """On the event loop."""
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *given)

    def _give_up(self) -> None:
        self._broken = True
        self._deliver([Event(stream, finish="error") for stream in self.replies])

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            if (reply := self.replies.get(event.stream)) is not None:
                reply.events.put_nowait(event)
                if event.finish is not None:
                    del self.replies[event.stream]
