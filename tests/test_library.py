"""paceline as a library: what `import paceline` gives, and configs made with it."""

import math
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import paceline
from lab.ablate.pretended import Pretender, write_all
from lab.cards_on_disk import write_group
from paceline.commands.train import base_config, parse_arguments
from paceline.core.schema import changes
from paceline.lab.ablate.arms import Choice, Plan, keep_plan, make_plan
from paceline.lab.ablate.schedule import Child
from paceline.recipes.presets import PRESETS, preset
from paceline.recipes.scaling import scaled, with_steps

PAGE = Path(__file__).parents[1] / "docs" / "library.md"


def test_importing_it_imports_almost_nothing_and_offers_everything() -> None:
    code = """
import sys
before = set(sys.modules)
import paceline
assert {name for name in set(sys.modules) - before if name.startswith("paceline")} == {"paceline"}
assert set(paceline.__all__) <= set(dir(paceline))
config = paceline.configure("r18-softcap", {"steps": 100}, scale="1/16")
sys.exit("torch" in sys.modules or "numpy" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", paceline.__all__)
def test_every_name_is_there_and_says_what_it_is(name: str) -> None:
    assert (getattr(paceline, name).__doc__ or "").strip()


def test_the_page_explains_every_name() -> None:
    rows = re.findall(r"^\| (`.+?) \|", PAGE.read_text(), re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`(\w+)[(`]", row)]
    assert sorted(named) == paceline.__all__
    assert f"gives {len(named)} names" in PAGE.read_text()


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nothing_like_this"):
        _ = paceline.nothing_like_this


# ---- configs


def test_a_preset_is_itself_and_every_one_is_listed() -> None:
    assert paceline.presets() == list(PRESETS)
    assert paceline.configure() == preset("demo")
    assert paceline.configure("r18-softcap") == preset("r18-softcap")


def test_changes_change_what_they_name_and_nothing_else() -> None:
    config = paceline.configure("demo", {"model.softcap": None, "seed": 3, "optim.muon.lr": 0.03})
    found = {change.field: change.after for change in changes(preset("demo"), config)}
    assert found == {"model.softcap": None, "seed": 3, "optim.muon.lr": 0.03}


def test_steps_and_scale_mean_what_they_mean_on_the_command_line() -> None:
    assert paceline.configure("r17-sparse-values", {"steps": 95}) == with_steps(preset("r17-sparse-values"), 95)
    assert paceline.configure("r18-softcap", scale="1/16") == scaled(preset("r18-softcap"), 1 / 16)
    assert paceline.configure("r18-softcap", scale=0.0625) == scaled(preset("r18-softcap"), 1 / 16)


@pytest.mark.parametrize(
    ("name", "wrong", "said"),
    [
        ("dmeo", {}, "did you mean demo"),
        ("demo", {"model.sofcap": 3.0}, "model.sofcap: no such setting"),
        ("demo", {"model": 3}, "model: no such setting"),
        ("demo", {"model.softcap": "low"}, "model.softcap"),
        ("demo", {"model.softcap": -1.0}, "must be positive"),
        ("demo", {"steps": 0}, "--steps 0 must be at least 1"),
        ("demo", {"steps": 1.5}, "steps: expected int"),
        ("demo", {1: 2, "seeds": 3}, "1: no such setting"),
        ("demo", [1], r"\[1\] is not a mapping of settings"),
        ("demo", "seed", "'seed' is not a mapping of settings"),
        (None, {}, "None is not the name of a preset"),
        (5, {}, "5 is not the name of a preset"),
    ],
)
def test_a_mistake_is_an_error_of_ours(name: Any, wrong: Any, said: str) -> None:
    with pytest.raises(paceline.PacelineError, match=said):
        paceline.configure(name, wrong)


def test_a_folder_may_be_a_path(tmp_path: Path) -> None:
    assert paceline.configure("demo", {"data.dir": tmp_path}).data.dir == str(tmp_path)


OTHER_MISTAKES: dict[str, tuple[Callable[[Any], object], str]] = {
    "a name to train": (lambda library: library.pretrain("demo"), "'demo' is not a config"),
    "no callback": (
        lambda library: library.pretrain(library.configure(), on_metrics=5),
        "on_metrics 5 cannot be called",
    ),
    "no place": (lambda library: library.load(5), "5 is not the folder of a run"),
    "one run": (lambda library: library.compare("runs/a"), "'runs/a' is not a list of runs"),
    "no runs": (lambda library: library.compare(5), "5 is not a list of runs"),
    "a target in quotes": (lambda library: library.compare(["a"], target="3"), "target '3' is not a loss"),
    "a target that is none": (lambda library: library.compare(["a"], target=math.nan), "target nan is not a loss"),
    "names to ablate": (lambda library: library.ablate("demo", "demo"), "'demo' is not a config"),
}


@pytest.mark.parametrize("name", OTHER_MISTAKES)
def test_a_value_of_another_kind_is_an_error_of_ours(name: str) -> None:
    call, said = OTHER_MISTAKES[name]
    with pytest.raises(paceline.PacelineError, match=said):
        call(paceline)


# ---- shards


def test_text_becomes_shards_with_a_tokenizer_of_its_own(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for number in range(40):
        (text / f"{number}.txt").write_text(f"Letter {number}. It was a bright cold day in April.\n" * 20)
    data = paceline.prepare(text, out=tmp_path / "data", tokenizer="bpe-300", val_share=0.2)
    assert (data.documents, data.tokenizer.vocab_size) == (40, 300)
    assert data.side_tokens("train") > data.side_tokens("val") > 0
    assert paceline.prepare(str(text), out=tmp_path / "data", tokenizer="bpe-300", val_share=0.2) == data


def test_text_that_cannot_be_read_is_an_error_of_ours_or_left_out(tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text("good")
    (tmp_path / "bad.txt").write_bytes(b"\xff")
    with pytest.raises(paceline.PacelineError, match="not UTF-8"):
        paceline.prepare(tmp_path, out=tmp_path / "data", tokenizer="bytes")
    with pytest.warns(UserWarning, match=r"20.0% of the input could not be read.*--encoding"):
        data = paceline.prepare(tmp_path, out=tmp_path / "rest", tokenizer="bytes", skip_bad=True)
    assert (data.documents, data.skipped_lines) == (1, 1)
    with pytest.raises(paceline.PacelineError, match="no input is given"):
        paceline.prepare(out=tmp_path / "none")


# ---- comparisons and ablations


def test_runs_are_compared_by_folder_or_as_runs(tmp_path: Path) -> None:
    first, *others = write_group(tmp_path, "a", [5.0, 5.01, 5.02])
    others += write_group(tmp_path, "b", [6.0, 6.01, 6.02], softcap=30.0)
    found = paceline.compare([paceline.Run(first), *others])
    assert [group.seeds for group in found.groups] == [[0, 1, 2], [0, 1, 2]]
    (pair,) = found.pairs
    assert pair.differs
    with pytest.raises(paceline.PacelineError, match="no run was given"):
        paceline.compare([])


BARE = {"model.softcap": None, "optim.matrices": "adamw"}


def demo_plan(**choice: object) -> Plan:
    return make_plan(paceline.configure("demo", BARE), paceline.configure(), Choice(**choice))  # type: ignore[arg-type]


def test_an_ablation_takes_two_configs_of_one_preset_apart(tmp_path: Path) -> None:
    """By techniques, each run a command that could be typed, and the answer names its parts."""
    plan = demo_plan(seeds=2, add=False)
    for run in plan.runs:
        assert parse_arguments(run.words, base_config(run.words)).config == run.config
    keep_plan(plan, tmp_path / "a")
    losses = {"full": 5.0, "base": 7.0, "without-softcap": 5.5, "without-muon": 6.0}
    write_all(plan, tmp_path / "a", lambda run: losses[run.arm] + run.seed / 100)
    found = paceline.ablate(
        paceline.configure(), paceline.configure("demo", BARE), seeds=2, add=False, out=tmp_path / "a"
    )
    assert {one.technique: round(one.loss.mean, 6) for one in found.effects} == {"softcap": -0.5, "muon": -1.0}
    assert [(bar.label, round(bar.value, 6)) for bar in found.waterfall] == [
        ("demo without these", 7.005),
        ("softcap", -0.5),
        ("muon", -1.0),
        ("interaction", -0.5),
        ("demo", 5.005),
    ]
    assert found.why_indicative == "CPU"


def test_an_ablation_makes_its_runs_and_says_when_each_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = demo_plan(seeds=1)
    pretender = Pretender(tmp_path / "a", {run.name: run for run in plan.runs})
    monkeypatch.setattr("paceline.lab.ablate.local.local_launch", lambda **_: pretender)
    monkeypatch.setattr("paceline.lab.ablate.schedule.POLL_S", 0.0)
    config, bare = paceline.configure(), paceline.configure("demo", {**BARE, "steps": 100})
    found = paceline.ablate(config, bare, seeds=1, jobs=2, out=tmp_path / "a")
    assert [arm.name for arm in found.arms] == [run.arm for run in plan.runs]
    assert pretender.most_at_a_time == 2
    assert capsys.readouterr().out.count("6.0000; ") == len(plan.runs)
    assert (tmp_path / "a" / "ablation.json").exists()


@pytest.mark.parametrize("wrong", [{"seeds": 0}, {"jobs": 0}])
def test_an_ablation_of_nothing_is_an_error_of_ours(wrong: dict[str, int], tmp_path: Path) -> None:
    bare = paceline.configure("demo", BARE)
    with pytest.raises(paceline.PacelineError, match="must be at least 1"):
        paceline.ablate(paceline.configure(), bare, out=tmp_path / "a", **wrong)
    with pytest.raises(paceline.PacelineError, match="do not differ"):
        paceline.ablate(paceline.configure(), paceline.configure(), out=tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_an_ablation_of_which_a_run_failed_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = {run.name: run for run in demo_plan(seeds=1).runs}
    pretender = Pretender(tmp_path / "a", runs, codes={"full-seed-0": 2})
    monkeypatch.setattr("paceline.lab.ablate.local.local_launch", lambda **_: pretender)
    monkeypatch.setattr("paceline.lab.ablate.schedule.POLL_S", 0.0)
    with pytest.raises(paceline.PacelineError, match=r"1 runs did not count, the first full-seed-0: .*; the same call"):
        paceline.ablate(paceline.configure(), paceline.configure("demo", BARE), seeds=1, out=tmp_path / "a")
    assert (tmp_path / "a" / "ablation.json").exists()


def test_a_run_that_is_not_counted_is_made_anew_when_its_folder_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, folder = demo_plan(seeds=1), tmp_path / "a"
    keep_plan(plan, folder)
    write_all(plan, folder, lambda run: 5.0)
    (folder / "base-seed-0" / "card.json").write_text("{")
    pretender = Pretender(folder, {run.name: run for run in plan.runs})
    monkeypatch.setattr("paceline.lab.ablate.local.local_launch", lambda **_: pretender)
    monkeypatch.setattr("paceline.lab.ablate.schedule.POLL_S", 0.0)
    config, bare = paceline.configure(), paceline.configure("demo", BARE)
    with pytest.raises(paceline.PacelineError, match=r"delete \S+/base-seed-0, then the same call tries"):
        paceline.ablate(config, bare, seeds=1, out=folder)
    shutil.rmtree(folder / "base-seed-0")
    assert not paceline.ablate(config, bare, seeds=1, out=folder).not_counted
    assert len(pretender.started) == 1


def test_a_script_prepares_data_without_being_run_again(tmp_path: Path) -> None:
    """Processes that share the work would import it, so there are none unless asked for."""
    (tmp_path / "text").mkdir()
    for number in range(40):
        (tmp_path / "text" / f"{number}.txt").write_text(f"document {number}\n" * 50)
    (tmp_path / "script.py").write_text("""
