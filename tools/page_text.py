"""Markdown for pages in docs/: paragraphs, lists, tables, links to files of the repository."""

from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def paragraphs(*parts: str | None) -> str:
    return "\n\n".join(part for part in parts if part)


def listed(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], others: str = "---") -> str:
    """`others` aligns all columns but the first."""
    lines = [headings, ["---", *[others] * (len(headings) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def linked(shown: str, path: str, page: str) -> str:
    """`page` is a path under docs/, `path` one from the root of the repository."""
    return f"[`{shown}`]({'../' * (page.count('/') + 1)}{path})"


def result_links(files: Iterable[str], page: str) -> str:
    return ", ".join(linked(name, f"benchmarks/results/{name}", page) for name in files)
