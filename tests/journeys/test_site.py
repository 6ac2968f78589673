"""The documentation site: built without a warning, whole, needing nothing from another host and no server, on a phone
too."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from report.browser import needs_chromium, opened, started

pytestmark = pytest.mark.journey
ROOT = Path(__file__).parents[2]
pytest.importorskip("mkdocs", reason="mkdocs is not installed (pip install 'paceline[docs]')")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `make site` does; --strict makes a warning an error, and a page outside of the menu is one."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    return out


class Page(HTMLParser):
    """What a page links to, what it asks for to be shown, and where one can land on it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.asked: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value for name, value in attrs if value is not None}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        elif tag == "link" and "href" in found and found.get("rel") != "canonical":
            self.asked.append(found["href"])
        elif "src" in found:
            self.asked.append(found["src"])


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in site.rglob("*.html")}


def target_of(page: Path, link: str, site: Path) -> Path:
    path = unquote(urlsplit(link).path)
    target = site / path.lstrip("/") if path.startswith("/") else page.parent / path
    return target.resolve() if path else page  # of a folder nothing is shown from disk, so no link may end there


def test_every_page_of_docs_is_there(site: Path) -> None:
    for path in (ROOT / "docs").rglob("*.md"):
        page = path.relative_to(ROOT / "docs").with_suffix(".html")
        assert (site / (page.with_name("index.html") if page.stem == "README" else page)).is_file(), path


def test_links_inside_the_site_lead_to_files_and_anchors(site: Path, pages: dict[Path, Page]) -> None:
    lost = []
    for path, page in pages.items():
        for link in page.links:
            if urlsplit(link).scheme:
                continue
            target, anchor = target_of(path, link, site), urlsplit(link).fragment
            if not target.is_file() or (anchor and anchor not in pages[target].anchors):
                lost.append(f"{path.relative_to(site)}: {link}")
    assert lost == []


def test_nothing_is_asked_of_another_host(site: Path, pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        for asked in page.asked:
            assert not urlsplit(asked).netloc, f"{path.relative_to(site)} asks for {asked}"
            assert asked.startswith("data:") or target_of(path, asked, site).is_file(), f"{path}: {asked}"
    for sheet in site.rglob("*.css"):
        assert "url(http" not in sheet.read_text(encoding="utf-8").replace('"', "").replace("'", ""), sheet


def test_files_of_the_repository_are_shown_where_pages_link_to_them(site: Path) -> None:
    assert "class" in (site / "source/src/paceline/model/gpt.py.html").read_text(encoding="utf-8")
    results = (site / "source/benchmarks/results.html").read_text(encoding="utf-8")
    assert all(path.name in results for path in (ROOT / "benchmarks" / "results").glob("*.json"))


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@needs_chromium
@pytest.mark.parametrize("how", ["served", "from disk"])
def test_search_finds_a_setting_in_a_browser_without_a_complaint(how: str, address: str, site: Path) -> None:
    with started() as browser:
        root = address if how == "served" else f"{site.as_uri()}/"
        shown = opened(browser, f"{root}index.html", site=root)
        shown.page.set_default_timeout(60_000)  # on a busy machine the index is read slowly
        shown.page.locator(".md-search__input").click()
        shown.page.locator(".md-search-result__meta", has_text="Type to start searching").wait_for()
        shown.page.locator(".md-search__input").press_sequentially("softcap")
        # results of the first letters alone may still stand there
        shown.page.locator(".md-search-result__link", has_text="softcap").first.click()
        shown.page.wait_for_url("**softcap**")
        assert "softcap" in (shown.page.locator("article").text_content() or "").lower()
        assert shown.complaints == []


@needs_chromium
def test_every_page_fits_a_phone_and_opens_from_disk_without_a_complaint(site: Path) -> None:
    """Code may be scrolled in its box; the page may not, and no table needs to be."""
    wide = """() => document.documentElement.scrollWidth > innerWidth ||
      [...document.querySelectorAll('article *')].some((one) =>
        !one.closest('pre, .headerlink') && one.getBoundingClientRect().right > innerWidth + 1)"""
    with started() as browser:
        shown = opened(browser, f"{site.as_uri()}/index.html", width=390, site=f"{site.as_uri()}/")
        assert shown.page.locator("article img").first.is_visible()
        assert "make demo" in shown.page.locator("article").inner_text()
        unfit = []
        for path in (ROOT / "docs").rglob("*.md"):
            page = path.relative_to(ROOT / "docs").with_suffix(".html")
            shown.page.goto((site / (page.with_name("index.html") if page.stem == "README" else page)).as_uri())
            if shown.page.evaluate(wide):
                unfit.append(page.as_posix())
        assert (unfit, shown.complaints) == ([], [])
