"""What ablations say of a technique, in words: the direction as the sign has it, and only beyond noise."""

from dataclasses import replace
from typing import Any

from paceline.lab.isolated import NOISE, isolated, verdict
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


def test_a_table_says_what_was_done_and_which_file_a_note_is_about() -> None:
    text = isolated([FULL, replace(SMALL, added=True, instead_of=("softcap",))], "../..") or ""
    assert "| full size, H200, 38 steps | left out of `r18-softcap`, as in `r17-sparse-values` |" in text
    assert "added to `r18-softcap`, in place of `softcap`, as in `r17-sparse-values`" in text
    assert "\n\n`s.json`: Shared. Indicative only (scale 1/16, CPU)" in text
    assert isolated([], "../..") is None
