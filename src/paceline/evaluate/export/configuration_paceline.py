"""The architecture of a model trained with paceline, as transformers reads it from config.json.

This file travels with an exported model, so it needs transformers only. Maps over layers are written out, one entry
per layer, so that the model need not know by which rule they were made.
"""

from typing import Any

from transformers import PretrainedConfig


class PacelineConfig(PretrainedConfig):
    model_type = "paceline"
    keys_to_ignore_at_inference = ("past_key_values",)

    def __init__(
        self,
        *,
        vocab_size: int = 50_304,
        embedding_rows: int = 50_304,
        hidden_size: int = 768,
        num_hidden_layers: int = 12,
        num_attention_heads: int = 6,
        num_key_value_heads: int = 6,
        head_dim: int = 128,
        intermediate_size: int = 3_072,
        activation: str = "relu2",
        attention_branch_scale: float = 1.0,
        norm_eps: float = 2.0**-23,
        qk_norm: str = "none",
        qk_norm_eps: float = 2.0**-23,
        rotary_base: float = 10_000.0,
        rotary_pairs: int = 64,
        rotary_spacing: str = "open",
        rotary_frequency_dtype: str = "float32",
        rotary_table_dtype: str = "float32",
        rotary_in_fp32: bool = True,
        max_position_embeddings: int = 65_536,
        tied_head: bool = False,
        embedding_norm: bool = False,
        x0_mix: bool = False,
        unet_skips: bool = False,
        attention_layers: list[bool] | None = None,
        value_tables: list[int | None] | None = None,
        value_residual: bool = False,
        value_lambdas: int = 0,
        softcap: float | None = None,
        document_mask: bool = False,
        end_of_text: int = 50_256,
        window_unit: str = "none",
        window_tokens: int = 0,
        block_tokens: int = 128,
        compute_dtype: str = "float32",
        stream_in_fp32: bool = False,
        scalar_dtype: str = "float32",
        use_cache: bool = True,
        **general: Any,
    ) -> None:
        """vocab_size: columns of the logits, those included that only pad the head. attention_layers: whether each
        layer has attention. value_tables: the table that each layer mixes into its values, or None. value_lambdas:
        scalars of that mix, 0 without one. window_tokens: the window of the step that was exported. compute_dtype:
        format of products on a GPU; a CPU computes in float32. scalar_dtype: of the learned scalars in training."""
        self.vocab_size = vocab_size
        self.embedding_rows = embedding_rows
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim
        self.intermediate_size = intermediate_size
        self.activation = activation
        self.attention_branch_scale = attention_branch_scale
        self.norm_eps = norm_eps
        self.qk_norm = qk_norm
        self.qk_norm_eps = qk_norm_eps
        self.rotary_base = rotary_base
        self.rotary_pairs = rotary_pairs
        self.rotary_spacing = rotary_spacing
        self.rotary_frequency_dtype = rotary_frequency_dtype
        self.rotary_table_dtype = rotary_table_dtype
        self.rotary_in_fp32 = rotary_in_fp32
        self.max_position_embeddings = max_position_embeddings
        self.tied_head = tied_head
        self.embedding_norm = embedding_norm
        self.x0_mix = x0_mix
        self.unet_skips = unet_skips
        self.attention_layers = attention_layers or [True] * num_hidden_layers
        self.value_tables = value_tables or [None] * num_hidden_layers
        self.value_residual = value_residual
        self.value_lambdas = value_lambdas
        self.softcap = softcap
        self.document_mask = document_mask
        self.end_of_text = end_of_text
        self.window_unit = window_unit
        self.window_tokens = window_tokens
        self.block_tokens = block_tokens
        self.compute_dtype = compute_dtype
        self.stream_in_fp32 = stream_in_fp32
        self.scalar_dtype = scalar_dtype
        self.use_cache = use_cache
        general.setdefault("tie_word_embeddings", False)  # a tied head is no second parameter here
        super().__init__(**general)
