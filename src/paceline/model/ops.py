"""What every part of the model uses: formats, the RMS norm, the seam of a matrix product, declared parameters and their
initial values."""

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.settings.model import DType, ModelConfig, PrecisionConfig
from paceline.settings.spec import Parameter, Part, Product, describe, norm

MatMul = Callable[[Tensor, Tensor], Tensor]
"""(x (..., in), weight (out, in)) -> x weightᵀ, (..., out), in the compute format."""
MakeMatMul = Callable[[Product, PrecisionConfig], MatMul]
"""Makes the `MatMul` of one product: the back end. One that keeps state, such as scales, returns a module whose
persistent buffers go into checkpoints."""


def torch_dtype(name: DType) -> torch.dtype:
    return torch.float32 if name == "fp32" else torch.bfloat16


def rms_norm(x: Tensor, eps: float) -> Tensor:
    """ρ(x) = x / sqrt(mean(x²) + ε) over the last axis, in fp32, returned in x's dtype. ε is always an argument: a
    framework default once depended on the input's dtype, and the records depend on that number."""
    return F.rms_norm(x.float(), (x.size(-1),), eps=eps).to(x.dtype)


def linear(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """x Wᵀ in `dtype`, whatever the formats of x and W; the result stays in it."""
    return F.linear(x.to(dtype), weight.to(dtype))


def plain_matmul(_: Product, precision: PrecisionConfig) -> MatMul:
    """The plain twin."""
    return partial(linear, dtype=torch_dtype(precision.compute))


def declare(module: nn.Module, part: Part) -> None:
    """Register the parameters of a part, uninitialised; a dotted name is an entry of a `ParameterDict`."""
    for spec in part.parameters:
        parameter = nn.Parameter(torch.empty(spec.shape, dtype=torch_dtype(spec.dtype)))
        group, dot, entry = spec.name.rpartition(".")
        if not dot:
            module.register_parameter(spec.name, parameter)
            continue
        if not hasattr(module, group):
            setattr(module, group, nn.ParameterDict())
        getattr(module, group)[entry] = parameter


class Norm(nn.Module):
    """A norm on the residual stream, as `model.norm` says; its weights, if it has any, are fp32."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.kind, self.eps = config.norm, config.norm_eps
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)
        declare(self, norm(config))

    def forward(self, x: Tensor) -> Tensor:
        """In fp32, returned in x's dtype."""
        if self.kind == "rms":
            return rms_norm(x, self.eps)
        shape = (x.size(-1),)
        if self.kind == "layer":
            return F.layer_norm(x.float(), shape, self.weight, self.bias, self.eps).to(x.dtype)
        return F.rms_norm(x.float(), shape, self.weight, self.eps).to(x.dtype)


class SubLayer(nn.Module):
    """A module with the parameters and matrix products that its part declares."""

    output_scale: nn.Parameter

    def __init__(self, config: ModelConfig, part: Part, make_matmul: MakeMatMul) -> None:
        super().__init__()
        self.config = config
        declare(self, part)
        self.matmuls = {product.name: make_matmul(product, config.precision) for product in part.products}
        modules = {name: matmul for name, matmul in self.matmuls.items() if isinstance(matmul, nn.Module)}
        self.stateful_matmuls = nn.ModuleDict(modules)  # so that their buffers are found

    def matrix(self, name: str) -> Tensor:
        """A declared matrix; one that ends a branch with the branch's learned scale, if there are such scales."""
        weight: Tensor = getattr(self, name)
        return weight * self.output_scale if self.config.residual_scales and name in ("output", "down") else weight

    def product(self, name: str, x: Tensor, matmul: MatMul | None = None) -> Tensor:
        """x times a declared matrix, and its bias if there are any. `matmul` takes the place of the layer's own."""
        y = (matmul or self.matmuls[name])(x, self.matrix(name))
        return y + getattr(self, f"{name}_bias").to(y.dtype) if self.config.biases else y


def initialise(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """Draw each parameter on the CPU from a generator keyed by (seed, its name).

    So the same seed gives the same start on any device, and switching a technique on or off leaves every other
    parameter's start as it was, which pairs the arms of an ablation. The draws run side by side: a generator draws on
    one core only."""
    named, specs = dict(model.named_parameters()), describe(config).parameters
    if alone := sorted(named.keys() ^ {spec.name for spec in specs}):  # the optimizer moves what is declared only
        sides = ["registered by a module", "declared in settings/spec.py"]
        here, missing = sides if alone[0] in named else reversed(sides)
        raise ValueError(f"parameter {alone[0]} is {here}, but not {missing}")
    with ThreadPoolExecutor() as pool:
        starts = pool.map(partial(_start, seed=seed), specs)
    for spec, start in zip(specs, starts, strict=True):
        named[spec.name].data = start


@torch.no_grad()
def _start(spec: Parameter, *, seed: int) -> Tensor:
    if spec.init.kind == "values" and not any(spec.init.values):
        return torch.zeros(spec.shape, dtype=torch_dtype(spec.dtype))  # a large table at once, without its fp32 form
    digest = hashlib.blake2b(f"{seed}:{spec.name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)  # torch seeds are signed
    fresh = torch.empty(spec.shape)
    if spec.init.kind == "normal":
        fresh.normal_(std=spec.init.std, generator=generator)
    elif spec.init.kind == "uniform":
        fresh.uniform_(-spec.init.bound, spec.init.bound, generator=generator)
    else:
        fresh.copy_(torch.tensor(spec.init.values))
    return (fresh.bfloat16().float() if spec.rounded else fresh).to(torch_dtype(spec.dtype))
