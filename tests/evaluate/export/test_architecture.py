"""No switch of the model is forgotten in an export."""

from dataclasses import fields, is_dataclass
from typing import Any

from paceline.core.schema import to_dict
from paceline.evaluate.export.architecture import generation_config, hf_config, hf_weights
from paceline.model.gpt import GPT
from paceline.recipes.presets import preset
from paceline.recipes.scaling import scaled
from paceline.settings.model import ModelConfig

NOT_NEEDED = {
    *(
        "embedding_init",
        "lm_head_init",
        "matrix_init",
        "zero_init_outputs",
        "attention_output_starts",
        "value_init_std",
        "precision.round_matrices_at_init",
    ),  # how a run begins
    *("window.start_tokens", "window.growth_tokens", "window.quantum_tokens"),  # the window of the step is exported
    *("qkv", "value_storage", "precision.embeddings"),  # how weights are stored, which they tell themselves
    "rotary.max_tokens",  # how long our own tables are; of learned positions it is exported
    *("dropout", "candidates", "qk_matrix_heads"),  # of training
    "loss_terms",  # what training adds to the loss; validation and exports leave it out
    "value_layers",  # the tables of each layer are exported
}


def spied(config: Any, seen: set[str], prefix: str = "") -> Any:
    """The same dataclass, which notes the dotted name of every field that is read."""

    class Spy(type(config)):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            if name in NAMES:
                seen.add(prefix + name)
            return super().__getattribute__(name)

    NAMES = {field.name for field in fields(config)}
    copy = object.__new__(Spy)
    for name in NAMES:
        value = getattr(config, name)
        object.__setattr__(copy, name, spied(value, seen, f"{name}.") if is_dataclass(value) else value)
    return copy


def test_every_switch_of_the_model_is_exported_or_known_not_to_matter() -> None:
    model = scaled(preset("r18-softcap"), 1 / 16).model
    weights = dict(GPT(model, end_of_text=0).named_parameters())
    seen: set[str] = set()
    spy: ModelConfig = spied(model, seen)
    hf_config(spy, sequence_tokens=256, windows=(256,), end_of_text=0)
    generation_config(spy, end_of_text=0)
    hf_weights(spy, weights)
    groups = {field.name for field in fields(model) if is_dataclass(getattr(model, field.name))}
    leaves = {name for name in dotted(to_dict(model)) if name.partition(".")[0] not in groups or "." in name}
    assert leaves - seen == NOT_NEEDED


def dotted(values: dict[str, Any], prefix: str = "") -> list[str]:
    return [
        name
        for key, value in values.items()
        for name in (dotted(value, f"{prefix}{key}.") if isinstance(value, dict) else [prefix + key])
    ]
