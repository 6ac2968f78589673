"""Standard output and error as commands see them: everything printed passes here, by `print` or through rich.

Characters that steer a terminal are shown as escapes, since names, configs, cards and samples may come from anybody;
newlines and tabs stay. And an output may be lost at any time (a closed pipe or terminal, a full disk): what is printed
then is dropped. Only where the output is what a command is for, and could not be kept, does `LostOutputError` end it.
"""

import contextlib
import io
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any, TextIO, cast

from paceline.core.errors import PacelineError

STEERS = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]|\r(?!\n)"  # C0, DEL and C1, of which \r\n is a newline
    "|[\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f\ufeff\ufff9-\ufffb]|[\U000e0000-\U000e007f]"  # order, invisible
)


class LostOutputError(PacelineError):
    """An output that takes no more."""


def neutral(text: str) -> str:
    """The text with every character that would steer a terminal as its escape."""
    return STEERS.sub(_escape, text)


def one_line(text: str) -> str:
    """The same of a text that is a line, whatever names it quotes."""
    return re.sub("[\t\r\n]", _escape, neutral(text))


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()


class Output:
    """A stream that takes text only, with a name for messages. While it is `needed`, its loss ends the command, unless
    it is the reader who is gone, as after `| head`; else `warn` is called once."""

    def __init__(
        self, stream: TextIO | None, name: str = "standard output", *, warn: Callable[[str], None] | None = None
    ) -> None:
        self.needed = False
        self.lost: LostOutputError | None = None
        self._unread = False
        self._stream, self._name, self._warn = stream or io.StringIO(), name, warn
        if stream is None:
            self._stream.close()

    def write(self, text: str) -> int:
        return self.write_unchanged(neutral(text))

    def write_unchanged(self, text: str) -> int:
        """For what is meant to steer the terminal, such as a bar of progress."""
        self._attempt(lambda: self._put(text))
        return len(text)

    def flush(self) -> None:
        self._attempt(self._stream.flush)

    def isatty(self) -> bool:
        with contextlib.suppress(ValueError):
            return self._stream.isatty()
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def let_go(self) -> None:
        """Nothing more is printed. What a lost stream still holds must not fail when the process ends."""
        self.needed, self._warn = False, None
        self.flush()
        if self.lost is not None:
            with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())

    def _put(self, text: str) -> None:
        try:
            self._stream.write(text)
        except UnicodeEncodeError:  # nothing of it was written
            encoding = self._stream.encoding
            self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))

    def _attempt(self, action: Callable[[], object]) -> None:
        if self.lost is None:
            try:
                action()
            except (OSError, ValueError) as error:  # ValueError: it is closed
                if self.needed or not isinstance(error, BlockingIOError):  # which passes
                    self._lose(error)
        if self.lost is not None and self.needed and not self._unread:
            raise self.lost

    def _lose(self, error: Exception) -> None:
        reason = error.strerror if isinstance(error, OSError) else "it is closed"
        self.lost = LostOutputError(f"{self._name} is lost: {reason}")
        self._unread = isinstance(error, BrokenPipeError | ValueError)
        if self._warn is not None and not self.needed:
            self._warn(f"paceline: {self.lost}; going on without it")


class _Unchanged:
    """An `Output` for who writes what steers the terminal and has made the rest neutral."""

    def __init__(self, output: Output) -> None:
        self.output, self.write = output, output.write_unchanged

    def __getattr__(self, name: str) -> Any:
        return getattr(self.output, name)


def unchanged(stream: TextIO | None) -> TextIO:
    """Where text goes as it is, but the loss of the stream is met as `Output` does."""
    return cast(TextIO, _Unchanged(stream if isinstance(stream, Output) else Output(stream, warn=_to_stderr)))


def loss_of(stream: object) -> LostOutputError | None:
    """Why an output takes no more; None: it does, as far as known."""
    output = stream.output if isinstance(stream, _Unchanged) else stream
    return output.lost if isinstance(output, Output) else None


def tell(line: str, stream: TextIO | None = None) -> None:
    """A line for whoever is there to read it, on standard output if no other is given."""
    with contextlib.suppress(OSError, ValueError):
        print(one_line(line), file=stream, flush=True)


def _to_stderr(line: str) -> None:
    tell(line, sys.stderr)


@contextlib.contextmanager
def standard_streams() -> Iterator[Output]:
    """While the block runs, standard output and error pass here; gives the first. Losing the second never matters."""
    _fill_closed()
    before = sys.stdout, sys.stderr
    err = Output(before[1], "standard error")
    out = Output(before[0], warn=lambda line: tell(line, cast(TextIO, err)))
    sys.stdout, sys.stderr = cast(TextIO, out), cast(TextIO, err)
    try:
        yield out
    except Exception:  # a bug of ours: its traceback may quote anything
        sys.excepthook = lambda *error: traceback.print_exception(*error, file=err)
        raise
    finally:
        out.let_go()
        err.let_go()
        sys.stdout, sys.stderr = before


def _fill_closed() -> None:
    """Else a checkpoint would be opened under the number of a closed standard stream, and get what libraries print."""
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(handle, True)
    os.close(handle)
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 - as long as the process
