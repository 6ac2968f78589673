"""Fitting a step into the memory there is: a model of memory first, a trial second.

The first rung of the ladder that is foretold to fit is taken, before anything is compiled. On a GPU the gradient of two
micro-batches is then tried, unless much is left: that costs their time and no compilation of its own. Out of memory
means one rung down. What a trial found is remembered for machine and config. On a CPU there is no error to catch (the
system ends some process instead), so that the model alone decides.
"""

import gc
import hashlib
import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from paceline.core.environment import cpu_model
from paceline.core.errors import ConfigError, PacelineError
from paceline.core.files import cache_folder, write_json
from paceline.core.probe import Choice
from paceline.core.schema import from_dict, to_dict
from paceline.core.units import human_bytes
from paceline.data.feed import DeviceBatch
from paceline.metrics.memory import available_bytes
from paceline.parallel.ranks import ALONE, Ranks
from paceline.parallel.share import share_of_batch
from paceline.train.assemble import Machine, Parts, assemble, inspect_machine
from paceline.train.config import RunConfig
from paceline.train.ladder import USABLE_SHARE, Fit, Rung, first_that_fits, foretold, ladder
from paceline.train.step import accumulate_gradient

SURE_SHARE = 0.7
"""Of the memory there is: a step that is foretold to take less is not tried. The model was never that far off."""
CPU_SHARE = 0.8
"""Of the memory that is free on a CPU; other programs want some, too."""
NEAR_SHARE = 0.1
"""A remembered choice holds while the memory there is differs by no more than this."""
REMEMBERED = "fit.json"
SIGNS = ("out of memory", "cublas_status_alloc_failed", "defaultcpuallocator")
"""Of an error that means that memory has run out."""


def assemble_to_fit(config: RunConfig, machine: Machine, ranks: Ranks = ALONE, *, before: Any = None) -> Parts:
    """The parts of a run whose steps fit into memory. `before`: the rung of the run that is resumed, as its card has
    it, which is kept if it fits: then the bits stay the same, too. A micro-batch that was asked for is not tried."""
    rungs = ladder(config, machine.back_ends, ranks.world)
    if config.batch.micro_tokens is not None:
        return _assembled(config, machine, ranks, Fit(rung=rungs[0], why="asked for", key=None))
    there_is = memory_there_is(config, machine.device, ranks)
    peaks = [foretold(config, machine.back_ends, rung, ranks.world).peak for rung in rungs]
    key = _key(config, machine, ranks)
    known = ranks.from_first(lambda: recall(key, there_is))
    start, why = _choose(config, machine, rungs, peaks, there_is, known=known, before=_rung_of(before))
    for rung, peak in list(zip(rungs, peaks, strict=True))[start:]:
        parts = _assembled(config, machine, ranks, Fit(rung=rung, why=why, key=key))
        sure = there_is is not None and peak <= SURE_SHARE * there_is
        if not can_run_out(machine.device) or sure or rung == known or config.parallel.talks_inside:
            return parts  # the last: a rank that ran out inside a pass would leave the others waiting
        if not ranks.largest_(torch.tensor(int(not _passes(parts, patient=rung == rungs[-1])))).item():
            if ranks.first:
                remember(key, rung, there_is)
            return parts
        why = f"out of memory with {rung}"
        if ranks.first:
            print(why)
        del parts
        release_memory()
    raise PacelineError(f"{why}, the least that can be done; {_last_resort(config, peaks[-1], there_is)}")


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """What a run would begin with."""

    rung: str
    memory: str


def outlook(config: RunConfig) -> Outlook:
    """How steps of this config would be cut on this machine. Nothing is allocated or remembered."""
    resolved, machine = inspect_machine(config)
    there_is = memory_there_is(resolved, machine.device)
    rungs = ladder(resolved, machine.back_ends)
    peaks = [foretold(resolved, machine.back_ends, rung).peak for rung in rungs]
    fits = first_that_fits(peaks, there_is)
    has = "" if there_is is None else f", {human_bytes(there_is)} may be had"
    if fits is None:
        return Outlook(rung="does not fit", memory=f"{human_bytes(peaks[-1])} foretold at the least{has}")
    return Outlook(rung=str(rungs[fits]), memory=f"{human_bytes(peaks[fits])} foretold{has}")


