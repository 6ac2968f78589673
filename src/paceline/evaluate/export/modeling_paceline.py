"""A model trained with paceline, for inference in transformers: the training code's mathematics, written once more.

This file travels with an exported model, so it needs torch and transformers only. Queries attend by the true positions
and documents of the keys, which the cache keeps with the tokens themselves, so that padding on the left shifts nothing.
The mask is dense: memory grows with the square of a prompt's length.

Shape letters: B sequences, T tokens of this pass, S tokens seen so far (cached ones first), H heads, D head width.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_paceline import PacelineConfig

CosSin = tuple[Tensor, Tensor]
NO_POSITION = -1
"""Where padding stands: no query sees it."""
ROW_HASH = {2: (36_313, 27_191), 3: (17_351, 60_961, 45_259)}
SIGN_HASH = {2: (48_271, 30_011), 3: (58_699, 39_779, 26_801)}
"""Multipliers of a token, the one before it and so on, by the length of the n-gram; products wrap in int32."""
SMEAR_INPUTS, MIX_SCALE = 12, 0.1


def rms_norm(x: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    return F.rms_norm(x.float(), (x.size(-1),), weight, eps).to(x.dtype)


class Norm(nn.Module):
    """Of the residual stream: RMS norm with or without weights, or layer norm."""

    def __init__(self, config: PacelineConfig) -> None:
        super().__init__()
        self.kind, self.eps, width = config.norm, config.norm_eps, config.hidden_size
        self.weight = nn.Parameter(torch.ones(width)) if self.kind != "rms" else None
        self.bias = nn.Parameter(torch.zeros(width)) if self.kind == "layer" and config.biases else None

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = (None if part is None else part.float() for part in (self.weight, self.bias))
        if self.kind == "layer":
            return F.layer_norm(x.float(), (x.size(-1),), weight, bias, self.eps).to(x.dtype)
        return rms_norm(x, self.eps, weight)


def linear(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    return F.linear(x.to(dtype), weight.to(dtype))


def affine(x: Tensor, layer: nn.Linear, scale: Tensor | None = None) -> Tensor:
    """In x's format; the bias is added to the rounded product, as in training. `scale`: of the weight."""
    y = linear(x, layer.weight if scale is None else layer.weight * scale, x.dtype)
    return y if layer.bias is None else y + layer.bias.to(y.dtype)


def scalar(config: PacelineConfig, learned: Tensor) -> Tensor:
    """In its format of training, which decides how what it multiplies is rounded."""
    return learned.to(getattr(torch, config.scalar_dtype))


def rotary_rows(config: PacelineConfig, positions_BT: Tensor, pairs: int) -> CosSin:
    """Cosines and sines at these positions, each (B, T, 1, pairs). Frequencies are formed on the CPU, as in training:
    a device's own powers differ in the last digit, and a position multiplies that."""
    steps = pairs if config.rotary_spacing == "open" else max(1, pairs - 1)
    omega = torch.pow(1.0 / config.rotary_base, torch.arange(pairs, dtype=torch.float32, device="cpu") / steps)
    omega = omega.to(getattr(torch, config.rotary_frequency_dtype)).float().to(positions_BT.device)
    angles = positions_BT.float()[..., None, None] * omega
    dtype = getattr(torch, config.rotary_table_dtype)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x_BTHD: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
    """Rotate dimension j with dimension j + D/2 for the first pairs; the others have no position."""
    cos, sin = cos.to(dtype), sin.to(dtype)
    pairs, half = cos.size(-1), x_BTHD.size(-1) // 2
    a, a_rest, b, b_rest = x_BTHD.split([pairs, half - pairs, pairs, half - pairs], dim=-1)
    rotated_a, rotated_b = (a * cos + b * sin).to(x_BTHD.dtype), (b * cos - a * sin).to(x_BTHD.dtype)
    return torch.cat([rotated_a, a_rest, rotated_b, b_rest], dim=-1)


