"""The cache changes nothing: same logits and same tokens as a whole forward pass, past window and document borders."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from model.lively import (
    LAYERS_OF_MANY_SHAPES,
    PREVIOUS_TOKENS,
    WINDOWS,
    lively,
    logits_without_cache,
    small,
    windows_of,
)
from paceline.core.errors import UserError
from paceline.evaluate.config import SamplingConfig
from paceline.evaluate.decode import Decoder
from paceline.evaluate.generate import generate, sample_text
from paceline.evaluate.inference_model import prepared
from paceline.model.gpt import GPT
from paceline.recipes.presets import PRESETS
from paceline.recipes.scaling import scaled
from paceline.text.tokenizer import ByteTokenizer

GREEDY = SamplingConfig(temperature=0.0)


@pytest.mark.parametrize(
    "unit", [pytest.param(unit, marks=() if unit in ("tokens", "blocks") else pytest.mark.slow) for unit in WINDOWS]
)
def test_greedy_text_is_the_same_with_and_without_a_cache_past_the_window(unit: str) -> None:
    model = small(unit)
    prompt = [0, *torch.randint(1, 61, (200,), generator=torch.Generator().manual_seed(2)).tolist()]
    for window in (128, 256):
        windows, plain = windows_of(model, window), []
        while len(plain) < 80:
            tokens = torch.tensor([prompt + plain])
            token = int(logits_without_cache(model, tokens, windows=windows)[0, : model.config.vocab_size].argmax())
            if token == model.end_of_text:
                break
            plain.append(token)
        cached = list(generate(model, prompt, GREEDY, windows=windows, new_tokens=80))
        assert len(plain) > 20
        assert cached == plain


def test_pieces_of_any_length_give_the_logits_of_the_whole() -> None:
    model = small("blocks")
    tokens = torch.randint(0, 61, (3, 300), generator=torch.Generator().manual_seed(3))  # 0s open documents
    decoder = Decoder(model, windows=(256,), max_tokens=300, slots=3)
    done = 0
    for piece in tokens.split([1, 130, 1, 126, 42], dim=1):
        done += piece.size(1)
        expected = logits_without_cache(model, tokens[:, :done], windows=(256,))
        torch.testing.assert_close(decoder.feed(piece), expected, rtol=1e-4, atol=1e-4)


def test_slots_of_unequal_length_do_not_disturb_each_other_past_their_rings() -> None:
    """Three sequences join one pool at different times, one of them is replaced; a ring holds 384 of their tokens."""
    model = small("blocks")
    tokens = torch.randint(0, 61, (4, 700), generator=torch.Generator().manual_seed(6))
    pool = Decoder(model, windows=(128,), max_tokens=700, slots=3)
    assert pool.cells == 384
    fed = {0: (0, 0), 1: (1, 0), 2: (2, 0)}  # slot -> (sequence, its tokens so far)

    def feed(slots: list[int], count: int) -> None:
        rows = range(min(slots), max(slots) + 1)
        new = torch.zeros(len(rows), count, dtype=torch.long)
        for slot in slots:
            sequence, start = fed[slot]
            new[slot - rows.start] = tokens[sequence, start : start + count]
            fed[slot] = (sequence, start + count)
        found = pool.feed(new, first=rows.start, live=[slot in slots for slot in rows])
        for slot in slots:
            sequence, end = fed[slot]
            expected = logits_without_cache(model, tokens[sequence : sequence + 1, :end], windows=(128,))
            torch.testing.assert_close(found[slot - rows.start], expected[0], rtol=1e-4, atol=1e-4)

    for slots, count in [([0], 600), ([2], 5), ([0, 2], 1), ([1], 130), ([0, 1, 2], 1), ([0, 2], 40), ([1], 300)]:
        feed(slots, count)
    pool.free(0)
    fed[0] = (3, 0)
    for slots, count in [([1, 2], 1), ([0], 7), ([0, 1, 2], 1), ([0, 2], 1), ([0, 1, 2], 1)]:
        feed(slots, count)


@pytest.mark.parametrize(
    "changes",
    [
        LAYERS_OF_MANY_SHAPES,
        PREVIOUS_TOKENS,
        {"smear": True, "positions": "learned", "long_window": LAYERS_OF_MANY_SHAPES["long_window"]},
    ],
    ids=["shapes", "previous tokens", "smeared positions"],
)
@pytest.mark.parametrize("ready", [lambda model: model, prepared], ids=["as trained", "prepared"])
def test_layers_of_many_kinds_with_two_windows_decode_as_they_train(
    changes: dict[str, Any], ready: Callable[[GPT], GPT]
) -> None:
    model, windows = small("blocks", **changes), (128, 384)
    tokens = torch.randint(0, 61, (2, 700), generator=torch.Generator().manual_seed(7))
    decoder = Decoder(ready(model), windows=windows, max_tokens=700, slots=2)
    for end in (300, 301, 302, 650, 700):
        got = decoder.feed(tokens[:, decoder.lengths[0] : end])
        expected = logits_without_cache(model, tokens[:, :end], windows=windows)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_decodes_as_it_trains(name: str) -> None:
    config = scaled(PRESETS[name](), 1 / 16).model
    fp32 = replace(config, precision=replace(config.precision, compute="fp32"))
    model = lively(GPT(fp32, end_of_text=0))
    tokens = torch.randint(1, 500, (1, 150), generator=torch.Generator().manual_seed(4))
    decoder = Decoder(model, windows=windows_of(model, 128), max_tokens=200)
    decoder.feed(tokens[:, :140])
    for position in range(140, 150):
        got = decoder.feed(tokens[:, position : position + 1])
        expected = logits_without_cache(model, tokens[:, : position + 1], windows=windows_of(model, 128))
        torch.testing.assert_close(got, expected, rtol=2e-3, atol=2e-3)


def test_a_prompt_that_is_no_text_is_refused_in_one_line() -> None:
    """As a shell passes on bytes that are not UTF-8, and as JSON may spell half a character."""
    for prompt in (b"\xff\xfe".decode("utf-8", "surrogateescape"), "half \ud800"):
        with pytest.raises(UserError, match="the prompt is not valid text"):
            sample_text(small("none"), ByteTokenizer(), prompt, GREEDY, windows=(), new_tokens=2)


def test_a_prompt_that_is_too_long_is_refused_in_one_line() -> None:
    model = small("none")
    with pytest.raises(UserError, match="1,025, but the model has positions for 1,024"):
        next(generate(model, [1] * 1000, GREEDY, windows=(), new_tokens=25))


def test_padding_rows_of_the_head_are_never_drawn() -> None:
    model = small("none")
    assert model.config.lm_head_rows == 64
    with torch.no_grad():
        model.head[61:] = 100.0
        model.head[:61] = -100.0
    assert all(token < 61 for token in generate(model, [1, 2], SamplingConfig(seed=5), windows=(), new_tokens=30))


def test_the_seed_decides_the_sample() -> None:
    model = small("blocks")

    def text(seed: int) -> list[int]:
        config = SamplingConfig(seed=seed, temperature=1.5)
        return list(generate(model, [0], config, windows=(128,), new_tokens=30))

    assert text(1) == text(1)
    assert text(1) != text(2)


def test_generation_ends_before_an_end_of_text() -> None:
    model = small("none")
    with torch.no_grad():
        model.head.zero_()  # all logits equal: the first id, which is end-of-text, wins
    assert list(generate(model, [1], GREEDY, windows=(), new_tokens=5)) == []
