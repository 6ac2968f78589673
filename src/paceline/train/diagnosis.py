"""What bad numbers came from, once a run has stopped because of them: the step, the data and the first tensor that is
not finite. The weights are still those with which it happened, so the forward pass is simply made again, sequence by
sequence, by every rank alike, since some may not be able to make one alone; it takes as long as a validation of one
batch."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.data.batches import training_source, windows_at
from paceline.model.gpt import GPT
from paceline.parallel.tables import part_here
from paceline.train.loop import Trainer

NAMED_WINDOWS = 4
"""Places of the data that are named; a shuffled batch may have hundreds."""
WEIGHT = "the weight"


def diagnose(trainer: Trainer) -> str:
    """Why a guarded run gave up, in one line."""
    guard, step = trainer.guard, trainer.guard.last_step
    c, corpus = trainer.config, trainer.parts.data.train
    windows = windows_at(corpus, c.data, c.batch, trainer.data_step_of(step), seed=c.seed)
    names = [shard.path.name for shard in corpus.shards]
    trainer.window.fill_(trainer.window_at(step) or 0)  # the loop may have gone on
    found = _search(trainer, windows)
    if found is None:
        places, tensor = windows, ""
    else:
        places, tensor = windows[found[0] : found[0] + 1], f"; first wrong on the way forward: {found[1]}"
    return (
        f"stopped after {guard.config.limit} skipped steps in a row; at step {step + 1} {guard.reason}{tensor}; "
        f"data: {_places(names, places, c.batch.sequence_tokens)}"
    )


def _places(names: list[str], windows: np.ndarray, length: int) -> str:
    """Where sequences begin and end, in tokens of their shards."""
    shown = [
        f"{names[shard]} tokens {start:,} to {start + length:,}" for shard, start in windows[:NAMED_WINDOWS].tolist()
    ]
    more = len(windows) - len(shown)
    return ", ".join(shown) + (f" and {more} more sequences" if more else "")


def _search(trainer: Trainer, windows: np.ndarray) -> tuple[int, str] | None:
    """The first sequence of a batch whose forward pass is not finite, and the first tensor in it that is not."""
    parts, window = trainer.parts, trainer.window
    source = training_source(parts.data.train, trainer.config.data)
    for number in range(len(windows)):
        batch = trainer.place.cut(source.take(windows[number : number + 1], trainer.config.batch.sequence_tokens))
        tokens, targets = (torch.from_numpy(array).to(parts.machine.device) for array in (batch.tokens, batch.targets))
        seen = parts.ranks.to_first(first_not_finite(parts.model, tokens, targets, window))
        if (name := parts.ranks.from_first(partial(_first_of, seen))) is not None:
            return number, name
    return None


def _first_of(seen: list[str | None]) -> str | None:
    """Ranks may have seen different things: each its own rows of a weight, which spoils everybody's outputs, or its own
    slice of a sequence, which spoils those to its right."""
    found = [name for name in seen if name is not None]
    return min(found, key=lambda name: not name.startswith(WEIGHT), default=None)


@torch.no_grad()
def first_not_finite(model: GPT, tokens: Tensor, targets: Tensor, window: Tensor) -> str | None:
    """The name of a weight, of the part of the model whose output it is, or the loss; None: all is finite."""
    bad_weights = (name for name, weight in model.named_parameters() if not part_here(weight).isfinite().all())
    wrong = [f"{WEIGHT} {name}" for name in bad_weights]  # the pass is made all the same: others may wait for it
    hooks = [
        module.register_forward_hook(partial(_note, wrong, f"the output of {name}"))
        for name, module in model.named_modules()
        if name
    ]
    try:
        losses = model(tokens, targets, window)
    finally:
        for hook in hooks:
            hook.remove()
    return next(iter(wrong), None if losses.isfinite().all() else "the loss")


def _note(wrong: list[str], name: str, _: nn.Module, inputs: Any, output: Any) -> None:
    if not all(tensor.isfinite().all() for tensor in _tensors(output)):
        wrong.append(name)


def _tensors(output: Any) -> Iterable[Tensor]:
    return [output] if isinstance(output, Tensor) else [part for part in output if isinstance(part, Tensor)]