def attention_mask_of(
    config: PacelineConfig, positions_BS: Tensor, documents_BS: Tensor, queries: int, window: int
) -> Tensor:
    """(B, 1, T, S) bool: which keys a query sees through a window. The last `queries` of the S tokens ask."""
    q, k = positions_BS[:, -queries:, None], positions_BS[:, None, :]
    seen = (k <= q) & (k != NO_POSITION)
    if config.document_mask:
        seen &= documents_BS[:, -queries:, None] == documents_BS[:, None, :]
    if config.window_unit in ("tokens", "tokens_in_blocks"):
        seen &= q - k < window
    if config.window_unit in ("blocks", "tokens_in_blocks"):
        block = config.block_tokens
        seen &= q // block - k // block < -(-window // block)
    slots = torch.arange(k.size(-1), device=k.device)
    seen |= slots[-queries:, None] == slots  # else padding would see nothing, of which torch before 2.5 makes NaN
    return seen[:, None]


def slots_before(positions_BS: Tensor) -> Tensor:
    """(B, S): the slot of the token before each, padding left out; -1: there is none."""
    slots = torch.arange(positions_BS.size(1), device=positions_BS.device)
    last = torch.where(positions_BS != NO_POSITION, slots, -1).cummax(-1).values
    return F.pad(last[:, :-1], (1, 0), value=-1)


def gathered(values_BS: Tensor, slots: Tensor) -> Tensor:
    """The values at these slots (B, T); -1 where a slot is -1."""
    return torch.where(slots >= 0, values_BS.gather(1, slots.clamp(min=0)), -1)


def hashed(grams: list[Tensor], multipliers: tuple[int, ...]) -> Tensor:
    total = grams[0] * multipliers[0]
    for gram, by in zip(grams[1:], multipliers[1:], strict=True):
        total = total ^ (gram * by)
    return total


class Pass(NamedTuple):
    """What all layers of a forward pass share."""

    dtype: torch.dtype
    """Of products."""
    rotary: dict[int, CosSin]
    """By the number of pairs that turn."""
    masks: dict[int, Tensor]
    """By window."""
    cache: Cache | None
    before: Tensor
    """(B, S): the slot of the token before each of those so far."""
    grams: list[Tensor]
    """The tokens of this pass, (B, T) int32, those before them and those before these; -1: none."""


