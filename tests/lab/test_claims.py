"""The ledger of claims: complete, consistent with the techniques, and readable by people and programs."""

import json
import re

import pytest

from paceline.core.errors import ConfigError
from paceline.lab.claims import VERDICTS, Claim, Seed, Verdict, _seed, claims, counts, seeds
from paceline.lab.ledger import as_json, count_line, render_text, select
from paceline.lab.techniques import TECHNIQUES

#         seed  record  T   P   F   N     from the review of the seeds against scripts and logs
COUNTED = [(3,   5,    14,  1,  2,  4),
           (2,  14,     9,  6, 11,  6),
           (1,  16,     7,  3, 11,  6),
           (0,  17,    10,  4,  4,  3),
           (4,  18,    13,  2, 14,  4)]  # fmt: skip


def test_every_claim_of_the_review_is_there_with_its_verdict() -> None:
    assert [(seed.number, seed.record, *counts(seed.claims).values()) for seed in seeds()] == COUNTED
    assert len(claims()) == 134


def test_a_seed_is_the_diff_of_two_presets() -> None:
    assert [(seed.predecessor, seed.preset) for seed in seeds()] == [
        ("r04-muon", "r05-modern-arch"),
        ("r13-window-warmup", "r14-value-embed"),
        ("r15-unet-values", "r16-block-mask"),
        ("r16-block-mask", "r17-sparse-values"),
        ("r17-sparse-values", "r18-softcap"),
    ]


def test_claims_are_said_once_and_have_a_fact() -> None:
    for seed in seeds():
        assert len({claim.claim for claim in seed.claims}) == len(seed.claims)
    assert all(claim.fact.strip() and claim.claim.endswith(".") and claim.at for claim in claims())


def test_a_claim_names_techniques_that_exist() -> None:
    assert {key for claim in claims() for key in claim.techniques} <= set(TECHNIQUES)
    assert all(len(set(claim.techniques)) == len(claim.techniques) for claim in claims())


@pytest.mark.parametrize("seed", seeds(), ids=lambda seed: seed.name)
def test_a_technique_that_came_with_the_record_is_claimed_by_its_seed_or_known_to_be_left_out(seed: Seed) -> None:
    came = {key for key, one in TECHNIQUES.items() if one.record == seed.record}
    claimed = {key for claim in select(seed=seed.number) for key in claim.techniques}
    untold = {5: {"separate-qkv", "norm-epsilon"}, 16: {"no-buffer-broadcast"},
              17: {"closed-spacing", "expandable-segments"}, 18: {"common-base-order"}}  # fmt: skip
    assert came - claimed == untold.get(seed.record, set())


@pytest.mark.parametrize(("key", "value"), [("verdict", "X"), ("techniques", "muon"), ("colour", "red")])
def test_a_mistake_in_the_table_is_named(key: str, value: object) -> None:
    claim = {"at": "1", "claim": "c.", "verdict": "T", "fact": "f.", "techniques": []}
    row = {"number": 9, "record": 5, "left_out": "", "claim": [{**claim, key: value}]}
    with pytest.raises(ConfigError, match=key):
        _seed(row)


def test_selecting_narrows() -> None:
    assert select() == claims()
    assert {claim.seed for claim in select(seed=4)} == {4}
    verdicts: list[Verdict] = list(VERDICTS)
    assert sum(len(select(verdict=verdict)) for verdict in verdicts) == len(claims())
    found = select(seed=4, verdict="F", technique="softcap-15")
    assert len(found) == 4
    assert all("softcap-15" in claim.techniques and claim.verdict == "F" for claim in found)


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_the_text_has_every_claim_and_keeps_its_width(width: int) -> None:
    found = select(seed=1)
    lines = render_text(found, width=width).splitlines()
    assert max(map(len, lines)) <= width
    assert sum(line.startswith("001 (r16)") for line in lines) == len(found) == 27
    text = render_text(found, width=1000)
    assert all(claim.claim in text and claim.fact in text for claim in found)


def test_square_brackets_of_a_claim_are_not_markup() -> None:
    odd = Claim(at="1", claim="[bold]c[/bold].", verdict="N", fact="f.", techniques=(), seed=0, record=17)
    assert "[bold]c[/bold]." in render_text([odd])


def test_the_counts_which_explain_the_verdicts_stand_above_the_table() -> None:
    first, empty, headings = render_text(claims()).splitlines()[:3]
    assert (first, empty) == (count_line(claims()), "")
    assert re.split(" {2,}", headings) == ["seed", "claim", "verdict", "what scripts and logs say"]
    assert " ".join(render_text(claims(), width=40).splitlines()[:3]) == count_line(claims())
    assert count_line(claims()).startswith("134 claims: 53 supported (T), 16 partly (P), 42 contradicted (F)")
    assert count_line(claims()[:1]).startswith("1 claim: ")


def test_a_program_reads_the_same_as_a_person() -> None:
    found = select(technique="softcap-15")
    written = json.loads(json.dumps(as_json(found)))
    assert [row["claim"] for row in written["claims"]] == [claim.claim for claim in found]
    assert sum(written["counts"].values()) == len(found)
    (alone,) = [row["measured"] for row in written["claims"] if row["claim"].startswith("The cap alone")]
    assert alone["files"] == ["h200-r17-95.json", "h200-r18-95.json"]
    assert alone["figures"][0]["low"] <= alone["figures"][0]["value"] <= alone["figures"][0]["high"]
    assert alone["indicative"] is None  # measured at full size
    casts = [row["measured"] for row in as_json(select(technique="selective-bf16"))["claims"] if row["measured"]]
    assert casts[0]["indicative"].startswith("scale 1/16, CPU")
