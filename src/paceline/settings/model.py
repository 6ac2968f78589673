"""Every switch of the architecture and of its numerics. No torch.

A technique that is off is absent: it adds no parameter, no buffer and no operation. `ModelConfig.layers` makes every
choice for every layer; the model, its description (`spec.py`) and all that is derived from that read layers, not rules.
"""

import math
from collections import Counter
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Annotated, Any, Literal

from paceline.core.command_line import Hidden
from paceline.core.errors import ConfigError
from paceline.core.units import BLOCK_TOKENS, round_up
from paceline.settings.limits import BELOW_1, FINITE, NOT_NEGATIVE, POSITIONS, SHARE, TOKENS, Limit, Limited, at_least

DType = Literal["fp32", "bf16"]
SOFTCAP = Limit("must be positive and at most 1e6; use None for no cap", lambda cap: 0 < cap <= 1e6)
EPS = Limit("must be a finite number, 0 or more", NOT_NEGATIVE.holds)


@dataclass(frozen=True, kw_only=True)
class RotaryConfig(Limited, prefix="--model.rotary."):
    """Rotary positions: dimension j of a head turns with dimension j + head_dim/2."""

    base: Annotated[float, Limit("must exceed 1", lambda base: 1 < base < math.inf)] = 10_000.0
    """Slowest frequency is about 1/base."""
    rotary_fraction: Annotated[float, SHARE.saying("1 turns every pair")] = 1.0
    """Share of the pairs that turn; the rest are free of position (truncated rotary: 0.5). Only those are rotated."""
    spacing: Literal["open", "closed"] = "open"
    """Exponents of the n turning pairs: j/n (open: never quite 1/base) or j/(n-1) (closed: ends at 1/base)."""
    frequency_dtype: DType = "fp32"
    """Rounding of the frequencies before the angles are formed. The angle itself is always fp32."""
    table_dtype: DType = "fp32"
    """Storage of the cosine and sine tables, which all layers share."""
    arithmetic: Literal["fp32", "activation"] = "fp32"
    """Precision of the rotation: fp32, or the dtype of the queries, which the result has either way."""
    max_tokens: Annotated[int, POSITIONS] = 65_536
    """Positions for which the table is computed, or learned (`model.positions`); shorter sequences take its first
    rows."""

    def pairs(self, head_dim: int) -> int:
        """Pairs of a head that turn."""
        return max(1, round(head_dim // 2 * self.rotary_fraction))


@dataclass(frozen=True, kw_only=True)
class WindowConfig(Limited, prefix="--model.window."):
    """The sliding window and its growth: quantum * floor((start + growth * step/steps) / quantum) tokens."""

    unit: Literal["none", "tokens", "tokens_in_blocks", "blocks"] = "none"
    """`tokens`: q - k < W. `blocks`: the key's block is fewer than W/128 blocks back, so the visible span depends on
    the offset in the block. `tokens_in_blocks`: both at once (record 15's hand-built list). `none`: no window."""
    start_tokens: Annotated[int, TOKENS] = 128
    """Window at step 0."""
    growth_tokens: Annotated[int, TOKENS] = 1_728
    """How much it has grown at the last step."""
    quantum_tokens: Annotated[int, TOKENS] = 128
    """The window changes in steps of this many tokens."""

    def check(self) -> None:
        quantum = BLOCK_TOKENS if self.unit == "blocks" else 1
        if self.quantum_tokens < 1 or self.quantum_tokens % quantum:
            raise ConfigError(f"--model.window.quantum-tokens {self.quantum_tokens} must be a multiple of {quantum}")
        if min(self.start_tokens, self.start_tokens + self.growth_tokens) < self.quantum_tokens:
            start, growth = f"start-tokens {self.start_tokens}", f"--model.window.growth-tokens {self.growth_tokens}"
            sight = f"shrinks below one quantum of {self.quantum_tokens}, so nothing would be seen"
            raise ConfigError(f"--model.window.{start} with {growth} {sight}")

    def tokens_at(self, step: int, steps: int) -> int:
        """Window in tokens at a step. Step `steps` itself is the last validation."""
        grown = self.start_tokens + self.growth_tokens * step / steps
        return self.quantum_tokens * int(grown // self.quantum_tokens)

    @property
    def widest_tokens(self) -> int:
        """The widest window of the whole schedule."""
        return max(self.tokens_at(0, 1), self.tokens_at(1, 1))


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Number formats by parameter class. On a device without bf16 products, `compute` falls to fp32 and says so."""

    mode: Literal["autocast", "explicit"] = "explicit"
    """`autocast`: fp32 residual stream, products in `compute`. `explicit`: the stream itself is in `compute`."""
    compute: DType = "fp32"
    """Format of products and, in explicit mode, of activations."""
    embeddings: DType = "fp32"
    """Storage of the token and value tables, their gradients and their Adam moments."""
    scalars: DType = "fp32"
    """Storage of the learned scalars."""
    round_matrices_at_init: bool = False
    """Start fp32 matrices from values rounded through bf16 (records 13 to 17 cast the whole model, then cast back)."""


WindowKind = Literal["short", "long"]
"""Which of the model's two windows a layer attends through: `model.window`, or `model.long_window`."""


@dataclass(frozen=True, kw_only=True)
class LayerOverride(Limited, prefix="model.layer_overrides: "):
    """What some layers have otherwise than the model's own fields say; None takes those."""

    layers: tuple[int, ...]
    """Which layers; negative: from the end."""
    attention: bool | None = None
    """False: no attention sub-layer."""
    qk_dim: int | None = None
    """Width of a head's queries and keys."""
    v_dim: int | None = None
    """Width of a head's values."""
    window: WindowKind | None = None
    """Through which window it attends."""
    mlp_width: int | None = None
    """Hidden width of the MLP; 0: no MLP."""
    attends_to: int | None = None
    """Queries, keys and values come from the stream after this earlier layer, not from the layer's own input."""
    key_offset: bool | None = None
    """The dimensions of a key that no rotary pair turns are those of the token before it."""
    score_scale: float | None = None
    """Factor on the scores, instead of 1/sqrt(width of a query)."""
    x0_gate: bool | None = None
    """Add a learned multiple of the embedding after attention, starting at 0."""
    ngram_gate: bool | None = None
    """Add a learned multiple of the n-gram rows after attention, starting at 0.05."""


@dataclass(frozen=True, kw_only=True)
class MixConfig(Limited, prefix="model.mixes: "):
    """At one place, streams of earlier places are added, each times a weight that a small network gives each token."""

    before: int
    """The layer before which it stands; `num_layers`: the head."""
    sources: tuple[int, ...]
    """Layers whose outputs are added; -1: the stream before the first."""
    starts: tuple[float, ...]
    """The weight of each at the start, for every token."""


@dataclass(frozen=True, kw_only=True)
class AttentionLayer:
    """The attention of one layer, every choice made."""

    num_heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    window: WindowKind
    value_table: int | None
    """The table whose rows are mixed into its values."""
    scale: float
    """Factor on the scores."""
    key_offset: bool = False
    attends_to: int | None = None
    """The earlier layer whose output it attends to; None: the layer's own input."""

    @property
    def q_width(self) -> int:
        return self.num_heads * self.qk_dim

    @property
    def k_width(self) -> int:
        return self.kv_heads * self.qk_dim

    @property
    def v_width(self) -> int:
        return self.kv_heads * self.v_dim

    @property
    def out_width(self) -> int:
        """Of the attended values, which the output matrix takes."""
        return self.num_heads * self.v_dim


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """One layer, every choice made."""

    index: int
    attention: AttentionLayer | None
    mlp_width: int
    """0: no MLP."""
    x0_gate: bool = False
    ngram_gate: bool = False


def _own(kind: type[AttentionLayer | LayerConfig], stated: dict[str, Any]) -> dict[str, Any]:
    """What is stated of the fields of a class."""
    return {each.name: stated[each.name] for each in fields(kind) if each.name in stated}


@dataclass(frozen=True, kw_only=True)
class NgramConfig(Limited, prefix="--model.ngrams."):
    """Rows looked up by a hash of the last tokens, with a sign of ±1 for each channel by another hash: two n-grams that
    share a row seldom share their signs. Zero at the start; documents are not separated."""

    bigram_rows: Annotated[int | None, at_least(2)] = None
    """Rows of the table for a token and the one before it; the last is for tokens without one. None: no such table."""
    trigram_rows: Annotated[int | None, at_least(2)] = None
    """The same for a token and the two before it."""
    sign_rows: Annotated[int, at_least(1)] = 8_192
    """Rows of the fixed table of signs; a power of 2."""

    def check(self) -> None:
        if self.sign_rows & (self.sign_rows - 1):
            raise ConfigError(f"--model.ngrams.sign-rows {self.sign_rows} is not a power of 2, as its hash needs")

    @property
    def tables(self) -> dict[int, int]:
        """Rows of the tables by the number of tokens that they look at."""
        return {n: rows for n, rows in ((2, self.bigram_rows), (3, self.trigram_rows)) if rows is not None}


@dataclass(frozen=True, kw_only=True)
class LossTerm(Limited, prefix="model.loss_terms: "):
    """A loss besides the next token's, by the name of its module in `model/loss_terms`."""

    name: str
    weight: float
    """Factor on its mean over tokens; a stage may scale it."""


MIX_WIDTH, MIX_SCALE = 64, 0.1
"""Hidden width of a mix's network, and the factor on what it gives."""
GATE_INPUTS, SMEAR_INPUTS = 6, 12
"""Numbers that a value gate reads of the layer's input and of a row, and the smear of an embedding."""
ACTIVATIONS = ("gelu", "gelu_tanh", "relu2", "swiglu")
"""Our own; a plug-in may bring others."""
MOST_LAYERS = 100_000
"""What is worked out layer by layer takes a second for so many."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Limited, prefix="--model."):
    """A GPT as a list of switches. Defaults are the plain choice."""

    vocab_size: Annotated[int, at_least(1)] = 50_257
    """Token ids that may occur."""
    embedding_multiple: Annotated[int, at_least(1)] = 1
    """Rows of token and value tables are padded to a multiple of this (128: 50,304 rows)."""
    lm_head_multiple: Annotated[int, at_least(1)] = 1
    """Rows of the output head are padded to a multiple of this; padding columns take part in the softmax."""
    width: Annotated[int, at_least(1)] = 768
    """Width of the residual stream."""
    num_layers: Annotated[int, at_least(1)] = 12
    """Blocks."""
    num_heads: Annotated[int, at_least(1)] = 6
    """Query heads."""
    num_kv_heads: Annotated[int | None, at_least(1)] = None
    """Key and value heads (grouped-query attention); None: as many as query heads."""
    head_dim: Annotated[int, at_least(1)] = 128
    """Width of one head."""
    mlp_ratio: Annotated[int, at_least(1)] = 4
    """Hidden width of the MLP over `width`; two thirds of that where the activation is gated, so that it has as many
    weights."""
    qkv: Literal["fused", "separate"] = "separate"
    """One matrix for queries, keys and values, or three. Muon treats the three parts alike either way."""
    qk_matrix_heads: Annotated[int | None, at_least(1)] = None
    """Muon treats the queries of this many heads as one matrix, and likewise the keys. None: those of all heads."""
    activation: str = "relu2"
    """Between the MLP's two matrices: gelu, gelu_tanh (GPT-2's approximation), relu2, swiglu (silu(gate x) · (up x), by
    a third matrix), or one of a plug-in."""
    biases: bool = False
    """A learned bias for every matrix inside blocks, and for every norm if that is `layer`."""
    norm: Literal["rms", "rms_weighted", "layer"] = "rms"
    """Norms on the residual stream: RMS norm without or with learned weights, or layer norm with them."""
    positions: Literal["rotary", "learned"] = "rotary"
    """Rotary, or a learned table of `rotary.max_tokens` rows that is added to the embedding."""
    dropout: Annotated[float, BELOW_1] = 0.0
    """Share of the numbers that training sets to 0, after the embedding and in what attention and MLP add to the
    stream. Which ones follows from seed, step and the token's place in the global batch."""
    zero_init_outputs: bool = False
    """Attention and MLP output matrices start at 0, so each block starts as the identity."""
    attention_output_starts: bool = False
    """With zero_init_outputs, attention's output matrix starts like any other; only that of the MLP starts at 0."""
    matrix_init: Literal["uniform", "gpt2", "half"] = "uniform"
    """Start of the matrices inside blocks: U(±1/sqrt(inputs)); N(0, 0.02) with output matrices at N(0, 0.02/sqrt(2
    layers)); or uniform with a standard deviation of 0.5/sqrt(width)."""
    residual_scales: bool = False
    """Each sub-layer makes r x + p y of the stream x and its output y, both learned, from r = sqrt(1.1) and p = 1. A
    layer without attention still scales the stream in its place."""
    attention_branch_scale: Annotated[float, FINITE] = 1.0
    """Factor on the attention branch (record 4: 1/sqrt(2 * layers))."""
    norm_eps: Annotated[float, EPS] = 2.0**-23
    """ε of the norms on the residual stream."""
    qk_norm: Literal["none", "before_rotary", "after_rotary"] = "none"
    """RMS norm of queries and keys."""
    qk_norm_eps: Annotated[float, EPS] = 2.0**-23
    """ε of that norm."""
    rotary: RotaryConfig = field(default_factory=RotaryConfig)
    tied_lm_head: bool = False
    """The head is the token table."""
    embedding_init: Literal["normal", "uniform", "gpt2", "small"] = "normal"
    """N(0, 1), or U(±1/sqrt(width)), the default of a linear layer, or N(0, 0.02), or N(0, 0.005)."""
    lm_head_init: Literal["zeros", "uniform", "gpt2"] = "uniform"
    """Start of an untied head. Zeros give a first loss of exactly ln(rows)."""
    embedding_norm: bool = False
    """RMS norm right after the embedding."""
    smear: bool = False
    """Add to each embedding the one before it, by a gate that reads its first 12 numbers, times a learned factor that
    starts at 0. Crosses documents."""
    ngrams: NgramConfig = field(default_factory=NgramConfig)
    x0_mix: bool = False
    """Each block first mixes its input with the embedding: x ← α x + β x0, learned, starting at (1, 0)."""
    unet_skips: bool = False
    """The second half adds the outputs of the first in reverse order, each with a learned weight starting at 1."""
    skip: tuple[int, int] | None = None
    """The second layer's input gets the first one's output times σ(λ), λ learned and starting at -1.5."""
    backout_layer: int | None = None
    """The output of this layer times a learned factor, starting at 0.5, is taken off the stream before the head."""
    value_path: Literal["plain", "residual", "layerwise", "mirrored", "sparse", "listed"] = "plain"
    """What is mixed into each layer's values: nothing; block 0's values; a table per layer; half as many tables used
    twice in mirrored order; `value_ends` tables for the first layers, used again in the same order by the last; or a
    table for each of `value_layers`."""
    value_layers: tuple[int, ...] = ()
    """Layers with a table of their own under the `listed` path. Negative: from the end."""
    value_gates: bool = False
    """v + g e instead of learned scalars: a gate for each head and token, 2 σ(W [x, e]) of the first 6 numbers of the
    layer's input and of the row; W starts at 0, hence g at 1."""
    value_init_std: Annotated[float, NOT_NEGATIVE] = 1.0
    """Value tables start at N(0, this)."""
    value_ends: int = 3
    """Tables of the `sparse` path."""
    value_lambdas: Literal[1, 2] = 2
    """1: (1 - λ) v + λ e. 2: λ0 v + λ1 e; layers without a table then still scale v by λ0. All start at 0.5."""
    value_storage: Literal["tables", "chunks"] = "tables"
    """One table per lookup, or all of them side by side in one wide matrix. The function is the same."""
    layers_without_attention: tuple[int, ...] = ()
    """Blocks that have no attention sub-layer, nor a value table of their own; their MLP, scalars and skips stay.
    Negative: from the end."""
    softcap: Annotated[float | None, SOFTCAP] = None
    """Logits become c * tanh((logits + softcap_shift) / c)."""
    softcap_shift: Annotated[float, FINITE] = 0.0
    """Of the cap: with a third of c, rare tokens' logits have room below, and likely ones are bent sooner."""
    candidates: Annotated[int | None, at_least(1)] = None
    """Sampled softmax: in training, compute logits of so many token ids a sequence, its targets among them; a stage may
    change the number. None: all ids."""
    document_mask: bool = False
    """Attention stays inside a document; end-of-text opens one."""
    window: WindowConfig = field(default_factory=WindowConfig)
    long_window: Hidden[WindowConfig | None] = None
    """A second window, counted in the same unit, for layers whose override says `long`."""
    layer_overrides: Hidden[tuple[LayerOverride, ...]] = ()
    """Layers that differ from the others; set by a preset or a config file."""
    mixes: Hidden[tuple[MixConfig, ...]] = ()
    """Places where earlier streams are added; set by a preset or a config file."""
    loss_terms: Hidden[tuple[LossTerm, ...]] = ()
    """Further losses, each added with its weight in training; validation leaves them out."""
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)

    def check(self) -> None:
        if self.num_layers > MOST_LAYERS:
            raise ConfigError(f"--model.num-layers {self.num_layers:,} exceeds {MOST_LAYERS:,}, far beyond any model")
        if self.head_dim % 2:
            raise ConfigError(f"--model.head-dim {self.head_dim} is odd, but rotary turns pairs; use an even width")
        if (joined := self.num_heads * self.head_dim) != self.width:
            product = f"--model.num-heads {self.num_heads} x --model.head-dim {self.head_dim} = {joined}"
            raise ConfigError(f"{product} is not --model.width {self.width}; heads must divide the width")
        if self.softcap_shift and self.softcap is None:
            raise ConfigError(f"--model.softcap-shift {self.softcap_shift} needs --model.softcap")
        self._check_values()
        self._check_layers()
        if self.candidates is not None and self.candidates > self.lm_head_rows:
            head = f"the {self.lm_head_rows:,} rows of the head"
            raise ConfigError(f"--model.candidates {self.candidates:,} exceeds {head}; None computes all logits")
        if self.tied_lm_head and (rows := self.embedding_rows) != self.lm_head_rows:
            both = f"--model.embedding-multiple gives {rows} and --model.lm-head-multiple {self.lm_head_rows}"
            raise ConfigError(f"--model.tied-lm-head needs equal rows, but {both}")

    def _check_values(self) -> None:
        heads, layers = self.num_heads, self.num_layers
        if self.qk_matrix_heads is not None and self.kv_heads % self.qk_matrix_heads:
            count = f"does not divide the {self.kv_heads} heads of the keys; use a divisor of it"
            raise ConfigError(f"--model.qk-matrix-heads {self.qk_matrix_heads} {count}")
        if heads % self.kv_heads:
            raise ConfigError(f"--model.num-kv-heads {self.kv_heads} does not divide --model.num-heads {heads}")
        if self.value_path == "mirrored" and layers % 2:
            raise ConfigError(f"--model.value-path mirrored uses tables twice, but --model.num-layers {layers} is odd")
        if self.value_path == "sparse" and not 0 < (needed := 2 * self.value_ends) <= layers:
            ends = f"--model.value-ends {self.value_ends} needs {needed} layers"
            raise ConfigError(f"{ends}, --model.num-layers has {layers}; use between 1 and {layers // 2}")
        if (self.value_path == "listed") != bool(self.value_layers):
            raise ConfigError(
                f"--model.value-layers {self.value_layers}: list layers with --model.value-path listed only"
            )
        if self.value_gates and self.value_path in ("plain", "residual"):
            raise ConfigError(f"--model.value-gates needs tables, which --model.value-path {self.value_path} has not")
        if self.value_path == "residual" and self.layers[0].attention is None:
            raise ConfigError("--model.value-path residual takes block 0's values, but block 0 has no attention")

    def _check_layers(self) -> None:
        named = [("layers-without-attention", layer) for layer in self.layers_without_attention]
        named += [("value-layers", layer) for layer in self.value_layers] + [("skip", n) for n in self.skip or ()]
        named += [("backout-layer", layer) for layer in (self.backout_layer,) if layer is not None]
        named += [("layer-overrides", layer) for change in self.layer_overrides for layer in change.layers]
        for flag, layer in named:
            if not -self.num_layers <= layer < self.num_layers:
                raise ConfigError(f"--model.{flag} {layer} does not exist; --model.num-layers is {self.num_layers}")
        if self.unet_skips and self.num_layers % 2:
            raise ConfigError(f"--model.unet-skips pairs layers, but --model.num-layers {self.num_layers} is odd")
        if self.long_window is not None and self.long_window.unit != self.window.unit:
            units = f"--model.long-window.unit {self.long_window.unit} is not --model.window.unit {self.window.unit}"
            raise ConfigError(f"{units}; count both windows in one unit")
        if self.long_window is not None and self.window.unit == "none":
            raise ConfigError("--model.long-window is set, but --model.window.unit is none: there are no windows")
        if self.skip is not None and (self.unet_skips or not 0 <= self.skip[0] < self.skip[1]):
            raise ConfigError(
                f"--model.skip {self.skip} must lead from a layer to a later one, without --model.unet-skips"
            )
        if self.smear and self.width < SMEAR_INPUTS:
            raise ConfigError(
                f"--model.smear reads {SMEAR_INPUTS} numbers of an embedding; --model.width is {self.width}"
            )
        for mix in self.mixes:
            if not 0 < mix.before <= self.num_layers or not all(-1 <= layer < mix.before for layer in mix.sources):
                raise ConfigError(
                    f"model.mixes: before {mix.before} with sources {mix.sources}: sources are earlier layers, or -1"
                )
            if len(mix.starts) != len(mix.sources) or not all(map(math.isfinite, mix.starts)):
                raise ConfigError(f"model.mixes: starts {mix.starts} are not a finite number for each of {mix.sources}")
        if len({mix.before for mix in self.mixes}) < len(self.mixes):
            raise ConfigError("model.mixes: two stand before the same layer; make them one")
        for each in self.layers:
            self._check_layer(each)

    def _check_layer(self, layer: LayerConfig) -> None:
        where, shape = f"--model.layer-overrides of layer {layer.index}", layer.attention
        if layer.ngram_gate and not self.ngrams.tables:
            raise ConfigError(f"{where}: ngram_gate, but --model.ngrams.bigram-rows and trigram-rows are not set")
        if layer.mlp_width < 0:
            raise ConfigError(f"{where}: mlp_width {layer.mlp_width} is negative; 0 leaves the MLP out")
        if shape is None:
            return
        if shape.qk_dim < 2 or shape.qk_dim % 2 or shape.v_dim < 1:
            raise ConfigError(f"{where}: qk_dim {shape.qk_dim} must be even and v_dim {shape.v_dim} positive")
        if shape.attends_to is not None and not 0 <= shape.attends_to < layer.index:
            raise ConfigError(f"{where}: attends_to {shape.attends_to} is not an earlier layer")
        if shape.key_offset and not 0 < self.rotary.pairs(shape.qk_dim) < shape.qk_dim // 2:
            raise ConfigError(f"{where}: key_offset needs pairs at rest; lower --model.rotary.rotary-fraction")
        if not -math.inf < shape.scale < math.inf:
            raise ConfigError(f"{where}: score_scale {shape.scale} is not a finite number")
        if shape.window == "long" and self.long_window is None:
            raise ConfigError(f"{where}: window long, but --model.long-window is not set")
        table = shape.value_table
        if table is not None and self.value_table_widths[table] != shape.v_width:
            other = f"which another layer uses with rows of {self.value_table_widths[table]}"
            raise ConfigError(f"{where}: v_dim {shape.v_dim} does not fit value table {table}, {other}")
        if self.value_path == "residual" and shape.v_dim != self.head_dim:
            raise ConfigError(f"{where}: v_dim {shape.v_dim}, but --model.value-path residual reuses block 0's values")

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads if self.num_kv_heads is not None else self.num_heads

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate beside its matrix up."""
        return self.activation == "swiglu"

    @property
    def mlp_width(self) -> int:
        """Hidden width of the MLP, if no override says otherwise."""
        plain = self.mlp_ratio * self.width
        return round_up(-(-2 * plain // 3), 8) if self.gated else plain

    @property
    def embedding_rows(self) -> int:
        return round_up(self.vocab_size, self.embedding_multiple)

    @property
    def lm_head_rows(self) -> int:
        return round_up(self.vocab_size, self.lm_head_multiple)

    @cached_property
    def layers(self) -> tuple[LayerConfig, ...]:
        """The model as a tuple of layers: the uniform fields, the rule of the value path, then the overrides."""
        without = {layer % self.num_layers for layer in self.layers_without_attention}
        tables = enumerate(self._value_pattern())
        return tuple(self._layer(index, table, attends=index not in without) for index, table in tables)

    def _layer(self, index: int, value_table: int | None, *, attends: bool) -> LayerConfig:
        stated: dict[str, Any] = {"num_heads": self.num_heads, "kv_heads": self.kv_heads, "mlp_width": self.mlp_width}
        stated |= {"qk_dim": self.head_dim, "v_dim": self.head_dim, "scale": self.head_dim**-0.5, "window": "short"}
        stated |= {"index": index, "value_table": value_table, "attention": attends}
        for change in self.layer_overrides:
            if index in {layer % self.num_layers for layer in change.layers}:
                changed = {name: value for name, value in vars(change).items() if value is not None}
                scale = (
                    max(1, changed["qk_dim"]) ** -0.5 if "qk_dim" in changed else stated["scale"]
                )  # 0: refused later
                stated |= changed | {"scale": changed.get("score_scale", scale)}
        stated["attention"] = AttentionLayer(**_own(AttentionLayer, stated)) if stated["attention"] else None
        return LayerConfig(**_own(LayerConfig, stated))

    @cached_property
    def layer_kinds(self) -> list[tuple[LayerConfig, int]]:
        """Layers that differ in more than their place: the first of each kind, and how many there are."""
        kinds = Counter(replace(layer, index=0) for layer in self.layers)
        first = {replace(layer, index=0): layer for layer in reversed(self.layers)}
        return [(first[kind], count) for kind, count in kinds.items()]

    @cached_property
    def read_later(self) -> frozenset[int]:
        """Layers whose output is read again: by a skip, by another layer's attention, before the head."""
        read = {shape.attends_to for shape in self.attending} | {self.backout_layer, self.skip and self.skip[0]}
        read |= {layer for mix in self.mixes for layer in mix.sources}
        return frozenset(layer for layer in read if layer is not None)

    @property
    def looks_at_previous(self) -> bool:
        """Whether something besides attention reads the tokens before a token."""
        return self.smear or bool(self.ngrams.tables) or any(shape.key_offset for shape in self.attending)

    @cached_property
    def attending(self) -> tuple[AttentionLayer, ...]:
        """Of the layers that have it."""
        return tuple(layer.attention for layer in self.layers if layer.attention is not None)

    def _value_pattern(self) -> tuple[int | None, ...]:
        """The tables of the value path by layer, as if all layers had attention."""
        layers, ends = range(self.num_layers), range(self.value_ends)
        match self.value_path:
            case "layerwise":
                return tuple(layers)
            case "mirrored":
                return tuple(map(min, layers, reversed(layers)))
            case "sparse":
                return (*ends, *[None] * (len(layers) - 2 * len(ends)), *ends)
            case "listed":
                tables = iter(range(self.num_layers))
                listed = {layer % self.num_layers for layer in self.value_layers}
                return tuple(next(tables) if layer in listed else None for layer in layers)
        return (None,) * len(layers)

    @cached_property
    def value_table_widths(self) -> dict[int, int]:
        """The tables that some layer looks up, ascending, with the width of their rows. One that no layer asks for does
        not exist, and the others keep their numbers, hence their names and their start."""
        widths = {shape.value_table: shape.v_width for shape in reversed(self.attending)}
        return {table: widths[table] for table in sorted(table for table in widths if table is not None)}

    @property
    def windows(self) -> dict[WindowKind, WindowConfig]:
        """The window of each kind; none without windows."""
        found: dict[WindowKind, WindowConfig] = {} if self.window.unit == "none" else {"short": self.window}
        if found and self.long_window is not None:
            found["long"] = self.long_window
        return found