class Attention(nn.Module):
    def __init__(self, config: PacelineConfig, layer: int, slot: int) -> None:
        """`slot`: the cache's place for this layer."""
        super().__init__()
        self.config, self.layer, self.slot = config, layer, slot
        width, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        self.qk_dim, self.v_dim = config.qk_dims[layer], config.v_dims[layer]
        self.query = nn.Linear(width, heads * self.qk_dim, bias=config.biases)
        self.key = nn.Linear(width, kv_heads * self.qk_dim, bias=config.biases)
        self.value = nn.Linear(width, kv_heads * self.v_dim, bias=config.biases)
        self.output = nn.Linear(heads * self.v_dim, width, bias=config.biases)
        if config.value_lambdas:
            self.value_mix = nn.Parameter(torch.full((config.value_lambdas,), 0.5))
        if config.value_gates and config.value_tables[layer] is not None:
            self.value_gate = nn.Linear(2 * config.value_gates, kv_heads, bias=False)
        self.output_scale = nn.Parameter(torch.ones(1)) if config.residual_scales else None

    def forward(self, x: Tensor, value_embed: Tensor | None, given: Pass) -> tuple[Tensor, Tensor]:
        """The branch's output (B, T, width) for a normalised stream, and the layer's own values before `value_embed`,
        (B, T, H_kv, D), was mixed in."""
        c, layer = self.config, self.layer
        parts = ((self.query, self.qk_dim), (self.key, self.qk_dim), (self.value, self.v_dim))
        q, k, raw_v = (affine(x.to(given.dtype), part).unflatten(-1, (-1, dim)) for part, dim in parts)
        rotary, mask = given.rotary.get(c.rotary_pairs[layer]), given.masks[c.window_tokens[layer]]
        q, k, v = self.positioned(q, rotary), self.positioned(k, rotary), self.mixed(x, raw_v, value_embed)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        if given.cache is not None:
            k, v = given.cache.update(k, v, self.slot)
        if c.key_offsets[layer]:
            half, slots = self.qk_dim // 2, torch.arange(k.size(2), device=k.device)
            at_rest = torch.arange(self.qk_dim, device=k.device) % half >= c.rotary_pairs[layer]
            source = torch.where(given.before >= 0, given.before, slots)[:, None, :, None]
            k = torch.where(at_rest, k.gather(2, source.expand_as(k)), k)
        group = c.num_attention_heads // c.num_key_value_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=c.score_scales[layer])
        branch, scale = affine(y.transpose(1, 2).flatten(-2), self.output, self.output_scale), c.attention_branch_scale
        return (branch if scale == 1.0 else scale * branch), raw_v

    def positioned(self, x: Tensor, rotary: CosSin | None) -> Tensor:
        c = self.config
        if c.qk_norm == "before_rotary":
            x = rms_norm(x, c.qk_norm_eps)
        if rotary is not None:
            x = rotate(x, *rotary, torch.float32 if c.rotary_in_fp32 else x.dtype)
        return rms_norm(x, c.qk_norm_eps) if c.qk_norm == "after_rotary" else x

    def mixed(self, x: Tensor, v: Tensor, value_embed: Tensor | None) -> Tensor:
        inputs, lambdas = self.config.value_gates, self.config.value_lambdas
        if inputs and value_embed is not None:
            read = torch.cat([x[..., :inputs], value_embed.flatten(-2)[..., :inputs]], dim=-1).float()
            gate = 2 * torch.sigmoid(linear(read, self.value_gate.weight, torch.float32))
            return v + gate[..., None].to(v.dtype) * value_embed
        if not lambdas:
            return v
        if lambdas == 1:
            mix = scalar(self.config, self.value_mix[0])  # so 1 - mix rounds as in training
            return v if value_embed is None else (1 - mix) * v + mix * value_embed
        if value_embed is None and self.config.value_residual:
            value_embed = v  # the first block mixes with itself
        scaled = self.value_mix[0] * v
        return scaled if value_embed is None else scaled + self.value_mix[1] * value_embed


class MLP(nn.Module):
    def __init__(self, config: PacelineConfig, hidden: int) -> None:
        super().__init__()
        self.activation, width, biases = config.activation, config.hidden_size, config.biases
        self.gate = nn.Linear(width, hidden, bias=biases) if self.activation == "swiglu" else None
        self.up = nn.Linear(width, hidden, bias=biases)
        self.down = nn.Linear(hidden, width, bias=biases)
        self.output_scale = nn.Parameter(torch.ones(1)) if config.residual_scales else None

    def forward(self, x: Tensor) -> Tensor:
        hidden = affine(x, self.up)
        if self.gate is not None:
            hidden = F.silu(affine(x, self.gate)) * hidden
        elif self.activation.startswith("gelu"):
            hidden = F.gelu(hidden, approximate="tanh" if self.activation == "gelu_tanh" else "none")
        else:
            hidden = F.relu(hidden).square()
        return affine(hidden, self.down, self.output_scale)


