"""A run foretold: seconds of a step and where they go, time to finish, memory, traffic, cost. No torch.

`work` and `network` count, `efficiency` and `memory` know what was measured, here they meet. Nothing is simulated: a
step is a sum over classes of work, every GPU does the same, and the slowest of a thousand is as fast as the first.
"""

import functools
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from paceline.core.errors import ConfigError
from paceline.lab.plan.efficiency import Efficiencies, fit, seconds, step_work
from paceline.lab.plan.figures import step_figures
from paceline.lab.plan.memory import GIB, USABLE, fits, memory, remedy
from paceline.lab.plan.network import exchange, exposed_exchange, sent_bytes
from paceline.lab.plan.work import Profile, Resource, Setting, Work, computation, optimizer
from paceline.metrics.flops import mean_flops_per_token, parameter_counts
from paceline.train.config import RunConfig

START_S = {True: 110.0, False: 10.0}
"""Launch to step 10 with an empty compile cache, measured on one H200; and for a run that does not compile."""
FORWARD_SHARE = 1 / 3
"""Of a step's computation: a validation has no backward pass."""
MEMORY_PARTS = ("weights", "gathered", "slots", "gradients", "activations", "head_kept", "head", "block", "update")
MEASURED_ON: dict[Profile, tuple[str, ...]] = {"reference": ("h100", "h200"), "fast": ("h200",)}
MEASURED_WIDTHS = (384, 1536)
"""Half and twice the width of the models that were measured."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All values of one GPU where nothing else is said."""

    preset: str
    profile: Profile
    gpu: str
    gpus: int
    nodes: int
    parameters: int
    steps: int
    tokens_per_step: int
    """Over all GPUs."""
    micro_tokens: int
    micro_batches: int
    step_s: float
    """Mean over the schedule."""
    first_step_s: float
    """At the first window, ..."""
    last_step_s: float
    """... and at the last."""
    compute_s: dict[str, float]
    """Forward and backward passes by class of work."""
    optimizer_s: float
    communication_s: float
    """Hidden or not."""
    exposed_communication_s: float
    communication_share: float
    """Of the step, what is exposed."""
    communication_bytes: float
    """Sent by one GPU in a step."""
    tokens_per_s: float
    """Over all GPUs."""
    mfu: float
    train_s: float
    """All steps; the records' clock leaves out the first ten."""
    validation_s: float
    start_s: float
    """Launch and compilation."""
    wall_s: float
    gpu_hours: float
    price: float
    cost: float
    """USD, from launch to end."""
    memory_gib: float
    """At the fullest moment of a step."""
    memory_parts_gib: dict[str, float]
    """What there is in the course of one, not all at once."""
    usable_gib: float
    """What a run can have of the GPU's memory."""
    fits: bool
    remedy: str | None
    """The smallest change with which it fits."""
    efficiencies: dict[Resource, float]
    limit: str
    notes: list[str]


def plan(at: Setting, *, price: float | None = None) -> Plan:
    _check(at, price)
    efficiencies = efficiencies_of(at.profile)
    parts = _by_kind(computation(at), efficiencies)
    optimizer_s, exposed_s = seconds(optimizer(at), efficiencies), seconds(exposed_exchange(at), efficiencies)
    compute_s = sum(parts.values())
    step_s = compute_s + optimizer_s + exposed_s
    config, cluster = at.config, at.cluster
    needed = memory(at)
    train_s, start_s = config.steps * step_s, START_S[at.compiled]
    validation_s = _validated_tokens(at) / config.batch.tokens * compute_s * FORWARD_SHARE
    gpu_hours = (train_s + validation_s + start_s) * cluster.gpus / 3600
    price = cluster.kind.price if price is None else price
    return Plan(
        preset=config.preset,
        profile=at.profile,
        gpu=cluster.gpu,
        gpus=cluster.gpus,
        nodes=cluster.nodes,
        parameters=parameter_counts(config.model)["total"],
        steps=config.steps,
        tokens_per_step=config.batch.tokens,
        micro_tokens=at.micro_tokens,
        micro_batches=at.tokens // at.micro_tokens,
        step_s=step_s,
        first_step_s=step_seconds(replace(at, window_tokens=config.model.window.tokens_at(0, config.steps))),
        last_step_s=step_seconds(
            replace(at, window_tokens=config.model.window.tokens_at(config.steps - 1, config.steps))
        ),
        compute_s=parts,
        optimizer_s=optimizer_s,
        communication_s=seconds(exchange(at), efficiencies),
        exposed_communication_s=exposed_s,
        communication_share=exposed_s / step_s,
        communication_bytes=sent_bytes(at),
        tokens_per_s=config.batch.tokens / step_s,
        mfu=_utilisation(at, step_s),
        train_s=train_s,
        validation_s=validation_s,
        start_s=start_s,
        wall_s=train_s + validation_s + start_s,
        gpu_hours=gpu_hours,
        price=price,
        cost=gpu_hours * price,
        memory_gib=needed.peak / GIB,
        memory_parts_gib={name: getattr(needed, name) / GIB for name in MEMORY_PARTS},
        usable_gib=USABLE * cluster.kind.memory_gib,
        fits=fits(at),
        remedy=None if fits(at) else remedy(at),
        efficiencies=dict(efficiencies),
        limit=_limit(at, efficiencies),
        notes=_notes(at),
    )


@functools.cache
def efficiencies_of(profile: Profile) -> Efficiencies:
    return fit(profile, step_figures())


