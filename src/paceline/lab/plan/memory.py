"""Peak memory of one GPU by `parallel.memory_model`, and what would make a run fit. Nothing is fitted. No torch."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from paceline.backends.lm_head import in_chunks
from paceline.backends.registry import Operation, Request, find, suited
from paceline.lab.plan.gpus import GPUS
from paceline.lab.plan.work import Setting, profile_on
from paceline.lab.technique import flag_words
from paceline.parallel.memory_model import KEEPING, Execution, Memory, step_memory
from paceline.parallel.memory_plans import USABLE_SHARE
from paceline.settings.run import RunConfig

GIB = 2**30


def memory(at: Setting) -> Memory:
    return step_memory(at.config.model, at.config.optim, at.share, _execution(at))


def peak_gib(at: Setting) -> float:
    return memory(at).peak / GIB


def usable_gib(at: Setting) -> float:
    return USABLE_SHARE * at.cluster.kind.memory_gib


def fits(at: Setting) -> bool:
    return peak_gib(at) <= usable_gib(at)


def _execution(at: Setting) -> Execution:
    capability = at.cluster.kind.capability
    usual = {operation: suited(operation, request_of(at), capability).name for operation in KEEPING}
    return Execution.of(at.config, at.cluster.gpus, {**usual, **named_back_ends(at.config)})


def request_of(at: Setting) -> Request:
    """What back ends are asked for on the cluster."""
    return Request(
        model=at.config.model,
        device="cuda",
        compute=at.config.model.precision.compute,
        compiled=at.compiled,
        custom_kernels=at.profile == "fast",
        lm_head_chunk_tokens=at.config.lm_head.chunk_tokens,
    )


def named_back_ends(config: RunConfig) -> dict[Operation, str]:
    """By operation, where the config does not leave the choice to the machine."""
    asked: dict[Operation, str] = {operation: getattr(config, operation).backend for operation in KEEPING}
    return {operation: name for operation, name in asked.items() if name != "auto"}


def remedy(at: Setting) -> str:
    """The first change that makes the run fit; those that cost little come first."""
    elsewhere = sorted(GPUS, key=lambda name: GPUS[name].memory_gib)
    moved = [(f"--gpu {name} ", replace(at, cluster=replace(at.cluster, gpu=name))) for name in elsewhere]
    moved = [(flag, replace(there, profile=profile_on(there.cluster.kind, there.profile))) for flag, there in moved]
    for gpu, here in [("", at), *moved]:
        for values in ({}, *_savings(here)):
            if fits(_changed(here, values)):
                return f"{gpu}{flags_of(values)}".strip()
    least = min(peak_gib(_changed(at, values)) for values in _savings(at))
    lacking = f"with every saving it still takes {least:,.0f} GiB, which no GPU of the table has"
    return f"a smaller model or a shorter --batch.sequence-tokens: {lacking}"


def flags_of(values: Mapping[str, Any]) -> str:
    """Of dotted fields, as on the command line."""
    return " ".join(word for field, value in values.items() for word in flag_words(field, value))


def _changed(at: Setting, values: Mapping[str, Any]) -> Setting:
    """Keeps what a deep model has computed about itself, unlike `with_values`."""
    config = at.config
    for name, value in values.items():
        section, field = name.split(".")
        config = replace(config, **{section: replace(getattr(config, section), **{field: value})})
    return replace(at, config=config)


def _savings(at: Setting) -> Iterator[dict[str, Any]]:
    """Values of dotted fields: smaller micro-batches; shared moments, a head in chunks, recomputation; shards of
    everything in place of shared moments; and these together, in the order of their price."""
    sequences, now, length = at.share.sequences, at.share.micro_sequences, at.config.batch.sequence_tokens
    smaller = [{"batch.micro_tokens": n * length} for n in range(now - 1, 0, -1) if sequences % n == 0]
    yield from smaller
    alone: list[dict[str, Any]] = [{"lm_head.backend": in_chunks().name}, {"train.recompute": True}]
    if find("lm_head", _execution(at).lm_head).short_chunk_tokens is not None:
        alone.pop(0)
    shared: list[dict[str, Any]] = [{"parallel.zero1": True}, {"parallel.fsdp": True}]
    for savings in [alone] if at.cluster.gpus == 1 else [[first, *alone] for first in shared]:
        together: dict[str, Any] = {}
        for saving in savings:
            together |= saving
            yield saving
            yield dict(together)
        yield from (together | each for each in smaller)
