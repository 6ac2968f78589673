"""The command line as a user meets it: help at once, one line for a mistake, flags on top of presets."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from paceline import __version__, cli
from paceline.cli import VERBS, main
from paceline.commands import train
from paceline.core.errors import PacelineError
from paceline.core.schema import changes
from paceline.recipes.presets import PRESETS, preset
from paceline.recipes.scaling import scaled, with_steps
from paceline.settings.run import RunConfig

FROZEN = Path(__file__).parent / "frozen" / "format-2"
"""A run that was made once and is kept."""
QUICK = """
import sys, time
from paceline.cli import main
try:
    code = main(sys.argv[1:])
except SystemExit as end:
    code = end.code or 0
sys.stderr.write(f"{code} {'torch' in sys.modules} {time.process_time():.3f}")
"""


def quickly(*argv: str) -> str:
    """Standard output of a fresh process that answers 0 in under a second of its own time, without torch."""
    for tries_left in (2, 1, 0):  # a busy sibling core makes even processor time longer
        done = subprocess.run([sys.executable, "-c", QUICK, *argv], capture_output=True, text=True, timeout=60)
        code, torch_imported, cpu_s = done.stderr.split()[-3:]
        assert code == "0", done.stderr
        assert torch_imported == "False"
        if float(cpu_s) < 1.0:
            return done.stdout
        assert tries_left, f"{cpu_s} s"
    raise AssertionError


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself_at_once(verb: str) -> None:
    said = quickly(*verb.split(), "--help")
    assert "usage: paceline" in said
    assert "example: paceline" in said


@pytest.mark.parametrize("argv", [(), ("--help",), ("-h",), ("help",)])
def test_without_a_verb_all_of_them_are_listed(argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    said = capsys.readouterr().out
    for verb, entry in VERBS.items():
        assert f"  {verb} " in said
        assert entry.summary in said


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"paceline {__version__}\n"


def test_presets_and_diff_answer_at_once() -> None:
    table = quickly("presets")
    assert all(name in table for name in PRESETS)
    rows = json.loads(quickly("presets", "--json"))
    assert [row["name"] for row in rows] == list(PRESETS)
    found = json.loads(quickly("diff", "r17-sparse-values", "r18-softcap", "--json"))
    assert {"field": "model.softcap", "from": 30.0, "to": 15.0} in found


def test_a_diff_shows_each_switch_with_both_values(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", "r15-unet-values", "r16-block-mask"]) == 0
    said = capsys.readouterr().out
    lines = {line.split()[0]: line.split()[1:] for line in said.splitlines() if line.strip()}
    assert lines["model.value_storage"] == ["chunks", "tables"]
    assert lines["train.skip_guards"] == ["off", "on"]
    assert "preset" not in lines
    assert main(["diff", "demo", "demo"]) == 0
    assert "demo and demo do not differ" in capsys.readouterr().out


# ---- mistakes


def mistake(capfd: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line that ends a wrong command with exit code 2."""
    assert main(argv) == 2
    said = capfd.readouterr()
    assert said.out == ""
    assert said.err.startswith("paceline: ")
    assert said.err.count("\n") == 1
    return said.err


