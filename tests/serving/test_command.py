"""`paceline serve` as a process: it says where it is, ends well on Ctrl-C, and tells a mistake in one line."""

import json
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from paceline.cli import main

RUN = Path(__file__).parents[1] / "frozen" / "format-2"


def test_it_serves_a_run_until_ctrl_c() -> None:
    command = [sys.executable, "-m", "paceline.cli", "serve", str(RUN), "--port", "0", "--max-streams", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[0]
        asked = json.dumps({"prompt": "a", "max_tokens": 5}).encode()
        request = urllib.request.Request(f"{url}v1/completions", asked, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=20) as answer:
            assert json.load(answer)["model"] == RUN.name
        with urllib.request.urlopen(url, timeout=20) as answer:
            page = answer.read().decode()
        process.send_signal(signal.SIGINT)
        said, complained = process.communicate(timeout=30)
    assert (process.returncode, said, complained) == (0, "", "")
    card = json.loads((RUN / "card.json").read_text())
    assert f"step {card['steps_done']:,} of {card['steps']:,}, " in page
    assert f"validation loss {card['val_loss']:.4f}" in page


def one_line(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["serve", *words]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


def test_mistakes_are_told_in_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "--max-streams 0" in one_line(capsys, str(RUN), "--max-streams", "0")
    assert str(tmp_path / "none") in one_line(capsys, str(tmp_path / "none"))
    assert "positions for" in one_line(capsys, str(RUN), "--port", "0", "--max-tokens", "1000000")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "--port" in one_line(capsys, str(RUN), "--port", str(taken.getsockname()[1]))


def test_without_its_packages_it_names_the_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "paceline.evaluate.serving.app", raising=False)
    assert "pip install 'paceline[serve]'" in one_line(capsys, str(RUN))
