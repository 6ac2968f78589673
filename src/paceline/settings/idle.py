"""Settings that have an effect only beside others: one table, for command lines and for groups of runs. No torch.

A setting given where it has no effect is named in a line, and does not make another experiment of a run. The table has
dotted names, or beginnings of them, and reads a config as `leaves(to_dict(config))` gives it, so that a config which
only another version understands can be asked, too. What is not in the table always matters.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Settings = Mapping[str, Any]
ADAM_RULES = ("adam", "adamw", "adam_rows")
"""Rules that read nothing of `optim.muon`. One of the user's own may."""


@dataclass(frozen=True)
class Condition:
    """Under which a setting matters."""

    words: str
    holds: Callable[[Settings], bool]


def _is_not(name: str, *values: Any) -> Callable[[Settings], bool]:
    return lambda config: config[name] not in values


def _rules(config: Settings) -> dict[str, str]:
    """The rules of the groups that are moved otherwise than by Adam, or may be."""
    stated = {group["name"]: group.get("rule") for group in config["optim.groups"]}
    stated["matrices"] = stated.get("matrices") or config["optim.matrices"]
    return {name: rule for name, rule in stated.items() if rule and rule not in ADAM_RULES}


def _has_scalars(config: Settings) -> bool:
    switches = ("x0_mix", "unet_skips", "smear", "residual_scales", "skip", "backout_layer")
    used = any(config.get(f"model.{name}") not in (None, False) for name in switches)
    return used or config["model.value_path"] != "plain" or _has_ngrams(config)


def _has_vectors(config: Settings) -> bool:
    return bool(config["model.norm"] != "rms" or config["model.biases"])


def _has_ngrams(config: Settings) -> bool:
    return any(config.get(f"model.ngrams.{name}_rows") is not None for name in ("bigram", "trigram"))


def _momentum_moves(config: Settings) -> bool:
    names = ("warmup_steps", "warmup_share", "cooldown_share")
    return any(config.get(f"optim.muon.momentum_{name}") for name in names)


def _averages(config: Settings) -> bool:
    return config["optim.average.tau_steps"] is not None or config["optim.average.tau_share"] is not None


def _long_windows(config: Settings) -> bool:
    return any(change.get("window") == "long" for change in config["model.layer_overrides"])


WINDOW = Condition("a window (--model.window.unit)", _is_not("model.window.unit", "none"))
SCALARS = Condition("learned scalars (--model.x0-mix, --model.unet-skips, a --model.value-path, ...)", _has_scalars)
VECTORS = Condition("--model.norm rms_weighted or layer, or --model.biases", _has_vectors)
AVERAGED = Condition("--optim.average.tau-steps or --optim.average.tau-share", _averages)
NGRAMS = Condition("--model.ngrams.bigram-rows or --model.ngrams.trigram-rows", _has_ngrams)
VALUE_TABLES = Condition("a --model.value-path with tables", _is_not("model.value_path", "plain", "residual"))
UNTIED = Condition("--model.no-tied-lm-head", _is_not("model.tied_lm_head", True))
COMPILED = Condition("--train.compile", _is_not("train.compile", False))
MUON = Condition("a group that Muon moves (--optim.matrices muon)", lambda config: bool(_rules(config)))
MATTERS: dict[str, Condition] = {
    "model.qk_matrix_heads": MUON,
    "model.lm_head_init": UNTIED,
    "model.qk_norm_eps": Condition("--model.qk-norm", _is_not("model.qk_norm", "none")),
    "model.value_ends": Condition("--model.value-path sparse", lambda config: config["model.value_path"] == "sparse"),
    "model.value_lambdas": Condition("--model.value-path", _is_not("model.value_path", "plain")),
    "model.value_storage": VALUE_TABLES,
    "model.value_init_std": VALUE_TABLES,
    "model.attention_output_starts": Condition("--model.zero-init-outputs", _is_not("model.zero_init_outputs", False)),
    "model.ngrams.sign_rows": NGRAMS,
    **{f"model.window.{name}_tokens": WINDOW for name in ("start", "growth", "quantum")},
    "model.long_window": Condition("a layer whose override says `long`", _long_windows),
    "optim.muon.": MUON,
    "optim.muon.momentum_start": Condition(
        "--optim.muon.momentum-warmup-steps (or -share) or --optim.muon.momentum-cooldown-share",
        lambda config: bool(_rules(config) and _momentum_moves(config)),
    ),
    "optim.adam.matrix_lr": Condition(
        "--optim.matrices adamw", lambda config: _rules(config).get("matrices") != "muon"
    ),
    "optim.adam.lm_head_lr": UNTIED,
    "optim.adam.scalar_lr": SCALARS,
    "optim.adam.ngram_lr": NGRAMS,
    "optim.adam.mix_lr": Condition("model.mixes", lambda config: bool(config.get("model.mixes"))),
    "optim.adam.gate_lr": Condition(
        "--model.value-gates or --model.smear",
        lambda config: bool(config["model.value_gates"] or config["model.smear"]),
    ),
    "optim.adam.vector_lr": VECTORS,
    "optim.adam.decay_vectors": Condition(
        "--optim.adam.weight-decay and parameters of one dimension",
        lambda config: bool(config["optim.adam.weight_decay"] and (_has_scalars(config) or _has_vectors(config))),
    ),
    "model.precision.scalars": SCALARS,
    **{f"optim.average.{name}": AVERAGED for name in ("start_share", "blend", "rescale", "groups")},
    **{f"train.{name}": COMPILED for name in ("cuda_graph", "coordinate_descent", "skip_guards")},
    "bad_steps.limit": Condition("--bad-steps.skip", _is_not("bad_steps.skip", False)),
    "parallel.zero1": Condition("--parallel.no-fsdp, which shards more", _is_not("parallel.fsdp", True)),
    "parallel.bucket_views": Condition("--parallel.no-fsdp", _is_not("parallel.fsdp", True)),
}
"""The longest entry that a name begins with says when it matters. A condition asks nothing that is the same experiment
either way (`SAME_EXPERIMENT`)."""


def why_idle(name: str, config: Settings) -> str | None:
    """What a setting needs and does not have in this config; None: it matters, as far as this version knows."""
    entry = max((entry for entry in MATTERS if _covers(entry, name)), key=len, default=None)
    try:
        return None if entry is None or MATTERS[entry].holds(config) else MATTERS[entry].words
    except (KeyError, TypeError, AttributeError):  # of another version, or edited
        return None


def _covers(entry: str, name: str) -> bool:
    return name.startswith(entry) if entry.endswith(".") else name == entry or name.startswith(f"{entry}.")
