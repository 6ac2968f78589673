"""A model as a GPU writes with it: the same mathematics in fewer and shorter kernels.

A compiled step of one text is a row: its products are sums, each one kernel with the norm before it and all that comes
after. So a layer of record 18 is eight kernels, two of them attention. Several texts, and what is not compiled, have
the library's products.
"""

import copy
import functools
from dataclasses import replace

import torch
from torch import Tensor, nn

from paceline.model.attention import AttentionInputs, SelfAttention, attention_plain
from paceline.model.block import MLP, Block, mlp_plain
from paceline.model.embed import Embeddings
from paceline.model.gpt import GPT
from paceline.model.ops import torch_dtype
from paceline.settings.spec import describe


def prepared(model: GPT) -> GPT:
    """A copy that shares the tables. Matrices are kept in the format of their products, to which every pass would cast
    them otherwise, and one matrix gives queries, keys and values."""
    lean = copy.deepcopy(model, {id(table): table for table in model.embeddings.parameters()})
    config, dtype = replace(model.config, qkv="fused"), torch_dtype(model.config.precision.compute)
    _ = config.layers, config.attending, config.value_table_widths  # cached under a lock that a compiler cannot take
    for module in lean.modules():
        if isinstance(module, SelfAttention) and model.config.qkv == "separate":
            _join(module)
        if isinstance(module, GPT | Block | SelfAttention | MLP | Embeddings):
            module.config = config
        if isinstance(module, SelfAttention):
            module.forward_with = attention_row
        if isinstance(module, MLP):
            module.forward_with = mlp_row
    kept_in_dtype = {spec.name for spec in describe(config).parameters if spec.group in ("matrices", "lm_head")}
    for name, parameter in lean.named_parameters():
        if name in kept_in_dtype:
            parameter.data = parameter.data.to(dtype)
    return lean


@torch.no_grad()
def _join(module: SelfAttention) -> None:
    module.qkv = nn.Parameter(module.joined_projection())
    module.matmuls["qkv"] = module.matmuls["query"]
    if module.config.biases:
        module.qkv_bias = nn.Parameter(torch.cat([module.query_bias, module.key_bias, module.value_bias]))
        del module.query_bias, module.key_bias, module.value_bias
    del module.query, module.key, module.value


def attention_row(
    module: SelfAttention, x: Tensor, stream: Tensor, inputs: AttentionInputs
) -> tuple[Tensor, Tensor | None]:
    """`attention_plain`, for a single compiled row by sums."""
    if not _sums_pay(module, x):
        return attention_plain(module, x, stream, inputs)
    dtype = torch_dtype(module.config.precision.compute)
    normed = functools.partial(row_product, dtype=dtype, norm_eps=module.config.norm_eps)
    q, k, v, raw_v = module.qkv_of(stream, inputs.value_embed, inputs.rotary, normed)
    y = inputs.attend(module.layer, q, k, v)
    return module.add_output(stream, y, functools.partial(row_product, dtype=dtype)), raw_v


def mlp_row(mlp: MLP, x: Tensor, stream: Tensor) -> Tensor:
    """`mlp_plain`, for a single compiled row by sums."""
    c = mlp.config
    if not _sums_pay(mlp, x):
        return mlp_plain(mlp, x, stream)
    dtype = torch_dtype(c.precision.compute)
    hidden = mlp.activation(row_product(stream, mlp.up, dtype=dtype, norm_eps=c.norm_eps))
    return stream + row_product(hidden, mlp.matrix("down"), dtype=dtype)


def _sums_pay(module: SelfAttention | MLP, x: Tensor) -> bool:
    """A sum takes the norm before it along, if that has no weights; of gates and biases it knows nothing."""
    c = module.config
    plain = c.norm == "rms" and not c.biases and not c.gated
    return plain and x.numel() == x.size(-1) and torch.compiler.is_compiling()


def row_product(x: Tensor, weight: Tensor, *, dtype: torch.dtype, norm_eps: float | None = None) -> Tensor:
    """`linear` of a single row as a sum of products: compiled, that is one kernel together with what precedes and
    follows it. Uncompiled it would be slow. With `norm_eps`, of the RMS norm of x; a sum of squares for every product,
    because sums of one shape share a kernel, and a single sum would be a kernel of its own."""
    row = x.float()[..., None, :]
    products = (row * weight.to(dtype).float()).sum(-1)
    if norm_eps is None:
        return products.to(dtype)
    squares = row.square().expand(*row.shape[:-2], *weight.shape)
    normed = (products * torch.rsqrt(squares.mean(-1) + norm_eps)).to(dtype)
    return normed.as_strided(normed.shape, normed.stride())  # which is in memory: else all readers work with both sums
