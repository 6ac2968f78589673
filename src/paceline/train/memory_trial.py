"""Memory that runs out: trying a plan before a run begins, and what to print where a run meets it later on."""

import gc
from dataclasses import dataclass, replace

import torch

from paceline.core.errors import PacelineError
from paceline.core.output import tell
from paceline.core.units import human_bytes
from paceline.data.feed import DeviceBatch
from paceline.model.masks import window_tensor
from paceline.parallel.machine import Machine, inspect_machine
from paceline.parallel.memory_fit import Fit, Limits, last_resort, remember
from paceline.parallel.memory_plans import Planned, first_that_fits, memory_plans
from paceline.settings.run import RunConfig
from paceline.train.assemble import Assembly
from paceline.train.gradient_step import accumulate_gradient

SIGNS = ("out of memory", "cublas_status_alloc_failed", "defaultcpuallocator")  # in an error's message


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """What a run would begin with."""

    plan: str
    memory: str


def outlook(config: RunConfig) -> Outlook:
    """How steps of this config would be cut on this machine. Nothing is allocated or remembered."""
    resolved, machine = inspect_machine(config)
    available, planned = _available(resolved, machine), Planned(config=resolved, backends=machine.backends, world=1)
    plans = memory_plans(planned)
    peaks = [planned.memory(plan).peak for plan in plans]
    fits = first_that_fits(peaks, available)
    has = "" if available is None else f" of {human_bytes(available)} available"
    if fits is None:
        return Outlook(plan="does not fit", memory=f"predicted peak at least {human_bytes(peaks[-1])}{has}")
    return Outlook(plan=str(plans[fits]), memory=f"predicted peak {human_bytes(peaks[fits])}{has}")


def _available(config: RunConfig, machine: Machine) -> int | None:
    return Limits(device=machine.device, limit_gib=config.train.memory_limit_gib).available()


def passes(run: Assembly, *, patient: bool = False) -> bool:
    """Whether a trial stays within memory. `patient`: tried twice, for there is no other plan. The first time also
    chooses kernels, which takes memory of its own."""
    try:
        trial(run)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        reported = str(error).split("\n")[0]
    else:
        return True
    finally:
        run.optimizer.zero_grad()
    if run.ranks.is_main and reported:
        tell(reported)
    release_cached_memory()
    return patient and passes(run)


def trial(run: Assembly) -> None:
    """The gradient of two micro-batches, the second beside what the first leaves, as in a step. Changes no weight."""
    config, device = run.config, run.machine.device
    share = run.largest_share
    sequences = min(2 * share.micro_sequences, share.sequences)
    ids = torch.arange(sequences * share.sequence_tokens, device=device) % config.model.vocab_size
    targets = ids.view(sequences, share.sequence_tokens)
    window_device = torch.device("cpu") if run.machine.backends.windows_on_host else device
    windows = window_tensor([share.sequence_tokens] * len(config.model.windows), window_device)
    weights = torch.ones(len(config.model.loss_terms), device=device)
    batch = DeviceBatch(targets.to(torch.int32), targets)
    accumulate_gradient(run.forward, batch, windows, weights, micro_sequences=share.micro_sequences)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release_memory() -> None:
    """Memory and compiled code of what nobody holds any more, such as a plan that is given up."""
    torch._dynamo.reset()
    release_cached_memory()


def release_cached_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Of the GPU's allocator; or of a library beside it, or of a CPU's, for which torch has no type of its own."""
    message = str(error).lower() if isinstance(error, RuntimeError) else ""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(sign in message for sign in SIGNS)


def out_of_memory(run: Assembly, fit: Fit) -> PacelineError:
    """One line with the settings to change and values that would fit. A choice of ours is lowered at the next launch:
    it is remembered here."""
    config, plan = run.config, fit.plan
    available = _available(config, run.machine)
    free_choice = replace(config, batch=replace(config.batch, micro_tokens=None))
    planned = Planned(config=free_choice, backends=run.machine.backends, world=run.ranks.world)
    lower = [other for other in memory_plans(planned) if other.below(plan)]
    peaks = [planned.memory(other).peak for other in [*lower, plan]]
    if not lower:
        resort = last_resort(planned, peaks[-1], available)
        return PacelineError(f"out of memory with {plan}, which takes the least memory; {resort}")
    if fit.key is not None:  # on whichever rank: rank 0 only learns that another is lost
        remember(fit.key, lower[0], available)
    found = first_that_fits(peaks[:-1], available)
    number = len(lower) - 1 if found is None else found
    flags = lower[number].flags(plan)
    return PacelineError(f"out of memory with {plan}; use {flags} (predicted peak {human_bytes(peaks[number])})")
