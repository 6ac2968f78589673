"""FlexAttention's form of the block lists, on a CPU, where it runs uncompiled and forward only."""

import pytest
import torch
from hypothesis import given, settings
from torch.testing import assert_close

from model.mask_cases import Case, cases
from model.small import END_OF_TEXT, random_tokens, windows
from paceline.backends.attention_plans import plan_flex
from paceline.kernels.attention import flex_block_mask
from paceline.model.attention import plan_reference
from paceline.model.masks import block_lists, document_ids
from paceline.settings.model import ModelConfig, WindowConfig


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("unit", ["none", "tokens", "tokens_in_blocks", "blocks"])
@pytest.mark.parametrize("with_documents", [True, False])
def test_uncompiled_flex_attention_gives_the_reference(unit: str, with_documents: bool) -> None:
    """Uncompiled it looks at the element test alone, so that test must be the whole rule."""
    tokens, window = 384, windows(200)
    config = ModelConfig(
        width=16, num_heads=4, head_dim=4, num_kv_heads=2, document_mask=with_documents, window=WindowConfig(unit=unit)
    )
    documents = document_ids(random_tokens(2, tokens, document_every=150), END_OF_TEXT) if with_documents else None
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, tokens, heads, 4, generator=generator) for heads in (4, 2, 2))
    expected, found = (
        plan(config, documents, tokens, window)(config.layers[0], q, k, v) for plan in (plan_reference, plan_flex)
    )
    assert_close(found, expected, rtol=1e-5, atol=1e-5)


@settings(max_examples=30)
@given(cases())
def test_ordered_lists_hold_the_same_blocks_members_first_and_ascending(case: Case) -> None:
    lists = block_lists(*case.arguments())
    mask = flex_block_mask(lists.full, lists.partial, lambda _b, _h, q, k: q >= k)
    ordered = [
        (lists.partial, mask.kv_num_blocks, mask.kv_indices),
        (lists.full, mask.full_kv_num_blocks, mask.full_kv_indices),
    ]
    for members, counts, indices in ordered:
        assert counts is not None
        assert indices is not None
        for row, count, index in zip(members.flatten(0, 1), counts.flatten(), indices.flatten(0, 2), strict=True):
            assert index[:count].tolist() == row.nonzero().flatten().tolist()