class Block(nn.Module):
    def __init__(self, config: PacelineConfig, layer: int) -> None:
        super().__init__()
        self.config, attends, hidden = config, config.attention_layers, config.mlp_widths[layer]
        self.x0_mix = nn.Parameter(torch.tensor([1.0, 0.0])) if config.x0_mix else None
        self.x0_gate = nn.Parameter(torch.zeros(1)) if config.x0_gates[layer] else None
        self.ngram_gate = nn.Parameter(torch.zeros(1)) if config.ngram_gates[layer] else None
        self.residual_scales = nn.Parameter(torch.ones(1 + (hidden > 0))) if config.residual_scales else None
        self.attention_norm = Norm(config) if attends[layer] else None
        self.attention = Attention(config, layer, slot=sum(attends[:layer])) if attends[layer] else None
        self.mlp_norm = Norm(config) if hidden else None
        self.mlp = MLP(config, hidden) if hidden else None

    def forward(
        self,
        x: Tensor,
        x0: Tensor,
        attended: Tensor | None,
        value_embed: Tensor | None,
        ngrams: Tensor | None,
        given: Pass,
    ) -> tuple[Tensor, Tensor | None]:
        """The stream after this block, and its own values if it has attention. `attended`: the stream that attention
        reads, if not its own."""
        branch = raw_v = None
        if self.x0_mix is not None:
            x = self.x0_mix[0] * x + self.x0_mix[1] * x0
        if self.attention is not None and self.attention_norm is not None:
            normed = self.attention_norm(x if attended is None else attended)
            branch, raw_v = self.attention(normed, value_embed, given)
        x = self.kept(x, 0)
        if self.x0_gate is not None:
            x = x + scalar(self.config, self.x0_gate) * x0
        if self.ngram_gate is not None and ngrams is not None:
            x = x + scalar(self.config, self.ngram_gate) * ngrams
        if branch is not None:
            x = x + branch
        if self.mlp is not None and self.mlp_norm is not None:
            x = self.kept(x, 1) + self.mlp(self.mlp_norm(x).to(given.dtype))
        return x, raw_v

    def kept(self, x: Tensor, sub_layer: int) -> Tensor:
        """What a sub-layer is added to."""
        return x if self.residual_scales is None else self.residual_scales[sub_layer] * x


