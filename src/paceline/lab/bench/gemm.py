"""The step's own matrix products, one by one: forward, gradient of the input, gradient of the weight.

Random data in the format of the products, through torch.matmul as the model calls it. Operands are taken in turn from
enough copies that none is still in the device's cache when its turn comes again.
"""

import functools
import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.lab.bench.matmul import measured_peak, median_seconds
from paceline.lab.bench.shapes import Product, mean_step_flops, products_of
from paceline.model.dtypes import torch_dtype
from paceline.train.assemble import inspect_machine
from paceline.train.config import RunConfig

COLD_BYTES = {"cuda": 256 * 2**20, "cpu": 2**20}
"""What the copies together hold at least: several times the 50 MB cache of an H100 or H200. A CPU's cache is shared
with everything else, and the largest would cost more to outgrow than the figure is worth."""


@dataclass(frozen=True)
class ProductTime:
    product: Product
    seconds: float
    """Median of one call."""

    @property
    def flops_per_s(self) -> float:
        return self.product.flops / self.seconds


def measure_products(config: RunConfig, *, repeats: int) -> dict[str, Any]:
    """Each product of a step, their sum, and what the whole model's arithmetic would take at their rate."""
    resolved, machine = inspect_machine(config)
    device, dtype = machine.device, torch_dtype(resolved.model.precision.compute)
    times = [time_product(product, device, dtype, repeats=repeats) for product in products_of(resolved)]
    gemm_s = sum(time.seconds * time.product.calls for time in times)
    flops_per_s = sum(time.product.flops * time.product.calls for time in times) / gemm_s
    return {
        "gemm_s": gemm_s,
        "gemm_tflops": flops_per_s / 1e12,
        "floor_s": mean_step_flops(resolved) / flops_per_s,
        "peak_tflops": measured_peak(machine) / 1e12,
        "products": [row_of(time) for time in times],
    }


def time_product(product: Product, device: torch.device, dtype: torch.dtype, *, repeats: int) -> ProductTime:
    bytes_of_one = (product.rows + product.columns) * product.depth * dtype.itemsize
    copies = 1 + COLD_BYTES[device.type] // bytes_of_one
    operands = itertools.cycle([_operands(product, device, dtype) for _ in range(copies)])
    return ProductTime(product, median_seconds(lambda: torch.matmul(*next(operands)), device, repeats=repeats))


def _operands(product: Product, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """As they lie in memory in the step: activations (tokens, features) and weights (out, in), all by rows."""
    random = functools.partial(torch.randn, device=device, dtype=dtype)
    p = product
    a = random(p.depth, p.rows).mT if p.kind == "grad weight" else random(p.rows, p.depth)
    b = random(p.columns, p.depth).mT if p.kind == "forward" else random(p.depth, p.columns)
    return a, b


def row_of(time: ProductTime) -> dict[str, Any]:
    p = time.product
    return {
        "name": p.name,
        "kind": p.kind,
        "shape": [p.rows, p.depth, p.columns],
        "calls": p.calls,
        "seconds": time.seconds,
        "tflops": time.flops_per_s / 1e12,
        "step_s": time.seconds * p.calls,
    }
