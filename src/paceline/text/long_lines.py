"""JSON too long for memory, a line or a file: texts go to a temporary file, everything else is checked and dropped.

Python's reader takes a line whole, and that and the text made of it are several times the line; a gzip file of 1 MB may
hold one of 1 GB. Here a line is read in blocks, once, at 60 MB/s, and what is held does not depend on its length. The
answers are those of `sources.parse_line`.
"""

import codecs
import json
import re
import tempfile
from collections.abc import Iterator
from functools import partial
from typing import IO, Any

from paceline.core.errors import DataError
from paceline.text.records import (
    NAMES_SHOWN,
    LongTextOrProblem,
    TextOrProblem,
    bad_byte,
    checked_text,
    no_field,
    not_utf8,
    text_of,
)

LONGEST_HELD = 4096
"""Characters of a key or a number."""
LONGEST_TEXT = 4 << 20
DECODER = json.JSONDecoder()
SPACE = re.compile(r"[ \t\n\r]*")
SCALAR = re.compile(r"[-+.\w]*")
IN_STRING = re.compile(
    r'(?:[^"\\]+|\\[^u]|\\u[dD][89abAB]..\\u....|\\u(?![dD][89abAB])....|\\u....(?=[^\\]|\\[^u]))*+', re.DOTALL
)
"""What can be decoded by itself: an escape is not cut in two, nor is a character that takes two of them."""


def spool_text(blocks: Iterator[bytes], field: str) -> tuple[IO[str] | None, str | None]:
    """The field of the line as a file at its start, or what is wrong with the line; neither of a blank line. The caller
    closes the file."""
    spool = tempfile.TemporaryFile("w+", encoding="utf-8", newline="")  # noqa: SIM115
    try:
        line = _Line(codecs.iterdecode(blocks, "utf-8"))
        is_blank = not line.peek()
        problem = None if is_blank else line.copy(field, spool)
        if problem is None and not is_blank:
            spool.seek(0)
            return spool, None
    except UnicodeDecodeError as error:
        problem = not_utf8(error.object[error.start])
    except UnicodeEncodeError:
        problem = f"field {field!r} holds half a surrogate pair, which is not text"
    except (ValueError, RecursionError) as error:
        problem = f"not JSON ({error})"
    spool.close()
    return None, problem


def records(blocks: Iterator[bytes], field: str) -> Iterator[TextOrProblem | LongTextOrProblem]:
    """The records of a .json file: of a list, or one after another. A text of LONGEST_TEXT characters or more is a
    file, which the caller closes. Raises ValueError where it is not JSON: what follows has no known beginning."""
    file = _Line(codecs.iterdecode(blocks, "utf-8", "surrogateescape"))
    is_list = file.peek() == "["
    file.at += is_list
    spool = new_spool()
    while file.peek() not in ("", "]"):
        if (record := file.whole_object()) is not None:
            yield _text_in_memory(record, field)
        else:
            spool.seek(0)
            spool.truncate()
            problem = file.copy_value(field, spool) or _problem_of(spool, field)
            spool.seek(0)
            text = None if problem else spool.read(LONGEST_TEXT)
            if text is None or len(text) < LONGEST_TEXT:
                yield text, problem
            else:
                spool.seek(0)
                yield spool, None
                spool = new_spool()
        if is_list and not file.another("]"):
            break
    if is_list:
        file.expect("]")
    if file.peek():
        raise ValueError("more than one value")


def new_spool() -> IO[str]:
    return tempfile.TemporaryFile("w+", encoding="utf-8", errors="surrogatepass", newline="")


def _text_in_memory(record: dict[str, Any], field: str) -> TextOrProblem:
    value = record.get(field)
    bad = bad_byte(value) if isinstance(value, str) else None
    return (None, bad) if bad else text_of(record, field)


def _problem_of(spool: IO[str], field: str) -> str | None:
    """What is wrong with the characters of a text."""
    spool.seek(0)
    for text in iter(partial(spool.read, LONGEST_TEXT), ""):
        if problem := bad_byte(text) or checked_text(text, field)[1]:
            return problem
    return None


