"""What ablations say of a technique, in words: the direction as the sign has it, and only beyond noise."""

from dataclasses import replace
from typing import Any

import pytest

from paceline.lab.isolated import NOISE, in_short, isolated, telling, verdict
from paceline.lab.results import Ablated, ablated, read
from paceline.lab.techniques import TECHNIQUES


def difference(mean: float, half: float = 0.01, p: float | None = 0.01) -> dict[str, Any]:
    return {"mean": mean, "low": mean - half, "high": mean + half, "p": p, "p_holm": p}


FULL = Ablated("f.json", "full size, H200", 38, False, "r18-softcap", "r17-sparse-values", (), (), 3, difference(-0.05),
               None, False, None, None)  # fmt: skip
SMALL = replace(FULL, file="s.json", size="1/16, CPU", indicative="scale 1/16, CPU", note="Shared.")
NOISY = replace(FULL, loss=difference(-0.001, p=1.0), noise=True)


def test_the_verdict_says_what_having_it_does() -> None:
    assert verdict(FULL) == "lowers the loss"
    assert verdict(replace(FULL, loss=difference(0.05))) == "raises the loss"
    assert verdict(NOISY) == NOISE
    assert verdict(replace(NOISY, loss=difference(0.0, half=0.0, p=1.0))) == "the same loss to the last bit"
    one_seed = {"mean": -0.05, "low": None, "high": None, "p": None, "p_holm": None}
    assert verdict(replace(FULL, loss=one_seed, noise=True)) == NOISE


def test_a_verdict_agrees_with_the_losses_of_the_runs() -> None:
    """Asked of the losses themselves, not of the difference that the file has."""
    one = ablated(TECHNIQUES["softcap-15"])[0]
    arms = {arm["name"]: arm["losses"] for arm in read(one.file)["arms"]}
    assert max(arms["full"]) < min(arms["without-softcap-15"])
    assert verdict(one) == "lowers the loss"


def test_a_cell_has_effect_interval_and_size() -> None:
    assert in_short(FULL) == "lowers the loss: -0.0500 [-0.0600, -0.0400] (full size, H200, 38 steps)"
    assert in_short(replace(SMALL, noise=True)) == "not told apart from noise (1/16, CPU, 38 steps)"
    together = in_short(replace(NOISY, beside=("padded-tables",)))
    assert together == "not told apart from noise, together with `padded-tables` (full size, H200, 38 steps)"


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        (NOISY, SMALL),  # the size goes first, also where it finds nothing
        (NOISY, replace(FULL, beside=("softcap",))),  # then that it is alone
        (FULL, NOISY),
        (FULL, replace(FULL, loss=difference(-0.5, p=0.02))),
    ],
)
def test_the_most_telling(better: Ablated, worse: Ablated) -> None:
    assert telling([better, worse]) is telling([worse, better]) is better
    assert telling([]) is None


def test_a_table_says_what_was_done_and_which_file_a_note_is_about() -> None:
    text = isolated([FULL, replace(SMALL, added=True, instead_of=("softcap",))], "../..") or ""
    assert "| full size, H200, 38 steps | left out of `r18-softcap`, as in `r17-sparse-values` |" in text
    assert "added to `r18-softcap`, in place of `softcap`, as in `r17-sparse-values`" in text
    assert "\n\n`s.json`: Shared. Indicative only (scale 1/16, CPU)" in text
    assert isolated([], "../..") is None
