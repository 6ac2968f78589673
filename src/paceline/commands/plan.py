"""`paceline plan`, without torch."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

from paceline.commands.train import base_config
from paceline.core.command_line import Bare, OptionalPreset, parse
from paceline.core.errors import ConfigError
from paceline.lab.plan.gpus import GPUS, Cluster
from paceline.lab.plan.plan import plan as plan_of
from paceline.lab.plan.visits import DOCUMENT_TOKENS
from paceline.lab.plan.work import Setting
from paceline.train.config import RunConfig

HELP = f"""Foretell a run before it is paid for: step time, time to finish, memory, communication, cost.

example: paceline plan r18-softcap --gpus 8 --gpu h100

GPUs: {", ".join(GPUS)}. Flags of `paceline train` change the preset. A run that does not fit in memory is an answer,
not a mistake: exit code 0, with the memory it needs and the smallest remedy. docs/plan.md has the model and its
errors."""


@dataclass(frozen=True, kw_only=True)
class PlanArgs:
    preset: OptionalPreset = "demo"
    """Which preset; `paceline presets` lists them."""
    scale: str = "1"
    """Shrink width, head width, vocabulary, batch and steps together: a number in (0, 1], or 1/16."""
    cluster: Bare[Cluster] = field(default_factory=lambda: Cluster(gpu="h100", gpus=8))
    profile: Literal["reference", "fast"] = "fast"
    """Whose efficiency: `reference`, the records' scripts and PyTorch's compiled paths, also by --train.no-fast-paths;
    `fast`, kernels of our own."""
    price: float | None = None
    """USD for a GPU and hour; None: a typical offer."""
    document_tokens: float = DOCUMENT_TOKENS
    """Mean length of a document, at whose borders a document mask ends attention."""
    json: bool = False
    """For programs."""
    config: Bare[RunConfig]


def plan(argv: Sequence[str]) -> int:
    arguments = parse_arguments(argv, base_config(argv))
    at = Setting(
        config=arguments.config,
        cluster=arguments.cluster,
        profile=arguments.profile if arguments.config.train.fast_paths else "reference",
        document_tokens=arguments.document_tokens,
    )
    found = plan_of(at, price=arguments.price)
    if arguments.json:
        print(json.dumps(asdict(found), indent=1))
    else:
        from paceline.lab.plan.show import show

        show(found)
    return 0


def parse_arguments(argv: Sequence[str], base: RunConfig) -> PlanArgs:
    """The flags on top of `base`, which `base_config` made of the same words."""
    defaults = PlanArgs(preset=base.preset, config=base)
    arguments = parse(PlanArgs, argv, verb="plan", description=HELP, default=defaults)
    if arguments.preset != base.preset:
        raise ConfigError(f"the preset {arguments.preset} goes first: paceline plan {arguments.preset} --flags")
    return arguments
