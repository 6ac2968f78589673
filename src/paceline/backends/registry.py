"""Every back end by operation: whether it can be used, how it is built, what it keeps for the backward pass. No torch.

An operation is a module of this package with a tuple `BACKENDS`, in the order in which `auto` prefers them; the last
works everywhere. The doctor, the choice at the start of a run, the memory model and the planner read these entries;
nothing else compares names. A back end that the user names is used or refused, never silently replaced.
"""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from paceline.core import probe
from paceline.core.errors import ConfigError
from paceline.core.probe import Choice
from paceline.settings.model import AttentionLayer, DType, LayerConfig, ModelConfig
from paceline.settings.spec import DTYPE_BYTES

FP32 = DTYPE_BYTES["fp32"]
Operation = Literal["attention", "qkv", "mlp", "lm_head", "matmul", "orthogonalise", "row_update"]
OPERATIONS: tuple[Operation, ...] = ("matmul", "attention", "qkv", "mlp", "lm_head", "orthogonalise", "row_update")
"""In the order in which they are chosen: a later one may ask what an earlier one is."""
FLAGS: dict[Operation, str] = {
    "attention": "--attention.backend",
    "qkv": "--qkv.backend",
    "mlp": "--mlp.backend",
    "lm_head": "--lm-head.backend",
    "matmul": "--matmul.backend",
    "orthogonalise": "--train.custom-kernels",
    "row_update": "--train.custom-kernels",
}


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a back end is asked for."""

    model: ModelConfig
    device: str
    """cpu or cuda."""
    compute: DType
    """Format of products on this device."""
    compiled: bool = False
    custom_kernels: bool = True
    """Whether `auto` may take kernels of our own."""
    deterministic: bool = False
    matmul: str = "reference"
    """The back end of single products, once that is chosen."""
    lm_head_chunk_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What the bytes that a back end keeps depend on."""

    model: ModelConfig
    layer: LayerConfig | None
    sequence_tokens: int
    micro_sequences: int
    compiled: bool
    lm_head_chunk_tokens: int | None = None

    @property
    def compute_bytes(self) -> int:
        return DTYPE_BYTES[self.model.precision.compute]

    @property
    def attention(self) -> AttentionLayer:
        assert self.layer is not None
        assert self.layer.attention is not None
        return self.layer.attention


def nothing(_: Request) -> str | None:
    return None


@dataclass(frozen=True, kw_only=True)
class Backend:
    name: str
    build: Callable[[Request], Any]
    """What the model or the optimizer is given; imports what it needs."""
    why_not: Callable[[Request], str | None] = nothing
    """Why it cannot be used; None: it can."""
    misfit: Callable[[Request], str | None] = nothing
    """The part of that which asks no machine, for plans of runs elsewhere: what it does not know."""
    capability: int | None = None
    """Major capability of the only GPUs that it works on; None: any."""
    pays_not: Callable[[Request], str | None] = nothing
    """Why `auto` passes it over, although it can be used by name."""
    reason: Callable[[Request], str] = lambda _: "plain PyTorch"
    """Why `auto` takes it, where it can be used."""
    kept: Callable[[Kept], float] = lambda _: 0.0
    """Bytes of one token that its backward pass needs; of `lm_head`, of all tokens of a micro-batch."""
    beyond: Callable[[Kept], float] = lambda _: 0.0
    """Of `lm_head`: bytes that exist beyond these at the fullest moment."""
    short_chunk_tokens: int | None = None
    """Of `lm_head`: tokens of a chunk where memory is short; None: the logits of all tokens exist at once."""
    custom: bool = False
    """A kernel of our own, which --train.no-custom-kernels keeps `auto` from taking; opaque to the compiler."""
    automatic: bool = True
    """Whether `auto` takes it at all."""
    windows_on_host: bool = False
    """Launches with the windows as numbers: where they lie on the device, it waits for them in every layer."""


