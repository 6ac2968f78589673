"""Models that are a plain GPT-2 or a plain Llama, as transformers' own classes have them: no code travels with them.

A switch that neither architecture knows must be off, also one that this module does not know. What differs only in
how it is written: GPT-2's matrices are stored (in, out), and Llama turns pairs the other way, which comes to the same
scores when the second half of each head's query and key rows changes its sign.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor

from paceline.evaluate.export.architecture import special_tokens
from paceline.settings.model import ModelConfig
from paceline.text.tokenizer import END_OF_TEXT

Shape = Literal["gpt2", "llama"]
FREE = {
    *("vocab_size", "embedding_multiple", "lm_head_multiple", "width", "num_layers", "num_heads", "num_kv_heads"),
    *("head_dim", "mlp_ratio", "qkv", "tied_lm_head", "norm_eps", "precision", "rotary"),
    *("zero_init_outputs", "matrix_init", "embedding_init", "lm_head_init", "dropout", "loss_terms"),  # of training
    *("qk_norm_eps", "value_ends", "value_lambdas", "value_storage"),  # of what must be off
}
"""Fields in which such models may differ, or which say nothing of them."""
SWITCHES: dict[Shape, dict[str, Any]] = {
    "gpt2": {"norm": "layer", "biases": True, "positions": "learned", "activation": ("gelu", "gelu_tanh")},
    "llama": {"norm": "rms_weighted", "biases": False, "positions": "rotary", "activation": ("swiglu",)},
}


def stock_shape(model: ModelConfig) -> Shape | None:
    """The architecture of transformers that the model is, if it is one."""
    if model.embedding_rows != model.lm_head_rows or model.window.unit != "none":
        return None
    for shape, wanted in SWITCHES.items():
        if all(_is(model, field.name, wanted) for field in fields(ModelConfig)):
            plain_heads = shape == "llama" or model.kv_heads == model.num_heads
            return shape if plain_heads and (shape == "gpt2" or _plain_rotary(model)) else None
    return None


def _is(model: ModelConfig, name: str, wanted: Mapping[str, Any]) -> bool:
    value = getattr(model, name)
    if name in FREE or name == "window":
        return True
    if name == "activation":
        return value in wanted[name]
    return bool(value == wanted.get(name, getattr(ModelConfig(), name)))


def _plain_rotary(model: ModelConfig) -> bool:
    r = model.rotary
    return (r.rotary_fraction, r.spacing, r.frequency_dtype, r.table_dtype) == (1.0, "open", "fp32", "fp32")


def stock_config(model: ModelConfig, shape: Shape, *, sequence_tokens: int, end_of_text: int) -> dict[str, Any]:
    """config.json."""
    own = _gpt2_config(model) if shape == "gpt2" else _llama_config(model, sequence_tokens)
    return {
        "model_type": shape,
        "dtype": "float32",
        **special_tokens(end_of_text),
        "prefix": END_OF_TEXT,
        "vocab_size": model.lm_head_rows,
        "tie_word_embeddings": model.tied_lm_head,
        **own,
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


def stock_weights(model: ModelConfig, shape: Shape, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of model.safetensors by their names there."""
    reader = _Reader(model, weights)
    found = _gpt2_weights(reader) if shape == "gpt2" else _llama_weights(reader)
    if not model.tied_lm_head:
        found["lm_head.weight"] = weights["head"]
    return {name: tensor.contiguous() for name, tensor in found.items()}


@dataclass(frozen=True)
class _Reader:
    """Weights of the attention, however they are stored."""

    model: ModelConfig
    weights: Mapping[str, Tensor]

    def query_key_value(self, layer: int, end: str = "") -> list[Tensor]:
        """`end` is that of a name: _bias."""
        path = f"blocks.{layer}.attention."
        if self.model.qkv == "separate":
            return [self.weights[f"{path}{part}{end}"] for part in ("query", "key", "value")]
        shape = self.model.attending[layer]
        return list(self.weights[f"{path}qkv{end}"].split([shape.q_width, shape.k_width, shape.v_width]))


def _gpt2_weights(reader: _Reader) -> dict[str, Tensor]:
    w = reader.weights
    found = {"wte.weight": w["embeddings.token"], "wpe.weight": w["embeddings.position"]}
    found |= {f"ln_f.{kind}": w[f"final_norm.{kind}"] for kind in ("weight", "bias")}
    moved = {"attention.output": "attn.c_proj", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
    norms = {"attention_norm": "ln_1", "mlp_norm": "ln_2"}
    for layer in range(reader.model.num_layers):
        ours, theirs = f"blocks.{layer}.", f"h.{layer}."
        found[f"{theirs}attn.c_attn.weight"] = torch.cat(reader.query_key_value(layer)).T
        found[f"{theirs}attn.c_attn.bias"] = torch.cat(reader.query_key_value(layer, "_bias"))
        found |= {f"{theirs}{new}.weight": w[f"{ours}{old}"].T for old, new in moved.items()}
        found |= {f"{theirs}{new}.bias": w[f"{ours}{old}_bias"] for old, new in moved.items()}
        found |= {
            f"{theirs}{new}.{kind}": w[f"{ours}{old}.{kind}"]
            for old, new in norms.items()
            for kind in ("weight", "bias")
        }
    return {f"transformer.{name}": tensor for name, tensor in found.items()}


def _llama_weights(reader: _Reader) -> dict[str, Tensor]:
    w = reader.weights
    found = {"embed_tokens.weight": w["embeddings.token"], "norm.weight": w["final_norm.weight"]}
    moved = {"attention.output": "self_attn.o_proj"}
    moved |= {f"mlp.{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    moved |= {"attention_norm.weight": "input_layernorm", "mlp_norm.weight": "post_attention_layernorm"}
    turned: tuple[Callable[[Tensor], Tensor], ...] = (_mirrored(reader.model), _mirrored(reader.model), lambda v: v)
    for layer in range(reader.model.num_layers):
        ours, theirs = f"blocks.{layer}.", f"layers.{layer}."
        for name, turn, part in zip("qkv", turned, reader.query_key_value(layer), strict=True):
            found[f"{theirs}self_attn.{name}_proj.weight"] = turn(part)
        found |= {f"{theirs}{new}.weight": w[f"{ours}{old}"] for old, new in moved.items()}
    return {f"model.{name}": tensor for name, tensor in found.items()}


def _mirrored(model: ModelConfig) -> Callable[[Tensor], Tensor]:
    """A projection whose turn by -t·ω is a turn by t·ω: the second dimension of every pair with the other sign."""
    half = model.head_dim // 2
    signs = torch.cat([torch.ones(half), -torch.ones(half)])
    return lambda matrix: matrix * signs.repeat(len(matrix) // len(signs))[:, None]
