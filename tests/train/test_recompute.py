"""Recomputing blocks in the backward pass changes memory and nothing else."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

from model.small import random_tokens, shaken, small, windows
from paceline.model.gpt import GPT, run_recomputed
from paceline.model.loss import Losses
from train.tiny import losses, run, tiny_config, weights

TOKENS, WINDOWS = random_tokens(2, 256), windows(128)


def gradients(model: GPT, forward: Callable[[Tensor, Tensor, Tensor], Losses]) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = forward(TOKENS, TOKENS.roll(-1), WINDOWS).main
    loss.sum().backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def kept_bytes(model: GPT) -> int:
    """Bytes that the backward pass will find kept, parameters apart."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(TOKENS, TOKENS, WINDOWS).main
    assert loss.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize("name", ["r04-muon", "r13-window-warmup", "r16-block-mask", "r18-softcap"])
def test_losses_and_gradients_have_the_same_bits(name: str) -> None:
    model = shaken(small(name))
    plain, expected = gradients(model, model)
    model.run_block = run_recomputed
    again, found = gradients(model, model)
    assert torch.equal(plain, again)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_less_is_kept_for_the_backward_pass() -> None:
    model = shaken(small("r18-softcap"))
    plain = kept_bytes(model)
    model.run_block = run_recomputed
    stream = TOKENS.numel() * model.config.width * 4
    assert kept_bytes(model) < plain / 4
    assert plain - kept_bytes(model) > 12 * 8 * stream  # two hidden layers of four widths a block, to name the largest


def test_compiled_code_computes_one_block_again_at_a_time() -> None:
    """With the skips outside of blocks, block 1 of these four was there again as long as block 2 needed its output."""
    model = shaken(replace(small("r18-softcap"), num_layers=4, value_ends=1, layers_without_attention=(1,)))
    model.run_block = run_recomputed
    most_hidden = []

    def count(graph: torch.fx.GraphModule, _: Sequence[Tensor]) -> Callable[..., Any]:
        most_hidden.append(most_alive(graph, TOKENS.numel() * model.config.layers[0].mlp_width))
        return make_boxed_func(graph.forward)  # type: ignore[no-any-return]

    torch._dynamo.reset()
    cut = partial(min_cut_rematerialization_partition, compiler="inductor")
    backend = aot_autograd(fw_compiler=count, partition_fn=cut)
    forward = torch.compile(model, fullgraph=True, dynamic=False, backend=backend)
    gradients(model, forward)
    assert most_hidden[-1] == 3  # of one block; it was 5


def most_alive(graph: torch.fx.GraphModule, numbers: int) -> int:
    """How many results of so many numbers are needed at once, if operations run in the graph's order."""
    nodes = list(graph.graph.nodes)
    ends = {used: at for at, node in enumerate(nodes) for used in node.all_input_nodes}
    shapes = [tuple(getattr(node.meta.get("val"), "shape", ())) for node in nodes]
    sized = [all(type(size) is int for size in shape) and math.prod(shape) == numbers for shape in shapes]
    spans = [(at, ends.get(node, at)) for at, node in enumerate(nodes) if sized[at]]
    return max(sum(first <= at < end for first, end in spans) for at in range(len(nodes)))


def test_a_run_is_the_same_run(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "data", steps=4)
    run(config, tmp_path / "plain")
    done = run(replace(config, train=replace(config.train, recompute=True)), tmp_path / "recomputed")
    assert done.run.model.run_block is run_recomputed
    assert losses(tmp_path / "plain") == losses(tmp_path / "recomputed")
    one, other = weights(tmp_path / "plain"), weights(tmp_path / "recomputed")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_it_compiles_as_one_graph_with_the_same_bits() -> None:
    shallow = replace(small("r18-softcap"), num_layers=4, value_ends=1, layers_without_attention=(1,))
    model = shaken(shallow)
    plain, expected = gradients(model, model)
    model.run_block = run_recomputed
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager")
    again, found = gradients(model, compiled)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert torch.equal(plain, again)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
