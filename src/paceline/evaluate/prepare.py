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

from paceline.model.attention import Attend, SelfAttention, Turn, attend_from_plain, make_heads
from paceline.model.block import ACTIVATIONS, MLP, Block, feed_forward
from paceline.model.config import PrecisionConfig
from paceline.model.dtypes import torch_dtype
from paceline.model.embed import Embeddings
from paceline.model.gpt import GPT


def prepared(model: GPT) -> GPT:
    """A copy that shares the tables. Matrices are kept in the format of their products, to which every pass would cast
    them otherwise, and one matrix gives queries, keys and values."""
    lean = copy.deepcopy(model, {id(table): table for table in model.embeddings.parameters()})
    config, dtype = replace(model.config, qkv="fused"), torch_dtype(model.config.precision.compute)
    _ = config.value_table_of_layer  # worked out once, under a lock that the compiler cannot take (Python 3.11)
    for module in lean.modules():
        if isinstance(module, SelfAttention) and model.config.qkv == "separate":
            _join(module)
        if isinstance(module, GPT | Block | SelfAttention | MLP | Embeddings):
            module.config = config
        if isinstance(module, SelfAttention):
            module.attend_from = attend_from_row
        if isinstance(module, MLP):
            module.feed_forward = feed_forward_row
    classes = lean.parameter_classes()
    for parameter in (*classes["matrices"].values(), *classes["head"].values()):
        parameter.data = parameter.data.to(dtype)
    return lean


@torch.no_grad()
def _join(attention: SelfAttention) -> None:
    attention.qkv = nn.Parameter(attention.joined_projection())
    del attention.query, attention.key, attention.value


def attend_from_row(
    layer: SelfAttention, x: Tensor, stream: Tensor, extra: Tensor | None, turn: Turn, attend: Attend
) -> tuple[Tensor, Tensor | None]:
    """`attend_from_plain`, for a single compiled row by sums."""
    if not _sums_pay(x):
        return attend_from_plain(layer, x, stream, extra, turn, attend)
    normed_product = functools.partial(row_product, norm_eps=layer.config.norm_eps)
    q, k, v, own = make_heads(layer, stream, extra, turn, normed_product)
    return layer.add_output(stream, attend(layer.layer, q, k, v), row_product), own


def feed_forward_row(mlp: MLP, x: Tensor, stream: Tensor) -> Tensor:
    """`feed_forward`, for a single compiled row by sums."""
    c = mlp.config
    if not _sums_pay(x):
        return feed_forward(mlp, x, stream)
    hidden = ACTIVATIONS[c.activation](row_product(stream, mlp.up, c.precision, norm_eps=c.norm_eps))
    return stream + row_product(hidden, mlp.down, c.precision)


def _sums_pay(x: Tensor) -> bool:
    return x.numel() == x.size(-1) and torch.compiler.is_compiling()


def row_product(x: Tensor, weight: Tensor, precision: PrecisionConfig, *, norm_eps: float | None = None) -> Tensor:
    """`linear` of a single row as a sum of products: compiled, that is one kernel together with what precedes and
    follows it. Uncompiled it would be slow. With `norm_eps`, of the RMS norm of x; a sum of squares for every product,
    because sums of one shape share a kernel, and a single sum would be a kernel of its own."""
    dtype = torch_dtype(precision.compute)
    row = x.float()[..., None, :]
    products = (row * weight.to(dtype).float()).sum(-1)
    if norm_eps is None:
        return products.to(dtype)
    squares = row.square().expand(*row.shape[:-2], *weight.shape)
    normed = (products * torch.rsqrt(squares.mean(-1) + norm_eps)).to(dtype)
    return normed.as_strided(normed.shape, normed.stride())  # which is in memory: else all readers work with both sums