def imported(module: str, name: str) -> Callable[[Request], Any]:
    """A `build` that gives `name` of a module, which is imported only then."""
    return lambda _: getattr(importlib.import_module(f"paceline.{module}"), name)


def after_probe(
    probed: Callable[[str], probe.Verdict], against: Callable[[Request], str | None]
) -> Callable[[Request], str | None]:
    """A `why_not`: what is missing on the device, or else what is `against` the request."""

    def why_not(request: Request) -> str | None:
        verdict = probed(request.device)
        return against(request) if verdict.usable else verdict.reason

    return why_not


def custom_backend(
    build: Callable[[Request], Any], unknown: Callable[[Request], str | None] = nothing, **fields: Any
) -> Backend:
    """`fused`, by kernels of our own, where these can be used and know the model, of which `unknown` says what they do
    not."""

    def misfit(request: Request) -> str | None:
        if request.compute != "bf16":
            return f"it computes in bf16, not {request.compute}"
        if request.matmul != "reference":
            return f"single products are computed by {request.matmul}"
        return unknown(request)

    return Backend(
        name="fused",
        build=build,
        why_not=after_probe(lambda device: probe.own_kernels(device), misfit),
        misfit=misfit,
        capability=probe.HOPPER,
        reason=lambda request: f"our kernel; {probe.own_kernels(request.device).reason}",
        custom=True,
        **fields,
    )


def backends(operation: Operation) -> tuple[Backend, ...]:
    found: tuple[Backend, ...] = importlib.import_module(f"paceline.backends.{operation}").BACKENDS
    return found


def find(operation: Operation, name: str) -> Backend:
    known = {backend.name: backend for backend in backends(operation)}
    if name not in known:
        raise ConfigError(f"{FLAGS[operation]} {name}: no such back end; there are auto, {', '.join(known)}")
    return known[name]


def choose(operation: Operation, requested: str, request: Request) -> Choice:
    """The back end for a setting: the one that is named, if it can be used, or what `auto` takes and why."""
    flag = FLAGS[operation]
    if requested != "auto":
        named = find(operation, requested)
        if (against := named.why_not(request)) is not None:
            raise ConfigError(f"{flag} {requested} cannot be used: {against}; use {flag} auto")
        return Choice(name=requested, reason=f"asked for by {flag} {requested}")
    passed_over = ""
    for backend, against in judged(operation, request):
        if against is None:
            return Choice(name=backend.name, reason=backend.reason(request) + passed_over)
        if backend.custom:
            passed_over += f"; not {backend.name}: {against}"
    raise AssertionError(f"the last back end of {operation} works everywhere")


def judged(operation: Operation, request: Request) -> Iterator[tuple[Backend, str | None]]:
    """Those that `auto` considers, each with what is against it."""
    for backend in _considered(operation, request):
        yield backend, backend.why_not(request) or backend.pays_not(request)


def suited(operation: Operation, request: Request, capability: int) -> Backend:
    """What `auto` takes where there is a GPU of this major capability, with all libraries. Asks no machine."""
    fitting = (each for each in _considered(operation, request) if each.capability in (None, capability))
    return next(each for each in fitting if each.misfit(request) is None and each.pays_not(request) is None)


def _considered(operation: Operation, request: Request) -> list[Backend]:
    found = (each for each in backends(operation) if each.automatic)
    return [each for each in found if request.custom_kernels or not each.custom]


@dataclass(frozen=True)
class Chosen:
    """The back ends of a run, by operation."""

    matmul: Choice
    attention: Choice
    qkv: Choice
    mlp: Choice
    lm_head: Choice
    orthogonalise: Choice
    row_update: Choice

    def build(self, operation: Operation, request: Request) -> Any:
        return find(operation, getattr(self, operation).name).build(request)

    @property
    def windows_on_host(self) -> bool:
        return find("attention", self.attention.name).windows_on_host
