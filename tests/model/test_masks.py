"""Which tokens a token may attend to, judged pair by pair from the records' rules; block lists say the same."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from model.mask_cases import B, Case, cases, expected, rule_of
from paceline.model.attention import chunked_mask
from paceline.model.masks import MaskRule, block_lists, dense_mask, document_ids, full_block_share
from paceline.recipes.presets import preset


def by_elements(blocks: Tensor) -> np.ndarray:
    """(…, query blocks, key blocks) -> (…, queries, keys)."""
    return blocks.repeat_interleave(B, dim=-1).repeat_interleave(B, dim=-2).numpy()


@settings(max_examples=40)
@given(cases())
def test_the_dense_mask_is_the_records_rule(case: Case) -> None:
    assert np.array_equal(dense_mask(*case.arguments()).numpy(), expected(case))


@settings(max_examples=40)
@given(cases())
def test_full_blocks_and_tested_partial_blocks_make_up_the_mask(case: Case) -> None:
    """The element test of a partial block knows nothing of a window in blocks: the lists hold that."""
    lists = block_lists(*case.arguments())
    assert not (lists.full & lists.partial).any()
    test = expected(case._replace(unit={"blocks": "none", "tokens_in_blocks": "tokens"}.get(case.unit, case.unit)))
    assert np.array_equal(by_elements(lists.full) | (by_elements(lists.partial) & test), expected(case))


@settings(max_examples=30)
@given(cases(), st.sampled_from([1, 2, 4]), st.integers(0, 2))
def test_the_chunked_mask_is_the_dense_one_cut_out(case: Case, blocks: int, spare: int) -> None:
    """Every pair of the sequence once, at its true position; keys before the sequence never."""
    chunk = B * blocks if case.tokens % (B * blocks) == 0 else B
    widest = case.tokens if case.unit == "none" else min(case.tokens, -(-case.window // B) * B)
    reach = widest + B * spare
    mask = chunked_mask(*case.arguments(), reach=reach, chunk=chunk).numpy()
    assert mask.shape[1:] == (case.tokens // chunk, chunk, reach + chunk)
    whole = np.zeros((mask.shape[0], case.tokens, reach + case.tokens), dtype=bool)
    for index, start in enumerate(range(0, case.tokens, chunk)):
        whole[:, start : start + chunk, start : start + reach + chunk] = mask[:, index]
    assert not whole[:, :, :reach].any()
    assert np.array_equal(whole[:, :, reach:], expected(case))


@settings(max_examples=40)
@given(cases())
def test_blocks_are_visited_and_full_by_the_formulas_of_record_16(case: Case) -> None:
    case = case._replace(unit="blocks")
    documents = np.zeros((1, case.tokens), dtype=np.int32) if case.documents is None else case.documents
    n, lists = -(-case.window // B), block_lists(*case._replace(documents=documents).arguments())
    for row, full, partial in zip(documents, lists.full, lists.partial, strict=True):
        lo, hi = row[::B], row[B - 1 :: B]
        for i in range(case.tokens // B):
            for j in range(case.tokens // B):
                visit = i >= j and i - j < n and lo[i] <= hi[j] and lo[j] <= hi[i]
                is_full = i > j and i - j < n and lo[i] == hi[j] and lo[j] == hi[i]
                assert bool(full[i, j]) == is_full
                assert bool(partial[i, j]) == (visit and not is_full)


def visible_keys(name: str, window: int) -> list[int]:
    """Keys that each query of one long document sees under a record's rule."""
    model, tokens = preset(name).model, 16 * B
    documents = torch.zeros(1, tokens, dtype=torch.int32)
    return dense_mask(MaskRule.of(model), documents, tokens, torch.tensor(window))[0].sum(dim=-1).tolist()


def in_tokens(window: int, _: int) -> int:
    return window


def in_blocks(window: int, offset: int) -> int:
    return B * (window // B - 1) + offset + 1


def in_both(window: int, offset: int) -> int:
    return min(window, B * (-(-window // B) - 1) + offset + 1)


@pytest.mark.parametrize(
    ("name", "windows", "visible"),
    [
        ("r13-window-warmup", (64, 128, 192, 1792), in_tokens),
        ("r14-value-embed", (64, 128, 192, 1792), in_tokens),
        ("r15-unet-values", (64, 128, 192, 1792), in_both),
        ("r16-block-mask", (128, 256, 1792), in_blocks),
        ("r17-sparse-values", (128, 256, 1792), in_blocks),
        ("r18-softcap", (128, 256, 1792), in_blocks),
    ],
)
def test_a_query_deep_in_a_document_sees_as_many_keys_as_the_record_says(
    name: str, windows: tuple[int, ...], visible: Callable[[int, int], int]
) -> None:
    for window in windows:
        counts = visible_keys(name, window)
        assert counts[14 * B :] == [visible(window, q % B) for q in range(14 * B, 16 * B)]


def test_in_a_window_of_one_block_the_first_token_of_a_block_sees_only_itself() -> None:
    counts = visible_keys("r16-block-mask", B)
    assert counts == [o + 1 for _ in range(16) for o in range(B)]


def test_records_4_and_5_are_only_causal() -> None:
    for name in ("r04-muon", "r05-modern-arch"):
        assert MaskRule.of(preset(name).model).only_causal
    for name in ("r13-window-warmup", "r15-unet-values", "r16-block-mask"):
        rule = MaskRule.of(preset(name).model)
        assert not rule.only_causal
        assert rule.by_document


def test_end_of_text_opens_a_document() -> None:
    """It shares its id with what follows; the fragment before the first is document 0; rows do not touch each other."""
    tokens = torch.tensor([[5, 9, 5, 5, 9, 9, 5], [9, 5, 5, 5, 5, 5, 5]])
    assert document_ids(tokens, end_of_text=9).tolist() == [[0, 1, 1, 1, 2, 3, 3], [1, 1, 1, 1, 1, 1, 1]]


def test_the_diagonal_keeps_the_share_of_full_blocks_at_13_in_14() -> None:
    tokens = 64 * B
    one_document = torch.zeros(1, tokens, dtype=torch.int32)
    rule = rule_of("blocks", by_document=True)
    for n, most in ((1, 0.0), (2, 1 / 2), (14, 13 / 14)):
        lists = block_lists(rule, one_document, tokens, torch.tensor(n * B))
        assert float(full_block_share(lists)) <= most + 1e-7
        assert not lists.full.diagonal(dim1=1, dim2=2).any()
        late = slice(14, None)  # rows that the start of the sequence does not cut short
        assert float(lists.full[:, late].sum() / (lists.full | lists.partial)[:, late].sum()) == pytest.approx(most)
