"""Fill in the generated parts of the pages in docs/: `python tools/pages.py` writes them, `--check` compares.

A page is Markdown that people edit. What stands between `<!-- generated: NAME … -->` and `<!-- end -->` is written by
the function of that name in `WRITERS`, from the code, docs/claims.toml and benchmarks/results.
"""

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import claim_pages
import plan_page
import reference_pages
import technique_pages
from paceline.core.errors import PacelineError, UserError
from page_text import DOCS

WRITERS: dict[str, Callable[[str], str]] = {
    "technique": technique_pages.below_its_text,
    "techniques": technique_pages.index,
    "measured runs": technique_pages.measured_runs,
    "claims": claim_pages.ledger,
    "claims and techniques": claim_pages.trace,
    "commands": reference_pages.commands,
    "settings": reference_pages.settings,
    "python names": reference_pages.python_names,
    "efficiencies": plan_page.efficiencies,
    "prediction errors": plan_page.errors,
    "gpus": plan_page.gpus,
}
"""Each takes the path of its page under docs/."""
REGION = re.compile(r"^(<!-- generated: ([a-z ]+), by python tools/pages\.py -->)$.*?^(<!-- end -->)$", re.M | re.S)
SHOWN = re.compile(r"^(````.*?^````)$", re.M | re.S)
"""A block that shows Markdown, marks included."""


def filled(page: str, docs: Path = DOCS) -> str:
    """The page's text with its generated parts as they should be."""

    def written(region: re.Match[str]) -> str:
        if region[2] not in WRITERS:
            raise UserError(f"docs/{page}: nothing generates {region[2]!r}; there are {', '.join(WRITERS)}")
        return f"{region[1]}\n\n{WRITERS[region[2]](page).strip()}\n\n{region[3]}"

    parts = SHOWN.split((docs / page).read_text(encoding="utf-8"))
    return "".join(part if n % 2 else REGION.sub(written, part) for n, part in enumerate(parts))


def stale(docs: Path = DOCS) -> dict[str, str]:
    """Path under docs/ to the text that the page should have, of every page that has another."""
    pages = sorted(path.relative_to(docs).as_posix() for path in docs.rglob("*.md"))
    made = {page: filled(page, docs) for page in pages}
    return {page: text for page, text in made.items() if text != (docs / page).read_text(encoding="utf-8")}


def main(argv: Sequence[str], docs: Path = DOCS) -> int:
    if list(argv) not in ([], ["--check"]):
        raise UserError(f"{' '.join(argv)}: only --check is known")
    old = stale(docs)
    if argv and old:
        raise PacelineError(f"run `python tools/pages.py`: {', '.join(old)} differ from what they are made from")
    for page, text in old.items():
        (docs / page).write_text(text, encoding="utf-8")
        print(f"wrote docs/{page}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except PacelineError as error:
        sys.exit(f"tools/pages.py: {error}")
