"""What --steps and --scale do to a preset. Both return a whole RunConfig; neither knows which preset it has.

--steps N keeps the shape of the schedule: window and fractional cool-down follow step/steps, a cool-down in steps is
scaled in proportion, the momentum warm-up keeps its length.

--scale F shrinks a preset for a small machine with all its techniques active: head width by F^(3/4) (16 of 128 at
1/16), vocabulary and steps by F, batch and n-gram tables by F², though stages of different batches keep different ones.
Heads and layers stay, so that value maps, skips and missing attention are the record's. A windowed preset keeps its
windows and a sequence of 16 blocks of 128 tokens, of one more than its widest window, or all it has, so that every
window of the schedule occurs. Stages and layer overrides follow the same rules.
"""

import math
from dataclasses import replace

from paceline.core.errors import ConfigError
from paceline.core.units import BLOCK_TOKENS, round_up
from paceline.settings.data import BUILTIN, BatchConfig, DataConfig
from paceline.settings.model import ModelConfig
from paceline.settings.run import EvaluateConfig, RunConfig
from paceline.settings.schedule import scaled_to, widest_windows

MIN_WINDOWED_TOKENS = 16 * BLOCK_TOKENS
MIN_WIDTH = 8
MIN_VOCABULARY = 512
VALIDATION_TOKENS = 16_384
"""Of one validation of a scaled preset, or one sequence where that is longer: half of the built-in validation text."""


def with_steps(config: RunConfig, steps: int) -> RunConfig:
    return replace(config, steps=steps, optim=scaled_to(config.optim, config.steps, steps))


def parse_scale(text: str) -> float:
    """A share such as 0.25 or 1/16."""
    above, slash, below = text.partition("/")
    try:
        scale = float(above) / (float(below) if slash else 1.0)
    except (ValueError, ZeroDivisionError):
        scale = 0.0
    if not 0.0 < scale <= 1.0:
        raise ConfigError(f"--scale {text} is not in (0, 1]; write it as 0.25 or 1/16")
    return scale


def scaled(config: RunConfig, scale: float) -> RunConfig:
    """The preset at a fraction of its size, on the built-in corpus and whatever device there is."""
    if scale == 1.0:
        return config
    least = max([1, *(math.ceil(2 / stage.share) for stage in config.stages)])  # so that each stage has a step
    smaller = with_steps(config, min(config.steps, max(least, round(config.steps * scale))))
    sequence_tokens = _scaled_sequence(config, scale)
    model = _scaled_model(config.model, scale, sequence_tokens)
    tokens = _scaled_batches(config, scale, sequence_tokens)
    batch = BatchConfig(tokens=tokens[config.batch.tokens], sequence_tokens=sequence_tokens)
    stages = tuple(
        replace(
            stage,
            batch_tokens=stage.batch_tokens and tokens[stage.batch_tokens],
            candidates=_candidates(stage.candidates, model.vocab_size, scale, sequence_tokens),
        )
        for stage in config.stages
    )
    sequences = max(1, VALIDATION_TOKENS // batch.sequence_tokens)
    return replace(
        smaller,
        model=model,
        batch=batch,
        stages=stages,
        data=DataConfig(dir=BUILTIN, tokenizer=f"bpe-{model.vocab_size}", order=config.data.order),
        train=replace(config.train, device="auto", compile=False),
        evaluate=EvaluateConfig(every=max(1, smaller.steps // 4), tokens=sequences * batch.sequence_tokens),
    )


def _scaled_model(model: ModelConfig, scale: float, sequence_tokens: int) -> ModelConfig:
    head_dim = _width(model.head_dim, scale**0.75, 4)
    overrides = tuple(
        replace(
            change,
            qk_dim=change.qk_dim and _width(change.qk_dim, scale**0.75, 4),
            v_dim=change.v_dim and _width(change.v_dim, scale**0.75, 4),
            mlp_width=change.mlp_width and _width(change.mlp_width, head_dim / model.head_dim, 8),
        )
        for change in model.layer_overrides
    )
    vocab_size = max(MIN_VOCABULARY, round(model.vocab_size * scale))
    grams = model.ngrams
    rows = [n and max(MIN_VOCABULARY, round(n * scale**2)) for n in (grams.bigram_rows, grams.trigram_rows)]
    return replace(
        model,
        head_dim=head_dim,
        width=head_dim * model.num_heads,
        vocab_size=vocab_size,
        candidates=_candidates(model.candidates, vocab_size, scale, sequence_tokens),
        layer_overrides=overrides,
        ngrams=replace(grams, bigram_rows=rows[0], trigram_rows=rows[1]),
    )


def _width(before: int, share: float, unit: int) -> int:
    """A share of a width, rounded to a multiple of `unit`; of heads, and of MLPs."""
    return min(before, max(MIN_WIDTH, unit * round(before * share / unit)))


def _scaled_sequence(config: RunConfig, scale: float) -> int:
    sequence, wanted = config.batch.sequence_tokens, config.batch.tokens * scale**2
    if config.model.window.unit == "none":
        return sequence
    fitting = round(min(sequence * scale, wanted) / BLOCK_TOKENS) * BLOCK_TOKENS
    beyond = round_up(max(widest_windows(config).values()) + 1, BLOCK_TOKENS)
    return max(min(sequence, max(beyond, MIN_WINDOWED_TOKENS)), fitting)


def _scaled_batches(config: RunConfig, scale: float, sequence_tokens: int) -> dict[int, int]:
    """The tokens of a step, by what they were: whole sequences, of which a larger batch has more."""
    sequences, found = 0, dict[int, int]()
    for before in sorted(
        {config.batch.tokens, *(stage.batch_tokens or config.batch.tokens for stage in config.stages)}
    ):
        sequences = max(sequences + 1, round(before * scale**2 / sequence_tokens))
        found[before] = sequences * sequence_tokens
    return found


def _candidates(before: int | None, vocab_size: int, scale: float, sequence_tokens: int) -> int | None:
    """Of a sampled softmax, as many as the targets of a sequence may be."""
    return before and min(vocab_size, max(round(before * scale), sequence_tokens))
