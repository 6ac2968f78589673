"""What commands print, whoever wrote the words and whoever reads them."""

import ast
import contextlib
import json
import os
import pty
import shutil
import subprocess
import sys
import threading
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import paceline
from lab.cards_on_disk import write_run
from paceline.cli import main
from paceline.core.output import Output, neutral, one_line, tell

SOURCES = Path(paceline.__file__).parent
FROZEN = Path(__file__).parent / "frozen" / "format-3"
TITLE, CLEAR, C1, TURNED = "\x1b]0;owned\x07", "\x1b[2J", "\x9b31m", "\u202e"
EVIL = f"evil{TITLE}{CLEAR}{C1}{TURNED}\x08[bold]:smile:"
AS_A_COMMAND = ("-m", "paceline.cli")

# ---- lost outputs


def shell(line: str, *words: str) -> "subprocess.CompletedProcess[str]":
    """A line of bash in which "$@" is `paceline WORDS…`; the exit code is the command's own."""
    given = ["bash", "-c", f"{line}; exit ${{PIPESTATUS[0]}}", "bash", sys.executable, *AS_A_COMMAND, *words]
    return subprocess.run(given, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("words", [("presets",), ("schedule", "demo", "--help"), ("presets", "--json")])
@pytest.mark.parametrize("line", ['"$@" | true', '"$@" >&-', '"$@" 2>&1 | head -1'])
def test_a_reader_who_has_gone_is_no_failure(line: str, words: tuple[str, ...]) -> None:
    done = shell(line, *words)
    assert done.returncode == 0
    assert done.stderr == ""


@pytest.mark.parametrize("words", [("presets",), ("train", "--help"), ("diff", "demo", "demo"), ("--version",)])
def test_an_answer_that_cannot_be_kept_is_one_line(words: tuple[str, ...]) -> None:
    done = shell('"$@" >/dev/full', *words)
    assert done.returncode == 1
    assert done.stderr == "paceline: standard output is lost: No space left on device\n"


@pytest.mark.parametrize("line", ['"$@" | true', '"$@" >&- 2>&-', '"$@" 2>/dev/full >/dev/null'])
def test_an_exit_code_stands_whoever_reads(line: str, tmp_path: Path) -> None:
    run = shutil.copytree(FROZEN, tmp_path / "run")
    (run / "metrics.jsonl").write_bytes(b"")
    done = shell(line, "verify", str(run))
    assert done.returncode == 1
    assert done.stderr == ""


def test_a_console_of_few_letters_gets_the_others_as_escapes() -> None:
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    script = "from paceline.core.output import standard_streams\nwith standard_streams(): print('é│')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=60)
    assert done.stdout == "\\xe9\\u2502\n", done.stderr


def test_a_console_that_is_full_for_a_moment_is_not_lost() -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    with open(write, "w", buffering=1) as stream, open(read) as reader:
        output = Output(stream)
        for _ in range(40):
            print("x" * 4000, file=output, flush=True)
        assert output.lost is None
        assert reader.read(60_000)
        print("after", file=output, flush=True)
        assert output.lost is None


# ---- escapes


@given(st.text())
def test_neutral_text_holds_no_control_characters_and_the_rest_as_it_was(text: str) -> None:
    found = neutral(text).replace("\r\n", "\n")
    assert not [c for c in found if unicodedata.category(c) == "Cc" and c not in "\n\t"]
    assert not [c for c in found if unicodedata.bidirectional(c) in ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI")]
    if text.isprintable():
        assert found == text
    assert len(one_line(text).splitlines()) <= 1 or "\x85" in text


def test_text_keeps_newlines_tabs_and_letters_of_all_languages() -> None:
    text = "a\tb\nc\r\nשלום, नमस्ते, \u200dé 👩\u200d💻\n"
    assert neutral(text) == text
    assert neutral("50 %\r100 %") == r"50 %\r100 %"


def foreign(folder: Path) -> list[Path]:
    """Runs of somebody who does not mean well: names, texts and settings would steer a terminal."""
    bad = {"name": EVIL, "notes": (EVIL,), "sample": EVIL, "environment": {"cpu": EVIL}, "track": EVIL}
    settings = {"train.device": "cpu", "data.dir": EVIL}
    one = [
        write_run(folder / f"{EVIL}{seed}", seed=seed, loss=3.3 + seed / 100, settings=settings, **bad)
        for seed in range(2)
    ]
    return one + [
        write_run(folder / f"b{seed}", seed=seed, loss=3.2 + seed / 100, softcap=30.0, **bad) for seed in range(3)
    ]


def commands(folder: Path) -> list[Sequence[str]]:
    runs = [str(run) for run in foreign(folder / "runs")]
    run = Path(shutil.copytree(FROZEN, folder / f"frozen{EVIL}"))
    config = json.loads((run / "config.json").read_text())
    changed = Path(shutil.copytree(run, folder / "changed"))
    (changed / "config.json").write_text(json.dumps({**config, "preset": EVIL, EVIL: 3}))
    shutil.rmtree(changed / "checkpoints")
    metrics = run / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-20])
    return [
        ("compare", *runs),
        ("board", str(folder / "runs")),
        ("board", str(folder / "runs"), "--target", "3.4"),
        ("report", *runs, EVIL, "--out", str(folder / "page.html")),
        ("report", *runs, "--out", str(folder / f"{EVIL}.html")),
        ("verify", str(run)),
        ("verify", str(changed)),
        ("verify", EVIL),
        ("train", "--resume", str(changed)),
        ("train", "--resume", runs[0], "--model.softcap", "3"),
        ("train", "--resume", runs[0], "--help"),
        ("train", EVIL),
        ("train", f"--{EVIL}", "3"),
        ("train", "demo", "--data.dir", EVIL),
        ("train", "demo", "--seed", EVIL),
        ("data", "stats", EVIL),
        ("data", "prepare", EVIL, "--out", str(folder / "shards")),
        ("sample", EVIL),
        (EVIL,),
        ("diff", "demo", EVIL),
    ]


