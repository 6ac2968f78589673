"""The doctor says what would be chosen, and why not the rest."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.commands.doctor import doctor
from paceline.core import probe


@pytest.fixture(autouse=True)
def cpu_that_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine without a GPU whose bf16 products kill the process."""
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(probe, "_exit_code_of", lambda code: -4)
    monkeypatch.setattr(probe, "cuda", lambda: probe.Verdict(name="cuda", usable=False, reason="no GPU is visible"))
    probe._bf16_on_cpu.cache_clear()
    yield
    probe._bf16_on_cpu.cache_clear()


def test_the_text_has_every_back_end_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor([]) == 0
    text = capsys.readouterr().out
    for expected in ("no GPU is visible", "signal 4", "no backward pass on a CPU", "flash-attention-3", "cores"):
        assert expected in text, expected
    assert max(map(len, text.splitlines())) < 120


def test_a_program_can_read_what_would_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    doctor(["--json"])
    answer = json.loads(capsys.readouterr().out)
    assert {what: choice["name"] for what, choice in answer["chosen"].items()} == {
        "device": "cpu",
        "attention": "reference",
        "products": "fp32",
    }
    assert {verdict["name"] for verdict in answer["back_ends"]} >= {"cuda", "bf16", "triton", "torch.compile", "flex"}
    assert answer["environment"]["python"]
