"""The page in Chromium: charts are drawn, answer to mouse and keyboard, fit a phone, follow the colour scheme, and ask
the network for nothing but the chart library beside it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.report.page import write_report
from report.ablation_on_disk import EFFECTS, write_ablation
from report.browser import Opened, needs_chromium, opened, playwright, started
from report.runs_on_disk import write_run

pytestmark = [needs_chromium, pytest.mark.journey]


@pytest.fixture(scope="module")
def browser() -> Iterator["playwright.Browser"]:
    with started() as browser:
        yield browser


def opened_file(browser: "playwright.Browser", path: Path, **options: Any) -> Opened:
    result = opened(browser, path.resolve().as_uri(), **options)
    result.page.wait_for_selector("#loss .main-svg")
    return result


@pytest.fixture(scope="module")
def one(browser: "playwright.Browser", tmp_path_factory: pytest.TempPathFactory) -> Opened:
    folder = tmp_path_factory.mktemp("one")
    write_report([write_run(folder / "run")], folder / "page.html")
    return opened_file(browser, folder / "page.html")


@pytest.fixture(scope="module")
def phone(browser: "playwright.Browser", tmp_path_factory: pytest.TempPathFactory) -> Opened:
    """Three runs, one of them unfinished and all of them hostile, on a narrow dark screen."""
    folder = tmp_path_factory.mktemp("phone")
    evil = "<script>alert(1)</script><img src=http://example.invalid/x onerror=alert(2)>"
    names = [evil, "a-name-without-any-space-" * 6, "demo"]
    runs = [
        write_run(folder / str(index), name=name, seed=index, done=300, sample=f"</pre>{evil}" + "x" * 300)
        for index, name in enumerate(names)
    ]
    write_report(runs, folder / "page.html")
    return opened_file(browser, folder / "page.html", width=390, scheme="dark")


@pytest.fixture(scope="module")
def ablated(browser: "playwright.Browser", tmp_path_factory: pytest.TempPathFactory) -> Opened:
    """Three arms with three seeds each."""
    folder = tmp_path_factory.mktemp("ablated")
    write_report([write_ablation(folder)], folder / "page.html")
    return opened_file(browser, folder / "page.html")


def chart_text(page: "playwright.Page") -> str:
    return str(page.locator("#loss .xtitle").text_content())


def test_every_chart_is_drawn(one: Opened) -> None:
    assert one.page.locator("#loss .scatterlayer .trace").count() == 3  # each step, smoothed, validation
    for name in ("window", "lr", "rate"):
        assert one.page.locator(f"#{name} .scatterlayer .trace path.js-line").count() == 1


def test_hovering_shows_the_values_under_the_mouse(one: Opened) -> None:
    one.page.locator("#loss .nsewdrag").hover(position={"x": 300, "y": 150})
    label = one.page.wait_for_selector("#loss .hoverlayer .legend")
    assert "training, smoothed" in label.text_content()


def test_tabs_are_reached_and_turned_by_keyboard(one: Opened) -> None:
    page = one.page
    page.mouse.move(0, 0)
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Notes on the card (1)"
    page.keyboard.press("Tab")
    seen = []
    for _ in range(4):
        seen.append((page.evaluate("document.activeElement.textContent"), chart_text(page)))
        page.keyboard.press("ArrowRight")
    assert seen == [
        ("Steps", "Steps"),
        ("Tokens", "Training tokens"),
        ("Train time", "Train time (s)"),
        ("Wall time", "Wall time (s)"),
    ]
    assert page.locator('[role="tab"][aria-selected="true"]').inner_text() == "Steps"  # round and back
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "whole"


def test_the_first_steps_come_into_the_frame_on_demand(one: Opened) -> None:
    highest = "document.getElementById('loss')._fullLayout.yaxis.range[1]"
    before = one.page.evaluate(highest)
    one.page.get_by_label("Show the whole range").check()
    assert one.page.evaluate(highest) > before + 1
    one.page.get_by_label("Show the whole range").uncheck()
    assert one.page.evaluate(highest) == before


def test_paper_is_light_and_shows_what_is_folded(one: Opened) -> None:
    page = one.page
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != dark
    assert page.locator("details:not([open])").count() == 0
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == dark
    assert page.locator("details[open]").count() == 0
    page.emulate_media(color_scheme="light")


LONG = ("a-run-with-learned-positions-and-a-rather-long-name", "Withoutanyplacewhereawordcouldend" * 3)


@pytest.mark.parametrize("shown", [1, 4, "long names"])
def test_axis_titles_labels_and_legends_fit_a_phone(
    shown: int | str, browser: "playwright.Browser", tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("narrow")
    if isinstance(shown, int):
        runs = [write_ablation(folder, effects=EFFECTS[:shown])]
    else:
        runs = [write_run(folder / name, name=name, softcap=20.0 + len(name)) for name in LONG]
    write_report(runs, folder / "page.html")
    page = opened_file(browser, folder / "page.html", width=390).page
    if shown == "long names":
        drawn = [tick.replace(" ", "") for tick in page.locator("#wall-time .ytick text").all_text_contents()]
        assert sorted(drawn) == sorted(LONG)
    cut = """[...document.querySelectorAll('.js-plotly-plot')].flatMap((chart) => {
      const box = chart.getBoundingClientRect();
      return [...chart.querySelectorAll('text')].filter((text) => {
        const own = text.getBoundingClientRect();
        return own.width && (own.left < box.left - 1 || own.right > box.right + 1 || text.textContent.includes('…'));
      }).map((text) => text.textContent);
    })"""
    assert page.evaluate(cut) == []
    covered = """[...document.querySelectorAll('.js-plotly-plot')].filter((chart) => {
      const top = chart.querySelector('.xtitle')?.getBoundingClientRect().top ?? Infinity;
      return [...chart.querySelectorAll('.xtick text')].some((tick) => tick.getBoundingClientRect().bottom > top + 1);
    }).map((chart) => chart.id)"""
    assert page.evaluate(covered) == []


def test_a_page_that_lost_its_library_says_so_and_keeps_its_tables(
    browser: "playwright.Browser", tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("moved")
    write_report([write_run(folder / "run")], folder / "page.html")
    next(folder.glob("plotly-*.js")).unlink()
    page = opened(browser, (folder / "page.html").as_uri()).page
    assert "paceline report --self-contained" in page.inner_text("#no-charts")


def test_a_phone_needs_no_sideways_scrolling(phone: Opened) -> None:
    page = phone.page
    page.evaluate("document.querySelectorAll('details').forEach((box) => { box.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    beyond = """[...document.querySelectorAll('main *')].filter((one) =>
      !one.parentElement.closest('.scroll') && one.getBoundingClientRect().right > 391).length"""
    assert page.evaluate(beyond) == 0


def test_page_and_charts_follow_the_colour_scheme(phone: Opened) -> None:
    page = phone.page
    colors = (
        "[getComputedStyle(document.body).backgroundColor, "
        "getComputedStyle(document.querySelector('#loss .xtick text')).fill, "
        "getComputedStyle(document.querySelector('#loss .trace path.js-line')).stroke]"
    )
    dark = page.evaluate(colors)
    page.emulate_media(color_scheme="light")
    page.wait_for_function(f"(dark) => {colors}.every((now, i) => now !== dark[i])", arg=dark)
    page.emulate_media(color_scheme="dark")


def test_every_group_has_a_switch_of_its_own_that_the_keyboard_turns(phone: Opened) -> None:
    page = phone.page
    drawn = "document.querySelectorAll('#loss .scatterlayer .trace').length"
    before = page.evaluate(drawn)
    assert page.locator("#legend input").count() == 2  # seeds 1 and 2 have one configuration
    page.locator("#legend input").nth(1).focus()
    page.keyboard.press("Space")
    assert page.evaluate(drawn) < before
    page.keyboard.press("Space")
    assert page.evaluate(drawn) == before
    assert "In no mean: " in page.inner_text("#part-warnings")


def test_an_ablation_is_drawn_as_waterfall_and_effects_and_as_tables(ablated: Opened) -> None:
    page = ablated.page
    assert page.locator("#waterfall-0 .bars .point").count() == 6
    assert "−0.0310" in page.locator("#waterfall-0 .bars").text_content()
    assert page.locator("#effects-0 .errorbar").count() == 4
    assert page.locator("#effects-0 .points path").count() == 4
    assert page.locator("#part-ablation .stack tbody tr").count() == 4 + 6


def test_times_and_memory_are_drawn(ablated: Opened) -> None:
    page = ablated.page
    assert page.locator("#wall-time .bars .point").count() == 3 * 4  # arms times parts
    assert page.locator("#memory .bars .point").count() == 3


def test_a_group_is_a_mean_with_a_band_and_each_run_on_demand(ablated: Opened) -> None:
    page = ablated.page
    lines = "document.getElementById('loss').data.filter((trace) => trace.line?.width > 0).length"
    assert page.evaluate("document.getElementById('loss').data.filter((trace) => trace.fill === 'tonexty').length") == 3
    assert page.evaluate(lines) == 3
    page.get_by_label("Show each run").check()
    assert page.evaluate(lines) == 3 + 9
    page.get_by_label("Show each run").uncheck()
    assert page.evaluate(lines) == 3


def test_everything_fits_on_paper(ablated: Opened) -> None:
    """A4 within its margins is 718 pixels wide."""
    page = ablated.page
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print")
    ends = "[...document.querySelectorAll('main *')].map((element) => element.getBoundingClientRect().right)"
    assert page.evaluate(f"Math.max(...{ends}) - document.body.getBoundingClientRect().left") <= 718
    page.emulate_media(media="screen")
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    page.wait_for_function("() => document.querySelector('#loss .main-svg').clientWidth > 800")


@pytest.mark.parametrize("which", ["one", "phone", "ablated"])
def test_nobody_complained_and_nothing_left_the_page(which: str, request: pytest.FixtureRequest) -> None:
    assert request.getfixturevalue(which).complaints == []
