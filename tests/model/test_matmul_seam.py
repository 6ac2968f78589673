"""The seam of a matrix product: a back end makes the product of every weight in the blocks, may keep state there, and
what it keeps is saved with the model."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from model.small import END_OF_TEXT, in_fp32, random_tokens, shaken, small, windows
from paceline.model.gpt import GPT, Seams
from paceline.model.ops import plain_matmul
from paceline.settings.model import PrecisionConfig
from paceline.settings.spec import Product, describe

CONFIG = in_fp32(small("r18-softcap"))


class Scaled(nn.Module):
    """The plain product, which also remembers the largest input it has seen, as a scale for FP8 would."""

    largest: Tensor

    def __init__(self, product: Product, precision: PrecisionConfig) -> None:
        super().__init__()
        self.plain, self.product = plain_matmul(product, precision), product
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        assert tuple(weight.shape) == (self.product.outputs, self.product.inputs)
        self.largest.copy_(x.detach().abs().max())
        return self.plain(x, weight)


def with_matmul(make: Callable[[Product, PrecisionConfig], Scaled]) -> tuple[GPT, GPT]:
    plain = shaken(CONFIG)
    model = GPT(CONFIG, end_of_text=END_OF_TEXT, seams=Seams(matmul=make))
    model.load_state_dict(plain.state_dict(), strict=False)
    return model, plain


def test_a_back_end_makes_every_product_of_the_blocks_once() -> None:
    made: list[Product] = []

    def make(product: Product, precision: PrecisionConfig) -> Scaled:
        assert precision == CONFIG.precision
        made.append(product)
        return Scaled(product, precision)

    model, plain = with_matmul(make)
    declared = [product for product in describe(CONFIG).products if product.name.startswith("blocks.")]
    shapes = [(p.name.rpartition(".")[2], p.outputs, p.inputs, p.counted_as) for p in declared]
    assert [(p.name, p.outputs, p.inputs, p.counted_as) for p in made] == shapes
    tokens = random_tokens(1, 128)
    assert torch.equal(*(m.logits(tokens, windows(128)) for m in (model, plain)))
    assert all(float(seen) > 0 for seen in model.state_buffers().values()), "each of them was used"


def test_state_of_a_product_is_saved_with_the_model_and_is_no_parameter() -> None:
    model, plain = with_matmul(Scaled)
    model.logits(random_tokens(1, 128), windows(128))
    buffers = model.state_buffers()
    assert len(buffers) == 4 * 11 + 2 * 12
    assert buffers["blocks.3.mlp.stateful_matmuls.up.largest"] is model.blocks[3].mlp.stateful_matmuls["up"].largest
    assert set(model.state_dict()) == set(plain.state_dict()) | set(buffers)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    other, _ = with_matmul(Scaled)
    other.load_state_dict(model.state_dict())
    for name, buffer in other.state_buffers().items():
        assert torch.equal(buffer, buffers[name])


def test_without_such_a_back_end_a_model_has_no_state_besides_its_parameters() -> None:
    assert not shaken(CONFIG).state_buffers()
