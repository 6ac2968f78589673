"""A draw keeps to its settings, and many draws at once are those of one text after the other."""

import random

import pytest
import torch

from paceline.evaluate.config import SamplingConfig
from paceline.evaluate.sampling import (
    Dials,
    Kind,
    choose,
    draw_all,
    draw_few,
    draw_sorted,
    kind_of,
    likeliest,
)

SETTINGS: dict[Kind, list[SamplingConfig]] = {
    "few": [
        SamplingConfig(temperature=t, top_k=k, top_p=p)
        for t, k, p in [(0.8, 50, 1.0), (1.0, 1, 1.0), (2.0, 64, 0.5), (0.3, 7, 0.9), (1.0, 5, 1e-30), (1e-5, 9, 1.0)]
    ],
    "greedy": [SamplingConfig(temperature=0.0), SamplingConfig(temperature=0.0, top_k=None, top_p=0.5)],
    "all": [SamplingConfig(temperature=t, top_k=k) for t, k in [(1.0, None), (0.7, 300), (2.0, 1000)]],
    "sorted": [
        SamplingConfig(temperature=t, top_k=k, top_p=p)
        for t, k, p in [(1.0, None, 0.9), (0.8, 65, 1.0), (1.5, 200, 0.7), (1.0, None, 1e-30), (1.0, 400, 0.99)]
    ],
}
DRAWS = {"few": draw_few, "greedy": draw_few, "all": draw_all, "sorted": draw_sorted}
VOCAB = 300


@pytest.mark.parametrize("kind", SETTINGS)
def test_many_draws_at_once_are_those_of_one_after_the_other(kind: Kind) -> None:
    rows = [config for config in SETTINGS[kind] for _ in range(100)]
    assert {kind_of(config, VOCAB) for config in rows} == {kind}
    logits = 3 * torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(1))
    expected = [choose(row, config, random.Random(n)) for n, (row, config) in enumerate(zip(logits, rows, strict=True))]
    settings = [(c.temperature, c.top_k or VOCAB, c.top_p, random.Random(n).random()) for n, c in enumerate(rows)]
    assert DRAWS[kind](logits, Dials(*torch.tensor(settings).T)).tolist() == expected


@pytest.mark.parametrize("kind", ["few", "all", "sorted"])
def test_the_largest_uniform_number_draws_the_last_candidate(kind: Kind) -> None:
    """Rounded to fp32 it is 1, so that no candidate lies beyond it."""
    logits = torch.zeros(1, VOCAB)
    for config in SETTINGS[kind]:
        dials = Dials(*torch.tensor([[config.temperature, config.top_k or VOCAB, config.top_p, 1.0]]).T)
        assert 0 <= int(DRAWS[kind](logits, dials)) < VOCAB


def test_draws_follow_the_probabilities() -> None:
    """Four standard deviations of 4,000 draws."""
    probabilities = torch.tensor([0.5, 0.05, 0.3, 0.15])
    generator = random.Random(0)
    for top_k in (None, 4, 64):
        config = SamplingConfig(temperature=1.0, top_k=top_k)
        drawn = torch.tensor([choose(probabilities.log(), config, generator) for _ in range(4_000)])
        found = torch.bincount(drawn, minlength=4) / 4_000
        assert ((found - probabilities).abs() < 4 * (probabilities * (1 - probabilities) / 4_000).sqrt()).all()


def test_top_k_and_top_p_keep_only_the_likeliest() -> None:
    logits = torch.tensor([0.1, 3.0, 2.0, 1.0])  # probabilities about 0.03, 0.63, 0.23, 0.09 (sorted: 1, 2, 3, 0)
    generator = random.Random(0)
    drawn = {
        "top_k": {choose(logits, SamplingConfig(temperature=1.0, top_k=2), generator) for _ in range(200)},
        "top_p": {
            choose(logits, SamplingConfig(temperature=1.0, top_k=None, top_p=0.7), generator) for _ in range(200)
        },
        "one": {choose(logits, SamplingConfig(temperature=1.0, top_k=None, top_p=0.01), generator) for _ in range(20)},
        "all": {choose(logits, SamplingConfig(temperature=2.0, top_k=None), generator) for _ in range(500)},
    }
    assert drawn == {"top_k": {1, 2}, "top_p": {1, 2}, "one": {1}, "all": {0, 1, 2, 3}}


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.25, 1), (0.25 + 1e-6, 2), (0.5 - 1e-6, 2), (0.5, 2), (0.5 + 1e-6, 3), (0.75, 3), (1.0, 4)]
)
@pytest.mark.parametrize("top_k", [4, None])
def test_top_p_keeps_the_fewest_that_reach_it(top_p: float, kept: int, top_k: int | None) -> None:
    """Four equal logits have probabilities of exactly 1/4: at 0.5 the third token is not needed."""
    config = SamplingConfig(temperature=1.0, top_k=top_k, top_p=top_p)
    uniform = torch.arange(64) / 64
    drawn = [choose(torch.zeros(4), config, Fixed(float(u))) for u in uniform]
    assert drawn == [int(u * kept) for u in uniform]
    rows = torch.zeros(64, 4)
    dials = Dials(torch.ones(64), torch.full((64,), 4.0), torch.full((64,), top_p), uniform)
    assert draw_sorted(rows, dials).tolist() == drawn
    assert len(set(draw_few(rows, dials).tolist())) == kept  # which of equals is the likelier is left open


class Fixed(random.Random):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def random(self) -> float:
        return self.value


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (SamplingConfig(temperature=1e-6), "few"),
        (SamplingConfig(temperature=0.99e-6), "greedy"),
        (SamplingConfig(top_k=64), "few"),
        (SamplingConfig(top_k=65), "sorted"),
        (SamplingConfig(top_k=299), "sorted"),
        (SamplingConfig(top_k=300), "all"),
        (SamplingConfig(top_k=None), "all"),
        (SamplingConfig(top_k=None, top_p=0.999), "sorted"),
    ],
)
def test_the_kind_of_draw_changes_at_its_bounds(config: SamplingConfig, kind: Kind) -> None:
    assert kind_of(config, VOCAB) == kind


@pytest.mark.parametrize("top_k", [1, 3, 7, 8, 9])
def test_the_likeliest_are_those_of_a_whole_sort_also_among_equals(top_k: int) -> None:
    logits = torch.randint(0, 4, (8,), generator=torch.Generator().manual_seed(top_k)).float()
    values, ids = torch.sort(logits, descending=True, stable=True)
    found = likeliest(logits, top_k)
    assert torch.equal(found[0], values[:top_k])
    assert torch.equal(found[1], ids[:top_k])


@pytest.mark.parametrize("extreme", [SamplingConfig(temperature=1e-300), SamplingConfig(top_p=1e-300)])
def test_settings_near_zero_take_the_likeliest(extreme: SamplingConfig) -> None:
    assert choose(torch.tensor([0.0, 9.0, 8.9]), extreme, random.Random(0)) == 1
