"""A model as a GPU writes with it: the same mathematics in fewer and shorter kernels."""

import copy
import functools
from dataclasses import replace

import torch
from torch import nn

from paceline.model.attention import SelfAttention, attend_from_plain
from paceline.model.block import MLP, Block, feed_forward
from paceline.model.dtypes import torch_dtype
from paceline.model.embed import Embeddings
from paceline.model.gpt import GPT
from paceline.model.linear import row_product


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
            module.attend_from = functools.partial(attend_from_plain, product=row_product)
        if isinstance(module, MLP):
            module.feed_forward = functools.partial(feed_forward, product=row_product)
    classes = lean.parameter_classes()
    for parameter in (*classes["matrices"].values(), *classes["head"].values()):
        parameter.data = parameter.data.to(dtype)
    return lean.requires_grad_(False)


@torch.no_grad()
def _join(attention: SelfAttention) -> None:
    attention.qkv = nn.Parameter(attention.joined_projection())
    del attention.query, attention.key, attention.value
