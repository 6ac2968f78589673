"""Parameter groups: which rule moves each, how fast, and how that becomes the settings of one step. No torch.

The model's description names the groups. `optim.muon` and `optim.adam` say how the usual ones are moved;
`optim.groups` changes any of them and says everything about a new one.
"""

import ast
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cache, lru_cache
from importlib import resources
from typing import Literal

from paceline.core.errors import ConfigError
from paceline.settings import plugins
from paceline.settings.optim import GroupConfig, OptimConfig

ADAM_RATES = {
    "matrices": "matrix_lr",
    "embeddings": "embedding_lr",
    "value_embeddings": "embedding_lr",
    "lm_head": "lm_head_lr",
    "scalars": "scalar_lr",
    "vectors": "vector_lr",
    "gates": "gate_lr",
    "mixes": "mix_lr",
    "ngrams": "ngram_lr",
}
"""The field of `optim.adam` that holds a group's rate."""
ONE_DIMENSIONAL = ("scalars", "vectors")


@dataclass(frozen=True, kw_only=True)
class _Rates:
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


@dataclass(frozen=True, kw_only=True)
class GroupSettings(_Rates):
    """How a group is moved in one step; a rule takes what it needs."""

    momentum: float
    moves: bool
    """False: gradients are kept and added to those of the next step that moves."""


@dataclass(frozen=True, kw_only=True)
class ParamGroup(_Rates):
    """A group with every choice made."""

    name: str
    rule: str
    every: int

    def settings(self, step: int, steps: int, lr_scale: float, momentum: float) -> GroupSettings:
        rates = {field.name: getattr(self, field.name) for field in fields(_Rates)} | {"lr": self.lr * lr_scale}
        return GroupSettings(**rates, momentum=momentum, moves=(step + 1) % self.every == 0 or step == steps - 1)


def param_groups(optim: OptimConfig, names: Iterable[str]) -> dict[str, ParamGroup]:
    """The groups of a model by name, in the order of their names."""
    return dict(_param_groups(optim, tuple(sorted(names))))


@lru_cache(maxsize=64)
def _param_groups(optim: OptimConfig, names: tuple[str, ...]) -> dict[str, ParamGroup]:
    changes = {group.name: group for group in optim.groups}
    if len(changes) < len(optim.groups):
        raise ConfigError("optim.groups: a group is named twice; say all about it in one entry")
    averaged = set(optim.average.groups) - set(ADAM_RATES)  # of the usual groups, those of the model are averaged
    for setting, stated in (("optim.groups", set(changes)), ("--optim.average.groups", averaged)):
        if unknown := sorted(stated - set(names)):
            raise ConfigError(f"{setting}: {unknown[0]!r} is no group of this model; there are {', '.join(names)}")
    return {name: _resolved(optim, name, changes.get(name, GroupConfig(name=name))) for name in names}


def _resolved(optim: OptimConfig, name: str, change: GroupConfig) -> ParamGroup:
    own = {"matrices": {"adamw": "adam"}.get(optim.matrices, optim.matrices), "ngrams": "adam_rows"}
    usually = own.get(name, "adam")
    rule = change.rule or (usually if name in ADAM_RATES else None)
    if rule is None:
        raise ConfigError(f"optim.groups: group {name!r} has no rule; add an entry with a rule and a rate")
    if rule not in rules():
        flag = "optim.groups" if change.rule else "--optim.matrices"
        raise ConfigError(f"{flag}: there is no rule {rule!r}; there are {', '.join(rules())}")
    usual = {"beta1": optim.adam.beta1, "beta2": optim.adam.beta2, "eps": optim.adam.eps}
    if rule == "muon":
        usual |= {"lr": optim.muon.lr, "weight_decay": optim.muon.weight_decay}
    else:
        decays = optim.adam.decay_vectors or name not in ONE_DIMENSIONAL
        usual |= {"weight_decay": optim.adam.weight_decay if decays else 0.0}
        usual |= {"lr": getattr(optim.adam, ADAM_RATES[name])} if name in ADAM_RATES else {}
    stated = {key: value for key in (*usual, "lr") if (value := getattr(change, key)) is not None}
    if "lr" not in usual | stated:
        raise ConfigError(f"optim.groups: group {name!r} has no lr")
    return ParamGroup(name=name, rule=rule, every=change.every, **(usual | stated))


@dataclass(frozen=True, kw_only=True)
class RuleFacts:
    """What is to be known of a rule before it is built."""

    gradient: Literal["dense", "rows"] = "dense"
    """`dense` reads `.grad`; `rows` reads `Event.rows`, and a table moved by it never has a dense gradient."""
    matrices: bool = False
    """It moves 2-D parameters only."""
    slots: int = 0
    """Slots of the parameter's shape and format, ..."""
    fp32_slots: int = 0
    """... of its shape in fp32, ..."""
    row_bytes: int = 0
    """... and bytes of others for each row."""
    fp32_update: int = 0
    """Tensors of the parameter's shape in fp32 that an update holds for a moment."""
    crossings: float = 3.0
    """How often an update crosses memory, in sizes of the parameter, its slots apart: weights read and written,
    gradients read."""
    orthogonal: bool = False
    """Its updates are made orthogonal by Newton–Schulz, whole matrices on one rank each."""

    def slot_bytes(self, shape: tuple[int, ...], element_bytes: int) -> int:
        """Of a parameter."""
        return math.prod(shape) * (self.slots * element_bytes + 4 * self.fp32_slots) + shape[0] * self.row_bytes

    def update_bytes(self, shape: tuple[int, ...]) -> int:
        return 4 * self.fp32_update * math.prod(shape)

    @staticmethod
    def row_gradient_bytes(shape: tuple[int, ...], element_bytes: int) -> int:
        """Of a token: its index and row, then sorted and summed in fp32."""
        return 8 + shape[1] * (element_bytes + 2 * 4)

    def crossed_bytes(self, shape: tuple[int, ...], element_bytes: int, tokens: int) -> float:
        """What an update of a parameter reads and writes; by rows, of those that so many tokens looked up."""
        if self.gradient == "rows":
            one = (1, *shape[1:])
            kept = math.prod(one) * element_bytes + self.slot_bytes(one, element_bytes)
            return 2 * tokens * (kept + self.row_gradient_bytes(shape, element_bytes))
        return self.crossings * math.prod(shape) * element_bytes + 2 * self.slot_bytes(shape, element_bytes)


def rules() -> dict[str, RuleFacts]:
    """The `FACTS` of every rule, those of plug-ins included."""
    brought = {name: rule for table in plugins.tables("rules") for name, rule in table.items()}
    return {**own_rules(), **{name: getattr(rule, "FACTS", RuleFacts()) for name, rule in brought.items()}}


@cache
def own_rules() -> dict[str, RuleFacts]:
    """The `FACTS` of the modules of `optim/rules`, read from their files: importing them would import torch."""
    return {name: _facts(ast.parse(text)) for name, text in modules_in("paceline.optim.rules").items()}


def modules_in(package: str) -> dict[str, str]:
    """The modules of a package by name, as text."""
    files = sorted(resources.files(package).iterdir(), key=lambda file: file.name)
    named = {file.name.removesuffix(".py"): file for file in files if file.name.endswith(".py")}
    return {name: file.read_text(encoding="utf-8") for name, file in named.items() if name != "__init__"}


def _facts(module: ast.Module) -> RuleFacts:
    for node in module.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="FACTS")], value=ast.Call(keywords=stated)):
                return RuleFacts(**{str(word.arg): ast.literal_eval(word.value) for word in stated})
    return RuleFacts()
