"""What a token takes from the tokens before it: published hashes, causality, and a cache that gives the same."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.core.errors import ConfigError
from paceline.evaluate.decode import Decoder
from paceline.model.gpt import GPT
from paceline.model.masks import window_tensor
from paceline.model.previous import ngram_rows, offset_keys, sign_rows
from paceline.recipes.presets import preset
from paceline.settings.model import LayerOverride, ModelConfig, NgramConfig
from paceline.settings.optim import AdamConfig, OptimConfig
from paceline.settings.parallel import ParallelConfig
from paceline.train.run import RunFolder
from train.tiny import run, tiny_config, weights

TINY = replace(preset("demo").model, vocab_size=300, width=64, num_heads=2, head_dim=32, num_layers=4, value_ends=1)
EACH: dict[str, dict[str, Any]] = {
    "smear": {"smear": True},
    "smear with learned positions": {"smear": True, "positions": "learned"},
    "bigrams": {"ngrams": NgramConfig(bigram_rows=512, sign_rows=64)},
    "both n-grams, in two layers": {
        "ngrams": NgramConfig(bigram_rows=512, trigram_rows=256, sign_rows=64),
        "layer_overrides": (LayerOverride(layers=(1, 3), ngram_gate=True),),
    },
    "key offset": {"layer_overrides": (LayerOverride(layers=(0, 3), key_offset=True),)},
}


def lively(config: ModelConfig) -> GPT:
    """Nothing is zero."""
    model, generator = GPT(config, end_of_text=0), torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if not parameter.any():
            parameter.data.normal_(std=0.3, generator=generator)
    return model


def tokens_of(count: int) -> Tensor:
    return torch.randint(0, 300, (2, count), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    ("gram", "rows", "row", "sign"),
    [
        ((464, 3290), 377_279, 349_207, 7990),
        ((50256, 464), 377_279, 143_001, 3392),
        ((13, 383), 377_279, 136_336, 2574),
        ((464, 3290), 10_575_359, 5_115_270, 7990),
        ((50256, 464), 10_575_359, 6_599_391, 3392),
        ((13, 383), 10_575_359, 3_143_021, 2574),
        ((464, 3290, 286), 10_575_359, 4_736_457, 8020),
        ((50255, 50255, 50255), 10_575_359, 7_144_679, 823),  # products that wrap
    ],
)
def test_hashes_are_the_published_ones(gram: tuple[int, ...], rows: int, row: int, sign: int) -> None:
    tokens, n = torch.tensor([gram]), len(gram)
    assert int(ngram_rows(tokens, None, n, rows + 1)[0, -1]) == row
    assert int(sign_rows(tokens, None, n, 8192)[0, -1]) == sign


def test_without_tokens_before_the_reserved_rows_are_read() -> None:
    tokens = torch.tensor([[5, 6, 7]])
    assert ngram_rows(tokens, None, 3, 100)[0, :2].tolist() == [99, 99]
    assert sign_rows(tokens, None, 3, 64)[0, :2].tolist() == [0, 0]
    before = torch.tensor([[-1, 4]])
    assert ngram_rows(tokens, before, 2, 100)[0, 0] == ngram_rows(torch.tensor([[4, 5]]), None, 2, 100)[0, 1]
    assert ngram_rows(tokens, before, 3, 100)[0, :2].tolist()[0] == 99


def test_a_key_shows_the_resting_dimensions_of_the_token_before() -> None:
    k = torch.randn(1, 5, 2, 8, generator=torch.Generator().manual_seed(0))
    changed = k.clone()
    changed[:, 2] += 1.0
    difference = (offset_keys(changed, pairs=1) != offset_keys(k, pairs=1)).any(dim=2)[0]  # (T, D)
    turning = torch.tensor([True, False, False, False] * 2)
    assert torch.equal(difference[2], turning)
    assert torch.equal(difference[3], ~turning)
    assert not difference[[0, 1, 4]].any()
    assert torch.equal(offset_keys(k, pairs=1)[:, 0], k[:, 0])


@pytest.mark.parametrize("changes", EACH.values(), ids=EACH)
def test_a_cache_gives_the_logits_of_the_whole_pass_beyond_its_ring(changes: dict[str, Any]) -> None:
    model, tokens = lively(replace(TINY, **changes)), tokens_of(640)
    whole = model.logits(tokens, window_tensor((128,), torch.device("cpu")))[..., :300]
    decoder = Decoder(model, windows=(128,), max_tokens=640, slots=3)
    assert decoder.cells < 640
    torch.testing.assert_close(decoder.feed(tokens[:, :600], first=1), whole[:, 599], rtol=1e-4, atol=1e-4)
    for step in range(600, 612):
        idle = step % 3 == 0  # the second text's step is taken twice: the first time it does not advance
        fed = decoder.feed(tokens[:, step : step + 1], first=1, live=[True, not idle])
        torch.testing.assert_close(fed[0], whole[0, step], rtol=1e-4, atol=1e-4)
        if idle:
            decoder.lengths[1] -= 1
            fed = decoder.feed(tokens[:, step : step + 1], first=1)
        torch.testing.assert_close(fed, whole[:, step], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("changes", EACH.values(), ids=EACH)
def test_nothing_looks_ahead_and_the_switch_acts(changes: dict[str, Any]) -> None:
    model, tokens = lively(replace(TINY, **changes)), tokens_of(128)
    changed = tokens.clone()
    changed[:, 100] = (changed[:, 100] + 1) % 300
    window = window_tensor((128,), torch.device("cpu"))
    one, other = (model.logits(given, window) for given in (tokens, changed))
    assert torch.equal(one[:, :100], other[:, :100])
    assert not torch.equal(one, lively(TINY).logits(tokens, window))


def test_only_rows_that_were_looked_up_move_and_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "data", steps=4)
    model = replace(config.model, ngrams=NgramConfig(bigram_rows=65_536), num_layers=2)
    config = replace(config, model=model, optim=replace(config.optim, adam=AdamConfig(ngram_lr=0.3)))
    run(config, tmp_path / "whole")
    whole = weights(tmp_path / "whole")["embeddings.ngrams.2"]
    moved = whole.any(dim=1)
    assert 0 < int(moved.sum()) <= 4 * 1024
    run(replace(config, train=replace(config.train, stop_after=2)), tmp_path / "parts")
    run(replace(config, train=replace(config.train, stop_after=None)), RunFolder(tmp_path / "parts").path)
    assert torch.equal(whole, weights(tmp_path / "parts")["embeddings.ngrams.2"])


def test_what_cannot_be_is_refused_by_name() -> None:
    refusals: list[tuple[str, dict[str, Any]]] = [
        ("sign-rows 100 is not a power of 2", {"ngrams": {"bigram_rows": 8, "sign_rows": 100}}),
        ("ngram_gate, but --model.ngrams", {"layer_overrides": (LayerOverride(layers=(1,), ngram_gate=True),)}),
        ("key_offset needs pairs at rest", {
            "rotary": replace(TINY.rotary, rotary_fraction=1.0),
            "layer_overrides": (LayerOverride(layers=(1,), key_offset=True),),
        }),
    ]  # fmt: skip
    for message, changes in refusals:
        with pytest.raises(ConfigError, match=message):
            replace(TINY, **{n: NgramConfig(**v) if isinstance(v, dict) else v for n, v in changes.items()})
    smeared = replace(preset("demo"), model=replace(preset("demo").model, smear=True))
    with pytest.raises(ConfigError, match="need the token before a slice"):
        replace(smeared, parallel=ParallelConfig(context_parallel=2))
    assert OptimConfig().adam.ngram_lr > 0
