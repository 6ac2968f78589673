"""Candidates hold their sequence's targets, turn through the vocabulary, and give the loss of a smaller vocabulary."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from model.lively import lively
from paceline.core.errors import ConfigError
from paceline.model.gpt import GPT
from paceline.model.loss import cap_logits
from paceline.model.sampled import SWEEP_STRIDE, CandidateSampler, check_candidates
from paceline.recipes.presets import preset
from train.tiny import run, tiny_config

WIDE = torch.tensor([512], dtype=torch.int32)


def sampler(rows: int, count: int, first: int = 0) -> CandidateSampler:
    made = CandidateSampler(rows)
    made.count = count
    made.first_sequence.fill_(first)
    return made


def by_hand(targets: Tensor, rows: int, count: int, number: int) -> list[int]:
    """One id after the other."""
    chosen = set(targets[targets >= 0].tolist())
    k = number * max(1, count // 8)
    while len(chosen) < count:
        chosen.add(SWEEP_STRIDE * (k % rows) % rows)
        k += 1
    return sorted(chosen)


@given(rows=st.integers(64, 2_000), seed=st.integers(0, 2**32 - 1), number=st.integers(3, 10**6), ignored=st.booleans())
def test_candidates_are_the_targets_and_the_next_ids_of_the_sweep(
    rows: int, seed: int, number: int, ignored: bool
) -> None:
    if math.gcd(rows, SWEEP_STRIDE) > 1:
        return
    targets = torch.from_numpy(np.random.default_rng(seed).integers(0, rows, 60))
    targets[:7] = -100 if ignored else targets[:7]
    found, places = sampler(rows, max(60, rows // 2), number - 3)(targets, 3)
    assert found.tolist() == by_hand(targets, rows, max(60, rows // 2), number)
    counted = targets >= 0
    assert torch.equal(found[places[counted]], targets[counted])
    assert torch.equal(places[~counted], targets[~counted])


def test_all_ids_are_candidates_of_as_many() -> None:
    targets = torch.tensor([3, 499, 3, 0])
    found, places = sampler(500, 500, 9)(targets, 0)
    assert torch.equal(found, torch.arange(500))
    assert torch.equal(places, targets)


def test_over_a_turn_of_the_sweep_each_id_comes_round_about_as_often() -> None:
    made, counts = sampler(2_000, 256), torch.zeros(2_000, dtype=torch.int64)
    turn = math.lcm(256 // 8, 2_000) // (256 // 8)
    for number in range(turn):
        counts[made(torch.full((64,), 7), number)[0]] += 1
    others = torch.cat([counts[:7], counts[8:]])
    assert counts[7] == turn
    assert others.max() - others.min() <= 2
    assert others.min() > 0


@pytest.mark.parametrize("count", [1, 4, 7])
def test_of_few_candidates_too_each_id_comes_round(count: int) -> None:
    """The sweep goes one id further from sequence to sequence."""
    made, targets = sampler(64, count), torch.full((5,), -100)
    found = [made(targets, number)[0].tolist() for number in range(64)]
    assert found == [by_hand(targets, 64, count, number) for number in range(64)]
    assert set(map(len, found)) == {count}
    assert set().union(*found) == set(range(64))


@pytest.mark.parametrize("rows", [50_257, 50_304, 2_048, 512])
def test_the_sweep_takes_every_row_of_our_heads(rows: int) -> None:
    assert math.gcd(SWEEP_STRIDE, rows) == 1


def small(candidates: int | None) -> GPT:
    config = replace(preset("demo").model, vocab_size=300, width=32, num_heads=2, head_dim=16, candidates=candidates)
    return lively(GPT(config, end_of_text=0))


def tokens_of(seed: int) -> Tensor:
    return torch.randint(0, 300, (3, 64), generator=torch.Generator().manual_seed(seed))


def test_as_many_candidates_as_ids_give_the_full_loss_bit_for_bit() -> None:
    whole, sampled = small(None), small(300)
    assert sampled.sampler is not None
    sampled.sampler.count = 300
    for model in (whole, sampled):
        model(tokens_of(1), tokens_of(2), WIDE).main.sum().backward()
    assert torch.equal(whole(tokens_of(1), tokens_of(2), WIDE).main, sampled(tokens_of(1), tokens_of(2), WIDE).main)
    for one, other in zip(whole.parameters(), sampled.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=2e-6)  # sums over sequences, in another order


def test_the_loss_is_that_of_a_vocabulary_of_the_candidates_and_the_others_get_no_gradient() -> None:
    model = small(150)
    assert model.sampler is not None
    model.sampler.count = 150
    model.sampler.first_sequence.fill_(40)
    tokens, targets = tokens_of(1), tokens_of(2)
    targets[1, :20] = -100
    losses = model(tokens, targets, WIDE).main
    logits = F.linear(model._head_input(model._stream_of(tokens, WIDE)), model._head_rows())
    seen = set()
    for number in range(3):
        candidates, _ = model.sampler(targets[number], number)
        seen |= set(candidates.tolist())
        place = {int(token): n for n, token in enumerate(candidates)}
        wanted = torch.tensor([place.get(int(target), -100) for target in targets[number]])
        own = cap_logits(logits[number, :, candidates], model.config.softcap)
        expected = F.cross_entropy(own, wanted, reduction="none", ignore_index=-100)
        torch.testing.assert_close(losses[number], expected, rtol=1e-5, atol=1e-6)
    losses.sum().backward()
    moved = model.head.grad.abs().sum(1).nonzero()[:, 0].tolist()
    assert set(moved) <= seen < set(range(300))


def test_without_gradients_all_ids_count() -> None:
    whole, sampled = small(None), small(100)
    assert sampled.sampler is not None
    sampled.sampler.count = 100
    with torch.no_grad():
        expected = whole(tokens_of(1), tokens_of(2), WIDE).main
        assert torch.equal(sampled(tokens_of(1), tokens_of(2), WIDE).main, expected)


def test_candidates_too_few_for_the_targets_are_refused_in_one_line() -> None:
    check_candidates(np.array([[1, 2, 2, -100]]), 2)
    check_candidates(np.arange(9)[None], 0)
    with pytest.raises(ConfigError, match=r"\) 2 do not hold the 3 distinct targets of a sequence of 4 tokens"):
        check_candidates(np.array([[1, 1, 1, 1], [1, 2, 3, -100]]), 2)


def test_a_run_whose_sequences_have_more_targets_does_not_begin(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "data")
    with pytest.raises(ConfigError, match=r"2 do not hold the \d+ distinct targets of a sequence of 256 tokens"):
        run(replace(config, model=replace(config.model, candidates=2)), tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
