"""Twenty steps of 96 sequences, and the ways to carry them out that must give the same run."""

import itertools
from dataclasses import replace
from pathlib import Path

from paceline.settings.data import BatchConfig
from paceline.settings.model import WindowConfig
from paceline.settings.parallel import ParallelConfig
from paceline.settings.run import RunConfig
from train.tiny import tiny_config

STEPS, SEQUENCES, LENGTH = 20, 96, 16
WORLDS, MICRO_BATCHES = (1, 2, 3, 4), (1, 2, 8)
SHARDS = {
    "plain": ParallelConfig(),
    "adam": ParallelConfig(zero1=True),
    "full": ParallelConfig(fsdp=True),
}
"""What of a model ranks keep in shards."""
Way = tuple[str, int, int]
"""(shards, ranks, micro-batches of each)."""
SAMPLE: tuple[Way, ...] = (
    *(("plain", 1, 1), ("plain", 2, 8), ("plain", 3, 2), ("plain", 4, 1)),
    *(("adam", 3, 1), ("full", 2, 2), ("full", 4, 1)),
)
"""Every number of ranks and of micro-batches at least once."""
ALL: tuple[Way, ...] = tuple(itertools.product(SHARDS, WORLDS, MICRO_BATCHES))


def name_of(way: Way) -> str:
    return "same-" + "-".join(map(str, way))


def config_of(data: Path, way: Way) -> RunConfig:
    """A model of two short layers without zeros at the start, whose gradients would be of mere rounding."""
    shards, world, count = way
    config = tiny_config(data, steps=STEPS)
    window = WindowConfig(unit="tokens", start_tokens=4, growth_tokens=8, quantum_tokens=4)
    tokens = SEQUENCES * LENGTH
    return replace(
        config,
        model=replace(config.model, lm_head_init="uniform", zero_init_outputs=False, window=window),
        batch=BatchConfig(tokens=tokens, sequence_tokens=LENGTH, micro_tokens=tokens // (world * count)),
        evaluate=replace(config.evaluate, every=None, tokens=7 * LENGTH),
        checkpoint=replace(config.checkpoint, every=None),
        parallel=SHARDS[shards],
    )