class Mix(nn.Module):
    """Streams of earlier layers, added by weights that each token gives itself."""

    def __init__(self, config: PacelineConfig, sources: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(config.hidden_size, config.mix_width, bias=False)
        self.weights = nn.Linear(config.mix_width, sources, bias=False)
        self.bias = nn.Parameter(torch.zeros(sources))

    def forward(self, x: Tensor, sources: list[Tensor], dtype: torch.dtype) -> Tensor:
        inner = F.gelu(linear(x, self.hidden.weight, dtype))
        shares = (MIX_SCALE * (linear(inner, self.weights.weight, dtype) + self.bias)).to(x.dtype)
        for share, source in zip(shares.unbind(-1), sources, strict=True):
            x = x + share[..., None] * source
        return x


class PacelineForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = PacelineConfig
    _supports_sdpa = True
    _no_split_modules = ("Block",)

    def __init__(self, config: PacelineConfig) -> None:
        super().__init__(config)
        rows, heads = config.embedding_rows, config.num_key_value_heads
        self.embed_tokens = nn.Embedding(rows, config.hidden_size)
        if config.learned_positions:
            self.embed_positions = nn.Embedding(config.learned_positions, config.hidden_size)
        tables = zip(config.value_tables, config.v_dims, strict=True)
        widths = {str(table): heads * v_dim for table, v_dim in tables if table is not None}
        self.value_embeddings = nn.ModuleDict({table: nn.Embedding(rows, width) for table, width in widths.items()})
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers))
        if config.unet_skips:
            self.skip_weights = nn.Parameter(torch.ones(config.num_hidden_layers // 2))
        if config.skip is not None:
            self.skip_gate = nn.Parameter(torch.zeros(1))
        if config.backout_layer is not None:
            self.backout = nn.Parameter(torch.zeros(1))
        if config.smear:
            self.smear, self.smear_gate = nn.Parameter(torch.zeros(1)), nn.Linear(SMEAR_INPUTS, 1, bias=False)
        tables_of = {n: nn.Embedding(rows, config.hidden_size) for n, rows in config.ngram_rows.items()}
        self.ngrams = nn.ModuleDict(tables_of)
        if tables_of:
            self.ngram_gate = nn.Parameter(torch.zeros(1))
            self.register_buffer("ngram_signs", torch.ones(config.sign_rows, config.hidden_size))
        self.mixes = nn.ModuleDict({before: Mix(config, len(sources)) for before, sources in config.mixes.items()})
        self.final_norm = Norm(config)
        if not config.tied_lm_head:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def products_dtype(self, device: torch.device) -> torch.dtype:
        """Format of matrix products: as trained on a GPU; on a CPU float32, for bf16 there is slow and may fail."""
        return torch.float32 if device.type == "cpu" else getattr(torch, self.config.compute_dtype)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **_: Any,
    ) -> CausalLMOutputWithPast:
        """input_ids (B, T) -> logits (B, T, vocab_size) fp32, capped. attention_mask: (B, S), 0 for padding, also of
        tokens in the cache. position_ids: (B, T); without them tokens are counted from the first that is no padding."""
        if attention_mask is not None and attention_mask.dim() != 2:
            raise ValueError("paceline models take an attention mask of (batch, tokens) and the default, growing cache")
        if past_key_values is None and (self.config.use_cache if use_cache is None else use_cache):
            past_key_values = DynamicCache()
        positions, masks, before, grams = self.seen(input_ids, attention_mask, position_ids, past_key_values)
        rotary = {pairs: rotary_rows(self.config, positions, pairs) for pairs in set(self.config.rotary_pairs) if pairs}
        dtype = self.products_dtype(input_ids.device)
        x = self.stream(input_ids, positions, Pass(dtype, rotary, masks, past_key_values, before, grams))
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.head(x[:, kept])
        loss = None if labels is None else self.loss_function(logits, labels, vocab_size=self.config.vocab_size)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)

    def seen(
        self, tokens_BT: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, cache: Cache | None
    ) -> tuple[Tensor, dict[int, Tensor], Tensor, list[Tensor]]:
        """Positions of this pass's tokens, (B, T); which keys each sees, (B, 1, T, S), by window; and `before` and
        `grams` of the pass."""
        tokens = tokens_BT.size(1)
        past = 0 if cache is None else cache.get_seq_length()
        if attention_mask is None:
            attention_mask = tokens_BT.new_ones(tokens_BT.size(0), past + tokens)
        if position_ids is None:
            position_ids = (attention_mask.long().cumsum(-1) - 1)[:, -tokens:]
        real = attention_mask[:, -tokens:] != 0
        positions = torch.where(real, position_ids, NO_POSITION)
        documents = (real & (tokens_BT == self.config.end_of_text)).cumsum(-1)  # end-of-text opens one
        positions_BS, documents_BS, tokens_BS = self.remembered(positions, documents, tokens_BT, cache)
        before = slots_before(positions_BS)
        earlier = gathered(before, before[:, -tokens:])
        grams = [tokens_BT, gathered(tokens_BS, before[:, -tokens:]), gathered(tokens_BS, earlier)]
        masks = {
            window: attention_mask_of(self.config, positions_BS, documents_BS, tokens, window)
            for window in set(self.config.window_tokens)
        }
        return positions.clamp(min=0), masks, before, [gram.to(torch.int32) for gram in grams]

    def remembered(
        self, positions: Tensor, documents: Tensor, tokens: Tensor, cache: Cache | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Positions, documents and ids of all tokens so far, each (B, S). They take a layer of the cache after those of
        keys and values, so that whatever reorders or crops a cache does the same to them."""
        if cache is None:
            return positions, documents, tokens
        slot = sum(self.config.attention_layers)
        while len(cache.layers) <= slot:
            cache.layers.append(DynamicLayer())
        if cache.layers[slot].get_seq_length():
            documents = documents + cache.layers[slot].values[:, 0, -1]
        keys, values = cache.update(torch.stack([positions, tokens], -1)[:, None], documents[:, None, :, None], slot)
        return keys[:, 0, :, 0], values[:, 0, :, 0], keys[:, 0, :, 1]

    def stream(self, tokens: Tensor, positions: Tensor, given: Pass) -> Tensor:
        """The residual stream after the last block, (B, T, width)."""
        c, dtype = self.config, given.dtype
        x = self.placed(tokens, positions, dtype)
        if c.smear:
            last = self.placed(given.grams[1].clamp(min=0), (positions - 1).clamp(min=0), dtype)
            last = torch.where(given.grams[1][..., None] >= 0, last, torch.zeros_like(last))
            open_by = torch.sigmoid(x[..., :SMEAR_INPUTS].float() @ self.smear_gate.weight.float().T)
            x = x + (scalar(c, self.smear) * open_by).to(x.dtype) * last
        if c.embedding_norm:
            x = rms_norm(x, c.norm_eps)
        x0, first, half = x, None, c.num_hidden_layers // 2
        ngrams = self.ngrams_of(given.grams).to(x.dtype) if c.ngram_rows else None
        if ngrams is not None:
            x = x + scalar(c, self.ngram_gate) * ngrams
        mixed = {source for sources in c.mixes.values() for source in sources}
        read_later = {*c.attends_to, c.backout_layer, *(c.skip or ()), *(range(half) if c.unet_skips else ()), *mixed}
        after = {-1: x}  # those layers; -1: before the first
        for layer, block in enumerate(self.layers):
            x = self.mixed(x, layer, after, dtype)
            if c.unet_skips and layer >= half:
                x = x + self.skip_weights[layer - half] * after[2 * half - 1 - layer]
            if c.skip is not None and layer == c.skip[1]:
                x = x + torch.sigmoid(scalar(c, self.skip_gate[0])) * after[c.skip[0]]
            table, source = c.value_tables[layer], c.attends_to[layer]
            value_embed = first
            if table is not None:  # (B, T, H_kv, D)
                value_embed = self.value_embeddings[str(table)](tokens).to(dtype).unflatten(-1, (-1, c.v_dims[layer]))
            x, raw_v = block(x, x0, None if source is None else after[source], value_embed, ngrams, given)
            if c.value_residual and layer == 0:
                first = raw_v
            if layer in read_later:
                after[layer] = x
        x = x if c.backout_layer is None else x - scalar(c, self.backout) * after[c.backout_layer]
        return self.mixed(x, c.num_hidden_layers, after, dtype)

    def placed(self, tokens: Tensor, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """Token rows, with those of their positions where such are learned, in the format of the stream."""
        x: Tensor = self.embed_tokens(tokens)
        if self.config.learned_positions:
            x = x + self.embed_positions(positions)
        return x.to(torch.float32 if self.config.stream_in_fp32 else dtype)

    def ngrams_of(self, grams: list[Tensor]) -> Tensor:
        """(B, T, width): the signed rows of all n-gram tables, added up."""
        signs, found = self.config.sign_rows, []
        for name, rows in self.config.ngram_rows.items():
            n, whole = int(name), grams[int(name) - 1] >= 0
            row = torch.where(whole, hashed(grams[:n], ROW_HASH[n]) % (rows - 1), rows - 1).long()
            sign = torch.where(whole, hashed(grams[:n], SIGN_HASH[n]) & (signs - 1), 0).long()
            found.append(self.ngrams[name](row) * self.ngram_signs[sign])
        return torch.stack(found).sum(0) if len(found) > 1 else found[0]

    def mixed(self, x: Tensor, layer: int, after: dict[int, Tensor], dtype: torch.dtype) -> Tensor:
        """With the earlier streams that are added before a layer, or before the head."""
        sources = self.config.mixes.get(str(layer))
        return x if sources is None else self.mixes[str(layer)](x, [after[source] for source in sources], dtype)

    def head(self, x: Tensor) -> Tensor:
        """(B, T, width) -> (B, T, vocab_size) fp32, capped."""
        weight = self.embed_tokens.weight if self.config.tied_lm_head else self.lm_head.weight
        logits = linear(self.final_norm(x), weight, self.products_dtype(x.device)).float()
        cap: float | None = self.config.softcap
        return logits if cap is None else cap * torch.tanh((logits + self.config.softcap_shift) / cap)