def on_a_terminal(run: Callable[[], object]) -> str:
    """All that a terminal gets on either stream."""
    master, slave = pty.openpty()
    seen: list[bytes] = []

    def listen() -> None:
        try:
            while piece := os.read(master, 65536):
                seen.append(piece)
        except OSError:  # the other end is closed
            pass

    listener = threading.Thread(target=listen)
    listener.start()
    before = sys.stdout, sys.stderr
    with open(slave, "w", encoding="utf-8") as terminal:
        sys.stdout = sys.stderr = terminal
        try:
            run()
        finally:
            sys.stdout, sys.stderr = before
    listener.join(60)
    os.close(master)
    return b"".join(seen).decode("utf-8", "replace")


@pytest.mark.parametrize("terminal", [False, True])
def test_no_name_card_config_or_path_steers_a_terminal(
    terminal: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setenv("TERM", "xterm-256color")
    shown = 0
    for words in commands(tmp_path):

        def run(words: Sequence[str] = words) -> None:
            with contextlib.suppress(SystemExit):  # as --help ends
                main(words)

        said = on_a_terminal(run) if terminal else ""
        if not terminal:
            run()
            out, err = capsys.readouterr()
            said = out + err
            assert "\x1b" not in said, words
        assert said, words
        for code in (TITLE, CLEAR, C1, TURNED, "\x07", "\x08", "\x9b"):
            assert code not in said, words
        shown += "evil\\x1b]0;owned" in said
    assert shown >= 15


def test_a_sample_keeps_its_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from train.tiny import run as train
    from train.tiny import tiny_config

    train(tiny_config(tmp_path / "data"), tmp_path / "run")
    capsys.readouterr()
    prompt = f"one\n\ttwo {CLEAR}"
    assert main(["sample", str(tmp_path / "run"), "--prompt", prompt, "--tokens", "8"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("one\n\ttwo \\x1b[2J")
    assert "\x1b" not in said


def test_lines_of_a_run_are_lines(capsys: pytest.CaptureFixture[str]) -> None:
    tell("lost: a\nfinished: b\r\x1b")
    assert capsys.readouterr().out == "lost: a\\nfinished: b\\r\\x1b\n"


def test_rich_is_reached_through_one_function_only() -> None:
    """A console made elsewhere would pass on what is in a name."""
    makers = set[str]()
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("Console", "_TextConsole"):
                makers.add(path.relative_to(SOURCES).as_posix())
    assert makers == {"metrics/console.py"}
