"""The architecture of a model trained with paceline, as transformers reads it from config.json.

This file travels with an exported model, so it needs transformers only. Maps over layers are written out, one entry
per layer, so that the model need not know by which rule they were made.
"""

from typing import Any

from transformers import PretrainedConfig


class PacelineConfig(PretrainedConfig):
    """An attribute for each entry of config.json, which holds them all, so that there is no other default.

    vocab_size: columns of the logits, those included that only pad the head. attention_layers: whether each layer has
    attention. value_tables: the table that each layer mixes into its values, or None. value_lambdas: scalars of that
    mix, 0 without one. qk_dims, v_dims: width of a head in each layer. mlp_widths: 0 where a layer has no MLP.
    learned_positions: rows of the table of positions, 0 without one. window_tokens: each layer's window at the step
    that was exported. compute_dtype: format of products on a GPU; a CPU computes in float32. scalar_dtype: of the
    learned scalars in training."""

    model_type = "paceline"
    keys_to_ignore_at_inference = ("past_key_values",)

    def __init__(self, *, use_cache: bool = True, **entries: Any) -> None:
        super().__init__(**{"tie_word_embeddings": False, **entries})  # a tied head is no second parameter here
        self.use_cache = use_cache  # after what the base class takes from entries of that name
