"""Generated parts of pages are what the code says, and nothing else of a page is touched."""

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.core.errors import PacelineError, UserError
from pages import REGION, WRITERS, main

ROOT = Path(__file__).parents[2]
OLD = "# By hand\n\n<!-- generated: settings, by python tools/pages.py -->\n\nold\n\n<!-- end -->\n\nAlso by hand.\n"


def test_the_pages_in_docs_are_current() -> None:
    assert main(["--check"]) == 0


def test_everything_that_can_be_generated_is_on_a_page() -> None:
    found = {name for path in (ROOT / "docs").rglob("*.md") for _, name, _ in REGION.findall(path.read_text())}
    assert found == set(WRITERS)


def test_an_old_part_is_named_and_then_written_and_the_rest_stays(tmp_path: Path) -> None:
    (tmp_path / "reference").mkdir()
    page = tmp_path / "reference" / "settings.md"
    page.write_text(OLD)
    with pytest.raises(PacelineError, match=r"reference/settings\.md"):
        main(["--check"], tmp_path)
    assert page.read_text() == OLD
    assert main([], tmp_path) == 0
    new = page.read_text()
    assert new.startswith("# By hand\n\n<!-- generated: settings")
    assert new.endswith("<!-- end -->\n\nAlso by hand.\n")
    assert "`model.num_layers`" in new
    assert "\nold\n" not in new
    assert main(["--check"], tmp_path) == 0


def test_markdown_that_is_shown_is_left_alone(tmp_path: Path) -> None:
    shown = f"````md\n{OLD}````\n"
    (tmp_path / "page.md").write_text(shown)
    assert main([], tmp_path) == 0
    assert (tmp_path / "page.md").read_text() == shown


def test_what_nothing_generates_and_unknown_arguments_are_refused(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(OLD.replace("settings", "dreams"))
    with pytest.raises(UserError, match="nothing generates 'dreams'"):
        main([], tmp_path)
    with pytest.raises(UserError, match="only --check"):
        main(["--chek"], tmp_path)


def test_it_needs_no_torch() -> None:
    code = "import sys, pages; pages.stale(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT / "tools", check=False).returncode == 0
