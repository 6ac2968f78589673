"""The ledger of claims: complete, consistent with the techniques, and with the numbers of the result files."""

import re

import pytest

import claim_pages
from claims import Claim, Seed, claims, counts, effect_in_words, seeds
from paceline.core.errors import ConfigError, PacelineError
from paceline.core.schema import from_dict
from paceline.lab.technique import techniques
from paceline.recipes.records import PUBLIC
from pages import filled
from result_files import read
from technique_pages import files_of, front_matter

LEDGER, SEEDS = filled("ledger.md"), filled("seeds.md")
MEASURED = [claim for claim in claims() if claim.measured]

#         seed  record  T   P   F   N     from the review of the seeds against scripts and logs
COUNTED = [(3,   5,    14,  1,  2,  4),
           (2,  14,     9,  6, 11,  6),
           (1,  16,     7,  3, 11,  6),
           (0,  17,    10,  4,  4,  3),
           (4,  18,    13,  2, 14,  4)]  # fmt: skip


def test_every_claim_of_the_review_is_there_with_its_verdict() -> None:
    assert [(seed.number, seed.record, *counts(seed.claim).values()) for seed in seeds()] == COUNTED
    assert claim_pages.count_line(claims()).startswith("134 claims: 53 supported (T), 16 partly (P), 42 contradicted")


def test_a_seed_is_the_diff_of_two_presets() -> None:
    assert [(PUBLIC[seed.preset].predecessor, seed.preset) for seed in seeds()] == [
        ("r04-muon", "r05-modern-arch"),
        ("r13-window-warmup", "r14-value-embed"),
        ("r15-unet-values", "r16-block-mask"),
        ("r16-block-mask", "r17-sparse-values"),
        ("r17-sparse-values", "r18-softcap"),
    ]


def test_a_claim_is_there_once_and_has_a_fact() -> None:
    for seed in seeds():
        assert len({claim.claim for claim in seed.claim}) == len(seed.claim)
    assert all(claim.fact.strip() and claim.claim.endswith(".") and claim.at for claim in claims())


def test_a_claim_names_techniques_that_exist() -> None:
    assert {key for claim in claims() for key in claim.techniques} <= set(techniques())
    assert all(len(set(claim.techniques)) == len(claim.techniques) for claim in claims())


@pytest.mark.parametrize("seed", seeds(), ids=lambda seed: seed.name)
def test_a_technique_that_came_with_the_record_is_claimed_by_its_seed_or_known_to_be_left_out(seed: Seed) -> None:
    came = {key for key, one in techniques().items() if one.record == seed.record}
    claimed = {key for claim in seed.claim for key in claim.techniques}
    left_out = {5: {"separate-qkv", "norm-epsilon"}, 16: {"no-buffer-broadcast"},
                17: {"closed-spacing", "expandable-segments"}, 18: {"common-base-order"}}  # fmt: skip
    assert came - claimed == left_out.get(seed.record, set())


@pytest.mark.parametrize(("key", "value"), [("verdict", "X"), ("techniques", "muon"), ("colour", "red")])
def test_a_mistake_in_the_table_is_named(key: str, value: object) -> None:
    claim = {"at": "1", "claim": "c.", "verdict": "T", "fact": "f.", "techniques": []}
    row = {"number": 9, "record": 5, "left_out": "", "claim": [{**claim, key: value}]}
    with pytest.raises(ConfigError, match=key):
        from_dict(Seed, row)


# ---- measurements


def test_enough_claims_are_measured() -> None:
    assert len(MEASURED) >= 48


@pytest.mark.parametrize("claim", MEASURED, ids=lambda claim: claim.claim[:40])
def test_a_measurement_names_its_files_and_says_if_it_is_indicative_only(claim: Claim) -> None:
    text = claim.measurement("ledger.md") or ""
    for place in claim.measured:
        file = place.partition("/")[0]
        assert (why := read(file)["why_indicative"]) is None or f"Indicative only: {why}" in text
        assert f"](../benchmarks/results/{file})" in text
    assert not re.search(r"\d\.\d", re.sub(r"\{[^}]*\}", "", claim.remark)), "a number written by hand"


def test_an_effect_has_its_numbers_and_its_significance_from_the_file() -> None:
    assert effect_in_words("h200-ablation-r18-softcap.json/softcap-15/leave-one-out/loss") == (
        "`softcap-15` lowers the loss: -0.04758 (95 %: -0.06201 to -0.03314, n = 3, left out)."
    )
    assert effect_in_words("cpu-ablation-r05.json/wide-heads/leave-one-out/step_s").startswith(
        "`wide-heads` lowers the step time, but not significantly after Holm's correction for 11 effects: -1.06 s"
    )
    with pytest.raises(PacelineError, match=r"cpu-ablation-r05\.json has no effect of muon"):
        effect_in_words("cpu-ablation-r05.json/muon/leave-one-out/loss")


def test_a_remark_has_its_numbers_from_its_files() -> None:
    (alone,) = [claim for claim in MEASURED if claim.claim.startswith("The cap alone")]
    text = alone.measurement("ledger.md") or ""
    assert "one seed each: 4.1776 and 4.1165. ([`h200-r17-95.json`]" in text
    assert "Measured at full size, H200, 38 steps ([`h200-ablation-r18-softcap.json`]" in text
    assert "Indicative" not in text


# ---- pages


def test_every_claim_is_in_the_ledger_and_leads_to_its_techniques() -> None:
    lines = SEEDS.splitlines()
    for claim in claims():
        assert f"| {claim.claim} | **{claim.verdict}** | {claim.fact} |" in LEDGER
        at = next(n for n, line in enumerate(lines) if line.startswith(f"- **{claim.at}** {claim.claim}"))
        below = []
        for line in lines[at + 1 :]:
            if not line.startswith("    - "):
                break
            below.append(line)
        for key in claim.techniques:
            line = next(line for line in below if f"(techniques/{key}.md)" in line)
            one, named = techniques()[key], front_matter(key)
            for part in (*(f"`{s.field}`" for s in one.switches), *named.code, *named.tests, *files_of(one)):
                assert part in line, f"{claim.at} {key}: the line does not lead to {part}"
        assert below, "a claim without techniques says so"
