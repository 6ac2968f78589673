"""Fitting a step into the available memory: a model of memory first, a trial second.

The first plan that is predicted to fit is taken, before anything is compiled. On a GPU the gradient of two
micro-batches is then tried, unless much is left; what a trial found is remembered for machine and config. On a CPU the
system ends a process instead of raising an error, so the model alone decides.
"""

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch

from paceline.core import files
from paceline.core.environment import cpu_model, memory_bytes
from paceline.core.errors import ConfigError, PacelineError
from paceline.core.output import tell
from paceline.core.schema import from_dict, to_dict
from paceline.core.units import human_bytes
from paceline.metrics.memory import available_bytes
from paceline.parallel.memory_plans import USABLE_SHARE, MemoryPlan, Planned, first_that_fits, memory_plans
from paceline.parallel.ranks import SINGLE_PROCESS, Ranks
from paceline.settings.spec import describe

SURE_SHARE = 0.7  # of the available memory: a step predicted to take less is not tried, as no prediction was so far off
CPU_SHARE = 0.8  # of the memory that is free on a CPU; other programs need some, too
NEAR_SHARE = 0.1  # a remembered choice holds while the available memory differs by no more than this
REMEMBERED = "fit.json"  # plans that earlier runs found to fit, in the cache folder
OLD_NAMES = {"head": "lm_head", "head_chunk_tokens": "lm_head_chunk_tokens"}  # fields of a plan in version 0.1
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Fit:
    plan: MemoryPlan
    why: str
    key: str | None  # under which the choice is remembered; None: the micro-batch was asked for, nothing was chosen

    def __str__(self) -> str:
        return f"{self.plan}: {self.why}"


@dataclass(frozen=True, kw_only=True)
class Limits:
    device: torch.device
    limit_gib: float | None
    ranks: Ranks = SINGLE_PROCESS

    def available(self) -> int | None:
        """Bytes that each rank may have: the least of all that are free, or the limit. None: not reported."""
        if self.device.type == "cuda":
            free: float = torch.cuda.mem_get_info(self.device)[0] + torch.cuda.memory_reserved(self.device)
        else:
            free = CPU_SHARE * (available_bytes() or math.inf) / self.ranks.world
        if self.limit_gib is not None:
            limit = self.limit_gib * 2**30
            free = limit if self.device.type == "cpu" else min(free, limit)
        least = -self.ranks.largest_(torch.tensor(-free, dtype=torch.float64)).item()
        return None if math.isinf(least) else int(least)


def fit_memory(
    planned: Planned, limits: Limits, assemble: Callable[[Fit], T], trial: Callable[[], Any], before: Any = None
) -> tuple[T, Fit]:
    """What `assemble` makes of the first plan that fits. `trial` gives what tries it on a GPU (`train.memory_trial`).
    `before`: the plan of the resumed run, as its card has it, kept if it fits, for equal bits."""
    plans, ranks = memory_plans(planned), limits.ranks
    _check_weights(planned, plans[-1], limits.device)
    if planned.batch.micro_tokens is not None:
        fit = Fit(plan=plans[0], why="asked for", key=None)
        return assemble(fit), fit
    available, peaks = limits.available(), [planned.memory(plan).peak for plan in plans]
    key = key_of(planned, limits.device)
    known = ranks.from_first(lambda: recall(key, available))
    start, why = _choose(planned, limits, plans, peaks, available, known=known, before=plan_of(before))
    for plan, peak in list(zip(plans, peaks, strict=True))[start:]:
        fit = Fit(plan=plan, why=why, key=key)
        run = assemble(fit)
        sure = available is not None and peak <= SURE_SHARE * available
        on_gpu = limits.device.type == "cuda"  # on a CPU too large an allocation is no error that can be caught
        if not on_gpu or sure or plan == known or planned.config.parallel.collective_forward:
            return run, fit  # the last: a rank that ran out inside a pass would leave the others waiting
        if not ranks.largest_(torch.tensor(int(not trial().passes(run, patient=plan == plans[-1])))).item():
            if ranks.is_main:
                remember(key, plan, available)
            return run, fit
        why = f"out of memory with {plan}"
        if ranks.is_main:
            tell(why)
        del run
        trial().release_memory()
    raise PacelineError(f"{why}, which takes the least memory; {last_resort(planned, peaks[-1], available)}")


