"""The pages about techniques and claims: in step with the tables, with links that lead somewhere."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.core.errors import PacelineError, UserError
from paceline.lab import cards
from paceline.lab.claims import claims
from paceline.lab.pages import DOCS
from paceline.lab.results import ablated, files_of
from paceline.lab.technique import command
from paceline.lab.techniques import TECHNIQUES

ROOT = Path(__file__).parents[2]
PAGES = cards.WRITTEN.pages()


def test_the_pages_in_docs_are_what_the_tables_say() -> None:
    assert DOCS == ROOT / "docs"
    assert cards.WRITTEN.main(["--check"]) == 0


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    cards.WRITTEN.main(["--docs", str(tmp_path)])
    return tmp_path


def test_written_pages_pass_the_check(docs: Path) -> None:
    assert cards.WRITTEN.main(["--check", "--docs", str(docs)]) == 0
    assert {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")} == set(PAGES)


def spoil(page: Path) -> None:
    page.write_text(page.read_text(encoding="utf-8") + "by hand\n", encoding="utf-8")


@pytest.mark.parametrize("page", ["techniques/softcap.md", "techniques/index.md", "ledger.md", "seeds.md"])
@pytest.mark.parametrize("damage", [spoil, Path.unlink])
def test_a_page_that_differs_or_is_missing_is_named_and_then_mended(page: str, damage: object, docs: Path) -> None:
    assert callable(damage)
    damage(docs / page)
    with pytest.raises(PacelineError, match=re.escape(str(docs / page))):
        cards.WRITTEN.main(["--check", "--docs", str(docs)])
    cards.WRITTEN.main(["--docs", str(docs)])
    assert cards.WRITTEN.main(["--check", "--docs", str(docs)]) == 0


def test_the_card_of_a_technique_that_is_gone_goes_too(docs: Path) -> None:
    shutil.copy(docs / "techniques/softcap.md", docs / "techniques/gone.md")
    with pytest.raises(PacelineError, match=r"gone\.md"):
        cards.WRITTEN.main(["--check", "--docs", str(docs)])
    cards.WRITTEN.main(["--docs", str(docs)])
    assert not (docs / "techniques/gone.md").exists()


def test_without_a_docs_folder_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        cards.WRITTEN.main(["--docs", str(tmp_path / "none")])


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings(page: str) -> None:
    folder = (ROOT / "docs" / page).parent
    for target in re.findall(r"\]\(([^)]+)\)", PAGES[page]):
        file, _, anchor = target.partition("#")
        if file:
            assert (folder / file).resolve().is_file(), f"{page}: {target}"
        else:
            headings = re.findall(r"^#+ (.+)$", PAGES[page], re.MULTILINE)
            assert anchor in {re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("key", TECHNIQUES)
def test_a_card_has_all_that_the_table_knows(key: str) -> None:
    one, text = TECHNIQUES[key], PAGES[f"techniques/{key}.md"]
    for part in (one.title, one.what, one.public, one.cost, one.formula or "", *one.code, *one.tests):
        assert part in text
    assert (command(one) or "None: it is always so.") in text
    assert (cards.NOT_MEASURED in text) == (not files_of(one))
    assert all(f"benchmarks/results/{name})" in text for name in files_of(one))
    assert all(claim.claim in text for claim in claims() if key in claim.techniques)
    for field in (switch.field for switch in one.switches):
        file = next(iter(re.findall(rf"\[`{re.escape(field)}`\]\(\.\./\.\./([^)]+)\)", text)))
        assert re.search(rf"^    {field.rpartition('.')[2]}: ", (ROOT / file).read_text(), re.MULTILINE), file


def test_the_index_leads_to_every_card() -> None:
    linked = re.findall(r"\]\(([a-z0-9-]+)\.md\)", PAGES["techniques/index.md"])
    assert sorted(linked) == sorted(TECHNIQUES)


def test_the_index_says_of_each_technique_what_was_measured() -> None:
    rows = re.findall(r"^\| \[[^|]+\]\(([a-z0-9-]+)\.md\) \| ([^|]+) \|", PAGES["techniques/index.md"], re.MULTILINE)
    cells = dict(rows)
    assert cells["softcap-15"] == "lowers the loss: -0.0476 [-0.0620, -0.0331] (full size, H200, 38 steps)"
    for key, one in TECHNIQUES.items():
        assert (cells[key] == "not measured") == (not files_of(one)), key
        assert (cells[key] == cards.WITH_OTHERS) == (bool(files_of(one)) and not ablated(one)), key


def test_every_claim_is_in_the_ledger_and_leads_to_its_techniques() -> None:
    lines = PAGES["seeds.md"].splitlines()
    for claim in claims():
        assert f"| {claim.claim} | **{claim.verdict}** | {claim.fact} |" in PAGES["ledger.md"]
        at = next(n for n, line in enumerate(lines) if line.startswith(f"- **{claim.at}** {claim.claim}"))
        below = []
        for line in lines[at + 1 :]:
            if not line.startswith("    - "):
                break
            below.append(line)
        for key in claim.techniques:
            line = next(line for line in below if f"(techniques/{key}.md)" in line)
            one = TECHNIQUES[key]
            for part in (*(f"`{s.field}`" for s in one.switches), *one.code, *one.tests, *files_of(one)):
                assert part in line, f"{claim.at} {key}: the line does not lead to {part}"
        assert below, "a claim without techniques says so"


def test_tables_have_as_many_cells_in_every_row() -> None:
    for page, text in PAGES.items():
        for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
            widths = {len(re.split(r"(?<!\\)\|", line)) for line in table.splitlines()}
            assert len(widths) == 1, page


def test_making_the_pages_needs_no_torch() -> None:
    code = "import sys, paceline.lab.cards as c; c.WRITTEN.pages(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
