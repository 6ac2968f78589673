"""The doctor says what would be chosen, and why not the rest."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.backends.registry import OPERATIONS
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
        "products": "fp32",
        **dict.fromkeys(OPERATIONS, "reference"),
    }
    assert {verdict["name"] for verdict in answer["back_ends"]} >= {"cuda", "bf16", "triton", "torch.compile", "flex"}
    assert answer["environment"]["python"]


@pytest.mark.parametrize(
    ("free_gib", "expected"),
    [
        (1000, "micro-batches of 65,536 tokens\n"),
        (5, "does not fit\n"),
    ],
)
def test_it_says_how_the_newest_record_would_fit(
    free_gib: int, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("paceline.parallel.memory_fit.available_bytes", lambda: free_gib * 2**30)
    doctor([])
    fits = capsys.readouterr().out.split("A step would fit as\n")[1]
    assert fits.startswith(f"  r18-softcap        {expected}")
    assert "predicted peak" in fits
    assert f" of {0.8 * free_gib:.2f} GiB available" in fits
