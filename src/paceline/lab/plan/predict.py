"""The prediction of a run: seconds of a step and where they go, time to finish, memory, traffic, cost. No torch.

`work` and `network` count, `efficiency` and `memory` know what was measured, here they meet. Nothing is simulated: a
step is a sum over classes of work, every GPU does the same, and the slowest of a thousand is as fast as the first.
"""

import math
from dataclasses import dataclass, replace

from paceline.backends.registry import find
from paceline.core.errors import ConfigError
from paceline.lab.plan.efficiency import EFFICIENCIES, Efficiencies, seconds, seconds_by, step_seconds, step_work
from paceline.lab.plan.memory import GIB, fits, flags_of, memory, named_back_ends, remedy, request_of, usable_gib
from paceline.lab.plan.network import exchange, sent_bytes
from paceline.lab.plan.work import Profile, Resource, Setting
from paceline.metrics.flops import mean_flops_per_token
from paceline.settings.schedule import batches_of
from paceline.settings.spec import describe

START_S = {True: 110.0, False: 10.0}  # launch to step 10: compiled with an empty cache on one H200, and not
FORWARD_SHARE = 1 / 3  # of a step's computation: a validation has no backward pass
MEMORY_PARTS = ("weights", "gathered", "slots", "gradients", "activations", "head_kept", "head", "block", "update")
NOTABLE_SHARE = 0.05  # of a step: communication that is said although something else is the limit
MEASURED_ON: dict[Profile, tuple[str, ...]] = {"reference": ("h100", "h200"), "fast": ("h200",)}
MEASURED_WIDTHS = (384, 1536)  # half and twice the width of the models that were measured


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
    tokens_per_step: int  # over all GPUs
    micro_tokens: int
    micro_batches: int
    step_s: float  # mean over the schedule
    first_step_s: float
    last_step_s: float
    compute_s: dict[str, float]  # forward and backward passes by class of work
    optimizer_s: float
    communication_s: float  # hidden or not
    exposed_communication_s: float
    communication_share: float  # of the step, what is exposed
    communication_bytes: float  # sent by one GPU in a step
    tokens_per_s: float  # over all GPUs
    mfu: float  # as a run's card counts it: the model's arithmetic without document borders, over the bf16 or fp32 peak
    train_s: float  # all steps; the records' clock leaves out the first ten
    validation_s: float
    start_s: float  # launch and compilation
    wall_s: float
    gpu_hours: float
    price: float
    cost: float  # USD, from launch to end
    memory_gib: float  # at the fullest moment of a step
    memory_parts_gib: dict[str, float]  # what there is in the course of one, not all at once
    usable_gib: float
    fits: bool
    remedy: str | None  # the smallest change with which it fits
    efficiencies: dict[Resource, float]
    limit: str
    notes: list[str]


def plan(at: Setting, *, price: float | None = None) -> Plan:
    _check(at)
    efficiencies = EFFICIENCIES[at.profile]
    parts = seconds_by("kind", step_work(at), efficiencies)
    optimizer_s, exposed_s = parts.pop("optimizer"), parts.pop("communication", 0)
    compute_s = sum(parts.values())
    step_s = compute_s + optimizer_s + exposed_s
    config, cluster, needed = at.config, at.cluster, memory(at)
    train_s, start_s = config.steps * step_s, START_S[at.compiled]
    evaluations = 1 + (0 if config.evaluate.every is None else math.ceil(config.steps / config.evaluate.every))
    validated_tokens = evaluations * config.evaluate.tokens  # 0 where the config does not say how many
    validation_s = validated_tokens / (at.tokens * cluster.gpus) * compute_s * FORWARD_SHARE
    gpu_hours = (train_s + validation_s + start_s) * cluster.gpus / 3600
    price = cluster.kind.price if price is None else price
    return Plan(
        preset=config.preset,
        profile=at.profile,
        gpu=cluster.gpu,
        gpus=cluster.gpus,
        nodes=cluster.nodes,
        parameters=describe(config.model).numel(),
        steps=config.steps,
        tokens_per_step=at.tokens * cluster.gpus,
        micro_tokens=at.micro_tokens,
        micro_batches=at.tokens // at.micro_tokens,
        step_s=step_s,
        first_step_s=step_seconds(replace(at, step=0)),
        last_step_s=step_seconds(replace(at, step=config.steps - 1)),
        compute_s=parts,
        optimizer_s=optimizer_s,
        communication_s=seconds(exchange(at, exposed=False), efficiencies),
        exposed_communication_s=exposed_s,
        communication_share=exposed_s / step_s,
        communication_bytes=sent_bytes(at),
        tokens_per_s=at.tokens * cluster.gpus / step_s,
        mfu=mean_flops_per_token(config) * at.tokens / step_s / at.flops_per_s,
        train_s=train_s,
        validation_s=validation_s,
        start_s=start_s,
        wall_s=train_s + validation_s + start_s,
        gpu_hours=gpu_hours,
        price=price,
        cost=gpu_hours * price,
        memory_gib=needed.peak / GIB,
        memory_parts_gib={name: getattr(needed, name) / GIB for name in MEMORY_PARTS},
        usable_gib=usable_gib(at),
        fits=fits(at),
        remedy=None if fits(at) else remedy(at),
        efficiencies=dict(efficiencies),
        limit=_limit(at, efficiencies),
        notes=_notes(at),
    )


