"""The GPUs that a run may be planned on, and how many of them stand where. No torch.

Rates are the makers' datasheets, dense, without sparsity; those of matrix products in bf16 are `metrics.flops`'s table.
Links are what one GPU sends in one direction: NVLink inside a node where there is one, otherwise PCIe. `node_gb_s` is
what a node usually sends to the others. Prices were typical of on-demand offers, which differ by a factor of two.
"""

import difflib
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from paceline.core.errors import ConfigError
from paceline.core.probe import HOPPER
from paceline.metrics.flops import DENSE_BF16_FLOPS
from paceline.settings.limits import Limit, Limited, at_least

ABOVE_0 = Limit("must be above 0", lambda value: value > 0)


class Gpu(NamedTuple):
    driver_name: str
    capability: int  # the major one
    fp32_tflops: float  # products in fp32, without tensor cores
    memory_gb_s: float
    memory_gib: float  # what the driver reports, which is a little less or more than the name says
    link_gb_s: float
    node_gb_s: float
    price: float  # USD for a GPU and hour

    @property
    def own_kernels(self) -> bool:
        """Whether all kernels of our own run there; elsewhere only those of attention do."""
        return self.capability == HOPPER

    def flops_per_s(self, compute: str) -> float:
        return DENSE_BF16_FLOPS[self.driver_name] if compute == "bf16" else self.fp32_tflops * 1e12


GPUS = {
    # capability, fp32 TFLOP/s, memory in GB/s and GiB, link and node in GB/s, price
    "b200":      Gpu("NVIDIA B200",           10,    80, 8000, 179.1, 900,  400, 5.00),
    "h200":      Gpu("NVIDIA H200",            9,    67, 4800, 139.8, 450,  400, 3.00),
    "h100":      Gpu("NVIDIA H100 80GB HBM3",  9,    67, 3350,  79.2, 450,  400, 2.50),
    "h100-pcie": Gpu("NVIDIA H100 PCIe",       9,    51, 2000,  79.2,  64,   50, 2.20),
    "a100":      Gpu("NVIDIA A100-SXM4-80GB",  8,  19.5, 2039,  79.2, 300,  200, 1.50),
    "a100-40":   Gpu("NVIDIA A100-SXM4-40GB",  8,  19.5, 1555,  39.4, 300,  200, 1.20),
    "l40s":      Gpu("NVIDIA L40S",            8,  91.6,  864,  44.5,  32,   25, 1.00),
    "l4":        Gpu("NVIDIA L4",              8,  30.3,  300,  22.0,  32, 12.5, 0.60),
    "5090":      Gpu("NVIDIA GeForce RTX 5090",12,   105, 1792,  31.4,  64, 12.5, 0.70),
    "4090":      Gpu("NVIDIA GeForce RTX 4090", 8,  82.6, 1008,  23.6,  32, 12.5, 0.45),
    "3090":      Gpu("NVIDIA GeForce RTX 3090", 8,  35.6,  936,  23.6,  32, 12.5, 0.25),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Cluster(Limited, prefix="--"):
    """`gpus` GPUs of one kind, `gpus_per_node` of them joined by the fast link."""

    gpu: str
    """Its kind, as docs/plan.md lists them."""
    gpus: Annotated[int, at_least(1)]
    """How many of them, in all machines together."""
    gpus_per_node: Annotated[int, at_least(1).saying("8 is usual")] = 8
    """How many of them are in one machine."""
    interconnect_gb_s: Annotated[float | None, ABOVE_0.saying("None takes what is usual")] = None
    """What a node sends to the others in one direction; None: what is usual for the GPU."""

    def check(self) -> None:
        if self.gpu not in GPUS:
            near = difflib.get_close_matches(self.gpu.lower().removeprefix("rtx").strip("-_ "), GPUS, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(GPUS)}"
            raise ConfigError(f"--gpu {self.gpu} is not in the table; {hint}")
        if self.gpus > self.gpus_per_node and self.gpus % self.gpus_per_node:
            fits = self.gpus // self.gpus_per_node * self.gpus_per_node
            cure = f"use {fits:,} or {fits + self.gpus_per_node:,}, or another --gpus-per-node"
            raise ConfigError(f"--gpus {self.gpus:,} does not fill nodes of {self.gpus_per_node}; {cure}")

    @property
    def kind(self) -> Gpu:
        return GPUS[self.gpu]

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.gpus_per_node)

    @property
    def node_gb_s(self) -> float:
        return self.interconnect_gb_s if self.interconnect_gb_s is not None else self.kind.node_gb_s