def memory_there_is(config: RunConfig, device: torch.device, ranks: Ranks = ALONE) -> int | None:
    """Bytes that each rank may have: the least that one of them has free, or `train.memory_limit_gib`. None: the system
    does not tell."""
    if device.type == "cuda":
        free: float = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    else:
        free = CPU_SHARE * (available_bytes() or math.inf) / ranks.world
    if config.train.memory_limit_gib is not None:
        limit = config.train.memory_limit_gib * 2**30
        free = limit if device.type == "cpu" else min(free, limit)
    least = -ranks.largest_(torch.tensor(-free, dtype=torch.float64)).item()
    return None if math.isinf(least) else int(least)


def _choose(
    config: RunConfig,
    machine: Machine,
    rungs: list[Rung],
    peaks: Sequence[int],
    there_is: int | None,
    *,
    known: Rung | None,
    before: Rung | None,
) -> tuple[int, str]:
    """The rung to begin with, and why."""
    of = "" if there_is is None else f" of {human_bytes(there_is)}"
    fits = first_that_fits(peaks, there_is)
    usable = [
        (rungs.index(rung), reason)
        for rung, reason in ((before, "as before"), (known, "remembered"))
        if rung in rungs and fits is not None and rungs.index(rung) >= fits
    ]
    if usable:  # the lower one: a run that ran out of memory left word of it
        number, reason = max(usable, key=lambda choice: choice[0])
        return number, f"{reason}, {human_bytes(peaks[number])}{of} foretold"
    if fits == 0:
        return 0, f"{human_bytes(peaks[0])}{of} foretold"
    if fits is not None:
        return fits, f"{human_bytes(peaks[fits])}{of} foretold; {rungs[0]} would take {human_bytes(peaks[0])}"
    if machine.device.type == "cpu" and config.train.memory_limit_gib is not None:
        raise ConfigError(
            f"--train.memory-limit-gib {config.train.memory_limit_gib:g} is too little even for {rungs[-1]}: "
            f"{_last_resort(config, peaks[-1], there_is)}"
        )
    return len(rungs) - 1, f"the least that can be done, but {human_bytes(peaks[-1])}{of} foretold"


def _assembled(config: RunConfig, machine: Machine, ranks: Ranks, fit: Fit) -> Parts:
    """The parts of a run on a rung."""
    rung, head = fit.rung, machine.back_ends.head
    if head.name != rung.head:
        head = Choice(name=rung.head, reason="the logits of all tokens would not fit")
    config = replace(
        config,
        batch=replace(config.batch, micro_tokens=rung.micro_tokens),
        head=replace(config.head, chunk_tokens=rung.head_chunk_tokens),
        train=replace(
            config.train,
            recompute=rung.recompute,
            expandable_segments=config.train.expandable_segments or rung.recompute,  # no holes where memory is short
        ),
    )
    machine = replace(machine, back_ends=replace(machine.back_ends, head=head), notes=(*machine.notes, str(fit)))
    return replace(assemble(config, machine, ranks), fit=fit)


def can_run_out(device: torch.device) -> bool:
    """Whether too large an allocation is an error that can be caught."""
    return device.type == "cuda"


def _passes(parts: Parts, *, patient: bool = False) -> bool:
    """`patient`: tried twice, for there is nothing below. The first time also chooses kernels, which takes memory of
    its own."""
    try:
        trial(parts)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        told = str(error).split("\n")[0]
    else:
        return True
    finally:
        parts.optimizer.zero_grad()
    if parts.ranks.first and told:
        print(told)
    release_cached_memory()
    return patient and _passes(parts)


def trial(parts: Parts) -> None:
    """The gradient of two micro-batches, the second beside what the first leaves, as in a step. Changes no weight."""
    config, device = parts.config, parts.machine.device
    share = share_of_batch(config.batch, parts.ranks.world, config.parallel.split_sequence)
    sequences = min(2 * share.micro_sequences, share.sequences)
    ids = torch.arange(sequences * share.sequence_tokens, device=device) % config.model.vocab_size
    targets = ids.view(sequences, share.sequence_tokens)
    window_device = "cpu" if parts.machine.back_ends.window_on_host else device
    window = torch.full((), share.sequence_tokens, dtype=torch.int32, device=window_device)
    batch = DeviceBatch(targets.to(torch.int32), targets)
    accumulate_gradient(parts.forward, batch, window, micro_sequences=share.micro_sequences)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release_memory() -> None:
    """Memory and compiled code of what nobody holds any more, such as a rung that is given up."""
    torch._dynamo.reset()
    release_cached_memory()


