"""How fast a model writes: tokens a second of one text and of many, and how long the first token takes.

Measured over the server's batcher, so with all that a text costs on the host, but without HTTP. A text that ends is
followed by another, so that there are always as many as asked for. The clock runs while all of them are being written.
"""

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from paceline.core.errors import ConfigError
from paceline.evaluate.config import SamplingConfig
from paceline.evaluate.serving.batcher import Batcher, Event, Stream, make_batcher
from paceline.metrics.memory import peak_bytes
from paceline.model.gpt import GPT
from paceline.model.masks import Windows
from paceline.parallel.machine import inspect_machine
from paceline.settings.run import RunConfig
from paceline.settings.schedule import widest_windows

NOISE = 0.02  # added to untrained weights: matrices that start at 0 would make all logits equal
PROFILED_STEPS = 8
LONGEST = 12  # kernels that a result names


@dataclass(frozen=True, kw_only=True)
class SampleCase:
    """What is measured; the fields are those of `paceline bench sample`."""

    steps: int
    repeats: int
    prompt_tokens: int
    sampling: SamplingConfig
    compiled: bool


def untrained(config: RunConfig) -> tuple[GPT, Windows]:
    """A preset's model at its widest window, on the GPU if there is one."""
    resolved, machine = inspect_machine(replace(config, train=replace(config.train, device="auto", compile=False)))
    model = GPT(resolved.model, end_of_text=resolved.data.end_of_text).to(machine.device)
    generator = torch.Generator(machine.device).manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, device=machine.device)
            parameter.add_((NOISE * noise).to(parameter.dtype))
    return model, tuple(widest_windows(resolved).values())


def measure_sampling(
    model: GPT, windows: Windows, case: SampleCase, streams: Sequence[int], *, say: Callable[[str], None]
) -> dict[str, Any]:
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    rows = []
    for count in streams:
        say(f"{count} at once")
        rows.append(_measure(model, windows, case, count))
    return {
        "step": " and ".join(sorted({row["step"] for row in rows})),
        "threads": torch.get_num_threads(),
        "load_before": load,
        "settings": {name: value for name, value in asdict(case).items() if name != "compiled"},
        "streams": rows,
    }


def _measure(model: GPT, windows: Windows, case: SampleCase, count: int) -> dict[str, Any]:
    device, max_tokens = model.embeddings.token.device, model.config.rotary.max_tokens
    if case.prompt_tokens >= max_tokens:
        raise ConfigError(f"--prompt-tokens {case.prompt_tokens:,}: the model has positions for {max_tokens:,}")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    batcher = make_batcher(model, windows=windows, slots=count, max_tokens=max_tokens, compiled=case.compiled)
    prepare_s = time.perf_counter() - started
    crowd = Crowd(batcher, case, count)
    first_token_s = [crowd.first_token_s() for _ in range(1 + case.repeats)][1:]  # the first one warms up, also below
    crowd.gather()
    rates, rates_by_cpu = zip(*[crowd.rates(case.steps) for _ in range(1 + case.repeats)][1:], strict=True)
    peak, graph = peak_bytes(str(device)), batcher.decode_graph
    step = "kernel by kernel" if graph is None else f"CUDA graph, {'' if graph.compiled else 'not '}compiled"
    return {
        "streams": count,
        "step": step,
        "tokens_per_s": statistics.median(rates),
        "lowest_tokens_per_s": min(rates),
        "highest_tokens_per_s": max(rates),
        "tokens_per_cpu_s": statistics.median(rates_by_cpu) if device.type == "cpu" else None,
        "first_token_s": statistics.median(first_token_s),
        "prepare_s": prepare_s,
        "peak_gib": None if peak is None else peak / 2**30,
        **_kernels(crowd, device),
    }


class Crowd:
    """`count` texts that are written at the same time for as long as anybody looks."""

    def __init__(self, batcher: Batcher, case: SampleCase, count: int) -> None:
        self.batcher, self.case, self.count = batcher, case, count
        self.added = 0

    def first_token_s(self) -> float:
        """Of one text that is alone."""
        stream = self._add()
        started = time.perf_counter()
        while not stream.made and not self.batcher.idle:
            self.batcher.step()
        taken = time.perf_counter() - started
        self.batcher.drop(stream)
        return taken

    def gather(self) -> None:
        for _ in range(self.count):
            self._add()
        while self.batcher.starting or self.batcher.waiting:
            self.step()

    def rates(self, steps: int) -> tuple[float, float]:
        """Tokens a second by the clock, and by processor time, which says more of a CPU that is shared."""
        started, started_cpu = time.perf_counter(), time.process_time()
        made = sum(event.token is not None for _ in range(steps) for event in self.step())
        return made / (time.perf_counter() - started), made / (time.process_time() - started_cpu)

    def step(self) -> list[Event]:
        events = self.batcher.step()
        for event in events:
            if event.finish is not None:
                self._add()
        return events

    def _add(self) -> Stream:
        """A text with a prompt, a seed and as much room as there is."""
        c, model = self.case, self.batcher.model
        draw = torch.Generator().manual_seed(self.added)
        prompt = torch.randint(model.config.vocab_size, (c.prompt_tokens,), generator=draw).tolist()
        sampling = replace(c.sampling, seed=c.sampling.seed + self.added)
        stream = Stream(sampling, prompt, self.batcher.decoder.max_tokens - c.prompt_tokens, math.inf)
        self.added += 1
        self.batcher.add(stream)
        return stream


def _kernels(crowd: Crowd, device: torch.device) -> dict[str, Any]:
    """How many kernels a step is, how long they take together, and the longest."""
    if device.type != "cuda":
        return {"kernels_per_step": None, "device_step_s": None, "longest_kernels": []}
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED_STEPS):
            crowd.step()
        torch.cuda.synchronize()
    seconds: dict[str, list[float]] = {}
    for event in profiler.events() or []:
        if event.device_type.name == "CUDA":
            seconds.setdefault(event.name, []).append(event.time_range.elapsed_us() / 1e6)
    rows: list[dict[str, Any]] = [
        {"name": name, "calls": len(each) / PROFILED_STEPS, "seconds": sum(each) / PROFILED_STEPS}
        for name, each in seconds.items()
    ]
    return {
        "kernels_per_step": sum(row["calls"] for row in rows),
        "device_step_s": sum(row["seconds"] for row in rows),
        "longest_kernels": sorted(rows, key=lambda row: -row["seconds"])[:LONGEST],
    }
