"""JSON too long for memory, a line or a file: texts go to a temporary file, everything else is checked and dropped.

Python's reader takes a line whole, and a gzip file of 1 MB may hold one of 1 GB. Here it is read in blocks, once, at 60
MB/s, and what is held does not depend on its length. The answers are those of `records.parse_line`.
"""

import codecs
import contextlib
import json
import re
import tempfile
from collections.abc import Callable, Iterator
from typing import IO, Any

from paceline.core.errors import DataError
from paceline.text import records
from paceline.text.records import LongTextOrProblem, TextOrProblem

LONGEST_HELD = 4096  # characters of a key or a number
LONGEST_TEXT = 4 << 20  # bytes of a text that stays in memory
DECODER = json.JSONDecoder()
SPACE = re.compile(r"[ \t\n\r]*")
SCALAR = re.compile(r"[-+.\w]*")
IN_STRING = re.compile(
    r'(?:[^"\\]+|\\[^u]|\\u[dD][89abAB]..\\u....|\\u(?![dD][89abAB])....|\\u....(?=[^\\]|\\[^u]))*+', re.DOTALL
)
"""What can be decoded by itself: an escape is not cut in two, nor is a character that takes two of them."""


def spool_text(blocks: Iterator[bytes], field: str) -> LongTextOrProblem:
    """The field of the line as a file, which the caller closes, or what is wrong with it; neither of a blank line."""
    line = _Json(codecs.iterdecode(blocks, "utf-8"), records.checked_text)
    try:
        return line.text_of(field, alone=True) if line.peek() else (None, None)
    except UnicodeDecodeError as error:
        return None, records.not_utf8(error.object[error.start])
    except (ValueError, RecursionError) as error:
        return None, f"not JSON ({error})"


def json_records(blocks: Iterator[bytes], field: str) -> Iterator[TextOrProblem | LongTextOrProblem]:
    """Those of a list, or one after another. The caller closes a text that is a file. ValueError: it is not JSON."""
    file = _Json(codecs.iterdecode(blocks, "utf-8", "surrogateescape"), records.escaped_text)
    for _ in file.elements("[", "]") if file.peek() == "[" else iter(file.peek, ""):
        record = file.whole_object()
        yield file.text_of(field) if record is None else records.text_of(record, field, records.escaped_text)
    file.end()


class _Json:
    """Values of JSON, read from the left. A mistake is a ValueError."""

    def __init__(self, blocks: Iterator[str], checked: Callable[[Any, str], TextOrProblem]) -> None:
        self.blocks, self.checked, self.buffer, self.at = blocks, checked, "", 0

    def text_of(self, field: str, *, alone: bool = False) -> LongTextOrProblem:
        """The field of the next value, after which nothing may follow if it is `alone`."""
        with contextlib.ExitStack() as unused:
            spool = unused.enter_context(
                tempfile.SpooledTemporaryFile(LONGEST_TEXT, "w+", encoding="utf-8", newline="")
            )
            problem = self.copy_field(field, spool)
            if alone:
                self.end()
            if problem is None:
                spool.seek(0)
                unused.pop_all()
                return spool, None
        return None, problem

    def copy_field(self, field: str, spool: IO[str]) -> str | None:
        """The next value's field to the file; what is wrong. Of several with one name the last counts."""
        if self.peek() != "{":
            self.skip()
            return records.no_field(field, None)
        is_there, problem = False, None
        names: dict[str, None] = {}
        for key in self.members():
            if len(names) <= records.NAMES_SHOWN:
                names[key] = None
            if key == field:
                is_there, problem = True, self.copy_text(field, spool)
            else:
                self.skip()
        return problem if is_there else records.no_field(field, names)

    def copy_text(self, field: str, spool: IO[str]) -> str | None:
        if self.peek() != '"':
            return self.checked(self.skip(), field)[1]
        spool.seek(0)
        spool.truncate()
        problem = None
        for part in self.string():
            problem = problem or self.checked(part, field)[1]
            if problem is None:
                _write(spool, part)
        return problem

    def whole_object(self) -> dict[str, Any] | None:
        """The next value, if it is an object of which all has been read: many times faster."""
        with contextlib.suppress(ValueError, RecursionError):
            value, end = DECODER.raw_decode(self.buffer, self.at)
            if isinstance(value, dict):
                self.at = end
                return value
        return None

    def skip(self) -> Any:
        """Check and drop the next value; an empty one of its type."""
        match self.peek():
            case '"':
                for _ in self.string():
                    pass
                return ""
            case "{":
                for _ in self.members():
                    self.skip()
                return {}
            case "[":
                for _ in self.elements("[", "]"):
                    self.skip()
                return []
        return json.loads(self.scalar())

    def members(self) -> Iterator[str]:
        """Each key; its value is to be read before the next is asked for."""
        for _ in self.elements("{", "}"):
            key = ""
            for part in self.string():
                key = (key + part)[:LONGEST_HELD]
            self.expect(":")
            yield key

    def elements(self, opening: str, closing: str) -> Iterator[str]:
        """Before each element, which is to be read before the next is asked for, the character it begins with."""
        self.expect(opening)
        while (first := self.peek()) != closing:
            yield first
            if self.peek() != ",":
                break
            self.at += 1
            if self.peek() == closing:
                raise ValueError(f"{closing!r} after a comma")
        self.expect(closing)

    def string(self) -> Iterator[str]:
        self.expect('"')
        while True:
            if part := self.match(IN_STRING):
                self.at += len(part)
                yield json.loads(f'"{part}"')
            if self.buffer.startswith('"', self.at):
                self.at += 1
                return
            if not self.more():
                raise ValueError("a string without an end")

    def scalar(self) -> str:
        while True:
            word = self.match(SCALAR)
            if len(word) > LONGEST_HELD:
                raise ValueError(f"a number of more than {LONGEST_HELD:,} digits")
            if self.at + len(word) < len(self.buffer) or not self.more():
                self.at += len(word)
                return word

    def expect(self, character: str) -> None:
        if self.peek() != character:
            raise ValueError(f"{character!r} is missing")
        self.at += 1

    def end(self) -> None:
        if self.peek():
            raise ValueError("more than one value")

    def peek(self) -> str:
        """The next character that is not blank; empty at the end."""
        while True:
            self.at += len(self.match(SPACE))
            if self.at < len(self.buffer):
                return self.buffer[self.at]
            if not self.more():
                return ""

    def match(self, pattern: re.Pattern[str]) -> str:
        """What fits from here on, perhaps nothing."""
        found = pattern.match(self.buffer, self.at)
        return found.group() if found else ""

    def more(self) -> bool:
        """Read a block; whether there was one."""
        block = next(self.blocks, None)
        self.buffer, self.at = self.buffer[self.at :] + (block or ""), 0
        return block is not None


def _write(spool: IO[str], text: str) -> None:
    try:
        spool.write(text)
    except OSError as error:
        full = f"no room for the text of a line that is too long for memory ({error.strerror})"
        raise DataError(f"{tempfile.gettempdir()}: {full}; set TMPDIR to a folder with room") from None