def release_cached_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ---- what was found out before


def _key(config: RunConfig, machine: Machine, ranks: Ranks) -> str:
    """Of all that a choice depends on, but for the memory that happens to be free."""
    cuda = machine.device.type == "cuda"
    name = torch.cuda.get_device_name(machine.device) if cuda else cpu_model()
    total = torch.cuda.get_device_properties(machine.device).total_memory if cuda else 0
    settings = {room: to_dict(getattr(config, room)) for room in ("model", "batch", "head", "optim", "parallel")}
    train = {name: getattr(config.train, name) for name in ("compile", "recompute", "memory_limit_gib")}
    chosen = {what: choice.name for what, choice in vars(machine.back_ends).items()}
    said = json.dumps([name, total, torch.__version__, ranks.world, settings, train, chosen], sort_keys=True)
    return hashlib.blake2b(said.encode(), digest_size=16).hexdigest()


def remember(key: str, rung: Rung, there_is: int | None) -> None:
    """A cache that cannot be written costs a trial each time, nothing else."""
    path = cache_folder() / REMEMBERED
    with suppress(OSError):
        write_json(path, {**_read(path), key: {"rung": asdict(rung), "there_is": there_is}})


def recall(key: str, there_is: int | None) -> Rung | None:
    """What was remembered, if there was about as much memory then."""
    entry = _read(cache_folder() / REMEMBERED).get(key)
    if not isinstance(entry, dict):
        return None
    then = entry.get("there_is")
    near = isinstance(then, int) and there_is is not None and abs(then - there_is) <= NEAR_SHARE * there_is
    return _rung_of(entry.get("rung")) if near or then == there_is else None


def _rung_of(values: Any) -> Rung | None:
    try:
        return from_dict(Rung, values)
    except ConfigError:
        return None


def _read(path: Path) -> dict[str, Any]:
    """A file that is missing or damaged remembers nothing."""
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


# ---- out of memory later


def is_out_of_memory(error: BaseException) -> bool:
    """Of the GPU's allocator; or of a library beside it, or of a CPU's, for which torch has no type of its own."""
    told = str(error).lower() if isinstance(error, RuntimeError) else ""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(sign in told for sign in SIGNS)


def out_of_memory(parts: Parts) -> PacelineError:
    """One line with the settings to change and values that would fit. A choice of ours is lowered at the next launch:
    it is remembered here."""
    config, back_ends, ranks = parts.config, parts.machine.back_ends, parts.ranks
    assert parts.fit is not None
    rung, there_is = parts.fit.rung, memory_there_is(config, parts.machine.device)
    free_choice = replace(config, batch=replace(config.batch, micro_tokens=None))
    lower = [other for other in ladder(free_choice, back_ends, ranks.world) if other.below(rung)]
    peaks = [foretold(config, back_ends, other, ranks.world).peak for other in [*lower, rung]]
    if not lower:
        resort = _last_resort(config, peaks[-1], there_is)
        return PacelineError(f"out of memory with {rung}, the least that can be done; {resort}")
    if parts.fit.key is not None:  # whichever rank it met: the first one only hears that another is lost
        remember(parts.fit.key, lower[0], there_is)
    found = first_that_fits(peaks[:-1], there_is)
    number = len(lower) - 1 if found is None else found
    flags = lower[number].flags(rung)
    return PacelineError(f"out of memory with {rung}; use {flags} ({human_bytes(peaks[number])} foretold)")


def _last_resort(config: RunConfig, peak: int, there_is: int | None) -> str:
    """What only the user may decide."""
    has = "" if there_is is None else f", there is {human_bytes(there_is)}"
    return (
        f"it needs {human_bytes(peak / USABLE_SHARE)}{has}; shorten --batch.sequence-tokens "
        f"{config.batch.sequence_tokens} or take a smaller model"
    )
