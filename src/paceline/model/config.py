"""Every switch of the architecture and of its numerics. No torch.

A technique that is off is absent: it adds no parameter, no buffer and no operation. Sizes derived from these fields
are properties here, so that the model, the planner and the parameter count use one formula.
"""

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from paceline.core.errors import ConfigError
from paceline.core.units import BLOCK_TOKENS, round_up

DType = Literal["fp32", "bf16"]


@dataclass(frozen=True, kw_only=True)
class RotaryConfig:
    """Rotary positions: dimension j of a head turns with dimension j + head_dim/2."""

    base: float = 10_000.0
    """Slowest frequency is about 1/base."""
    turning_share: float = 1.0
    """Share of the pairs that turn; the rest are free of position (truncated rotary: 0.5). Only those are rotated."""
    spacing: Literal["open", "closed"] = "open"
    """Exponents of the n turning pairs: j/n (open: never quite 1/base) or j/(n-1) (closed: ends at 1/base)."""
    frequency_dtype: DType = "fp32"
    """Rounding of the frequencies before the angles are formed. The angle itself is always fp32."""
    table_dtype: DType = "fp32"
    """Storage of the cosine and sine tables, which all layers share."""
    arithmetic: Literal["fp32", "activation"] = "fp32"
    """Precision of the rotation: fp32, or the dtype of the queries, which the result has either way."""
    max_tokens: int = 65_536
    """Positions for which the table is computed; shorter sequences take its first rows."""

    def __post_init__(self) -> None:
        if not 0.0 < self.turning_share <= 1.0:
            raise ConfigError(
                f"--model.rotary.turning-share {self.turning_share} is outside (0, 1]; 1 turns every pair"
            )
        if not 1.0 < self.base < math.inf:
            raise ConfigError(f"--model.rotary.base {self.base} must exceed 1; the records use 10000 and 1024")
        if self.max_tokens < 1:
            raise ConfigError(f"--model.rotary.max-tokens {self.max_tokens} must be positive")


@dataclass(frozen=True, kw_only=True)
class WindowConfig:
    """The sliding window and its growth: quantum * floor((start + growth * step/steps) / quantum) tokens."""

    unit: Literal["none", "tokens", "tokens_in_blocks", "blocks"] = "none"
    """`tokens`: q - k < W. `blocks`: the key's block is fewer than W/128 blocks back, so the visible span depends on
    the offset in the block. `tokens_in_blocks`: both at once (record 15's hand-built list). `none`: no window."""
    start_tokens: int = 128
    """Window at step 0."""
    growth_tokens: int = 1_728
    """How much it has grown at the last step."""
    quantum_tokens: int = 128
    """The window changes in steps of this many tokens."""

    def __post_init__(self) -> None:
        quantum = BLOCK_TOKENS if self.unit == "blocks" else 1
        if self.quantum_tokens < 1 or self.quantum_tokens % quantum:
            raise ConfigError(
                f"--model.window.quantum-tokens {self.quantum_tokens} must be a multiple of {quantum} for windows "
                f"counted in {self.unit}"
            )
        if self.start_tokens < self.quantum_tokens or self.start_tokens + self.growth_tokens < self.quantum_tokens:
            raise ConfigError(
                f"--model.window.start-tokens {self.start_tokens} with --model.window.growth-tokens "
                f"{self.growth_tokens} shrinks below one quantum of {self.quantum_tokens} tokens, so nothing would be "
                f"seen; start at {self.quantum_tokens} or more"
            )

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

    def computing_in(self, compute: DType) -> "PrecisionConfig":
        """The same storage, with products in another format."""
        return replace(self, compute=compute)