@pytest.fixture
def nothing_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(arguments: train.TrainArgs) -> None:
        pytest.fail(f"a run would have started: {arguments}")

    monkeypatch.setattr(train, "_start", refuse)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("tran",), ("no verb 'tran'", "did you mean 'train'?")),
        (("xyzzy",), ("no verb 'xyzzy'", "there are train, presets")),
        (("data",), ("'data' needs one of prepare, download, verify, stats",)),
        (("data", "prepar"), ("'data' needs one of prepare, download, verify, stats",)),
        (("diff", "demo"), ("paceline diff", "see --help")),
        (("diff", "demo", "r18"), ("preset 'r18' does not exist; did you mean r18-softcap?",)),
        (("train", "dmeo"), ("preset 'dmeo' does not exist; did you mean demo?",)),
        (("train", "demo", "--stepz", "3"), ("--stepz", "did you mean --steps?")),
        (("train", "demo", "--steps", "many"), ("--steps", "'many'")),
        (("train", "demo", "--steps", "0"), ("--steps 0 must be at least 1",)),
        (("train", "demo", "--steps", "-5"), ("--steps -5 must be at least 1",)),
        (("train", "demo", "--steps", "1.5"), ("--steps", "'1.5'")),
        (("train", "demo", "--seed", "-1"), ("--seed -1 is outside",)),
        (("train", "demo", "--scale", "2"), ("--scale 2 is not in (0, 1]",)),
        (("train", "demo", "--scale", "1/0"), ("--scale 1/0 is not in (0, 1]",)),
        (("train", "demo", "--model.width", "wide"), ("--model.width", "'wide'")),
        (("train", "demo", "--model.activation", "tanh"), ("--model.activation", "'tanh'", "relu2")),
        (("train", "demo", "--model.softcap", "low"), ("--model.softcap", "'low'")),
        (("train", "demo", "--model.layers-without-attention", "x"), ("--model.layers-without-attention", "'x'")),
        (("train", "demo", "--launch", "moon"), ("--launch", "'moon'", "local")),
        (("train", "r18-softcap", "--batch.sequence-tokens", "65500"), ("--batch.tokens 524,288", "use 524,000")),
        (
            ("train", "r18-softcap", "--batch.sequence-tokens", "64", "--batch.tokens", "524288"),
            ("--batch.sequence-tokens 64 is not a multiple of 128", "use 128"),
        ),
        (("train", "r18-softcap", "--batch.tokens", "100000"), ("--batch.tokens 100,000", "use 65,536")),
        (("train", "r18-softcap", "--batch.micro-tokens", "1000"), ("--batch.micro-tokens 1,000", "65,536")),
        (("train", "r05-modern-arch", "--batch.micro-tokens", "3072"), ("--batch.micro-tokens 3,072", "divide")),
        (
            ("train", "r05-modern-arch", "--batch.sequence-tokens", "2048"),
            ("--batch.sequence-tokens 2,048 exceeds --model.rotary.max-tokens 1,024",),
        ),
        (("train", "r18-softcap", "--model.num-heads", "5"), ("--model.num-heads 5", "--model.width 768")),
        (("train", "r18-softcap", "--model.num-layers", "11"), ("--model.unet-skips", "--model.num-layers 11 is odd")),
        (("train", "r18-softcap", "--model.num-kv-heads", "4"), ("--model.num-kv-heads 4 does not divide",)),
        (("train", "r18-softcap", "--model.num-kv-heads", "0"), ("--model.num-kv-heads 0 must be at least 1",)),
        (("train", "r18-softcap", "--model.value-ends", "7"), ("--model.value-ends 7 needs 14 layers",)),
        (("train", "r18-softcap", "--model.window.start-tokens", "64"), ("--model.window.start-tokens 64", "128")),
        (("train", "r18-softcap", "--model.window.growth-tokens", "-1"), ("--model.window.growth-tokens -1",)),
        (("train", "r18-softcap", "--model.softcap", "0"), ("--model.softcap 0.0 must be positive",)),
        (("train", "r18-softcap", "--model.softcap", "-3"), ("--model.softcap -3.0 must be positive",)),
        (("train", "r18-softcap", "--model.vocab-size", "50256"), ("--data.end-of-text 50256", "--model.vocab-size")),
        (("train", "r17-sparse-values", "--optim.schedule.cooldown-share", "0.4"), ("set exactly one of them",)),
        (("train", "demo", "--optim.muon.momentum", "1"), ("--optim.muon.momentum 1.0 is outside [0, 1)",)),
        (("train", "demo", "--optim.clip-norm", "0"), ("--optim.clip-norm 0.0 must be positive",)),
        (("train", "demo", "--optim.clip-norm", "nan"), ("--optim.clip-norm nan must be positive",)),
        (("train", "demo", "--model.attention-branch-scale", "nan"), ("--model.attention-branch-scale nan",)),
        (("sample", "--temperature", "nan"), ("--temperature nan must be a number from 0 on",)),
        (("train", "demo", "--data.tokenizer", "klingon"), ("--data.tokenizer klingon", "bpe-N")),
        (("train", "demo", "--evaluate.every", "0"), ("--evaluate.every 0 must be at least 1",)),
        (("train", "demo", "--checkpoint.keep", "0"), ("--checkpoint.keep 0 must be at least 2",)),
    ],
    ids=lambda value: " ".join(value[-3:]) if isinstance(value, tuple) else None,
)
@pytest.mark.usefixtures("nothing_trains")
def test_a_mistake_costs_one_line_and_exit_code_2(
    argv: tuple[str, ...], words: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    said = mistake(capfd, *argv)
    for word in words:
        assert word in said


def test_a_terminal_without_unicode_gets_the_same_line() -> None:
    command = [sys.executable, "-m", "paceline.cli", "train", "demo", "--stepz", "3"]
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=env)
    assert done.returncode == 2
    expected = "paceline: paceline train: Unrecognized options: --stepz, 3; did you mean --steps?; see --help\n"
    assert done.stderr == expected