def _check(at: Setting) -> None:
    gpus, parts = at.cluster.gpus, at.config.parallel.context_parallel
    if gpus % parts:
        raise ConfigError(f"--parallel.context-parallel {parts} does not divide --gpus {gpus:,}; use a multiple of it")
    runs = gpus // parts
    for batch in (each for each in batches_of(at.config) if each.sequences % runs):
        fewer = next(n for n in range(min(runs, batch.sequences), 0, -1) if batch.sequences % n == 0)
        more = math.ceil(batch.sequences / runs) * runs * batch.sequence_tokens
        cure, length = f"use --gpus {fewer * parts:,}, or --batch.tokens {more}", f"{batch.sequence_tokens:,} tokens"
        raise ConfigError(f"--gpus {gpus:,} cannot share {batch.sequences:,} sequences of {length} equally; {cure}")
    on, kind, elsewhere = f"cannot be used on {at.cluster.gpu}", at.cluster.kind, "these kernels are for Hopper"
    if at.profile == "fast" and not kind.own_kernels:
        raise ConfigError(f"--profile fast {on}: {elsewhere}; leave it out")
    for operation, name in named_back_ends(at.config).items():
        back_end, flag = find(operation, name), flags_of({f"{operation}.backend": name})
        if why := back_end.misfit(request_of(at)) if back_end.capability in (None, kind.capability) else elsewhere:
            raise ConfigError(f"{flag} {on}: {why}; leave it out")


# ---- in words

LIMITS: dict[Resource, str] = {
    "products": "Matrix products take {share:.0%} of a step, at {efficiency:.0%} of the GPU's peak: arithmetic is the "
    "limit, so more or faster GPUs help.",
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
    by_resource = seconds_by("resource", step_work(at), efficiencies)
    name = max(LIMITS, key=lambda resource: by_resource.get(resource, 0.0))
    share = by_resource[name] / sum(by_resource.values())
    said = LIMITS[name].format(share=share, efficiency=efficiencies.get(name, 1.0), sent=sent_bytes(at) / 1e9)
    waiting = seconds_by("kind", step_work(at), efficiencies).get("communication", 0.0) / sum(by_resource.values())
    if waiting < NOTABLE_SHARE or name == "link":
        return said
    return f"{said} Waiting for other GPUs takes {waiting:.0%}, which faster links or a larger --batch.tokens shorten."


def _notes(at: Setting) -> list[str]:
    """Where the prediction goes beyond what was measured."""
    gpu, gpus, fast, measured_on = at.cluster.gpu, at.cluster.gpus, at.profile == "fast", MEASURED_ON[at.profile]
    model, sharded = at.config.model, at.config.parallel.collective_forward
    named = flags_of({f"{operation}.backend": name for operation, name in named_back_ends(at.config).items()})
    uncompiled = "" if at.compiled else ", and it is not compiled"
    low, high = MEASURED_WIDTHS
    asked = {
        f"no step with {at.profile} paths was measured on {gpu}; efficiencies are those of "
        f"{' and '.join(measured_on)}": gpu not in measured_on,
        f"our fused kernels are for Hopper; {gpu} takes PyTorch's compiled paths": not at.cluster.kind.own_kernels,
        "no step with our own kernels was measured on several GPUs": fast and gpus > 1,
        f"no step under {sharded} was measured{uncompiled}": gpus > 1 and sharded is not None,
        f"{named}: counted in memory only, times are those of the profile's own back ends": bool(named),
        "no step was measured on several nodes": at.cluster.nodes > 1,
        f"a width of {model.width:,} is far from the measured 768": not low <= model.width <= high,
        "products in fp32 were not measured": model.precision.compute == "fp32",
        "the length of the validation data is not known and not counted": not at.config.evaluate.tokens,
    }
    return [text for text, applies in asked.items() if applies]
