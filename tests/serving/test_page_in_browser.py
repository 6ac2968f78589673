"""The page in Chromium: text comes, can be stopped, and never becomes markup; by keyboard, in the dark, on a phone."""

import re
from collections.abc import Iterator

import pytest

from paceline.evaluate.config import SamplingConfig, ServeConfig
from paceline.evaluate.generate import text_stream
from report.browser import needs_chromium, opened, playwright, started
from serving.tiny_server import TOKENIZER, WINDOWS, Served, served, tiny_model

pytestmark = [needs_chromium, pytest.mark.journey]
NAME = "<img src=x onerror=alert(1)> {{script}}"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(ServeConfig(), name=NAME) as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator["playwright.Browser"]:
    with started() as found:
        yield found


def test_a_prompt_is_continued_by_keyboard_and_shown_as_text(browser: "playwright.Browser", server: Served) -> None:
    result = opened(browser, server.url)
    page, prompt = result.page, "<b>Return</b> <script>alert(2)</script>"
    assert page.locator("h1").text_content() == NAME
    page.keyboard.type(prompt)  # the field has the focus
    page.get_by_label("New tokens").fill("60")
    page.get_by_label("Seed").fill("4")
    page.keyboard.press("Control+Enter")
    page.get_by_text("Done").wait_for()
    sampling = SamplingConfig(temperature=0.8, top_k=50, seed=4)
    expected = "".join(text_stream(tiny_model(), TOKENIZER, prompt, sampling, windows=WINDOWS, new_tokens=60))
    assert page.locator("#text").text_content() == prompt + expected
    assert page.locator("#text b, #text script").count() == 0
    assert result.complaints == []


def test_the_drawn_seed_and_the_rate_are_shown_and_the_text_goes_on(
    browser: "playwright.Browser", server: Served
) -> None:
    result = opened(browser, server.url)
    page = result.page
    page.get_by_label("Text to continue").fill("Return")
    page.get_by_label("New tokens").fill("30")
    given, seeds = "Return", set()
    for button in ("Continue", "Write on"):
        given = re.sub(r"\r\n?", "\n", given)  # as a text field keeps it
        page.get_by_role("button", name=button).click()
        page.get_by_role("button", name=button, disabled=False).wait_for()
        found = re.fullmatch(
            r"Done \((?:length|stop)\): \d+ tokens, \d+ tokens/s, seed (\d+)", page.locator("#state").inner_text()
        )
        assert found is not None
        seeds.add(found[1])
        sampling = SamplingConfig(temperature=0.8, top_k=50, seed=int(found[1]))
        given += "".join(text_stream(tiny_model(), TOKENIZER, given, sampling, windows=WINDOWS, new_tokens=30))
        assert page.locator("#text").text_content() == given
    assert len(seeds) == 2
    assert result.complaints == []


def test_writing_can_be_stopped_and_an_error_is_told(browser: "playwright.Browser", server: Served) -> None:
    page = opened(browser, server.url).page
    page.get_by_label("New tokens").fill("8000")
    page.get_by_label("Temperature").fill("0")
    page.get_by_role("button", name="Continue").click()
    page.get_by_text("pieces").wait_for()
    page.keyboard.press("Escape")
    page.get_by_text("Stopped").wait_for()
    server.settle()
    page.get_by_label("Text to continue").fill("x" * 1000)
    page.get_by_role("button", name="Continue").click()
    page.get_by_text("there is room for 192").wait_for()


def test_a_phone_in_the_dark_needs_no_scrolling_sideways(browser: "playwright.Browser", server: Served) -> None:
    page = opened(browser, server.url, width=360, scheme="dark").page
    page.locator("#made").evaluate("(element) => element.append('x'.repeat(2000))")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)"