def verb_that_raises(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(_: list[str]) -> int:
        raise error

    monkeypatch.setattr(train, "train", fail)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (PacelineError("the disk is full"), 1, "paceline: the disk is full\n"),
        (KeyboardInterrupt(), 130, "paceline: interrupted\n"),
        (
            OSError(errno.ENOSPC, "No space left on device", "a.html"),
            1,
            "paceline: a.html: cannot be read or written (No space left on device)\n",
        ),
    ],
)
def test_failures_have_their_own_exit_codes(
    error: BaseException, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    verb_that_raises(monkeypatch, error)
    assert main(["train"]) == code
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("bug", [ZeroDivisionError("ours"), OSError(errno.EBADF, "Bad file descriptor")])
def test_a_bug_of_ours_keeps_its_traceback(bug: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    verb_that_raises(monkeypatch, bug)
    with pytest.raises(type(bug)):
        main(["train"])


@pytest.mark.parametrize("argv", [("report", str(FROZEN), "--out"), ("ablate", "r18-softcap", "--out")])
@pytest.mark.parametrize("place", ["file", "file/under", "/proc/nowhere/x"])
def test_a_place_that_cannot_be_written_is_one_line(
    argv: tuple[str, ...], place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    where = tmp_path / place / "page"
    assert main([*argv, str(where)]) == 1
    said = capsys.readouterr().err
    assert said.startswith("paceline: /")
    assert "cannot be read or written (" in said
    assert said.count("\n") == 1


def test_every_verb_is_there() -> None:
    assert cli.VERBS.keys() >= {"train", "presets", "diff", "sample", "report", "doctor"}


# ---- flags on top of presets


Parse = Callable[..., RunConfig]


class ParsedError(Exception):
    """Thrown in place of a run; carries what would have run."""


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> Parse:
    """argv of `paceline train` -> the config that would be trained."""

    def stop(arguments: train.TrainArgs) -> None:
        raise ParsedError(arguments)

    monkeypatch.setattr(train, "_start", stop)

    def parse(*argv: str) -> RunConfig:
        with pytest.raises(ParsedError) as caught:
            main(["train", *argv])
        arguments: train.TrainArgs = caught.value.args[0]
        return arguments.config

    return parse


@pytest.mark.parametrize("name", list(PRESETS))
def test_a_preset_without_flags_is_itself(name: str, parsed: Parse) -> None:
    assert parsed(name) == preset(name)


def test_no_preset_and_no_flag_is_the_demo(parsed: Parse) -> None:
    assert parsed() == preset("demo")


def test_flags_without_a_preset_change_the_demo(parsed: Parse) -> None:
    assert parsed("--seed", "3") == replace(preset("demo"), seed=3)


@pytest.mark.parametrize(
    ("flags", "changed"),
    [
        (("--model.softcap", "None"), {"model.softcap": None}),
        (("--model.softcap", "none"), {"model.softcap": None}),
        (("--model.softcap=30",), {"model.softcap": 30.0}),
        (("--model.no-x0-mix", "--seed", "7"), {"model.x0_mix": False, "seed": 7}),
        (("--model.layers-without-attention", "1", "-1"), {"model.layers_without_attention": (1, -1)}),
        (("--model.rotary.rotary-fraction", "1"), {"model.rotary.rotary_fraction": 1.0}),
        (("--model.num-kv-heads", "1"), {"model.num_kv_heads": 1}),
        (("--optim.muon.lr", "0.03"), {"optim.muon.lr": 0.03}),
        (("--train.compile", "--train.untimed-steps", "0"), {"train.compile": True, "train.untimed_steps": 0}),
        (
            ("--batch.tokens", "4096", "--batch.micro-tokens", "1024"),
            {"batch.tokens": 4096, "batch.micro_tokens": 1024},
        ),
        (("--data.dir", "elsewhere", "--checkpoint.every", "5"), {"data.dir": "elsewhere", "checkpoint.every": 5}),
    ],
)
def test_flags_change_what_they_name_and_nothing_else(
    flags: tuple[str, ...], changed: dict[str, object], parsed: Parse
) -> None:
    found = changes(preset("demo"), parsed("demo", *flags))
    assert {change.field: change.after for change in found} == changed


@pytest.mark.parametrize("flag", ["--model.qk-norm", "--model.window.unit"])
def test_a_technique_whose_off_is_called_none_can_be_switched_off(flag: str, parsed: Parse) -> None:
    found = changes(preset("demo"), parsed("demo", flag, "none"))
    assert [change.after for change in found] == ["none"]


def test_a_preset_after_a_flag_is_refused_rather_than_ignored(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--seed", "3", "r18-softcap"]) == 2
    assert "goes first: paceline train r18-softcap" in capsys.readouterr().err


@pytest.mark.parametrize("spelling", [("--scale", "1/16"), ("--scale=1/16",), ("--scale", "0.0625")])
def test_scale_shrinks_the_preset_before_flags_change_it(spelling: tuple[str, ...], parsed: Parse) -> None:
    small = scaled(preset("r18-softcap"), 1 / 16)
    assert parsed("r18-softcap", *spelling) == small
    found = changes(small, parsed("r18-softcap", *spelling, "--model.softcap", "9"))
    assert {change.field: change.after for change in found} == {"model.softcap": 9.0}


def test_steps_scale_the_schedule_but_a_named_cooldown_stays(parsed: Parse) -> None:
    assert parsed("r17-sparse-values", "--steps", "95") == with_steps(preset("r17-sparse-values"), 95)
    found = parsed("r17-sparse-values", "--steps=95")
    assert found.optim.schedule.cooldown_steps == 38
    named = parsed("r17-sparse-values", "--steps", "95", "--optim.schedule.cooldown-steps", "10")
    assert named.optim.schedule.cooldown_steps == 10
    both = parsed("r17-sparse-values", "--scale", "1/16", "--steps", "190")
    assert (both.steps, both.model.width) == (190, 96)
    assert both.optim.schedule.cooldown_steps == pytest.approx(190 * 600 / 1490, abs=1)


@pytest.mark.parametrize("word", ["runs/a\udcff", "half a letter \ud83d"])
def test_bytes_that_are_no_text_are_refused_before_a_run_is_named_by_them(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No card could hold such a name, which is what a folder named in other than UTF-8 comes as."""
    monkeypatch.chdir(tmp_path)
    assert main(["train", "demo", "--out", word]) == 2
    said = capsys.readouterr().err
    assert "is not text in UTF-8" in said
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