class _Line:
    """One value of JSON, read from the left. A mistake is a ValueError."""

    def __init__(self, blocks: Iterator[str]) -> None:
        self.blocks, self.buffer, self.at = blocks, "", 0

    def copy(self, field: str, spool: IO[str]) -> str | None:
        problem = self.copy_value(field, spool)
        if self.peek():
            raise ValueError("more than one value")
        return problem

    def copy_value(self, field: str, spool: IO[str]) -> str | None:
        """The next value's `field` to the file; what is wrong. Of several with one name the last counts."""
        if self.peek() != "{":
            self.skip()
            return no_field(field, None)
        problem: str | None = ""
        names: dict[str, None] = {}
        for key in self.members():
            if len(names) <= NAMES_SHOWN:
                names[key] = None
            if key != field or self.peek() != '"':
                kind = self.skip()
                problem = f"field {field!r} is {kind}, not text" if key == field else problem
                continue
            spool.seek(0)
            spool.truncate()
            for part in self.string():
                _write(spool, part)
            problem = None
        return no_field(field, names) if problem == "" else problem

    def whole_object(self) -> dict[str, Any] | None:
        """The next value, if it is an object of which all has been read: many times faster."""
        try:
            value, end = DECODER.raw_decode(self.buffer, self.at)
        except (ValueError, RecursionError):
            return None
        if not isinstance(value, dict):
            return None
        self.at = end
        return value

    def skip(self) -> str:
        """Check and drop the next value; the name of its type."""
        match self.peek():
            case '"':
                for _ in self.string():
                    pass
                return "str"
            case "{":
                for _ in self.members():
                    self.skip()
                return "dict"
            case "[":
                self.items()
                return "list"
        return type(json.loads(self.scalar())).__name__

    def members(self) -> Iterator[str]:
        """Each key; its value is to be read before the next is asked for."""
        self.expect("{")
        while self.peek() != "}":
            key = ""
            for part in self.string():
                key = (key + part)[:LONGEST_HELD]
            self.expect(":")
            yield key
            if not self.another("}"):
                break
        self.expect("}")

    def items(self) -> None:
        self.expect("[")
        while self.peek() != "]":
            self.skip()
            if not self.another("]"):
                break
        self.expect("]")

    def another(self, end: str) -> bool:
        """Whether a comma and a further element follow."""
        if self.peek() != ",":
            return False
        self.at += 1
        if self.peek() == end:
            raise ValueError(f"{end!r} after a comma")
        return True

    def string(self) -> Iterator[str]:
        self.expect('"')
        while True:
            found = IN_STRING.match(self.buffer, self.at)
            assert found is not None
            if found.group():
                self.at = found.end()
                yield json.loads(f'"{found.group()}"')
            if self.buffer.startswith('"', self.at):
                self.at += 1
                return
            if not self.more():
                raise ValueError("a string without an end")

    def scalar(self) -> str:
        while True:
            found = SCALAR.match(self.buffer, self.at)
            assert found is not None
            if len(found.group()) > LONGEST_HELD:
                raise ValueError(f"a number of more than {LONGEST_HELD:,} digits")
            if found.end() < len(self.buffer) or not self.more():
                self.at += len(found.group())
                return found.group()

    def expect(self, character: str) -> None:
        if self.peek() != character:
            raise ValueError(f"{character!r} is missing")
        self.at += 1

    def peek(self) -> str:
        """The next character that is not blank; empty at the end."""
        while True:
            found = SPACE.match(self.buffer, self.at)
            assert found is not None
            self.at = found.end()
            if self.at < len(self.buffer):
                return self.buffer[self.at]
            if not self.more():
                return ""

    def more(self) -> bool:
        """Read a block; whether there was one."""
        block = next(self.blocks, None)
        self.buffer, self.at = self.buffer[self.at :] + (block or ""), 0
        return block is not None


def _write(spool: IO[str], text: str) -> None:
    try:
        spool.write(text)
    except OSError as error:
        raise DataError(
            f"{tempfile.gettempdir()}: no room for the text of a line that is too long for memory ({error.strerror}); "
            f"set TMPDIR to a folder with room"
        ) from None
