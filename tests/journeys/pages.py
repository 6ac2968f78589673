"""What the pages show to be typed: commands and Python, in the order of the page, with the output shown below them.

A command is a line of a shell block, a line after `$ `, or a line of an unlabelled block or inline code that starts a
program of ours. Inline Python is a call of the package.
"""

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from test_documents import DOCUMENTS, GENERATED, ROOT

PROGRAMS = ("paceline", "torchrun", "make", "python", "pip", "sky")
"""By which a command is known where nothing else marks it as one."""
SHELLS = ("sh", "bash", "shell", "console")
EVERY_GENERATED = 15
"""Of the generated pages' commands, of which there are many of a kind, one in so many is run; all are parsed."""

_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_CODE = re.compile(
    r"^(?P<indent>[ \t]*)```(?P<label>[^\n`]*)\n(?P<block>.*?)^(?P=indent)```[ \t]*$|`(?P<inline>[^`\n]+)`",
    re.MULTILINE | re.DOTALL,
)
_STARTS_OURS = re.compile(rf"(?:{'|'.join(PROGRAMS)}) \S")
_CALLS_OURS = re.compile(r"(?:\w+ = )?paceline\.\w+\(.*\)")


@dataclass(frozen=True)
class Shown:
    page: str
    text: str
    """A command without its comment, or a whole block of Python."""
    language: Literal["shell", "python"] = "shell"
    inline: bool = False
    """In running text, where a verb alone is a name."""
    output: tuple[str, ...] = ()
    """Lines that the page shows below the command."""

    def __str__(self) -> str:
        return f"{self.page}: {' '.join(self.text.split())[:120]}"


def all_shown() -> list[Shown]:
    """Page by page. Of the generated ones a sample, as if on one page."""
    written = [one for path in DOCUMENTS if path not in GENERATED for one in shown_on(path)]
    known = {one.text for one in written}
    generated = sorted({one.text for path in GENERATED for one in shown_on(path)} - known)
    return written + [Shown("docs/techniques", text) for text in generated[::EVERY_GENERATED]]


def shown_on(path: Path) -> list[Shown]:
    """Each once, where it stands first."""
    page = path.relative_to(ROOT).as_posix()
    return list(dict.fromkeys(_shown_in(page, _COMMENT.sub("", path.read_text(encoding="utf-8")))))


def _shown_in(page: str, text: str) -> Iterator[Shown]:
    for code in _CODE.finditer(text):
        inline, label = code["inline"], (code["label"] or "").strip()
        if inline is not None:
            if _CALLS_OURS.fullmatch(inline):
                yield Shown(page, inline, "python", inline=True)
            elif _STARTS_OURS.match(inline):
                yield Shown(page, inline, inline=True)
        elif label == "python":
            yield Shown(page, textwrap.dedent(code["block"]), "python")
        else:
            yield from _commands(page, textwrap.dedent(code["block"]), every_line=label in SHELLS)


def _commands(page: str, block: str, *, every_line: bool) -> Iterator[Shown]:
    """With a prompt, lines without one are output; without a prompt, a shell block has commands only."""
    lines = block.replace("\\\n", " ").splitlines()
    prompted = any(line.startswith("$ ") for line in lines)
    for number, line in enumerate(lines):
        if prompted:
            if line.startswith("$ "):
                yield Shown(page, _uncommented(line[2:]), output=_output(lines[number + 1 :]))
        elif _STARTS_OURS.match(line) or (every_line and _uncommented(line)):
            yield Shown(page, _uncommented(line))


def _output(lines: list[str]) -> tuple[str, ...]:
    end = next((number for number, line in enumerate(lines) if line.startswith("$ ")), len(lines))
    return tuple(line for line in lines[:end] if line.strip())


def _uncommented(line: str) -> str:
    return re.split(r"(?:^|\s)#", line)[0].strip()
