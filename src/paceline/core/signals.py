"""Ctrl-C, SIGTERM and SIGHUP: graceful shutdown at the next step boundary, or at once where nothing would be torn: in a
validation or a gradient, which may take minutes. A second signal ends the process wherever it is, unless it is SIGHUP,
which a terminal that closes may send twice, and a service manager after SIGTERM."""

import contextlib
import signal
import threading
from collections.abc import Iterator

HANG_UP = getattr(signal, "SIGHUP", None)  # None: Windows has none


class Interrupted(KeyboardInterrupt):
    """A signal came where work may be dropped. Not an Exception, so that no library takes it for a failure."""


class StopRequest:
    signal_number: int | None = None
    _may_drop = False

    def __bool__(self) -> bool:
        return self.signal_number is not None

    @property
    def exit_code(self) -> int:
        """As shells report an end by signal; 0 if nobody asked."""
        return 128 + self.signal_number if self.signal_number else 0

    @contextlib.contextmanager
    def droppable(self, allowed: bool) -> Iterator[None]:
        """While the block runs, a signal ends it by `Interrupted`, if `allowed`: what it does must leave no trace."""
        self._may_drop = allowed
        try:
            if allowed and self.signal_number is not None:
                raise Interrupted
            yield
        finally:
            self._may_drop = False

    def ask(self) -> None:
        """As Ctrl-C does, but by the program itself, between two steps and as often as it likes."""
        self.signal_number = self.signal_number or signal.SIGINT

    def hear(self, number: int) -> None:
        if self.signal_number is not None:
            if number == HANG_UP:
                return
            raise KeyboardInterrupt
        self.signal_number = number
        if self._may_drop:
            raise Interrupted


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """While the block runs, the first SIGINT, SIGTERM or SIGHUP only makes the request; on the main thread, which alone
    may. A SIGHUP that was ignored before, as by nohup, stays ignored."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    handled = [signal.SIGINT, signal.SIGTERM]
    if HANG_UP is not None and signal.getsignal(HANG_UP) is not signal.SIG_IGN:
        handled.append(HANG_UP)
    before = {number: signal.signal(number, lambda number, _: request.hear(number)) for number in handled}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
