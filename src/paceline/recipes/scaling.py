"""What --steps and --scale do to a preset. Both return a whole RunConfig; neither knows which preset it has.

--steps N keeps the shape of the schedule: window and fractional cool-down follow step/steps, a cool-down in steps is
scaled in proportion, the momentum warm-up keeps its length.

--scale F shrinks a preset for a small machine with all its techniques active: head width by F^(3/4) (16 of 128 at
1/16), vocabulary and steps by F, batch by F². Heads and layers stay, so that value maps, skips and missing attention
are the record's. A windowed preset keeps 16 blocks of 128 tokens, or all it has, so that every window of the schedule
occurs.
"""

from dataclasses import replace

from paceline.core.errors import ConfigError
from paceline.core.units import BLOCK_TOKENS
from paceline.settings.data import BUILTIN, BatchConfig, DataConfig
from paceline.settings.model import ModelConfig
from paceline.settings.run import EvaluateConfig, RunConfig
from paceline.settings.schedule import scaled_to

MIN_WINDOWED_TOKENS = 16 * BLOCK_TOKENS
MIN_HEAD_DIM = 8
MIN_VOCABULARY = 512
VALIDATION_TOKENS = 16_384
"""Of one validation of a scaled preset, or one sequence where that is longer: about half of what the built-in
validation documents hold, so that they suffice whatever the vocabulary and the Python that brings them."""


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
    smaller = with_steps(config, max(1, round(config.steps * scale)))
    model, batch = _scaled_model(config.model, scale), _scaled_batch(config, scale)
    sequences = max(1, VALIDATION_TOKENS // batch.sequence_tokens)
    return replace(
        smaller,
        model=model,
        batch=batch,
        data=DataConfig(dir=BUILTIN, tokenizer=f"bpe-{model.vocab_size}", order=config.data.order),
        train=replace(config.train, device="auto", compile=False),
        evaluate=EvaluateConfig(every=max(1, smaller.steps // 4), tokens=sequences * batch.sequence_tokens),
    )


def _scaled_model(model: ModelConfig, scale: float) -> ModelConfig:
    head_dim = max(MIN_HEAD_DIM, 4 * round(model.head_dim * scale**0.75 / 4))
    vocab_size = max(MIN_VOCABULARY, round(model.vocab_size * scale))
    return replace(model, head_dim=head_dim, width=head_dim * model.num_heads, vocab_size=vocab_size)


def _scaled_batch(config: RunConfig, scale: float) -> BatchConfig:
    sequence, wanted = config.batch.sequence_tokens, config.batch.tokens * scale**2
    if config.model.window.unit != "none":
        fitting = round(min(sequence * scale, wanted) / BLOCK_TOKENS) * BLOCK_TOKENS
        sequence = max(min(sequence, MIN_WINDOWED_TOKENS), fitting)
    return BatchConfig(tokens=max(1, round(wanted / sequence)) * sequence, sequence_tokens=sequence)
