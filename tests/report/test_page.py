"""The page without a browser: self-contained, escaped, complete, and clear about what is missing."""

import html
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from paceline.commands.results import report
from paceline.core.errors import RunError, UserError
from paceline.metrics.card import Evaluation
from paceline.report import page
from paceline.report.charts import as_script, chart_data, loss_points
from paceline.report.markup import element
from paceline.report.sections.results import figures
from paceline.report.subject import load_subject
from paceline.settings.model import LayerOverride
from paceline.settings.schedule import Stage
from report.runs_on_disk import SAMPLE, loss_at, write_run

EVIL = "<script>alert(1)</script>\"'&</pre>\u2028"


@pytest.fixture(autouse=True)
def without_plotly(monkeypatch: pytest.MonkeyPatch) -> None:
    """plotly.js is 4.8 MB of somebody else's text; the browser tests have it."""
    monkeypatch.setattr(page, "_plotly_js", lambda: "/* plotly.js */")


class Reader(HTMLParser):
    """What a browser would make of the page: elements, text, and everything that points elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.points: list[str] = []
        self.text: dict[str, str] = {}
        self.data = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.points += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action", "data")]
        self.points += [name for name, _ in attrs if name.startswith("on")]

    def handle_data(self, data: str) -> None:
        tag = self.tags[-1] if self.tags else ""
        self.text[tag] = self.text.get(tag, "") + data


def text_of(folders: Sequence[Path], out: Path, **options: Any) -> str:
    page.write_report(folders, out, **options)
    return out.read_text(encoding="utf-8")


def only_run(folder: Path) -> dict[str, Any]:
    """Its chart data."""
    [run] = chart_data(load_subject([folder]))["runs"]
    return run


def test_notes_of_a_run_are_folded_unless_it_is_unfinished(tmp_path: Path) -> None:
    choice = "attention reference: our kernels need a GPU"
    finished = text_of([write_run(tmp_path / "a", steps=40, notes=(choice,))], tmp_path / "a.html")
    assert f"<details><summary>Notes on the card (1)</summary><ul><li>{choice}.</li></ul></details>" in finished
    unfinished = text_of([write_run(tmp_path / "b", steps=40, done=20, notes=(choice,))], tmp_path / "b.html")
    assert "<details open><summary>Notes on the card (1)</summary>" in unfinished


def test_what_a_run_was_judged_by_is_shown(tmp_path: Path) -> None:
    book = Evaluation(
        kind="text",
        name="<book>.txt",
        step=40,
        made="2026-11-16T12:00:00+00:00",
        figures={"loss": 3.25, "bits_per_byte": 1.5, "odd": float("nan")},
        of={"bytes": 1000},
        positions=((0, 15, True, 16, 5.5), (256, 511, False, 1_256, 3.0)),
    )
    text = text_of([write_run(tmp_path / "a", steps=40, evaluations=(book,))], tmp_path / "a.html")
    assert "text &lt;book&gt;.txt</td><td>40</td><td>loss 3.2500, bits per byte 1.5000, odd –" in text
    assert "<td>0 to 15</td><td>inside</td><td>16</td><td>5.5000</td>" in text
    assert "<td>256 to 511</td><td>beyond</td><td>1,256</td><td>3.0000</td>" in text
    assert "Judged after training" not in text_of([write_run(tmp_path / "b", steps=40)], tmp_path / "b.html")


def test_pages_of_many_runs_share_one_chart_library_and_are_small(tmp_path: Path) -> None:
    for name in ("a", "b"):
        run = write_run(tmp_path / "runs" / name, steps=2000)
        text = text_of([run], run / "report.html")
        [library] = Reader(text).points
        assert (run / library).resolve().parent == tmp_path / "runs"
        assert (run / library).read_text() == page._plotly_js()
        assert len(text) < 1_000_000
        assert "script-src &#x27;self&#x27; file:" in text
    assert len(list(tmp_path.rglob("plotly-*.js"))) == 1


def test_what_is_called_the_same_is_the_same(tmp_path: Path) -> None:
    one, other = write_run(tmp_path / "a", steps=40), write_run(tmp_path / "b", steps=40, data_fingerprint="another")
    same = text_of([one, other], tmp_path / "page.html").split("What is the same")[1]
    assert "data.dir" not in same
    config = json.loads((other / "config.json").read_text())
    for folder, preset, every in ((one, "demo", 10), (other, "copy", 20)):
        config |= {"preset": preset, "data": config["data"] | {"dir": preset}}
        config["evaluate"]["every"] = every
        (folder / "config.json").write_text(json.dumps(config))
    card = json.loads((one / "card.json").read_text())
    (other / "card.json").write_text(json.dumps(card))
    differs, same = text_of([one, other], tmp_path / "page.html").split("<h2>What differs")[1].split("What is the same")
    assert "Different, too, and no other experiment: preset, data.dir, evaluate.every." in differs
    assert "Nothing but the seed" not in differs
    assert not re.search(r"data\.dir|evaluate\.every|preset demo", same)


def test_groups_have_bits_per_byte(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"{seed}", name=f"r-{seed}", steps=40, seed=seed, softcap=15.0) for seed in (0, 1)]
    runs.append(write_run(tmp_path / "x", name="x", steps=40, softcap=30.0, val_bpb=None))
    text = text_of(runs, tmp_path / "page.html")
    groups = text.split("<h2>Results")[1].split("</table>")[0]
    place = re.findall(r'scope="col">([^<]*)<', groups).index("Bits per byte")
    rows = [re.findall(r"<td>([^<]*)<", row) for row in groups.split("<tr>")[2:]]
    bits, unknown = (row[place - 1] for row in rows)
    assert (float(bits), unknown) == (pytest.approx(load_subject(runs).runs[0].card.val_bpb, abs=1e-4), "–")


def test_nothing_is_loaded_from_anywhere(tmp_path: Path) -> None:
    text = text_of([write_run(tmp_path / "run", steps=40)], tmp_path / "page.html", self_contained=True)
    assert Reader(text).points == []
    assert "default-src 'none'" in html.unescape(text)
    assert not re.search(r"https?://|@import|url\(", text)


def test_whatever_a_run_contains_is_text(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "run", name=EVIL, steps=40, sample=EVIL, notes=(EVIL,), environment={EVIL: EVIL}, track=EVIL
    )
    config = json.loads((run / "config.json").read_text())
    config[EVIL] = EVIL
    (run / "config.json").write_text(json.dumps(config))
    read = Reader(text_of([run, run], tmp_path / "page.html"))
    plain = Reader(text_of([write_run(tmp_path / "other", steps=40)] * 2, tmp_path / "other.html"))
    assert read.tags.count("script") == plain.tags.count("script") == 3
    assert read.points == plain.points
    assert EVIL in read.text["pre"]
    assert EVIL in read.text["h1"]


def test_the_numbers_of_a_chart_cannot_end_its_script(tmp_path: Path) -> None:
    subject = load_subject([write_run(tmp_path, name="</script><script>alert(1)</script>", steps=20)])
    data = as_script(chart_data(subject))
    assert "<" not in data
    assert json.loads(data)["runs"][0]["label"] == "</script><script>alert(1)</script>"


def test_the_page_has_the_figures_and_explains_both_clocks(tmp_path: Path) -> None:
    text = text_of([write_run(tmp_path / "run", name="my run")], tmp_path / "page.html")
    for expected in ("my run", "3.5889", "1.8889", "1m23s", "12,047", "1.57 M", "774.7 MiB", "bf16 -&gt; fp32"):
        assert expected in text, expected
    assert "from step 10 on" in text
    assert "everything since launch" in text
    assert "Unfinished" not in text
    assert SAMPLE.splitlines()[0] in text


def test_the_top_says_what_the_run_is(tmp_path: Path) -> None:
    text = text_of([write_run(tmp_path / "run", seed=3, track="mine")], tmp_path / "page.html")
    assert "preset demo, track mine, seed 3, model.softcap 30.0, started 2025-01-04 10:00." in text


def test_values_that_differ_from_the_preset_are_marked(tmp_path: Path) -> None:
    text = text_of([write_run(tmp_path / "run", seed=3)], tmp_path / "page.html")
    assert "2 of " in text
    assert text.count('class="changed"') == 4  # seed and softcap, in the short table and among all values
    assert "preset: 15.0" in text


def test_an_unfinished_run_says_so(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", done=312, val_loss=None, peak_bytes=None, tokens_per_s=None, train_s=None)
    text = text_of([run], tmp_path / "page.html")
    assert "Unfinished: 312 of 500 steps" in text
    stopped = write_run(tmp_path / "stopped", done=12, ended="2025-01-04T10:02:00+00:00")
    assert "Stopped: 12 of 500 steps" in text_of([stopped], tmp_path / "page.html")
    assert "What the model wrote" not in text


@pytest.mark.parametrize(
    ("done", "value", "meaning"),
    [
        (12, "–", "validated at step 0 only: 7.3300"),
        (312, f"{loss_at(300, 500, 3.23):.4f}", "last validated at step 300; nats per token"),
        (400, f"{loss_at(400, 500, 3.23):.4f}", "nats per token"),
    ],
)
def test_a_validation_is_the_headline_only_with_its_step_where_others_followed(
    done: int, value: str, meaning: str, tmp_path: Path
) -> None:
    [run] = load_subject([write_run(tmp_path, done=done)]).runs
    assert figures(run)["Validation loss"] == (value, meaning)


@pytest.mark.parametrize(
    ("gzip_bpb", "beside"), [(2.4567, "gzip -9 needs 2.457, untrained 3.858"), (None, "untrained 3.858")]
)
def test_bits_per_byte_of_a_finished_run_have_something_beside_them(
    gzip_bpb: float | None, beside: str, tmp_path: Path
) -> None:
    [run] = load_subject([write_run(tmp_path / "run", gzip_bpb=gzip_bpb)]).runs
    assert figures(run)["Bits per byte"][1] == f"comparable between tokenizers; {beside}"
    [early] = load_subject([write_run(tmp_path / "early", done=100, gzip_bpb=gzip_bpb)]).runs
    assert figures(early)["Bits per byte"][1] == "comparable between tokenizers"


@pytest.mark.parametrize(("done", "train_time", "speed"), [(10, "–", "–"), (11, "0.2s", "12,047")])
def test_clocks_that_timed_no_step_are_not_shown(done: int, train_time: str, speed: str, tmp_path: Path) -> None:
    [run] = load_subject([write_run(tmp_path, steps=done, train_s=0.17)]).runs
    shown = figures(run)
    assert (shown["Train time"][0], shown["Tokens per second"][0]) == (train_time, speed)


def test_settings_without_effect_that_differ_are_said_to(tmp_path: Path) -> None:
    """They make no other experiment, but the runs do not have one configuration."""
    runs = [write_run(tmp_path / name, steps=40, seed=seed) for seed, name in enumerate("ab")]
    for run, momentum in zip(runs, (0.85, 0.8), strict=True):
        config = json.loads((run / "config.json").read_text())
        config["optim"] |= {"matrices": "adamw", "muon": config["optim"]["muon"] | {"momentum": momentum}}
        (run / "config.json").write_text(json.dumps(config))
    differs, same = text_of(runs, tmp_path / "page.html").split("<h2>What differs")[1].split("What is the same")
    assert "Different without effect: optim.muon.momentum." in differs
    assert "Nothing but the seed" not in differs
    assert "optim.muon.momentum<" not in same
    assert "optim.muon.momentum_" in same


def test_a_run_that_has_only_begun_has_a_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", done=0, losses=())
    (run / "metrics.jsonl").write_text("")
    assert "Nothing is recorded yet" in text_of([run], tmp_path / "page.html")


def test_several_runs_share_a_page_and_what_differs_is_shown(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "a", steps=40), write_run(tmp_path / "b", steps=40, seed=1)]
    text = text_of(runs, tmp_path / "page.html")
    differing = text.split("<h2>What differs")[1].split("<h2>")[0]
    assert re.findall(r'scope="row">([^<]+)<', differing) == ["model.softcap"]
    assert "demo (2)" in text  # the same name twice would be one line in the legend


def test_the_train_axis_begins_when_its_clock_does(tmp_path: Path) -> None:
    run = only_run(write_run(tmp_path, steps=40))
    assert run["x"]["train"][:10] == [None] * 10
    assert None not in run["x"]["train"][10:]


def test_long_runs_are_thinned_and_the_page_says_so(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "long", steps=5100)
    run = only_run(folder)
    assert len(run["loss"]) <= loss_points(1)
    assert run["x"]["step"][-1] == 5100
    assert set(map(len, run["x"].values())) == {len(run["loss"])}
    assert f"thinned to {loss_points(1):,} points" in text_of([folder], tmp_path / "page.html")
    assert "thinned" not in text_of([write_run(tmp_path / "short", steps=40)], tmp_path / "page.html")


def test_attributes_are_escaped() -> None:
    assert element("p", "<", title='"><b>') == '<p title="&quot;&gt;&lt;b&gt;">&lt;</p>'


@pytest.mark.parametrize("name", ["card.json", "config.json", "metrics.jsonl"])
@pytest.mark.parametrize("damage", ["missing", "half"])
def test_a_damaged_run_is_an_error_that_names_the_file_and_writes_nothing(
    name: str, damage: str, tmp_path: Path
) -> None:
    path = write_run(tmp_path / "run", steps=20) / name
    half = path.read_text()[:200] + "\n"
    path.unlink()
    if damage == "half":
        path.write_text(half)
    with pytest.raises(RunError, match=re.escape(str(path))):
        page.write_report([tmp_path / "run"], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_among_several_runs_the_damaged_ones_are_named_on_the_page_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("well", "other-version", "torn", "empty"):
        write_run(tmp_path / "runs" / name, name=name, steps=20)
    card = tmp_path / "runs/other-version/card.json"
    card.write_text(card.read_text().replace('"format": 1', '"format": 9'))
    (tmp_path / "runs/torn/metrics.jsonl").write_text('{"kind": "st\n')
    for path in (tmp_path / "runs/empty").iterdir():
        path.unlink()
    assert report(["well", "other-version", "torn", "runs/empty", "--out", "page.html"]) == 0
    text = (tmp_path / "page.html").read_text()
    left_out, told = text.split("Left out, because it cannot be read")[1].split("</ul>")[0], capsys.readouterr().err
    assert left_out.count("<li>") == told.count("left out: ") == 3
    for words in ("has card format 9", "line 1: not a record", "empty/card.json: does not exist"):
        assert words in left_out
        assert words in told
    assert "<h1>well</h1>" in text


@pytest.mark.parametrize("field", ["wall_s", "val_loss", "tokens_per_s"])
def test_an_infinite_number_is_damage(field: str, tmp_path: Path) -> None:
    card = write_run(tmp_path, steps=20) / "card.json"
    card.write_text(re.sub(rf'"{field}": [^,]+', f'"{field}": 1e999', card.read_text()))
    with pytest.raises(RunError, match=r"card\.json: holds an infinite number"):
        load_subject([tmp_path])


@pytest.mark.parametrize("losses", [[[1.5, None, 2, -1, 1e300]], [[1]], [], [[None] * 5]])
def test_odd_rows_of_losses_are_shown_or_skipped(losses: list[list[float | None]], tmp_path: Path) -> None:
    card = write_run(tmp_path / "run", steps=20) / "card.json"
    card.write_text(json.dumps({**json.loads(card.read_text()), "losses": losses}))
    assert "Configuration" in text_of([tmp_path / "run"], tmp_path / "page.html")


def test_no_run_at_all_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no run"):
        page.write_report([], tmp_path / "page.html")


def test_without_plotly_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the real _plotly_js
    monkeypatch.setitem(sys.modules, "plotly.offline", None)  # as Python marks what cannot be imported
    with pytest.raises(UserError, match=r"paceline\[report\]"):
        page.write_report([write_run(tmp_path / "run", steps=20)], tmp_path / "page.html")


def test_the_command_writes_beside_the_run_or_where_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        write_run(tmp_path / "runs" / name, steps=20)
    for line, written in [("a", "runs/a/report.html"), ("a runs/b", "report.html"), ("latest --out x.html", "x.html")]:
        assert report(line.split()) == 0
        assert capsys.readouterr().out.strip() == written
        assert (tmp_path / written).is_file()


def test_a_report_needs_no_torch(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=20)
    code = (
        "import sys; from paceline.commands.results import report\n"
        "report(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(run)], check=False).returncode == 0


def test_the_commands_import_neither_plotly_nor_scipy_before_they_are_used() -> None:
    code = (
        "import sys, paceline.commands.results, paceline.report.watch\n"
        "from paceline.analysis import statistics\n"
        "sys.exit(bool({'plotly', 'scipy', 'torch'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- the schedule


def test_the_schedule_shows_each_window_and_what_changes(tmp_path: Path) -> None:
    """Two windows, batches that double, and a momentum that warms up, by the settings of the run."""
    subject = load_subject([write_run(tmp_path / "run", steps=100)])
    [run] = subject.runs
    assert run.settings is not None
    model = run.settings.model
    layers = (LayerOverride(layers=(1,), window="long"),)
    model = replace(model, long_window=replace(model.window, start_tokens=512, growth_tokens=0), layer_overrides=layers)
    muon = replace(run.settings.optim.muon, momentum_start=0.75, momentum_warmup_steps=50)
    stages = (Stage(share=0.5, batch_tokens=1024), Stage(share=0.5))
    optim = replace(run.settings.optim, muon=muon)
    staged = replace(run, settings=replace(run.settings, model=model, optim=optim, stages=stages))
    shown = chart_data(replace(subject, runs=[staged]))["groups"][0]["schedule"]
    ends = {name: (chart["y"][0], chart["y"][-1]) for name, chart in shown.items() if name not in ("lr", "rate")}
    assert ends == {"batch": (1024, 2048), "window": (128, 384), "window-long": (512, 512), "momentum": (0.75, 0.85)}
    assert shown["batch"]["x"][0] == 1
    assert shown["batch"]["y"][:51].count(1024) == 50
    page_of_it = " ".join(page.sections_of(replace(subject, runs=[staged])).values())
    for title in ("Batch (tokens)", "Long attention window (tokens)", "Momentum of Muon"):
        assert title in page_of_it


def test_what_never_changes_is_not_drawn_and_an_unknown_config_shows_what_was_recorded(tmp_path: Path) -> None:
    subject = load_subject([write_run(tmp_path / "run", steps=100)])
    assert set(chart_data(subject)["groups"][0]["schedule"]) == {"lr", "window", "rate"}
    unknown = replace(subject, runs=[replace(subject.runs[0], settings=None)])
    assert set(chart_data(unknown)["groups"][0]["schedule"]) == {"lr", "window", "rate"}
