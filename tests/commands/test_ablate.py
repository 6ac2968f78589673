"""`paceline ablate` as a user meets it: told beforehand, run to its waterfall, gone on with, one line for a mistake."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.commands import ablate
from paceline.core.schema import read_json
from paceline.metrics.card import read_card

TINY = [
    *("r18-softcap", "--scale", "1/16", "--steps", "2", "--batch.tokens", "128", "--batch.sequence-tokens", "128"),
    *("--evaluate.tokens", "128", "--evaluate.every", "1", "--train.untimed-steps", "0", "--train.threads", "1"),
    *("--model.num-layers", "6", "--model.layers-without-attention", "4"),
]
ONE_PART = [*TINY, "--only", "softcap-15", "--no-add", "--seeds", "2"]


class Inside:
    """A child that has run to its end in this process, which saves the import of torch."""

    def __init__(self, code: int) -> None:
        self.code = code

    def poll(self) -> int:
        return self.code

    def ask_to_stop(self) -> None: ...

    def kill(self) -> None: ...


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """Runs are made in this process; the words of each."""
    started: list[Sequence[str]] = []

    def launch(words: Sequence[str], log: Path, place: int) -> Inside:
        started.append(words)
        return Inside(main(["train", *words]))

    monkeypatch.setattr("paceline.lab.ablate.local.local_launch", lambda **_: launch)
    monkeypatch.setattr("paceline.lab.ablate.schedule.POLL_S", 0.0)
    return started


def test_a_small_ablation_runs_to_its_waterfall_and_is_not_run_twice(
    tmp_path: Path, inside: list[Sequence[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["ablate", *ONE_PART, "--out", str(tmp_path / "a")]
    assert main(command) == 0
    said = capsys.readouterr().out
    found = read_json(tmp_path / "a" / "ablation.json")
    assert len(inside) == 6
    assert [bar["kind"] for bar in found["waterfall"]] == ["start", "step", "interaction", "end"]
    assert "waterfall of the loss" in said
    assert "Indicative only (scale 1/16, CPU)" in said
    full, without = (
        [read_card(tmp_path / "a" / f"{arm}-seed-{seed}").val_loss or 0.0 for seed in (0, 1)]
        for arm in ("full", "without-softcap-15")
    )
    (leave_out,) = found["effects"]
    assert leave_out["loss"]["mean"] == pytest.approx(sum(full) / 2 - sum(without) / 2)
    assert not (tmp_path / "a" / "full-seed-0" / "checkpoints").exists()

    assert main([*command, "--json"]) == 0  # all is there: nothing is run, and the answer is the same
    again = json.loads(capsys.readouterr().out)
    assert len(inside) == 6
    assert {**again, "made": None} == {**found, "made": None}

    card = tmp_path / "a" / "full-seed-1" / "card.json"
    card.write_text(card.read_text()[:100])
    assert main([*command, "--json"]) == 1
    captured = capsys.readouterr()
    assert "not counted: full-seed-1: is damaged" in " ".join(captured.err.split())
    assert [one["n"] for one in json.loads(captured.out)["effects"]] == [1]
    assert main([*command, "--batch.tokens", "256"]) == 2
    assert "was begun with `paceline train r18-softcap" in capsys.readouterr().err


def test_flags_apply_to_all_arms_even_where_the_preset_has_that_value(capsys: pytest.CaptureFixture[str]) -> None:
    """With the cap at 15 everywhere it is no part of the diff any more."""
    assert main(["ablate", *TINY, "--model.softcap", "15", "--dry-run", "--json"]) == 0
    captured = capsys.readouterr()
    plan = json.loads(captured.out)
    assert not any("softcap-15" in run["folder"] for run in plan["runs"])
    base = next(run["train"] for run in plan["runs"] if run["folder"] == "base-seed-0")
    assert base[base.index("--model.softcap") + 1] == "15.0"


def test_a_dry_run_names_arms_reasons_and_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ablate", *TINY, "--dry-run", "--out", str(tmp_path / "a")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for words in (
        *("without-softcap-15", "with-softcap-15", "acts on a GPU only", "10 arms x 3 seeds: 30 runs of 2 steps"),
        "30 runs to make, 1 at a time; how long is known when the first has ended",
    ):
        assert words in said
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("without", "arms"),
    [
        (["muon"], {"full": "muon 15.0", "without-muon": "adamw 15.0"}),
        (["model.softcap=30"], {"full": "muon 15.0", "without-softcap-15": "muon 30.0"}),
        (["model.unet-skips=False"], {"full": "muon 15.0", "without-unet-skips": "muon 15.0"}),
        (
            ["muon", "softcap"],
            {
                "full": "muon 15.0",
                "base": "adamw None",
                "without-muon": "adamw 15.0",
                "without-softcap": "muon None",
                "with-muon": "muon None",
                "with-softcap": "adamw 15.0",
            },
        ),
    ],
    ids=" ".join,
)
def test_one_preset_without_what_is_named(without: list[str], arms: dict[str, str]) -> None:
    """Of a single part nothing is run twice."""
    argv = ["demo", "--steps", "3", "--without", *without]
    plan = ablate._plan(argv, ablate._parsed(argv))
    found = {arm.name: f"{arm.config.optim.matrices} {arm.config.model.softcap}" for arm in plan.arms}
    assert found == arms
    unet = {arm.name: arm.config.model.unet_skips for arm in plan.arms}
    assert unet == {name: name != "without-unet-skips" for name in arms}


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["r18-softcap", "--only", "softcap"], "--only softcap: no part of this diff; there are padded-tables"),
        (["r18-softcap", "--against", "r18-softcap"], "do not differ"),
        (["demo"], "a preset by --against, or techniques by --without, such as --without muon"),
        (["demo", "--without", "moon"], "did you mean muon?"),
        (["demo", "--without", "token-window"], "demo does not have it"),
        (["demo", "--without", "micro-batches"], "it is always on"),
        (["demo", "--without", "model.softcap=-1"], "--model.softcap -1.0 must be positive"),
        (["demo", "--without", "muon", "--against", "r18-softcap"], "exclude each other"),
        (["r18"], "did you mean r18-softcap?"),
        (["r18-softcap", "--seeds", "0"], "--seeds 0 must be at least 1"),
        (["r18-softcap", "--jobs", "0"], "--jobs 0 must be at least 1"),
        (["r18-softcap", "--scale", "2"], "--scale 2 is not in (0, 1]"),
        (["r18-softcap", "--model.softcap", "-1"], "--model.softcap -1.0 must be positive"),
        (["--seeds", "3", "r18-softcap"], "goes first"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_costs_one_line(argv: list[str], said: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["ablate", *argv, *(["--train.device", "cpu"] if "demo" not in argv else [])]) == 2
    error = capfd.readouterr().err
    assert error.count("\n") == 1
    assert said in error


def test_a_missing_scipy_is_told_before_the_first_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    assert main(["ablate", *ONE_PART, "--out", str(tmp_path / "a")]) == 2
    assert capsys.readouterr().err == (
        "paceline: paceline ablate needs scipy for its intervals: pip install 'paceline[report]'\n"
    )
    assert not (tmp_path / "a").exists()


def command_line(folder: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "paceline.cli", "ablate", *ONE_PART, "--out", str(folder), *more]


@pytest.mark.slow
def test_interrupted_and_started_again_it_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    """Real processes: Ctrl-C in the middle of a run ends all of them well, and the same command goes on."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    subprocess.run(command_line(whole, "--jobs", "2"), check=True, capture_output=True)
    process = subprocess.Popen(command_line(parts, "--jobs", "2"), stdout=subprocess.PIPE, text=True)
    while not any(parts.glob("*/metrics.jsonl")):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the same command goes on where it was" in said
    assert not (parts / "ablation.json").exists()
    subprocess.run(command_line(parts, "--jobs", "2"), check=True, capture_output=True)
    losses = [{arm["name"]: arm["losses"] for arm in read_json(f / "ablation.json")["arms"]} for f in (whole, parts)]
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_runs_as_jobs_of_slurms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By submitit's local executor; a job that fails is told by its own last line."""
    pytest.importorskip("submitit", reason="needs paceline[slurm]")
    slurm = [
        "--launch",
        "slurm",
        "--slurm.cluster",
        "local",
        "--slurm.minutes",
        "5",
        "--slurm.logs",
        str(tmp_path / "l"),
    ]
    command = ["ablate", *ONE_PART, "--seeds", "1", "--json", "--out", str(tmp_path / "a"), *slurm]
    assert main(command) == 0
    assert [arm["name"] for arm in json.loads(capsys.readouterr().out)["arms"]] == [
        "full",
        "base",
        "without-softcap-15",
    ]
    assert main([*command, "--out", str(tmp_path / "b"), "--data.dir", str(tmp_path / "nowhere")]) == 1
    assert "full-seed-0: ended with exit code 1" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_killed_with_its_child_alive_the_folder_stays_closed_until_the_child_has_ended(tmp_path: Path) -> None:
    process = subprocess.Popen(command_line(tmp_path / "a"), stdout=subprocess.DEVNULL)
    while not any((tmp_path / "a").glob("*/config.json")):
        time.sleep(0.05)
    process.kill()
    process.wait()
    codes = set()
    deadline = time.monotonic() + 120
    while 0 not in codes and time.monotonic() < deadline:
        done = subprocess.run(command_line(tmp_path / "a"), check=False, capture_output=True, text=True)
        codes.add(done.returncode)
        assert done.returncode == 0 or "is at work there" in done.stderr
    assert 0 in codes


@pytest.mark.slow
def test_the_ablation_of_record_18_at_a_sixteenth(tmp_path: Path) -> None:
    """From one command to a waterfall with all its parts."""
    words = [*TINY, "--steps", "8", "--seeds", "2", "--jobs", "2", "--out", str(tmp_path / "a")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", "paceline.cli", "ablate", *words], check=True, env=environment)
    found = read_json(tmp_path / "a" / "ablation.json")
    steps = [bar["label"] for bar in found["waterfall"] if bar["kind"] == "step"]
    assert steps == ["padded-tables", "softcap-15", "selective-bf16", "one-adam", "cooldown-share"]
    assert all(one["loss"]["mean"] == 0 for one in found["effects"] if one["technique"] == "one-adam")


def test_a_gpu_is_never_shared(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    command = ["ablate", "r18-softcap", "--only", "softcap-15", "--dry-run"]  # full size asks for a GPU
    assert main([*command, "--jobs", "3"]) == 2
    assert "--jobs 3 exceeds the 2 GPUs here" in capsys.readouterr().err
    assert main(command) == 0
    assert "12 runs to make, 2 at a time" in capsys.readouterr().out
