"""Where documents part inside a text file (`--document-separator`), found in a stream of any length."""

import itertools
import re
from collections.abc import Iterable, Iterator

from paceline.core.errors import ConfigError

BLANK_LINES = "blank-lines"
EXPRESSION = "re:"
ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "\\": "\\"}
LONGEST_CHARS = 1 << 16  # of a separator and what it looks ahead, searched again before the end of what has been read
BEHIND_CHARS = 256  # text before the place of the search that an expression sees: `^` and looking behind need it


def compile_separator(given: str) -> re.Pattern[str]:
    """A string stands for itself (with \\n, \\t), wherever it is if it has letters, and as a line of its own if it is
    punctuation alone: a lone % also stands in text. `re:` opens a regular expression."""
    if given == BLANK_LINES:
        pattern = r"\r?\n(?:[ \t]*\r?\n)+"
    elif given.startswith(EXPRESSION):
        pattern = given.removeprefix(EXPRESSION)
    else:
        text = re.sub(r"\\([nrtf\\])", lambda found: ESCAPES[found[1]], given)
        line_end = r"[ \t]*(?:\r?\n|\Z)"
        alone = not re.search(r"[\w\s]", text)
        pattern = rf"^{re.escape(text)}{line_end}" if alone else f"{re.escape(text)}(?:{line_end})?"
    try:
        separator = re.compile(pattern, re.MULTILINE)
    except re.error as error:
        raise ConfigError(f"--document-separator {given!r}: not a regular expression ({error})") from None
    if not given or separator.match(""):
        raise ConfigError(f"--document-separator {given!r} matches the empty text, so it would part every character")
    return separator


def split_documents(blocks: Iterable[str], separator: re.Pattern[str]) -> Iterator[Iterator[str]]:
    """Each document as its parts, to be read to their end before the next document is asked for."""
    for _, parts in itertools.groupby(_numbered_parts(blocks, separator), key=lambda part: part[0]):
        yield (text for _, text in parts)


def _numbered_parts(blocks: Iterable[str], separator: re.Pattern[str]) -> Iterator[tuple[int, str]]:
    """The text without its separators, each part with the number of its document. A match counts once so much text
    follows that more could not change it."""
    number, text, done, search = 0, "", 0, 0
    for block in itertools.chain(blocks, [None]):
        text += block or ""
        sure = len(text) if block is None else len(text) - LONGEST_CHARS
        while found := separator.search(text, search):
            if found.end() > sure and found.start() >= sure - LONGEST_CHARS:
                break
            if found.start() > done:
                yield number, text[done : found.start()]
            number, done = number + 1, found.end()
            search = max(found.end(), found.start() + 1)
        end = max(done, min(sure, found.start()) if found else sure)
        if end > done:
            yield number, text[done:end]
        kept = max(0, end - BEHIND_CHARS)
        text, done, search = text[kept:], end - kept, max(search, end) - kept
