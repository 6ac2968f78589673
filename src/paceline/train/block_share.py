"""How much of a masked attention is whole blocks, which cost no element test: recorded with every validation."""

from torch import Tensor

from paceline.core.units import BLOCK_TOKENS
from paceline.model.config import ModelConfig
from paceline.model.masks import MaskRule, block_lists, document_ids, full_block_share


def block_share(model: ModelConfig, tokens_BT: Tensor, window: Tensor, *, end_of_text: int) -> Tensor | None:
    """Share of the visited blocks of 128 x 128 that need no element test; None without a mask, or for
    sequences that are not whole blocks."""
    rule, tokens = MaskRule.of(model), tokens_BT.size(1)
    if rule.only_causal or tokens % BLOCK_TOKENS:
        return None
    documents = document_ids(tokens_BT, end_of_text) if rule.by_document else None
    return full_block_share(block_lists(rule, documents, tokens, window))