import paceline.text.prepare
paceline.text.prepare.SMALL_INPUT_BYTES = 0
print("once")
print(paceline.prepare("text", out="shards", tokenizer="bytes", val_share=0.1).documents)
""")
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[0], done.stdout.count("once")) == (0, "once", 1), done.stderr


def test_an_interrupted_ablation_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretender = Pretender(tmp_path / "a", {run.name: run for run in demo_plan(seeds=1).runs})

    def launch(words: Sequence[str], log: Path, place: int) -> Child:
        child = pretender(words, log, place)
        signal.raise_signal(signal.SIGINT)
        return child

    monkeypatch.setattr("paceline.lab.ablate.local.local_launch", lambda **_: launch)
    monkeypatch.setattr("paceline.lab.ablate.schedule.POLL_S", 0.0)
    config, bare = paceline.configure(), paceline.configure("demo", BARE)
    with pytest.raises(paceline.PacelineError, match="stopped; the same call goes on where it was"):
        paceline.ablate(config, bare, seeds=1, out=tmp_path / "a")
    assert len(pretender.started) == 1
    assert not (tmp_path / "a" / "ablation.json").exists()
    monkeypatch.setattr("paceline.lab.ablate.local.local_launch", lambda **_: pretender)
    assert len(paceline.ablate(config, bare, seeds=1, out=tmp_path / "a").effects) == 4
