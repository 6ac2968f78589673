"""Models that are a plain GPT-2 or a plain Llama, as transformers' own classes have them: no code travels with them.

A switch that neither architecture knows must be off, also one that this module does not know. What differs only in
how it is written: GPT-2's matrices are stored (in, out), and Llama turns pairs the other way, which comes to the same
scores when the second half of each head's query and key rows changes its sign.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal

import torch
from torch import Tensor

from paceline.evaluate.export.architecture import hf_weights, special_tokens
from paceline.settings.model import ModelConfig
from paceline.text.tokenizer import END_OF_TEXT

Shape = Literal["gpt2", "llama"]
FREE = {
    *("vocab_size", "embedding_multiple", "lm_head_multiple", "width", "num_layers", "num_heads", "num_kv_heads"),
    *("head_dim", "mlp_ratio", "qkv", "tied_lm_head", "norm_eps", "precision", "rotary"),
    *("zero_init_outputs", "matrix_init", "embedding_init", "lm_head_init"),  # of training, and
    *("dropout", "loss_terms", "candidates", "qk_matrix_heads"),
    *("qk_norm_eps", "value_ends", "value_lambdas", "value_storage", "window"),  # of what must be off
}
"""Fields in which such models may differ, or which say nothing of them."""
SWITCHES: dict[Shape, dict[str, tuple[Any, ...]]] = {
    "gpt2": {"norm": ("layer",), "biases": (True,), "positions": ("learned",), "activation": ("gelu", "gelu_tanh")},
    "llama": {"norm": ("rms_weighted",), "activation": ("swiglu",)},
}


def stock_shape(model: ModelConfig) -> Shape | None:
    """The architecture of transformers that the model is, if it is one."""
    plain, r = ModelConfig(), model.rotary
    plain_rotary = (r.rotary_fraction, r.spacing, r.frequency_dtype, r.table_dtype) == (1.0, "open", "fp32", "fp32")
    if model.embedding_rows != model.lm_head_rows or model.window.unit != "none":
        return None
    for shape, wanted in SWITCHES.items():
        fits = plain_rotary if shape == "llama" else model.kv_heads == model.num_heads
        names = [field.name for field in fields(ModelConfig) if field.name not in FREE]
        if fits and all(getattr(model, name) in wanted.get(name, (getattr(plain, name),)) for name in names):
            return shape
    return None


def stock_config(model: ModelConfig, shape: Shape, *, sequence_tokens: int, end_of_text: int) -> dict[str, Any]:
    """config.json."""
    return {
        "model_type": shape,
        "dtype": "float32",
        **special_tokens(end_of_text),
        "prefix": END_OF_TEXT,
        "vocab_size": model.lm_head_rows,
        "tie_word_embeddings": model.tied_lm_head,
        **(_gpt2_config(model) if shape == "gpt2" else _llama_config(model, sequence_tokens)),
    }


def _gpt2_config(model: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "n_positions": model.rotary.max_tokens,
        "n_embd": model.width,
        "n_layer": model.num_layers,
        "n_head": model.num_heads,
        "n_inner": model.mlp_width,
        "activation_function": {"gelu": "gelu", "gelu_tanh": "gelu_new"}[model.activation],
        "layer_norm_epsilon": model.norm_eps,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop"), model.dropout),
        "attn_pdrop": 0.0,
    }


def _llama_config(model: ModelConfig, sequence_tokens: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": model.width,
        "intermediate_size": model.mlp_width,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": sequence_tokens,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rotary.base,  # as transformers 4 has it, and programs that read its files
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rotary.base},
        "attention_bias": False,
        "mlp_bias": False,
    }


GPT2_NAMES = {
    "embed_tokens": "transformer.wte", "embed_positions": "transformer.wpe", "final_norm": "transformer.ln_f",
    "layers": "transformer.h", "attention_norm": "ln_1", "mlp_norm": "ln_2", "attention": "attn", "output": "c_proj",
    "up": "c_fc", "down": "c_proj",
}  # fmt: skip
LLAMA_NAMES = {
    "embed_tokens": "model.embed_tokens", "final_norm": "model.norm", "layers": "model.layers",
    "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm", "attention": "self_attn",
    **{part: f"{part[0]}_proj" for part in ("query", "key", "value", "output")},
    **{part: f"{part}_proj" for part in ("gate", "up", "down")},
}  # fmt: skip
"""Parts of the names in an export of ours, and theirs."""


def stock_weights(model: ModelConfig, shape: Shape, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of model.safetensors by their names there."""
    ours = hf_weights(model, weights)
    ours = _as_gpt2(ours) if shape == "gpt2" else _as_llama(ours, model.head_dim)
    names = GPT2_NAMES if shape == "gpt2" else LLAMA_NAMES
    return {".".join(names.get(part, part) for part in name.split(".")): t.contiguous() for name, t in ours.items()}


def _as_gpt2(ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Queries, keys and values as one; matrices inside blocks as (in, out)."""
    found: dict[str, Tensor] = {}
    for name, tensor in ours.items():
        path, _, end = name.rpartition(".attention.query.")
        if path:
            parts = [ours[f"{path}.attention.{part}.{end}"] for part in ("query", "key", "value")]
            name, tensor = f"{path}.attention.c_attn.{end}", torch.cat(parts)
        if ".attention.key." not in name and ".attention.value." not in name:
            found[name] = tensor.T if name.startswith("layers.") and tensor.dim() == 2 else tensor
    return found


def _as_llama(ours: Mapping[str, Tensor], head_dim: int) -> dict[str, Tensor]:
    """Queries and keys whose turn by -t·ω is a turn by t·ω: the second dimension of every pair with the other sign."""
    signs = torch.ones(head_dim, 1)
    signs[head_dim // 2 :] = -1.0
    turned = ("attention.query.weight", "attention.key.weight")
    return {n: t * signs.repeat(len(t) // head_dim, 1) if n.endswith(turned) else t for n, t in ours.items()}
