"""A switch that is off is absent: no parameter, no buffer, no operation. A switch that is on adds what it says.

The bare transformer is written out here; the model with every switch off must run the same operations, give the same
bits, and hold the same weights. Each switch is then judged by what it adds to that.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from model.small import END_OF_TEXT, random_tokens, shaken, small, windows
from paceline.model.gpt import GPT
from paceline.settings.model import ModelConfig, RotaryConfig, WindowConfig

LAYERS, HEADS, DIM, VOCAB = 4, 2, 8, 40
BARE = ModelConfig(
    vocab_size=VOCAB, width=HEADS * DIM, num_layers=LAYERS, num_heads=HEADS, head_dim=DIM,
    rotary=RotaryConfig(max_tokens=256),
)  # fmt: skip
TOKENS, WINDOW = random_tokens(1, 256, vocab_size=VOCAB), windows(128)
VIEWS = ("view", "_unsafe_view", "t", "transpose", "unsqueeze", "select", "split", "split_with_sizes", "slice",
         "expand", "permute", "alias", "detach", "lift_fresh")  # fmt: skip
BOOL_MASK_TO_FLOAT = ("where", "scalar_tensor")  # inside torch's attention, by version

NORM = Counter({"pow": 1, "mean": 1, "add_": 1, "rsqrt": 1, "mul": 1})


class Operations(TorchDispatchMode):
    """Counts what reaches the device, views apart."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.count[name] += name not in (*VIEWS, *BOOL_MASK_TO_FLOAT)
        return func(*args, **(kwargs or {}))


def operations(run: Callable[[], object]) -> Counter[str]:
    with torch.no_grad(), Operations() as seen:
        run()
    return +seen.count


def of_model(config: ModelConfig) -> Counter[str]:
    model = GPT(config, end_of_text=END_OF_TEXT)
    return operations(lambda: model(TOKENS, TOKENS, WINDOW))


def parameters(config: ModelConfig) -> set[str]:
    return {name for name, _ in GPT(config, end_of_text=END_OF_TEXT).named_parameters()}


