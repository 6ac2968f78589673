"""How fast this machine multiplies at best, and the step's own matrix products one by one, forward and both gradients.

Random data in the format of the products, through torch.matmul as the model calls it. Operands are taken in turn from
enough copies that none is still in the device's cache when its turn comes again.
"""

import functools
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.metrics.flops import mean_flops_per_token
from paceline.model.ops import torch_dtype
from paceline.parallel.machine import Machine, inspect_machine
from paceline.settings.run import RunConfig
from paceline.settings.schedule import largest_batch, mean_batch_tokens
from paceline.settings.spec import describe

PEAK_SIDE = {"cuda": 8192, "cpu": 1024}  # of the square product whose rate counts as the device's peak
COLD_BYTES = {"cuda": 256 * 2**20, "cpu": 2**20}  # of all copies: several times the 50 MB cache of an H200, no CPU's


class Product(NamedTuple):
    """(rows, depth) times (depth, columns), `calls` times a step."""

    name: str
    kind: str  # `forward`, `grad input` or `grad weight`
    rows: int
    depth: int
    columns: int
    calls: float  # mean over the steps

    @property
    def flops(self) -> int:
        """Of one call."""
        return 2 * self.rows * self.depth * self.columns


def products_of(config: RunConfig) -> list[Product]:
    """Every product with a weight, those of equal shape as one. The head counts once, however it is cut."""
    tokens = largest_batch(config).micro_sequences * config.batch.sequence_tokens
    weights: dict[tuple[int, int], list[str]] = {}
    for product in describe(config.model).products:
        short = " ".join(product.name.split(".")[-2:])  # `blocks.3.mlp.up` as `mlp up`
        weights.setdefault((product.outputs, product.inputs), []).append(short)
    found = []
    for (out, into), names in weights.items():
        name, calls = ", ".join(dict.fromkeys(names)), len(names) * mean_batch_tokens(config) / tokens
        found.append(Product(name, "forward", tokens, into, out, calls))
        found.append(Product(name, "grad input", tokens, out, into, calls))
        found.append(Product(name, "grad weight", out, tokens, into, calls))
    return found


def measure_products(config: RunConfig, *, repeats: int) -> dict[str, Any]:
    """Each product of a step, their sum, and what the whole model's arithmetic would take at their rate."""
    resolved, machine = inspect_machine(config)
    dtype, products = torch_dtype(resolved.model.precision.compute), products_of(resolved)
    rows = [_measured(product, machine.device, dtype, repeats) for product in products]
    gemm_s = sum(row["step_s"] for row in rows)
    flops_per_s = sum(product.flops * product.calls for product in products) / gemm_s
    return {
        "gemm_s": gemm_s,
        "gemm_tflops": flops_per_s / 1e12,
        "floor_s": floor_s(resolved, flops_per_s),
        "peak_tflops": measured_peak(machine) / 1e12,
        "products": rows,
    }


def _measured(p: Product, device: torch.device, dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    """Median of one call, and of all in a step."""
    copies = 1 + COLD_BYTES[device.type] // ((p.rows + p.columns) * p.depth * dtype.itemsize)
    operands = itertools.cycle([_operands(p, device, dtype) for _ in range(copies)])
    seconds = median_seconds(lambda: torch.matmul(*next(operands)), device, repeats=repeats)
    return {
        "name": p.name,
        "kind": p.kind,
        "shape": [p.rows, p.depth, p.columns],
        "calls": p.calls,
        "seconds": seconds,
        "tflops": p.flops / seconds / 1e12,
        "step_s": seconds * p.calls,
    }


def _operands(p: Product, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """As they lie in memory in the step: activations (tokens, features) and weights (out, in), all by rows."""
    random = functools.partial(torch.randn, device=device, dtype=dtype)
    a = random(p.depth, p.rows).mT if p.kind == "grad weight" else random(p.rows, p.depth)
    b = random(p.columns, p.depth).mT if p.kind == "forward" else random(p.depth, p.columns)
    return a, b


class Marks:
    """Places in the device's queue, or on a CPU times. The first is set at once."""

    def __init__(self, device: torch.device) -> None:
        self._on_cpu = device.type == "cpu"
        self._times: list[float] = []
        self._events: list[torch.cuda.Event] = []
        self.set()

    def set(self) -> None:
        """Does not wait."""
        if self._on_cpu:
            self._times.append(time.perf_counter())
        else:
            self._events.append(torch.cuda.Event(enable_timing=True))
            self._events[-1].record()

    def seconds(self) -> list[float]:
        """From each mark to the next. Waits for the last."""
        if self._on_cpu:
            return [second - first for first, second in itertools.pairwise(self._times)]
        self._events[-1].synchronize()
        return [first.elapsed_time(second) / 1e3 for first, second in itertools.pairwise(self._events)]


def median_seconds(work: Callable[[], object], device: torch.device, *, repeats: int) -> float:
    """Median time of one call. On a GPU the calls are queued without a wait between them."""
    for _ in range(3):  # warm-up
        work()
    marks = Marks(device)
    for _ in range(repeats):
        work()
        marks.set()
    return statistics.median(marks.seconds())


def measured_peak(machine: Machine, *, repeats: int = 20) -> float:
    """FLOP/s of a large square product of random matrices, in bf16 where the machine has it, else in fp32."""
    side, dtype = PEAK_SIDE[machine.device.type], torch.bfloat16 if machine.bf16 else torch.float32
    a, b = (torch.randn(side, side, device=machine.device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * side**3 / median_seconds(lambda: torch.mm(a, b, out=out), machine.device, repeats=repeats)


def floor_s(config: RunConfig, flops_per_s: float) -> float:
    """Of a step's whole arithmetic at this rate, mean over the schedule; attention as if no document ended."""
    return mean_flops_per_token(config) * mean_batch_tokens(config) / flops_per_s
