"""Ctrl-C and SIGTERM as a wish that the loop honours between two steps. A second one ends at once."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


class StopRequest:
    signal_number: int | None = None

    def __bool__(self) -> bool:
        return self.signal_number is not None

    @property
    def exit_code(self) -> int:
        """As shells report an end by signal; 0 if nobody asked."""
        return 128 + self.signal_number if self.signal_number else 0


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """While the block runs, the first SIGINT or SIGTERM only sets the request; handlers are put back afterwards."""
    request = StopRequest()

    def ask(number: int, _: FrameType | None) -> None:
        if request:
            raise KeyboardInterrupt
        request.signal_number = number

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
