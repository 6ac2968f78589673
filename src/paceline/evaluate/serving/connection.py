"""A connection with time limits: uvicorn has none for headers, nor for a client that does not read its answer.

Where there are too many connections, the oldest without a whole request is closed, so that half-sent requests keep
nobody out.
"""

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

HEADERS_S = 10.0
"""A client has so long to send the headers of a request."""


class Connection(H11Protocol):
    most: int
    """Connections at the same time."""
    request_s: float
    """From the end of the headers to the end of the answer, as the client reads it."""
    _limit: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.since_s = self.loop.time()
        self._end_after(HEADERS_S)
        if len(self.connections) > self.most:  # uvicorn's own limit would answer 503 to the newest
            incomplete = [one for one in self.connections if isinstance(one, Connection) and one.is_incomplete]
            oldest = min(incomplete, key=lambda one: one.since_s)
            self.connections.discard(oldest)
            oldest.transport.abort()

    @property
    def is_incomplete(self) -> bool:
        """Whether there is no whole request that is not answered."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def data_received(self, data: bytes) -> None:
        if self._limit is None:  # the first bytes of a further request
            self._end_after(HEADERS_S)
        super().data_received(data)

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self._end_after(self.request_s)

    def on_response_complete(self) -> None:
        self._stop_limit()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_limit()
        super().connection_lost(exc)

    def _end_after(self, seconds: float) -> None:
        self._stop_limit()
        self._limit = self.loop.call_later(seconds, self.transport.abort)  # whatever was not read is dropped

    def _stop_limit(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None
