"""Plans of attention besides the plain twin's: how a forward pass attends by FlexAttention, by our kernel over
intervals of keys, or by FlashAttention over packed documents."""

from dataclasses import dataclass

from torch import Tensor

from paceline.backends.ranges import Ranges, ranges_of
from paceline.core.units import BLOCK_TOKENS
from paceline.kernels.attention import attend_dense, attend_flex, flex_block_mask
from paceline.model.attention import Attend, Plan, attention_of, by_window
from paceline.model.masks import MaskRule, allowed, block_lists
from paceline.settings.model import LayerConfig, ModelConfig, WindowKind


def plan_flex(config: ModelConfig, documents_BT: Tensor | None, tokens: int, windows: Tensor) -> Attend:
    """FlexAttention over the full and partial blocks; plainly causal presets keep the fused kernel."""
    rule = MaskRule.of(config)
    if rule.only_causal:
        return lambda layer, q, k, v: attend_dense(q, k, v, None, scale=attention_of(layer).scale)

    def make(_: WindowKind, window: Tensor) -> Attend:
        lists = block_lists(rule, documents_BT, tokens, window)

        def test(b: Tensor, _: Tensor, q: Tensor, k: Tensor) -> Tensor:
            """The whole rule, though the lists hold the block window: uncompiled, FlexAttention never looks at them."""
            if documents_BT is None:
                return allowed(rule, q, k, None, None, window)
            return allowed(rule, q, k, documents_BT[b, q], documents_BT[b, k], window)

        batch = 1 if documents_BT is None else documents_BT.size(0)
        mask = flex_block_mask(lists.full.expand(batch, -1, -1), lists.partial.expand(batch, -1, -1), test)
        return lambda layer, q, k, v: attend_flex(q, k, v, mask, scale=attention_of(layer).scale)

    return by_window(config, windows, make)


@dataclass(frozen=True, eq=False)  # by identity: the compiler hashes it before it has its field
class OverRanges:
    """Attention by our kernel over the interval of keys that each query sees. An `Attend`."""

    by_kind: dict[WindowKind, Ranges]

    def of(self, layer: LayerConfig) -> Ranges:
        return self.by_kind[attention_of(layer).window]

    def __call__(self, layer: LayerConfig, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from paceline.kernels.attention_ranges import attend_ranges

        seen = self.of(layer)
        return attend_ranges(q, k, v, seen.first_key, seen.end_query, scale=attention_of(layer).scale)


def plan_ranges(config: ModelConfig, documents_BT: Tensor | None, tokens: int, windows: Tensor) -> Attend:
    """`OverRanges`; what that cannot cut into blocks is left to FlexAttention."""
    rule = MaskRule.of(config)
    if rule.only_causal or tokens % BLOCK_TOKENS:
        return plan_flex(config, documents_BT, tokens, windows)
    used = {shape.window for shape in config.attending}
    kinds: list[WindowKind] = list(config.windows) or ["short"]
    found = {kind: ranges_of(rule, documents_BT, tokens, windows[i]) for i, kind in enumerate(kinds) if kind in used}
    return OverRanges(found)


def plan_packed(version: int) -> Plan:
    """FlashAttention of a version, each document a segment."""
    from paceline.kernels.attention_varlen import attend_packed, segment_starts, sequence_starts

    def plan(config: ModelConfig, documents_BT: Tensor | None, tokens: int, windows: Tensor) -> Attend:
        rule = MaskRule.of(config)
        starts = None if documents_BT is None else segment_starts(documents_BT)

        def make(_: WindowKind, window: Tensor) -> Attend:
            limit = window if rule.window_in_tokens else None

            def attend(layer: LayerConfig, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                segments = sequence_starts(q.size(0), tokens, q.device) if starts is None else starts
                return attend_packed(q, k, v, segments, limit, scale=attention_of(layer).scale, version=version)

            return attend

        return by_window(config, windows, make)

    return plan
