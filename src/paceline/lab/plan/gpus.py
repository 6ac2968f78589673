"""The GPUs that a run may be planned on, and how many of them stand where. No torch.

Rates are the makers' datasheets, dense, without sparsity; those of matrix products in bf16 are `metrics.flops`'s table.
Links are what one GPU sends in one direction: NVLink inside a node where there is one, otherwise PCIe. `node_gb_s` is
what a node usually sends to the others. Prices are what on-demand offers typically asked when this was written; offers
differ by a factor of two, so they are an orientation, to be replaced by --price.
"""

import difflib
from dataclasses import dataclass

from paceline.core.errors import ConfigError
from paceline.metrics.flops import DENSE_BF16_FLOPS


@dataclass(frozen=True, kw_only=True)
class Gpu:
    driver_name: str
    fp32_tflops: float
    """Products in fp32, without tensor cores."""
    memory_gb_s: float
    memory_gib: float
    """What the driver reports, which is a little less or more than the name says."""
    link_gb_s: float
    node_gb_s: float
    price: float
    """USD for a GPU and hour."""

    def flops_per_s(self, compute: str) -> float:
        return DENSE_BF16_FLOPS[self.driver_name] if compute == "bf16" else self.fp32_tflops * 1e12


GPUS = {
    "b200": Gpu(driver_name="NVIDIA B200", fp32_tflops=80, memory_gb_s=8000, memory_gib=179.1,
                link_gb_s=900, node_gb_s=400, price=5.00),
    "h200": Gpu(driver_name="NVIDIA H200", fp32_tflops=67, memory_gb_s=4800, memory_gib=139.8,
                link_gb_s=450, node_gb_s=400, price=3.00),
    "h100": Gpu(driver_name="NVIDIA H100 80GB HBM3", fp32_tflops=67, memory_gb_s=3350, memory_gib=79.2,
                link_gb_s=450, node_gb_s=400, price=2.50),
    "h100-pcie": Gpu(driver_name="NVIDIA H100 PCIe", fp32_tflops=51, memory_gb_s=2000, memory_gib=79.2,
                     link_gb_s=64, node_gb_s=50, price=2.20),
    "a100": Gpu(driver_name="NVIDIA A100-SXM4-80GB", fp32_tflops=19.5, memory_gb_s=2039, memory_gib=79.2,
                link_gb_s=300, node_gb_s=200, price=1.50),
    "a100-40": Gpu(driver_name="NVIDIA A100-SXM4-40GB", fp32_tflops=19.5, memory_gb_s=1555, memory_gib=39.4,
                   link_gb_s=300, node_gb_s=200, price=1.20),
    "l40s": Gpu(driver_name="NVIDIA L40S", fp32_tflops=91.6, memory_gb_s=864, memory_gib=44.5,
                link_gb_s=32, node_gb_s=25, price=1.00),
    "l4": Gpu(driver_name="NVIDIA L4", fp32_tflops=30.3, memory_gb_s=300, memory_gib=22.0,
              link_gb_s=32, node_gb_s=12.5, price=0.60),
    "5090": Gpu(driver_name="NVIDIA GeForce RTX 5090", fp32_tflops=105, memory_gb_s=1792, memory_gib=31.4,
                link_gb_s=64, node_gb_s=12.5, price=0.70),
    "4090": Gpu(driver_name="NVIDIA GeForce RTX 4090", fp32_tflops=82.6, memory_gb_s=1008, memory_gib=23.6,
                link_gb_s=32, node_gb_s=12.5, price=0.45),
    "3090": Gpu(driver_name="NVIDIA GeForce RTX 3090", fp32_tflops=35.6, memory_gb_s=936, memory_gib=23.6,
                link_gb_s=32, node_gb_s=12.5, price=0.25),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """`gpus` GPUs of one kind, `gpus_per_node` of them joined by the fast link."""

    gpu: str
    """Its kind, as docs/plan.md lists them."""
    gpus: int
    """How many of them, in all machines together."""
    gpus_per_node: int = 8
    """How many of them are in one machine."""
    interconnect_gb_s: float | None = None
    """What a node sends to the others in one direction; None: what is usual for the GPU."""

    def __post_init__(self) -> None:
        if self.gpu not in GPUS:
            near = difflib.get_close_matches(self.gpu.lower().removeprefix("rtx").strip("-_ "), GPUS, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(GPUS)}"
            raise ConfigError(f"--gpu {self.gpu} is not in the table; {hint}")
        if self.gpus < 1:
            raise ConfigError(f"--gpus {self.gpus} must be at least 1")
        if self.gpus_per_node < 1:
            raise ConfigError(f"--gpus-per-node {self.gpus_per_node} must be at least 1; 8 is usual")
        if self.gpus > self.gpus_per_node and self.gpus % self.gpus_per_node:
            fits = self.gpus // self.gpus_per_node * self.gpus_per_node
            raise ConfigError(
                f"--gpus {self.gpus:,} does not fill nodes of {self.gpus_per_node}; use {fits:,} or "
                f"{fits + self.gpus_per_node:,}, or another --gpus-per-node"
            )
        if self.interconnect_gb_s is not None and not self.interconnect_gb_s > 0:
            raise ConfigError(f"--interconnect-gb-s {self.interconnect_gb_s} must be above 0; None takes what is usual")

    @property
    def kind(self) -> Gpu:
        return GPUS[self.gpu]

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.gpus_per_node)

    @property
    def node_gb_s(self) -> float:
        return self.interconnect_gb_s if self.interconnect_gb_s is not None else self.kind.node_gb_s
