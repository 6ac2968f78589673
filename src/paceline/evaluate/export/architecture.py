"""Our switches and weights as the exported model has them (`configuration_paceline.py`, `modeling_paceline.py`).

Ways of storing that compute the same come out as one: fused projections are split into three, value tables that lie
side by side into one each. Numbers stay as they were stored. No transformers: writing an export needs none of it.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from paceline.core.units import BLOCK_TOKENS
from paceline.model.config import DType, ModelConfig
from paceline.model.rotary import turning_pairs

DTYPES: dict[DType, str] = {"fp32": "float32", "bf16": "bfloat16"}
"""Formats as transformers spells them."""

ARCHITECTURE = "PacelineForCausalLM"


def hf_config(model: ModelConfig, *, sequence_tokens: int, window: int, end_of_text: int) -> dict[str, Any]:
    """config.json. Weights are loaded in float32, which holds every number of a checkpoint. `sequence_tokens`: of
    training, which other programs take as the most to give the model at once, as `paceline evaluate` does."""
    attention = [layer not in model.attentionless for layer in range(model.num_layers)]
    return {
        "model_type": "paceline",
        "architectures": [ARCHITECTURE],
        "auto_map": {
            "AutoConfig": "configuration_paceline.PacelineConfig",
            "AutoModelForCausalLM": f"modeling_paceline.{ARCHITECTURE}",
        },
        "dtype": "float32",
        **special_tokens(end_of_text),
        "vocab_size": model.head_rows,
        "embedding_rows": model.embedding_rows,
        "hidden_size": model.width,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.mlp_width,
        "activation": model.activation,
        "attention_branch_scale": model.attention_branch_scale,
        "norm_eps": model.norm_eps,
        "qk_norm": model.qk_norm,
        "qk_norm_eps": model.qk_norm_eps,
        "rotary_base": model.rotary.base,
        "rotary_pairs": turning_pairs(model.rotary, model.head_dim),
        "rotary_spacing": model.rotary.spacing,
        "rotary_frequency_dtype": DTYPES[model.rotary.frequency_dtype],
        "rotary_table_dtype": DTYPES[model.rotary.table_dtype],
        "rotary_in_fp32": model.rotary.arithmetic == "fp32",
        "max_position_embeddings": sequence_tokens,
        "tied_head": model.tied_head,
        "embedding_norm": model.embedding_norm,
        "x0_mix": model.x0_mix,
        "unet_skips": model.unet_skips,
        "attention_layers": attention,
        "value_tables": list(model.value_table_of_layer),
        "value_residual": model.value_path == "residual",
        "value_lambdas": 0 if model.value_path == "plain" else model.value_lambdas,
        "softcap": model.softcap,
        "document_mask": model.document_mask,
        "end_of_text": end_of_text,
        "window_unit": model.window.unit,
        "window_tokens": window,
        "block_tokens": BLOCK_TOKENS,
        "compute_dtype": DTYPES[model.precision.compute],
        "stream_in_fp32": model.precision.mode == "autocast",
        "scalar_dtype": DTYPES[model.precision.scalars],
    }


def generation_config(model: ModelConfig, *, end_of_text: int) -> dict[str, Any]:
    """generation_config.json. Rows that only pad the head stay in the logits, because training's softmax has them,
    and are never drawn."""
    padding = list(range(model.vocab_size, model.head_rows))
    return {**special_tokens(end_of_text), **({"suppress_tokens": padding} if padding else {})}


def special_tokens(end_of_text: int) -> dict[str, int]:
    """One token opens a document, ends one and, where a mask says so, fills."""
    return {f"{role}_token_id": end_of_text for role in ("bos", "eos", "pad")}


def hf_weights(model: ModelConfig, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of model.safetensors by their names there."""
    found: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        found |= _exported(model, name, tensor)
    return found


def _exported(model: ModelConfig, name: str, tensor: Tensor) -> dict[str, Tensor]:
    if name == "embeddings.value_chunks":
        tables = tensor.split(model.kv_width, dim=1)
        return {_value_table(n): table.contiguous() for n, table in zip(model.value_tables, tables, strict=True)}
    if name.startswith("embeddings.values."):
        return {_value_table(int(name.rpartition(".")[2])): tensor}
    if name.endswith(".attention.qkv"):
        parts = tensor.split([model.width, model.kv_width, model.kv_width])
        stem = _in_layers(name).removesuffix("qkv")
        return {
            f"{stem}{part}.weight": rows.contiguous()
            for part, rows in zip(("query", "key", "value"), parts, strict=True)
        }
    if tensor.dim() == 1:
        return {_in_layers(name): tensor}
    renamed = {"embeddings.token": "embed_tokens", "head": "lm_head"}.get(name, _in_layers(name))
    return {f"{renamed}.weight": tensor}


def _value_table(number: int) -> str:
    return f"value_embeddings.{number}.weight"


def _in_layers(name: str) -> str:
    return name.replace("blocks.", "layers.", 1)
