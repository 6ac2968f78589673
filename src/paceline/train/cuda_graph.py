"""The gradient of a micro-batch as a CUDA graph: captured once for each shape, then replayed as one launch.

The some 650 kernels of record 18's micro-batch, launched one by one, leave gaps of 14 ms a step on an H200. A graph has
fixed addresses: tokens and targets are copied to where it reads them, and gradients are set to zero instead of
forgotten.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from paceline.data.feed import DeviceBatch
from paceline.settings.run import RunConfig
from paceline.train.gradient_step import forward_backward

EAGER_STEPS = 3  # of a launch, and of a new shape, before a graph is captured: compiled, tuned, allocator at rest


class CapturedGradient:
    """`gradient_step.forward_backward` for micro-batches of one shape. Capturing allocates as much as one takes."""

    def __init__(
        self, model: nn.Module, parameters: Iterable[nn.Parameter], like: DeviceBatch, windows: Tensor, weights: Tensor
    ) -> None:
        """`like`: a micro-batch, whose shape all have. `windows`, `weights`: the tensors that will hold later ones."""
        self.tokens, self.targets = like.tokens.clone(), like.targets.clone()
        self.counted = torch.ones((), device=windows.device)
        for parameter in parameters:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        torch.cuda.empty_cache()  # what single launches have kept is taken from the same memory
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):  # the feed copies meanwhile
            self.losses = forward_backward(model, self.tokens, self.targets, windows, weights, self.counted)

    def __call__(
        self, model: nn.Module, tokens: Tensor, targets: Tensor, windows: Tensor, weights: Tensor, counted: Tensor | int
    ) -> Tensor:
        """`model`, `windows` and `weights` are those of the capture."""
        self.tokens.copy_(tokens)
        self.targets.copy_(targets)
        self.counted.fill_(counted)
        self.graph.replay()
        return self.losses


class CapturedGradients:
    """A graph for each shape of micro-batch, captured after a few steps of that shape, where there is room."""

    def __init__(self, run: Any, model: nn.Module, windows: Tensor, weights: Tensor) -> None:
        self._run, self._model, self._windows, self._weights = run, model, windows, weights
        self._steps: dict[tuple[int, ...], int] = {}
        self.captured: dict[tuple[int, ...], CapturedGradient] = {}

    @classmethod
    def where_possible(cls, run: Any, model: nn.Module, windows: Tensor, weights: Tensor) -> "CapturedGradients | None":
        device, on_host = run.machine.device.type, run.machine.backends.windows_on_host
        given = {"device": device, "world": run.ranks.world, "windows_on_host": on_host}
        return None if why_not_captured(run.config, **given) else cls(run, model, windows, weights)

    def of(self, batch: DeviceBatch, micro_sequences: int, candidates: int = 0) -> CapturedGradient | None:
        """The graph for micro-batches of so many sequences and candidates, if there is one by now."""
        like = DeviceBatch(batch.tokens[:micro_sequences], batch.targets[:micro_sequences])
        shape = (*like.tokens.shape, candidates)
        seen = self._steps[shape] = self._steps.get(shape, 0) + 1
        if seen == EAGER_STEPS + 1 and has_room(self._run.config.train.memory_limit_gib):
            named, rows = self._run.model.named_parameters(), self._run.row_gradients
            parameters = [param for name, param in named if name not in rows]  # these never have a dense gradient
            self.captured[shape] = CapturedGradient(self._model, parameters, like, self._windows, self._weights)
        return self.captured.get(shape)

    def drop(self) -> None:
        """From now on kernels are launched one by one, and the graphs' memory is given back."""
        self.captured.clear()
        self._steps = dict.fromkeys(self._steps, EAGER_STEPS + 1)
        torch.cuda.empty_cache()


def why_not_captured(config: RunConfig, *, device: str, world: int, windows_on_host: bool) -> str | None:
    """Why a run's gradient is not captured, or None."""
    reasons = {
        "--train.no-cuda-graph": not config.train.cuda_graph,
        f"device {device}": device != "cuda",
        "it is not compiled": not config.train.compile,
        f"{world} ranks: the exchange belongs to some micro-batches only": world > 1,
        "attention launches with the window as a number": windows_on_host,
        "memory is short, and a graph keeps what it takes": config.train.recompute,
        "diagnostics look at every micro-batch's gradient": config.metrics.diagnostics,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def has_room(limit_gib: float | None) -> bool:
    """Whether what a micro-batch has taken so far can be taken once more, and half of it besides: validation finds no
    memory in a graph."""
    taken = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    if limit_gib is not None:
        free = min(free, int(limit_gib * 2**30) - torch.cuda.memory_reserved())
    return taken * 1.5 < free