MOST_LAYERS = 100_000
"""What is worked out layer by layer takes a second for so many."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A GPT as a list of switches. Defaults are the plain choice."""

    vocab_size: int = 50_257
    """Token ids that may occur."""
    embedding_multiple: int = 1
    """Rows of token and value tables are padded to a multiple of this (128: 50,304 rows)."""
    head_multiple: int = 1
    """Rows of the output head are padded to a multiple of this; padding columns take part in the softmax."""
    width: int = 768
    """Width of the residual stream."""
    num_layers: int = 12
    """Blocks."""
    num_heads: int = 6
    """Query heads."""
    num_kv_heads: int | None = None
    """Key and value heads (grouped-query attention); None: as many as query heads."""
    head_dim: int = 128
    """Width of one head."""
    mlp_ratio: int = 4
    """Hidden width of the MLP over `width`."""
    qkv: Literal["fused", "separate"] = "separate"
    """One matrix for queries, keys and values, or three. Muon treats the three parts alike either way."""
    activation: Literal["gelu", "relu2"] = "relu2"
    """Between the MLP's two matrices."""
    zero_init_outputs: bool = False
    """Attention and MLP output matrices start at 0, so each block starts as the identity."""
    attention_branch_scale: float = 1.0
    """Factor on the attention branch (record 4: 1/sqrt(2 * layers))."""
    norm_eps: float = 2.0**-23
    """ε of the RMS norms on the residual stream."""
    qk_norm: Literal["none", "before_rotary", "after_rotary"] = "none"
    """RMS norm of queries and keys."""
    qk_norm_eps: float = 2.0**-23
    """ε of that norm."""
    rotary: RotaryConfig = field(default_factory=RotaryConfig)
    tied_head: bool = False
    """The head is the token table."""
    embedding_init: Literal["normal", "uniform"] = "normal"
    """N(0, 1), or U(±1/sqrt(width)), the default of a linear layer."""
    head_init: Literal["zeros", "uniform"] = "uniform"
    """Start of an untied head. Zeros give a first loss of exactly ln(rows)."""
    embedding_norm: bool = False
    """RMS norm right after the embedding."""
    x0_mix: bool = False
    """Each block first mixes its input with the embedding: x ← α x + β x0, learned, starting at (1, 0)."""
    unet_skips: bool = False
    """The second half adds the outputs of the first in reverse order, each with a learned weight starting at 1."""
    value_path: Literal["plain", "residual", "layerwise", "mirrored", "sparse"] = "plain"
    """What is mixed into each layer's values: nothing; block 0's values; a table per layer; half as many tables used
    twice in mirrored order; or `value_ends` tables for the first layers, used again in the same order by the last."""
    value_ends: int = 3
    """Tables of the `sparse` path."""
    value_lambdas: Literal[1, 2] = 2
    """1: (1 - λ) v + λ e. 2: λ0 v + λ1 e; layers without a table then still scale v by λ0. All start at 0.5."""
    value_storage: Literal["tables", "chunks"] = "tables"
    """One table per lookup, or all of them side by side in one wide matrix. The function is the same."""
    layers_without_attention: tuple[int, ...] = ()
    """Blocks that have no attention sub-layer, nor a value table of their own; their MLP, scalars and skips stay.
    Negative: from the end."""
    softcap: float | None = None
    """Logits become c * tanh(logits / c)."""
    document_mask: bool = False
    """Attention stays inside a document; end-of-text opens one."""
    window: WindowConfig = field(default_factory=WindowConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "embedding_multiple",
            "head_multiple",
            "width",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "mlp_ratio",
        ):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"--model.{name.replace('_', '-')} {value} must be at least 1")
        if self.num_layers > MOST_LAYERS:
            raise ConfigError(f"--model.num-layers {self.num_layers:,} exceeds {MOST_LAYERS:,}, far beyond any model")
        for name in ("norm_eps", "qk_norm_eps"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ConfigError(
                    f"--model.{name.replace('_', '-')} {getattr(self, name)} must be a finite number, 0 or more"
                )
        if not math.isfinite(self.attention_branch_scale):
            raise ConfigError(f"--model.attention-branch-scale {self.attention_branch_scale} must be a finite number")
        if self.head_dim % 2:
            raise ConfigError(f"--model.head-dim {self.head_dim} is odd, but rotary turns pairs; use an even width")
        if self.num_heads * self.head_dim != self.width:
            raise ConfigError(
                f"--model.num-heads {self.num_heads} x --model.head-dim {self.head_dim} = "
                f"{self.num_heads * self.head_dim} is not --model.width {self.width}; heads must divide the width"
            )
        self._check_values()
        self._check_layers()
        if self.softcap is not None and not 0 < self.softcap < math.inf:
            raise ConfigError(f"--model.softcap {self.softcap} must be positive and finite; use None for no cap")
        if self.tied_head and self.embedding_rows != self.head_rows:
            raise ConfigError(
                f"--model.tied-head needs equal rows, but --model.embedding-multiple gives {self.embedding_rows} and "
                f"--model.head-multiple {self.head_rows}; set both multiples alike"
            )

    def _check_values(self) -> None:
        if self.num_heads % self.kv_heads:
            raise ConfigError(
                f"--model.num-kv-heads {self.kv_heads} does not divide --model.num-heads {self.num_heads}, so query "
                f"heads could not be grouped over them"
            )
        if self.value_path == "mirrored" and self.num_layers % 2:
            raise ConfigError(
                f"--model.value-path mirrored uses each table twice, but --model.num-layers {self.num_layers} is odd; "
                f"use an even depth or --model.value-path layerwise"
            )
        if self.value_path == "sparse" and not 0 < 2 * self.value_ends <= self.num_layers:
            raise ConfigError(
                f"--model.value-ends {self.value_ends} needs {2 * self.value_ends} layers, --model.num-layers has "
                f"{self.num_layers}; use between 1 and {self.num_layers // 2}"
            )
        if self.value_path == "residual" and 0 in self.attentionless:
            raise ConfigError(
                "--model.value-path residual takes block 0's values, but --model.layers-without-attention drops block 0"
            )

    def _check_layers(self) -> None:
        for layer in self.layers_without_attention:
            if not -self.num_layers <= layer < self.num_layers:
                raise ConfigError(
                    f"--model.layers-without-attention {layer} does not exist; --model.num-layers is {self.num_layers}"
                )
        if self.unet_skips and self.num_layers % 2:
            raise ConfigError(
                f"--model.unet-skips pairs each layer of the first half with one of the second, but --model.num-layers "
                f"{self.num_layers} is odd, so a skip would start from a layer that does not exist"
            )

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads if self.num_kv_heads is not None else self.num_heads

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def mlp_width(self) -> int:
        return self.mlp_ratio * self.width

    @property
    def embedding_rows(self) -> int:
        return round_up(self.vocab_size, self.embedding_multiple)

    @property
    def head_rows(self) -> int:
        return round_up(self.vocab_size, self.head_multiple)

    @cached_property
    def attentionless(self) -> frozenset[int]:
        """Indices of the blocks without attention, counted from the start."""
        return frozenset(layer % self.num_layers for layer in self.layers_without_attention)

    @cached_property
    def value_table_of_layer(self) -> tuple[int | None, ...]:
        """For each layer the value table that it looks up, or None. Without attention there are no values to mix with,
        so such a layer has none."""
        return tuple(
            None if layer in self.attentionless else table for layer, table in enumerate(self._value_pattern())
        )

    def _value_pattern(self) -> tuple[int | None, ...]:
        """The tables of the value path by layer, as if all layers had attention."""
        layers = self.num_layers
        if self.value_path == "layerwise":
            return tuple(range(layers))
        if self.value_path == "mirrored":
            return tuple(min(layer, layers - 1 - layer) for layer in range(layers))
        if self.value_path == "sparse":
            ends = tuple(range(self.value_ends))
            return (*ends, *(None for _ in range(layers - 2 * self.value_ends)), *ends)
        return (None,) * layers

    @cached_property
    def value_tables(self) -> tuple[int, ...]:
        """The tables that some layer looks up, ascending. One that no layer asks for does not exist, and the others
        keep their numbers, hence their names and their start."""
        return tuple(sorted({table for table in self.value_table_of_layer if table is not None}))

    @property
    def num_value_tables(self) -> int:
        return len(self.value_tables)