def turned(u: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = u.split(DIM // 2, dim=-1)
    return torch.cat([a * cos + b * sin, b * cos - a * sin], dim=-1)


def bare_transformer(w: dict[str, Tensor], cos: Tensor, sin: Tensor) -> Tensor:
    """Embedding, blocks of attention and MLP, head, loss: nothing else."""
    width, eps = HEADS * DIM, 2.0**-23
    x = F.embedding(TOKENS, w["embeddings.token"])
    for layer in range(LAYERS):
        at = f"blocks.{layer}."
        n = F.rms_norm(x, (width,), eps=eps)
        q, k, v = (
            F.linear(n, w[f"{at}attention.{part}"]).view(1, -1, HEADS, DIM) for part in ("query", "key", "value")
        )
        q, k = (turned(u, cos[:, None], sin[:, None]) for u in (q, k))
        heads = (u.transpose(1, 2) for u in (q, k, v))
        y = F.scaled_dot_product_attention(*heads, is_causal=True, scale=1 / math.sqrt(DIM))
        x = x + F.linear(y.transpose(1, 2).flatten(-2), w[f"{at}attention.output"])
        hidden = F.relu(F.linear(F.rms_norm(x, (width,), eps=eps), w[f"{at}mlp.up"])).square()
        x = x + F.linear(hidden, w[f"{at}mlp.down"])
    z = F.linear(F.rms_norm(x, (width,), eps=eps), w["head"])
    return F.cross_entropy(z.flatten(0, 1), TOKENS.flatten(), reduction="none").view(TOKENS.shape)


def test_with_every_switch_off_the_model_is_the_bare_transformer() -> None:
    model = shaken(BARE)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def bare() -> Tensor:
        rotary = model.rotary(slice(0, TOKENS.size(1)), DIM)
        return bare_transformer(weights, rotary.cos, rotary.sin)

    per_block = ("attention.query", "attention.key", "attention.value", "attention.output", "mlp.up", "mlp.down")
    blocks = {f"blocks.{layer}.{part}" for layer in range(LAYERS) for part in per_block}
    assert set(weights) == {"embeddings.token", "head"} | blocks
    assert {name for name, _ in model.named_buffers()} == {"rotary_cos_8", "rotary_sin_8"}
    assert operations(lambda: model(TOKENS, TOKENS, WINDOW)) == operations(bare)
    assert torch.equal(model(TOKENS, TOKENS, WINDOW).main, bare())


def times(count: int, one: Counter[str]) -> Counter[str]:
    return Counter({name: count * n for name, n in one.items()})


def in_blocks(part: str) -> set[str]:
    return {f"blocks.{layer}.{part}" for layer in range(LAYERS)}


VALUE_MIX = in_blocks("attention.value_mix")
DOCUMENTS = Counter({"eq": 2, "cumsum": 1, "bitwise_and": 1})
MASK = Counter({"arange": 1, "le": 1})
ON: list[tuple[dict[str, Any], set[str], Counter[str]]] = [
    ({"qk_norm": "before_rotary"}, set(), times(2 * LAYERS, NORM)),
    ({"qk_norm": "after_rotary"}, set(), times(2 * LAYERS, NORM)),
    ({"embedding_norm": True}, set(), NORM),
    ({"attention_branch_scale": 0.5}, set(), Counter({"mul": LAYERS})),
    ({"softcap": 15.0}, set(), Counter({"div": 1, "tanh": 1, "mul": 1})),
    ({"x0_mix": True}, in_blocks("x0_mix"), Counter({"mul": 2 * LAYERS, "add": LAYERS})),
    ({"unet_skips": True}, {"skip_weights"}, Counter({"mul": LAYERS // 2, "add": LAYERS // 2})),
    (
        {"value_path": "residual", "value_lambdas": 1},
        VALUE_MIX,
        times(LAYERS - 1, Counter({"rsub": 1, "mul": 2, "add": 1})),
    ),
    ({"value_path": "residual"}, VALUE_MIX, Counter({"mul": 2 * LAYERS, "add": LAYERS})),
    (
        {"value_path": "layerwise"},
        VALUE_MIX | {f"embeddings.values.{table}" for table in range(LAYERS)},
        Counter({"embedding": LAYERS, "mul": 2 * LAYERS, "add": LAYERS}),
    ),
    (
        {"value_path": "mirrored"},
        VALUE_MIX | {"embeddings.values.0", "embeddings.values.1"},
        Counter({"embedding": LAYERS // 2, "mul": 2 * LAYERS, "add": LAYERS}),
    ),
    (
        {"value_path": "mirrored", "value_storage": "chunks"},
        VALUE_MIX | {"embeddings.value_chunks"},
        Counter({"embedding": LAYERS // 2, "mul": 2 * LAYERS, "add": LAYERS}),
    ),
    (
        {"value_path": "sparse", "value_ends": 1},
        VALUE_MIX | {"embeddings.values.0"},
        Counter({"embedding": 1, "mul": LAYERS + 2, "add": 2}),
    ),
    ({"document_mask": True}, set(), MASK + DOCUMENTS),
    ({"window": WindowConfig(unit="tokens")}, set(), MASK + Counter({"sub": 1, "lt": 1, "bitwise_and": 1})),
    (
        {"window": WindowConfig(unit="blocks")},
        set(),
        MASK + Counter({"floor_divide": 3, "add": 1, "sub": 1, "lt": 1, "bitwise_and": 1}),
    ),
    ({"zero_init_outputs": True}, set(), Counter()),
    ({"lm_head_init": "zeros"}, set(), Counter()),
    ({"embedding_init": "uniform"}, set(), Counter()),
    ({"lm_head_multiple": 64}, set(), Counter()),
    ({"rotary": RotaryConfig(rotary_fraction=0.5, max_tokens=256)}, set(), Counter()),
]


@pytest.mark.parametrize(("change", "weights", "added"), ON, ids=["-".join(map(str, c)) for c, _, _ in ON])
def test_a_switch_adds_its_own_weights_and_operations_and_no_others(
    change: dict[str, Any], weights: set[str], added: Counter[str]
) -> None:
    config = replace(BARE, **change)
    assert parameters(config) == parameters(BARE) | weights
    assert of_model(config) == of_model(BARE) + added


FEWER: list[tuple[dict[str, Any], set[str]]] = [
    ({"tied_lm_head": True}, {"head"}),
    ({"layers_without_attention": (1,)}, {p for p in parameters(BARE) if p.startswith("blocks.1.attention")}),
]


@pytest.mark.parametrize(("change", "gone"), FEWER, ids=["tied_lm_head", "layers_without_attention"])
def test_switches_that_take_something_away(change: dict[str, Any], gone: set[str]) -> None:
    config = replace(BARE, **change)
    assert parameters(config) == parameters(BARE) - gone
    removed = of_model(BARE) - of_model(config)
    assert not of_model(config) - of_model(BARE)
    assert removed["mm"] == (4 if "layers_without_attention" in change else 0)


def test_truncated_rotary_turns_half_as_many_pairs() -> None:
    """The same operations, each half as wide."""
    truncated = replace(BARE, rotary=RotaryConfig(rotary_fraction=0.5, max_tokens=256))
    for config, pairs in ((truncated, DIM // 4), (BARE, DIM // 2)):
        buffers = dict(GPT(config, end_of_text=END_OF_TEXT).named_buffers())
        assert {tuple(table.shape) for table in buffers.values()} == {(256, pairs)}


OFF: list[dict[str, Any]] = [
    {"x0_mix": False},
    {"unet_skips": False},
    {"value_path": "plain"},
    {"qk_norm": "none"},
    {"embedding_norm": False},
    {"softcap": None},
    {"document_mask": False},
    {"window": WindowConfig(unit="none")},
]


@pytest.mark.parametrize("change", OFF, ids=["-".join(c) for c in OFF])
def test_switched_off_among_others_it_only_takes_away(change: dict[str, Any]) -> None:
    """Record 18 without one technique: a subset of its weights and of its operations, and another function."""
    config = replace(small("r18-softcap"), document_mask=True)
    without = replace(config, **change)
    assert parameters(without) <= parameters(config)
    assert of_model(without) < of_model(config)
    on, off = shaken(config), shaken(without)
    off.load_state_dict({name: value for name, value in on.state_dict().items() if name in parameters(without)})
    losses = [model(TOKENS, TOKENS, WINDOW).main for model in (on, off)]
    assert not torch.allclose(*losses, atol=1e-2)
