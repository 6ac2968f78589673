"""Pages that are written from the code: their markdown, and a command that writes them or compares them.

A module of pages makes their texts; `PagesOf` is the rest of its command line. A page that lies in its folder and is
not made by it belongs to something that is gone, and goes too.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import paceline
from paceline.core.command_line import parse
from paceline.core.errors import PacelineError, UserError

DOCS = Path(paceline.__file__).parents[2] / "docs"
"""In a checkout; an installed package has no pages."""


# ---- markdown


def paragraphs(*parts: str | None) -> str:
    return "\n\n".join(part for part in parts if part)


def listed(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def result_links(files: Iterable[str], root: str) -> str:
    """Result files by name, for a page from which `root` leads to the repository."""
    return ", ".join(f"[`{name}`]({root}/benchmarks/results/{name})" for name in files)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


# ---- writing and checking


@dataclass(frozen=True, kw_only=True)
class PagesArgs:
    check: bool = False
    """Write nothing; fail if a page is not what the code says."""
    docs: Path = DOCS
    """Folder of the pages."""


@dataclass(frozen=True, kw_only=True)
class PagesOf:
    """Pages of one module."""

    module: str
    """Its name, for `python -m`."""
    about: str
    """What it writes, for its help."""
    source: str
    """What to edit in the place of a page."""
    folder: str
    """Under docs/; it holds pages of this module only."""
    texts: Callable[[], dict[str, str]]
    """Path under docs/ to text, of every page."""

    def pages(self) -> dict[str, str]:
        """The same, with a line for those who open a page to edit it."""
        made_by = f"<!-- Written by `python -m {self.module}`; edit {self.source} instead. -->"
        return {path: f"{made_by}\n\n{text.strip()}\n" for path, text in self.texts().items()}

    def stale(self, docs: Path) -> list[str]:
        """Pages that are missing, differ, or belong to something that is gone."""
        made = self.pages()
        differ = [path for path, text in made.items() if _read(docs / path) != text]
        return differ + [path for path in self._in_folder(docs) if path not in made]

    def write(self, docs: Path) -> None:
        made = self.pages()
        for path in self._in_folder(docs):
            if path not in made:
                (docs / path).unlink()
        for path, text in made.items():
            (docs / path).parent.mkdir(parents=True, exist_ok=True)
            (docs / path).write_text(text, encoding="utf-8")

    def _in_folder(self, docs: Path) -> list[str]:
        return sorted(f"{self.folder}/{path.name}" for path in (docs / self.folder).glob("*.md"))

    def main(self, argv: Sequence[str]) -> int:
        text = f"{self.about}\n\nexample: python -m {self.module} --check"
        arguments = parse(PagesArgs, argv, verb=self.module.rpartition(".")[2], description=text)
        if not arguments.docs.is_dir():
            raise UserError(f"--docs {arguments.docs}: no such folder; run in a checkout, or name its docs folder")
        if not arguments.check:
            self.write(arguments.docs)
        elif old := self.stale(arguments.docs):
            raise PacelineError(
                f"{len(old)} pages differ from the code, the first is {arguments.docs / old[0]}; write them with "
                f"`python -m {self.module}`"
            )
        return 0

    def exit_code(self, argv: Sequence[str]) -> int:
        """`main` as a process: an error is one line."""
        try:
            return self.main(argv)
        except PacelineError as error:
            print(f"{self.module}: {error}", file=sys.stderr)
            return error.exit_code


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None
