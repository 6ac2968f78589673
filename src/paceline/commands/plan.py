"""`paceline plan`, without torch."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated

from paceline.commands.output import answer
from paceline.commands.train import PresetArgs, base_config, parse_on_preset
from paceline.core.command_line import Bare
from paceline.lab.plan.gpus import GPUS, Cluster
from paceline.lab.plan.predict import plan as plan_of
from paceline.lab.plan.visits import DOCUMENT_TOKENS
from paceline.lab.plan.work import Profile, Setting, profile_on
from paceline.settings.limits import NOT_NEGATIVE, Limited, at_least
from paceline.settings.run import RunConfig

HELP = f"""Predict a run before it is paid for: step time, time to finish, memory, communication, cost.

example: paceline plan r18-softcap --gpus 8 --gpu h100

GPUs: {", ".join(GPUS)}. Flags of `paceline train` change the preset. A run that does not fit in memory is an answer,
not a mistake: exit code 0, with the memory it needs and the smallest remedy. docs/plan.md has the model and its
errors."""


@dataclass(frozen=True, kw_only=True)
class PlanArgs(PresetArgs, Limited, prefix="--"):
    cluster: Bare[Cluster] = field(default_factory=lambda: Cluster(gpu="h100", gpus=8))
    profile: Profile | None = None
    """Whose efficiency and memory: `reference`, the records' scripts and PyTorch's compiled paths, also by
    --train.no-custom-kernels; `fast`, kernels of our own, which are for Hopper. None: what the GPU can use."""
    price: Annotated[float | None, NOT_NEGATIVE.saying("in USD for a GPU and hour")] = None
    """USD for a GPU and hour; None: a typical offer."""
    document_tokens: Annotated[float, at_least(1).saying("English web pages have 650")] = DOCUMENT_TOKENS
    """Mean length of a document, at whose borders a document mask ends attention."""
    json: bool = False
    """For programs."""
    config: Bare[RunConfig]


def plan(argv: Sequence[str]) -> int:
    asked = parse_on_preset(PlanArgs, argv, base_config(argv), verb="plan", description=HELP)
    from paceline.lab.plan.plan_tables import show

    usual = profile_on(asked.cluster.kind) if asked.config.train.custom_kernels else "reference"
    profile = usual if asked.profile is None or not asked.config.train.custom_kernels else asked.profile
    at = Setting(config=asked.config, cluster=asked.cluster, profile=profile, document_tokens=asked.document_tokens)
    found = plan_of(at, price=asked.price)
    return answer(asdict(found), lambda: show(found), as_json=asked.json)
