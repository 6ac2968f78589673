"""What the pages show to be typed: commands and Python, in the order of the page, with the output shown below them.

A command is a line of a shell block, a line after `$ `, or a line of an unlabelled block or inline code that starts a
program of ours. Inline Python is a call of the package. Output stands below a prompt, or in a block of plain text right
after the one with the commands.
"""

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from test_documents import DOCUMENTS, ROOT

PROGRAMS = ("paceline", "torchrun", "make", "python", "pip", "sky")
"""By which a command is known where nothing else marks it as one."""
SHELLS = ("sh", "bash", "shell", "console")
TECHNIQUES = ROOT / "docs" / "techniques"
EVERY = 15
"""Of the commands on pages of techniques, of which there are many of a kind, one in so many is run; all are parsed."""

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
    together: int = 1
    """How many commands made this output, this one last."""

    def __str__(self) -> str:
        return f"{self.page}: {' '.join(self.text.split())[:120]}"


def all_shown() -> list[Shown]:
    """Page by page. Of those of techniques a sample, as if on one page."""
    alike = [path for path in DOCUMENTS if path.parent == TECHNIQUES]
    found = [one for path in DOCUMENTS if path not in alike for one in shown_on(path)]
    known = {one.text for one in found}
    sampled = sorted({one.text for path in alike for one in shown_on(path)} - known)
    return found + [Shown("docs/techniques", text) for text in sampled[::EVERY]]


def shown_on(path: Path) -> list[Shown]:
    """Each once, where it stands first."""
    page = path.relative_to(ROOT).as_posix()
    return list(dict.fromkeys(_shown_in(page, _COMMENT.sub("", path.read_text(encoding="utf-8")))))


def _shown_in(page: str, text: str) -> Iterator[Shown]:
    block: list[Shown] = []  # of the block that may be followed by its output
    end = 0
    for code in _CODE.finditer(text):
        label, inside = (code["label"] or "").strip(), textwrap.dedent(code["block"] or "")
        if block and label == "text" and not text[end : code.start()].strip():
            block[-1] = replace(block[-1], output=_lines(inside), together=len(block))
            continue
        yield from block
        block, end = [], code.end()
        if code["inline"] is not None:
            yield from _inline(page, code["inline"])
        elif label == "python":
            block = [Shown(page, inside, "python")]
        else:
            block = list(_commands(page, inside, every_line=label in SHELLS))
    yield from block


def _inline(page: str, code: str) -> Iterator[Shown]:
    if _CALLS_OURS.fullmatch(code):
        yield Shown(page, code, "python", inline=True)
    elif _STARTS_OURS.match(code):
        yield Shown(page, code, inline=True)


def _commands(page: str, block: str, *, every_line: bool) -> Iterator[Shown]:
    """With a prompt, lines without one are output; without a prompt, a shell block has commands only."""
    lines = block.replace("\\\n", " ").splitlines()
    if any(line.startswith("$ ") for line in lines):
        for part in re.split(r"^\$ ", "\n".join(lines), flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            yield Shown(page, _uncommented(command), output=_lines(output))
        return
    for line in lines:
        if _STARTS_OURS.match(line) or (every_line and _uncommented(line)):
            yield Shown(page, _uncommented(line))


def _lines(text: str) -> tuple[str, ...]:
    return tuple(line for line in text.splitlines() if line.strip())


def _uncommented(line: str) -> str:
    return re.split(r"(?:^|\s)#", line)[0].strip()
