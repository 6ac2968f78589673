"""Pages of techniques: what people write names code and tests that exist, and what is generated has everything else."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from claims import claims
from paceline.commands import train
from paceline.core.errors import ConfigError, UserError
from paceline.lab.technique import Technique, techniques, with_values
from paceline.recipes.presets import preset
from paceline.recipes.records import PUBLIC
from pages import filled
from result_files import effects
from technique_pages import (
    NOT_MEASURED,
    STEP_MS,
    TRAIN_S,
    WITH_OTHERS,
    below_its_text,
    command,
    files_of,
    front_matter,
    shown_on,
    telling,
    whole_record,
)

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "paceline"
TECHNIQUES = techniques()
INDEX = filled("techniques/index.md")

each = pytest.mark.parametrize("one", TECHNIQUES.values(), ids=list(TECHNIQUES))


def page_of(one: Technique) -> str:
    return filled(f"techniques/{one.key}.md")


def test_every_technique_has_a_page_and_every_page_a_technique() -> None:
    pages = {path.stem for path in (ROOT / "docs" / "techniques").glob("*.md")}
    assert pages == {*TECHNIQUES, "index"}
    with pytest.raises(UserError, match="technique 'gone' does not exist"):
        below_its_text("techniques/gone.md")
    with pytest.raises(UserError, match=r"docs/techniques/gone\.md does not exist"):
        front_matter("gone")


# ---- what people write


@each
def test_a_page_says_what_the_technique_is_what_it_costs_and_what_the_logs_say(one: Technique) -> None:
    by_hand, _, generated = page_of(one).partition("<!-- generated: technique, by python tools/pages.py -->")
    title, *parts = re.split(r"^#+ (.+)$", by_hand.split("---\n", 2)[2], flags=re.MULTILINE)
    headings, texts = parts[::2], parts[1::2]
    assert headings == [one.title, "Cost", "In the public records"]
    assert all(text.strip() for text in texts)
    assert not title.strip()
    assert generated.endswith("<!-- end -->\n")


def defined_in(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """Functions, classes and assigned names of one level."""
    found: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = node
        elif isinstance(node, ast.Assign):
            found |= {target.id: node for target in node.targets if isinstance(target, ast.Name)}
    return found


def resolves(path: Path, symbol: str) -> bool:
    body = ast.parse(path.read_text(encoding="utf-8")).body
    *outer, last = symbol.split(".")
    for name in outer:
        node = defined_in(body).get(name)
        if not isinstance(node, ast.ClassDef):
            return False
        body = node.body
    return last in defined_in(body)


@each
def test_code_and_tests_are_where_the_front_matter_says(one: Technique) -> None:
    found = front_matter(one.key)
    assert found.code
    assert found.tests
    for reference in found.code:
        file, _, symbol = reference.partition(":")
        assert (SOURCE / file).is_file(), reference
        assert resolves(SOURCE / file, symbol), f"{reference} is not there"
    for reference in found.tests:
        file, _, name = reference.partition("::")
        assert name.startswith("test_")
        assert resolves(ROOT / "tests" / file, name), f"{reference} is not there"


def test_a_mistake_in_the_front_matter_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "techniques").mkdir()
    (tmp_path / "techniques" / "odd.md").write_text("---\ncode: [a]\ntests: [b]\ncolour: red\n---\n")
    monkeypatch.setattr("technique_pages.DOCS", tmp_path)
    with pytest.raises(ConfigError, match=r"odd\.md\.colour"):
        front_matter("odd")


def test_measurements_in_words_read_their_numbers_from_files() -> None:
    measured = [sentence for key in TECHNIQUES for sentence in front_matter(key).measurements]
    assert measured
    for one in measured:
        assert not re.search(r"\d\.\d", re.sub(r"\{[^}]*\}", "", one.said)), f"{one.said}: a number written by hand"
        assert "{" not in str(one)


# ---- what is generated


@each
def test_a_page_has_switch_links_results_and_claims(one: Technique) -> None:
    text = page_of(one)
    assert (command(one) if one.switches else "None: it is always on.") in text
    assert (NOT_MEASURED in text) == (not files_of(one))
    assert all(f"](../../src/paceline/{ref.partition(':')[0]})" in text for ref in front_matter(one.key).code)
    assert all(f"](../../tests/{ref.partition('::')[0]})" in text for ref in front_matter(one.key).tests)
    assert all(f"benchmarks/results/{name})" in text for name in files_of(one))
    assert all(claim.claim in text for claim in claims() if one.key in claim.techniques)
    for field in (switch.field for switch in one.switches):
        file = next(iter(re.findall(rf"\[`{re.escape(field)}`\]\(\.\./\.\./([^)]+)\)", text)))
        assert re.search(rf"^    {field.rpartition('.')[2]}: ", (ROOT / file).read_text(), re.MULTILINE), file


def sampled() -> list[Any]:
    """Every fifth by default: building the parser takes most of a test's time, and it is the same for all."""
    switched = [one for one in TECHNIQUES.values() if one.switches]
    return [pytest.param(one, id=one.key, marks=pytest.mark.slow if n % 5 else ()) for n, one in enumerate(switched)]


@pytest.mark.parametrize("one", sampled())
def test_the_command_trains_what_the_switch_says(one: Technique, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[Any] = []

    def stop(arguments: train.TrainArgs) -> None:
        parsed.append(arguments.config)
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "_start", stop)
    program, verb, *words = command(one).split()
    assert (program, verb) == ("paceline", "train")
    with pytest.raises(KeyboardInterrupt):
        train.train(words)
    values = {switch.field: switch.off if one.presets else switch.on for switch in one.switches}
    assert parsed == [with_values(preset(shown_on(one)), values)]


def test_the_index_leads_to_every_page_and_says_what_was_measured() -> None:
    cells = dict(re.findall(r"^\| \[[^|]+\]\(([a-z0-9-]+)\.md\) \| ([^|]+) \|", INDEX, re.MULTILINE))
    assert sorted(cells) == sorted(TECHNIQUES)
    assert cells["softcap-15"] == "lowers the loss: -0.0476 [-0.0620, -0.0331] (full size, H200, 38 steps)"
    assert cells["qk-norm"] == "has no measurable effect on the loss (interval includes 0) (1/16, CPU, 24 steps)"
    for key, one in TECHNIQUES.items():
        assert (cells[key] == "not measured") == (not files_of(one)), key
        assert (cells[key] == WITH_OTHERS) == (bool(files_of(one)) and not effects(one)), key


def test_the_most_telling_effect_is_of_the_largest_size_then_alone_then_the_surest() -> None:
    full, small, added = effects(TECHNIQUES["softcap-15"])
    assert telling([small, full, added]) is full
    alone, *_ = effects(TECHNIQUES["selective-bf16"])
    together, *_ = effects(TECHNIQUES["padded-head"])
    assert telling([together, alone]) is alone
    sure, *_ = effects(TECHNIQUES["momentum-warmup"])
    assert telling([alone, sure]) is sure
    assert telling([]) is None


# ---- the public results


def test_a_whole_record_is_compared_with_its_direct_predecessor_only() -> None:
    assert "1,490 → 1,390 steps" in (whole_record(18) or "")
    assert whole_record(13) is None, "record 12 is no preset"


def test_times_of_the_public_logs_agree_with_the_presets() -> None:
    for name, public in PUBLIC.items():
        train_s = TRAIN_S[public.record]
        assert train_s == pytest.approx((preset(name).steps - 10) * STEP_MS[name] / 1000, rel=0.001)  # ten are free
        assert train_s / 60 == pytest.approx(public.minutes, rel=0.02)
