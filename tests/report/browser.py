"""Chromium for the tests of pages: opens one and keeps everything it complained about or asked for."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

CHROMIUM = shutil.which("chromium")
ARGUMENTS = [
    "--headless", "--no-sandbox", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--no-first-run",
]  # fmt: skip

needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="chromium is not installed (Debian: apt-get install chromium)"
)
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")


@dataclass
class Opened:
    """A page and everything it complained about or asked for."""

    page: "playwright.Page"
    complaints: list[str] = field(default_factory=list)


@contextmanager
def started() -> Iterator["playwright.Browser"]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


def opened(
    browser: "playwright.Browser", url: str, *, width: int = 1200, scheme: str = "light", site: str | None = None
) -> Opened:
    """`url` may be asked for, what lies under it (or under `site`), and the chart library beside it; anything else is a
    complaint, and so is an answer that does not come."""

    def expected(asked: str) -> bool:
        return asked.startswith((site or url, "data:")) or (url.startswith("file:") and "/plotly-" in asked)

    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    result = Opened(context.new_page())
    page = result.page
    page.on("console", lambda message: result.complaints.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: result.complaints.append(str(error)))
    page.on("dialog", lambda dialog: (result.complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.on("request", lambda asked: expected(asked.url) or result.complaints.append(f"request: {asked.url}"))
    left = "net::ERR_ABORTED"  # the page was left before the answer came
    page.on("requestfailed", lambda asked: asked.failure == left or result.complaints.append(f"failed: {asked.url}"))
    page.goto(url)
    return result
