"""The README of an exported model: what it is, what it was trained on, how well it does. From the run's card alone."""

from paceline.metrics.card import LOSS_COLUMNS, RunCard

HEAD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [paceline]
---"""

USE = """## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(".", trust_remote_code=True, add_bos_token=True)
model = AutoModelForCausalLM.from_pretrained(".", trust_remote_code=True)
prompts = tokenizer(["A first prompt", "Another one, which is longer"], padding=True, return_tensors="pt")
print(tokenizer.batch_decode(model.generate(**prompts, max_new_tokens=50), skip_special_tokens=True))
```

`add_bos_token=True` opens every text with end-of-text, as documents did in training; `pipeline` does it by itself.
"""
OWN_CODE = "The model runs the code in `modeling_paceline.py`, which needs torch and transformers only.\n"


def model_card(card: RunCard, *, step: int, own_code: bool) -> str:
    """README.md for the weights of `step`. `own_code`: the model needs more than transformers has."""
    version = card.code_version
    facts = {
        "preset": card.preset,
        "parameters": f"{card.parameters:,}",
        "step": f"{step:,} of {card.steps:,}",
        "validation loss": _loss(card, step),
        "data fingerprint": f"`{card.all_data}`",
        "seed": card.seed,
        "started": card.started,
        "paceline": f"{version.version}, commit {version.commit or 'unknown'}",
    }
    use = USE + OWN_CODE if own_code else USE.replace(", trust_remote_code=True", "")
    table = "| | |\n|---|---|\n" + "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    return "\n\n".join([HEAD, f"# {card.name}", "A language model trained with paceline.", table, _diff(card), use])


def _loss(card: RunCard, step: int) -> str:
    """That of the exported step; the newest of the run belongs to other weights."""
    rows = [dict(zip(LOSS_COLUMNS, row, strict=False)) for row in card.losses]
    found = next((row for row in rows if row.get("step") == step), {})
    if found.get("val_loss") is None:
        return "not measured at this step"
    bits = "" if found.get("val_bpb") is None else f", {found['val_bpb']:.4f} bits per byte"
    return f"{found['val_loss']:.4f} nats per token{bits}"


def _diff(card: RunCard) -> str:
    if not card.diff:
        return f"The configuration is that of the preset `{card.preset}`."
    rows = "\n".join(f"| `{change.field}` | {change.before} | {change.after} |" for change in card.diff)
    return f"What differs from the preset `{card.preset}`:\n\n| switch | preset | this model |\n|---|---|---|\n{rows}"
