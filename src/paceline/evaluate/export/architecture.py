"""Our switches and weights as the exported model has them (`configuration_paceline.py`, `modeling_paceline.py`).

Ways of storing that compute the same come out as one: fused projections are split into three, value tables that lie
side by side into one each. Numbers stay as they were stored. No transformers: writing an export needs none of it.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from paceline.core.units import BLOCK_TOKENS
from paceline.model.masks import Windows
from paceline.model.previous import drawn_signs
from paceline.settings.model import GATE_INPUTS, MIX_WIDTH, DType, ModelConfig
from paceline.text.tokenizer import END_OF_TEXT

DTYPES: dict[DType, str] = {"fp32": "float32", "bf16": "bfloat16"}
"""Formats as transformers spells them."""

ARCHITECTURE = "PacelineForCausalLM"
SAME_NAMES = (
    "activation", "attention_branch_scale", "backout_layer", "biases", "document_mask", "embedding_norm",
    "embedding_rows", "head_dim", "norm", "norm_eps", "qk_norm", "qk_norm_eps", "residual_scales", "skip", "softcap",
    "smear", "softcap_shift", "tied_lm_head", "unet_skips", "x0_mix",
)  # fmt: skip
"""What config.json calls as `ModelConfig` does."""


def hf_config(model: ModelConfig, *, sequence_tokens: int, windows: Windows, end_of_text: int) -> dict[str, Any]:
    """config.json. Weights are loaded in float32, which holds every number of a checkpoint. `sequence_tokens`: of
    training, which other programs take as the most to give the model at once, as `paceline evaluate` does. What may
    differ by layer is a list with an entry for each, 0 where a layer has no such thing."""
    by_kind = dict(zip(model.windows, windows, strict=True))
    shapes, turns = [layer.attention for layer in model.layers], model.positions == "rotary"
    return {
        "model_type": "paceline",
        "architectures": [ARCHITECTURE],
        "auto_map": {
            "AutoConfig": "configuration_paceline.PacelineConfig",
            "AutoModelForCausalLM": f"modeling_paceline.{ARCHITECTURE}",
        },
        "dtype": "float32",
        **special_tokens(end_of_text),
        "prefix": END_OF_TEXT,
        **{name: getattr(model, name) for name in SAME_NAMES},
        "vocab_size": model.lm_head_rows,
        "hidden_size": model.width,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.kv_heads,
        "qk_dims": [0 if s is None else s.qk_dim for s in shapes],
        "v_dims": [0 if s is None else s.v_dim for s in shapes],
        "score_scales": [0 if s is None else s.scale for s in shapes],
        "attends_to": [None if s is None else s.attends_to for s in shapes],
        "x0_gates": [layer.x0_gate for layer in model.layers],
        "ngram_gates": [layer.ngram_gate for layer in model.layers],
        "ngram_rows": {str(n): rows for n, rows in model.ngrams.tables.items()},
        "sign_rows": model.ngrams.sign_rows,
        "key_offsets": [s is not None and s.key_offset for s in shapes],
        "mixes": {str(mix.before): mix.sources for mix in model.mixes},
        "mix_width": MIX_WIDTH,
        "intermediate_size": model.mlp_width,
        "mlp_widths": [layer.mlp_width for layer in model.layers],
        "learned_positions": 0 if turns else model.rotary.max_tokens,
        "rotary_base": model.rotary.base,
        "rotary_pairs": [0 if s is None or not turns else model.rotary.pairs(s.qk_dim) for s in shapes],
        "rotary_spacing": model.rotary.spacing,
        "rotary_frequency_dtype": DTYPES[model.rotary.frequency_dtype],
        "rotary_table_dtype": DTYPES[model.rotary.table_dtype],
        "rotary_in_fp32": model.rotary.arithmetic == "fp32",
        "max_position_embeddings": sequence_tokens,
        "attention_layers": [s is not None for s in shapes],
        "value_tables": [None if s is None else s.value_table for s in shapes],
        "value_residual": model.value_path == "residual",
        "value_gates": GATE_INPUTS if model.value_gates else 0,
        "value_lambdas": 0 if model.value_path == "plain" or model.value_gates else model.value_lambdas,
        "end_of_text": end_of_text,
        "window_unit": model.window.unit,
        "window_tokens": [0 if s is None else by_kind.get(s.window, 0) for s in shapes],
        "block_tokens": BLOCK_TOKENS,
        "compute_dtype": DTYPES[model.precision.compute],
        "stream_in_fp32": model.precision.mode == "autocast",
        "scalar_dtype": DTYPES[model.precision.scalars],
    }


def generation_config(model: ModelConfig, *, end_of_text: int) -> dict[str, Any]:
    """generation_config.json. Rows that only pad the head stay in the logits, because training's softmax has them,
    and are never drawn."""
    padding = list(range(model.vocab_size, model.lm_head_rows))
    return {**special_tokens(end_of_text), **({"suppress_tokens": padding} if padding else {})}


def special_tokens(end_of_text: int) -> dict[str, int]:
    """One token opens a document, ends one and, where a mask says so, fills."""
    return {f"{role}_token_id": end_of_text for role in ("bos", "eos", "pad")}


def hf_weights(model: ModelConfig, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of model.safetensors by their names there."""
    each = (_exported(model, name.replace("blocks.", "layers.", 1), tensor) for name, tensor in weights.items())
    return {name: tensor for found in each for name, tensor in found.items()}


def fixed_tensors(model: ModelConfig) -> dict[str, Tensor]:
    """What an export holds besides the weights: the signs of n-grams."""
    return {"ngram_signs": drawn_signs(model)} if model.ngrams.tables else {}


def _exported(model: ModelConfig, name: str, tensor: Tensor) -> dict[str, Tensor]:
    for part in ("smear", "ngrams."):
        name = name.replace(f"embeddings.{part}", part)
    if name == "embeddings.value_chunks":
        names = [f"value_embeddings.{number}.weight" for number in model.value_table_widths]
        return _split(tensor, names, list(model.value_table_widths.values()), dim=1)
    if name.endswith((".attention.qkv", ".attention.qkv_bias")):
        shape = model.layers[int(name.split(".")[1])].attention
        assert shape is not None
        path, kind = name.rpartition("qkv")[0], "bias" if tensor.dim() == 1 else "weight"
        names = [f"{path}{part}.{kind}" for part in ("query", "key", "value")]
        return _split(tensor, names, [shape.q_width, shape.k_width, shape.v_width], dim=0)
    if tensor.dim() == 1:
        return {f"{name.removesuffix('_bias')}.bias" if name.endswith("_bias") else name: tensor}
    moved = {"embeddings.token": "embed_tokens", "embeddings.position": "embed_positions", "head": "lm_head"}
    renamed = moved.get(name, name)
    return {f"{renamed.replace('embeddings.values.', 'value_embeddings.')}.weight": tensor}


def _split(tensor: Tensor, names: list[str], sizes: list[int], *, dim: int) -> dict[str, Tensor]:
    return {name: part.contiguous() for name, part in zip(names, tensor.split(sizes, dim=dim), strict=True)}