def _check_weights(planned: Planned, plan: MemoryPlan, device: torch.device) -> None:
    """However a step is cut, the weights are made in the memory of the machine, where a CPU keeps all that it needs."""
    needed = planned.memory(plan).always if device.type == "cpu" else describe(planned.config.model).nbytes()
    if (has := memory_bytes()) is not None and needed > has:
        cure = "take a smaller one (--model.vocab-size, --model.width, --model.num-layers, --model.mlp-ratio)"
        needs = f"{human_bytes(needed)}, this machine has {human_bytes(has)}"
        raise ConfigError(f"the model's weights need {needs}; {cure}")


def _choose(
    planned: Planned,
    limits: Limits,
    plans: list[MemoryPlan],
    peaks: Sequence[int],
    available: int | None,
    *,
    known: MemoryPlan | None,
    before: MemoryPlan | None,
) -> tuple[int, str]:
    """Number of the plan to begin with, and why."""
    of = "" if available is None else f" of {human_bytes(available)} available"
    fits = first_that_fits(peaks, available)
    usable = [
        (plans.index(plan), reason)
        for plan, reason in ((before, "as before"), (known, "remembered"))
        if plan in plans and fits is not None and plans.index(plan) >= fits
    ]
    if usable:  # the one that saves more: a run that ran out of memory has left it
        number, reason = max(usable, key=lambda choice: choice[0])
        return number, f"{reason}, predicted peak {human_bytes(peaks[number])}{of}"
    if fits is not None:
        larger = f"; {plans[0]} would take {human_bytes(peaks[0])}" if fits else ""
        return fits, f"predicted peak {human_bytes(peaks[fits])}{of}{larger}"
    if limits.device.type == "cpu" and limits.limit_gib is not None:
        resort = last_resort(planned, peaks[-1], available)
        raise ConfigError(f"--train.memory-limit-gib {limits.limit_gib:g} is too little even for {plans[-1]}: {resort}")
    return len(plans) - 1, f"takes the least memory, but the predicted peak is {human_bytes(peaks[-1])}{of}"


def last_resort(planned: Planned, peak: int, available: int | None) -> str:
    """What only the user may decide."""
    has = "" if available is None else f", {human_bytes(available)} is available"
    cure = f"shorten --batch.sequence-tokens {planned.batch.sequence_tokens} or take a smaller model"
    return f"it needs {human_bytes(peak / USABLE_SHARE)}{has}; {cure}"


def key_of(planned: Planned, device: torch.device) -> str:
    """Of all that a choice depends on, but for the memory that happens to be free."""
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else cpu_model()
    total = torch.cuda.get_device_properties(device).total_memory if cuda else 0
    config = planned.config
    settings = {
        **{part: to_dict(getattr(config, part)) for part in ("model", "optim", "parallel")},
        "batch": to_dict(planned.batch),
        "lm_head_asked": config.lm_head.backend,
        "lm_head_chunk_tokens": config.lm_head.chunk_tokens,
        "compiled": config.train.compile,
        "recompute": config.train.recompute,
        "world": planned.world,
    }
    chosen = {what: choice.name for what, choice in vars(planned.backends).items()}
    known = json.dumps([name, total, torch.__version__, settings, chosen], sort_keys=True)
    return hashlib.blake2b(known.encode(), digest_size=16).hexdigest()


def remember(key: str, plan: MemoryPlan, available: int | None) -> None:
    files.remember(REMEMBERED, key, {"plan": asdict(plan), "available": available})


def recall(key: str, available: int | None) -> MemoryPlan | None:
    """What was remembered, if about as much memory was available then."""
    entry = files.read_cache(REMEMBERED).get(key)
    if not isinstance(entry, dict):
        return None
    then = entry.get("available")
    near = isinstance(then, int) and available is not None and abs(then - available) <= NEAR_SHARE * available
    return plan_of(entry.get("plan")) if near or then == available else None


def plan_of(values: Any) -> MemoryPlan | None:
    """A plan as a card or the cache has it, under today's names or older ones."""
    if isinstance(values, dict):
        values = {OLD_NAMES.get(name, name): value for name, value in values.items()}
    try:
        return from_dict(MemoryPlan, values)
    except ConfigError:
        return None
