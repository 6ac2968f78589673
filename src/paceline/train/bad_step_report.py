"""What bad numbers came from, once a run has stopped because of them: the step, the data and the first tensor that is
not finite. The weights are still those with which it happened, so the forward pass is made again, sequence by sequence,
by every rank alike, since some may not be able to make one alone."""

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.data.batches import spans_at, training_source
from paceline.model.gpt import GPT
from paceline.parallel.embedding_sync import part_here
from paceline.settings.schedule import schedule
from paceline.train.bad_steps import CULPRIT, LOSS, MEAN, VARIANCE, BadSteps
from paceline.train.loop import Loop

NAMED_SPANS = 4  # places of the data that are named; a shuffled batch may have hundreds
WEIGHT = "the weight"


def reason(bad_steps: BadSteps) -> str:
    """Of the step that was skipped last."""
    number, loss, mean, variance = (bad_steps.known[place] for place in (CULPRIT, LOSS, MEAN, VARIANCE))
    if number > 1:
        return f"the gradient of {bad_steps.names[int(number) - 2]} is not finite"
    if number == 0:
        return "the loss is not finite"
    return f"a loss of {loss:.4f} after {mean:.4f} with a standard deviation of {variance**0.5:.4f}"


def bad_step_report(loop: Loop, bad_steps: BadSteps) -> str:
    """Why a run gave up after bad steps, in one line."""
    step, c, corpus = bad_steps.last_step, loop.run.config, loop.run.data.train
    settings = schedule(c, step)
    spans = spans_at(corpus, c.data, c.batch, dict(loop.recent)[step], settings.sequences, seed=c.seed)
    names = [shard.path.name for shard in corpus.shards]
    loop.gradient.prepare(settings)  # the loop may have gone on
    places, tensor = spans, ""
    if (found := _search(loop, spans)) is not None:
        places, tensor = spans[found[0] : found[0] + 1], f"; first wrong in the forward pass: {found[1]}"
    what = f"skipped steps in a row; at step {step + 1} {reason(bad_steps)}{tensor}"
    return f"stopped after {bad_steps.config.limit} {what}; data: {_places(names, places, c.batch.sequence_tokens)}"


def _places(names: list[str], spans: np.ndarray, length: int) -> str:
    """Where sequences begin and end, in tokens of their shards."""
    shown = [f"{names[shard]} tokens {start:,} to {start + length:,}" for shard, start in spans[:NAMED_SPANS].tolist()]
    more = len(spans) - len(shown)
    return ", ".join(shown) + (f" and {more} more sequences" if more else "")


def _search(loop: Loop, spans: np.ndarray) -> tuple[int, str] | None:
    """The first sequence of a batch whose forward pass is not finite, and the first tensor in it that is not."""
    run, c = loop.run, loop.run.config
    source = training_source(run.data.train, c.data)
    for number in range(len(spans)):
        batch = run.place.cut(source.take(spans[number : number + 1], c.batch.sequence_tokens))
        tokens, targets = (torch.from_numpy(array).to(run.machine.device) for array in (batch.tokens, batch.targets))
        seen = run.ranks.to_first(first_not_finite(run.model, tokens, targets, loop.gradient.windows))
        if (name := run.ranks.from_first(partial(_first_of, seen))) is not None:
            return number, name
    return None


def _first_of(seen: list[str | None]) -> str | None:
    """Ranks may have seen different things: each its own rows of a weight, which spoils everybody's outputs, or its own
    slice of a sequence, which spoils those to its right."""
    found = [name for name in seen if name is not None]
    return min(found, key=lambda name: not name.startswith(WEIGHT), default=None)


@torch.no_grad()
def first_not_finite(model: GPT, tokens: Tensor, targets: Tensor, windows: Tensor) -> str | None:
    """The name of a weight, of the part of the model whose output it is, or the loss; None: all is finite."""
    bad_weights = (name for name, weight in model.named_parameters() if not part_here(weight).isfinite().all())
    wrong = [f"{WEIGHT} {name}" for name in bad_weights]  # the pass is made all the same: others may wait for it
    parts = {f"the output of {name}": module for name, module in model.named_modules() if name}
    hooks = [module.register_forward_hook(partial(_note, wrong, output)) for output, module in parts.items()]
    try:
        losses = model(tokens, targets, windows).main
    finally:
        for hook in hooks:
            hook.remove()
    return next(iter(wrong), None if losses.isfinite().all() else "the loss")


def _note(wrong: list[str], name: str, _: nn.Module, inputs: Any, output: Any) -> None:
    parts = [output] if isinstance(output, Tensor) else output
    if not all(part.isfinite().all() for part in parts if isinstance(part, Tensor)):
        wrong.append(name)