def step_seconds(at: Setting) -> float:
    return seconds(step_work(at), efficiencies_of(at.profile))


def _check(at: Setting, price: float | None) -> None:
    batch, gpus, parts = at.config.batch, at.cluster.gpus, at.config.parallel.split_sequence
    if gpus % parts:
        raise ConfigError(f"--parallel.split-sequence {parts} does not divide --gpus {gpus:,}; use a multiple of it")
    runs = gpus // parts
    if batch.sequences % runs:
        fewer = next(n for n in range(min(runs, batch.sequences), 0, -1) if batch.sequences % n == 0)
        more = math.ceil(batch.sequences / runs) * runs * batch.sequence_tokens
        raise ConfigError(
            f"--gpus {gpus:,} cannot share {batch.sequences:,} sequences of {batch.sequence_tokens:,} tokens equally; "
            f"use --gpus {fewer * parts:,}, or --batch.tokens {more}"
        )
    if price is not None and not 0 <= price < math.inf:
        raise ConfigError(f"--price {price} must be a number of at least 0, in USD for a GPU and hour")
    if not at.document_tokens >= 1:
        raise ConfigError(f"--document-tokens {at.document_tokens} must be at least 1; English web pages have 650")


def _by_kind(work: Iterable[Work], efficiencies: Efficiencies) -> dict[str, float]:
    sums: defaultdict[str, float] = defaultdict(float)
    for item in work:
        sums[item.kind] += seconds([item], efficiencies)
    return dict(sums)


def _validated_tokens(at: Setting) -> int:
    """Of the whole run; 0 where the config does not say how many."""
    evaluate = at.config.evaluate
    times = 1 + (0 if evaluate.every is None else math.ceil(at.config.steps / evaluate.every))
    return times * evaluate.tokens


def _utilisation(at: Setting, step_s: float) -> float:
    """As a run's card counts it: the model's arithmetic without document borders, over the bf16 or fp32 peak."""
    length = at.config.batch.sequence_tokens
    per_token = mean_flops_per_token(at.config.model, sequence_tokens=length, steps=at.config.steps)
    return per_token * at.tokens / step_s / at.flops_per_s


# ---- in words

LIMITS: dict[Resource, str] = {
    "products": "Matrix products take {share:.0%} of a step, at {efficiency:.0%} of the GPU's peak: arithmetic is the "
    "limit, so more or faster GPUs help and faster links would not.",
    "attention": "Attention takes {share:.0%} of a step: shorter windows or shorter sequences would help most.",
    "memory": "Reading and writing memory takes {share:.0%} of a step, at {efficiency:.0%} of the GPU's bandwidth: "
    "memory is the limit, so fused kernels or a wider model use the GPU better.",
    "newton_schulz": "Orthogonalising Muon's matrices takes {share:.0%} of a step: more GPUs to share them, or a "
    "larger --batch.tokens, would help most.",
    "link": "Waiting for other GPUs takes {share:.0%} of a step ({sent:.3g} GB sent by each): links are the limit, so "
    "a larger --batch.tokens or fewer GPUs use them better.",
    "fixed": "Starting kernels and exchanges takes {share:.0%} of a step: there is too little work for a GPU, so fewer "
    "GPUs or larger micro-batches use them better.",
}


def _limit(at: Setting, efficiencies: Efficiencies) -> str:
    work = step_work(at)
    by_resource = {name: seconds((w for w in work if w.resource == name), efficiencies) for name in LIMITS}
    name = max(by_resource, key=lambda resource: by_resource[resource])
    share = by_resource[name] / sum(by_resource.values())
    return LIMITS[name].format(share=share, efficiency=efficiencies.get(name, 1.0), sent=sent_bytes(at) / 1e9)


def _named_back_ends(config: RunConfig) -> list[str]:
    """Flags that name a back end."""
    asked = {
        "--attention.backend": config.attention.backend,
        "--attention.heads": config.attention.heads,
        "--mlp.backend": config.mlp.backend,
        "--head.backend": config.head.backend,
    }
    return [f"{flag} {name}" for flag, name in asked.items() if name != "auto"]


def _notes(at: Setting) -> list[str]:
    """Where the prediction goes beyond what was measured."""
    low, high = MEASURED_WIDTHS
    named = _named_back_ends(at.config)
    asked = {
        f"no step with {at.profile} paths was measured on {at.cluster.gpu}; efficiencies are those of "
        f"{' and '.join(MEASURED_ON[at.profile])}": at.cluster.gpu not in MEASURED_ON[at.profile],
        "kernels of our own are written for Hopper and may be missing here": at.profile == "fast"
        and not at.cluster.gpu.startswith("h"),
        "no step with fast paths was measured on several GPUs": at.profile == "fast" and at.cluster.gpus > 1,
        f"no step under {at.config.parallel.talks_inside} was measured, and it is not compiled": at.cluster.gpus > 1
        and at.config.parallel.talks_inside is not None,
        f"{' '.join(named)}: counted in memory only, times are those of the profile's own back ends": bool(named),
        "no step was measured on several nodes": at.cluster.nodes > 1,
        f"a width of {at.config.model.width:,} is far from the measured 768": not low <= at.config.model.width <= high,
        "products in fp32 were not measured": at.config.model.precision.compute == "fp32",
        "the length of the validation data is not known and not counted": not at.config.evaluate.tokens,
    }
    return [text for text, applies in asked.items() if applies]
