"""Code and CUDA graphs of every shape that a staged run will have, made before its first step: else the clock would
count a compilation in the middle of the run."""

import torch

from paceline.data.feed import DeviceBatch
from paceline.settings.schedule import schedule, stage_starts
from paceline.train.gradient_step import GUARDED_STEPS, GradientStep, forward_backward


def compile_ahead(gradient: GradientStep, start: int) -> None:
    """Of the steps from `start` on, if they have several shapes. Changes no weight. Not with several ranks, which
    compile in their first steps."""
    run, config = gradient.run, gradient.run.config
    steps = [schedule(config, step) for step in sorted({start, *stage_starts(config)[:-1]}) if step >= start]
    shapes = {(run.share(each.sequences).micro_sequences, each.candidates): each for each in steps}
    if len(shapes) == 1 or run.ranks.world > 1:
        return
    for (micro, candidates), settings in shapes.items():
        gradient.prepare(settings)
        ids = torch.zeros(micro, config.batch.sequence_tokens, dtype=torch.int64, device=run.machine.device)
        like = DeviceBatch(ids.to(torch.int32), ids)
        for _ in range(GUARDED_STEPS):
            compute = (gradient.graphs and gradient.graphs.of(like, micro, candidates)) or forward_backward
            compute(gradient.replica, like.tokens, ids, gradient.windows, gradient.loss_weights, ids.numel())
            gradient.forget_gradients(run.share(settings.sequences))
        gradient.steps_of[micro, candidates] = GUARDED_STEPS
