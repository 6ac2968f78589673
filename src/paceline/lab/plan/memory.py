"""Peak memory of one GPU: `parallel.memory_model` for a run that does not exist yet, and what would make it fit. No
torch. Nothing is fitted here."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from paceline.lab.plan.gpus import GPUS
from paceline.lab.plan.work import Setting, table_bytes
from paceline.parallel.memory_model import Execution, Memory, halo_tokens, step_memory
from paceline.train.config import RunConfig

GIB = 2**30
USABLE = 0.92
"""Share of a GPU's memory that a run can have; the rest is the context's, the libraries' and lost between blocks."""


@dataclass(frozen=True)
class MemoryFigure:
    """A measured peak."""

    source: str
    setting: Setting
    gib: float


def memory(at: Setting) -> Memory:
    """Of a step. Shared moments of Adam are held by each rank for its rows only."""
    config, ranks = at.config, at.cluster.gpus
    whole = step_memory(config.model, config.optim, at.share, _execution(at))
    shared = config.parallel.shard_adam and not config.parallel.fully_shard
    elsewhere = 2 * table_bytes(config.model) * (ranks - 1) // ranks if shared else 0
    return replace(whole, slots=whole.slots - elsewhere)


def peak_gib(at: Setting) -> float:
    return memory(at).peak / GIB


def fits(at: Setting) -> bool:
    return peak_gib(at) <= USABLE * at.cluster.kind.memory_gib


def _execution(at: Setting) -> Execution:
    config, fast = at.config, at.profile == "fast"
    flex = "flex" if at.compiled else "reference"  # flex is for compiled runs only
    mlp = "fused" if fast and config.model.activation == "relu2" else "reference"
    return Execution(
        attention=_named(config.attention.backend, "ranges" if fast else flex),
        heads=_named(config.attention.heads, "fused" if fast else "reference"),
        mlp=_named(config.mlp.backend, mlp),
        head=_named(config.head.backend, "fused" if fast else "reference"),
        head_chunk_tokens=config.head.chunk_tokens,
        compiled=at.compiled,
        recompute=config.train.recompute,
        gradient_copies=2 if at.cluster.gpus > 1 and not config.parallel.bucket_views else 1,
        shards=at.cluster.gpus if config.parallel.fully_shard else 1,
        halo_tokens=halo_tokens(config.model, config.batch, config.parallel.split_sequence),
    )


def _named(asked: str, by_profile: str) -> str:
    return by_profile if asked == "auto" else asked


def remedy(at: Setting) -> str:
    """The first change that makes the run fit; those that cost little come first."""
    for flags, changed in _remedies(at):
        if fits(changed):
            return flags
    for name in sorted(GPUS, key=lambda name: GPUS[name].memory_gib):
        elsewhere = replace(at, cluster=replace(at.cluster, gpu=name))
        for flags, changed in [("", elsewhere), *_remedies(elsewhere)]:
            if fits(changed):
                return f"--gpu {name} {flags}".strip()
    least = min(peak_gib(changed) for _, changed in _remedies(at))
    return (
        f"a smaller model or a shorter --batch.sequence-tokens: with every saving it still takes {least:,.0f} GiB, "
        "which no GPU of the table has"
    )


def _remedies(at: Setting) -> Iterator[tuple[str, Setting]]:
    """(flags, the run with them): smaller micro-batches, shared moments, a head in chunks, recomputation, shards of
    everything, and these together."""
    for tokens in _smaller_micro_batches(at):
        yield f"--batch.micro-tokens {tokens}", _with_micro_tokens(at, tokens)
    for savings in _savings(at):
        saved, flags = at, ""
        for flag, change in savings:
            saved, flags = replace(saved, config=change(saved.config)), f"{flags} {flag}".strip()
            yield flag, replace(at, config=change(at.config))
            yield flags, saved
        for tokens in _smaller_micro_batches(at):
            yield f"{flags} --batch.micro-tokens {tokens}", _with_micro_tokens(saved, tokens)


def _smaller_micro_batches(at: Setting) -> list[int]:
    sequences, now, length = at.share.sequences, at.share.micro_sequences, at.config.batch.sequence_tokens
    return [n * length for n in range(now - 1, 0, -1) if sequences % n == 0]


Saving = tuple[str, Callable[[RunConfig], RunConfig]]
"""A flag and what it does to a config."""


def _savings(at: Setting) -> list[list[Saving]]:
    """Those that go together, in the order of their price; shards of everything take the place of shared moments."""
    moments: Saving = "--parallel.shard-adam", lambda c: replace(c, parallel=replace(c.parallel, shard_adam=True))
    everything: Saving = "--parallel.fully-shard", lambda c: replace(c, parallel=replace(c.parallel, fully_shard=True))
    chunked: Saving = "--head.backend chunked", lambda c: replace(c, head=replace(c.head, backend="chunked"))
    recomputed: Saving = "--train.recompute", lambda c: replace(c, train=replace(c.train, recompute=True))
    alone = [*([chunked] if at.profile == "reference" else []), recomputed]
    return [alone] if at.cluster.gpus == 1 else [[moments, *alone], [everything, *alone]]


def _with_micro_tokens(at: Setting, tokens: int) -> Setting:
    return replace(at, config=replace(at.config, batch=replace(at.config.batch, micro_tokens=tokens)))
