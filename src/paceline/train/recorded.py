"""The gradient of a micro-batch as a CUDA graph: recorded once, then replayed as one launch.

A micro-batch of record 18 is some 650 kernels. Launched one by one they leave gaps on the device, 14 ms of a step on an
H200; replayed they follow each other. A graph has fixed addresses: tokens and targets are copied to where it reads
them, the window lies where it always lies, and gradients stay where they are, set to zero instead of forgotten.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from paceline.data.feed import DeviceBatch
from paceline.train.config import RunConfig

EAGER_STEPS = 3
"""Steps of a launch before a graph is recorded: compiled, tuned and with an allocator at rest."""


class RecordedGradient:
    """`step.differentiate` for micro-batches of one shape. Recording allocates as much as a micro-batch takes."""

    def __init__(self, model: nn.Module, parameters: Iterable[nn.Parameter], like: DeviceBatch, window: Tensor) -> None:
        """`like`: a micro-batch, whose shape all have. `window`: the tensor that will hold every later window."""
        self.tokens, self.targets = like.tokens.clone(), like.targets.clone()
        self.counted = torch.ones((), device=window.device)
        for parameter in parameters:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        torch.cuda.empty_cache()  # what single launches have kept is taken from the same memory
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):  # the feed copies meanwhile
            loss = model(self.tokens, self.targets, window).sum() / self.counted
            loss.backward()
            self.loss: Tensor = loss.detach()

    def __call__(
        self, model: nn.Module, tokens: Tensor, targets: Tensor, window: Tensor, counted: Tensor | int
    ) -> Tensor:
        """`model` and `window` are those of the recording."""
        self.tokens.copy_(tokens)
        self.targets.copy_(targets)
        self.counted.fill_(counted)
        self.graph.replay()
        return self.loss


def recordable(config: RunConfig, *, device: str, world: int, window_on_host: bool) -> str | None:
    """Why a run's gradient is not recorded, or None."""
    if not config.train.cuda_graph:
        return "--train.no-cuda-graph"
    if device != "cuda":
        return f"device {device}"
    if not config.train.compile:
        return "it is not compiled"
    if world > 1:
        return f"{world} ranks: the exchange belongs to some micro-batches only"
    if window_on_host:
        return "attention launches with the window as a number"
    if config.train.recompute:
        return "memory is short, and a graph keeps what it takes"
    if config.metrics.instruments:
        return "instruments look at every micro-batch's gradient"
    return None


def has_room(limit_gib: float | None) -> bool:
    """Whether what a micro-batch has taken so far can be had once more, and half of it besides: validation finds no
    memory in a graph."""
    taken = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    if limit_gib is not None:
        free = min(free, int(limit_gib * 2**30) - torch.cuda.memory_reserved())
    return taken * 1.5 < free
