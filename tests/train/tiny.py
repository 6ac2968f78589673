"""A run small enough to train in a second: bytes as tokens, two layers, its own shards."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from paceline.checkpoint.config import CheckpointConfig
from paceline.data.config import BatchConfig, DataConfig
from paceline.data.shards import write_shard
from paceline.data.tokenizer import ByteTokenizer
from paceline.evaluate.config import EvaluateConfig
from paceline.recipes.presets import preset
from paceline.train.config import RunConfig, TrainConfig

SENTENCES = [b"the cat sat on the mat. ", b"a dog ate the bone. ", b"birds sing in the morning. "]


def tiny_config(folder: Path, **changes: object) -> RunConfig:
    """The demo preset with two layers of width 32, on shards that this writes into `folder`."""
    write_text_shards(folder)
    demo = preset("demo")
    model = replace(demo.model, vocab_size=257, width=32, num_layers=2, num_heads=2, head_dim=16)
    config = replace(
        demo,
        steps=12,
        model=replace(model, window=replace(demo.model.window, growth_tokens=128)),
        data=DataConfig(dir=str(folder), tokenizer="bytes", end_of_text=256, order="shuffled"),
        batch=BatchConfig(tokens=1024, sequence_tokens=256, micro_tokens=512),
        train=TrainConfig(device="cpu", free_steps=2),
        evaluate=EvaluateConfig(every=4, tokens=0),
        checkpoint=CheckpointConfig(every=3, keep=2),
    )
    return replace(config, **changes)  # type: ignore[arg-type]


def write_text_shards(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "x_val_000000.bin").exists():
        tokenizer = ByteTokenizer()
        tokenizer.save(folder)
        generator = np.random.Generator(np.random.PCG64(0))
        for name, documents in (("x_train_000001.bin", 120), ("x_val_000000.bin", 12)):
            tokens = [document(generator) for _ in range(documents)]
            write_shard(folder / name, np.concatenate(tokens), documents=documents, tokenizer=tokenizer.fingerprint)


def document(generator: np.random.Generator) -> np.ndarray:
    picks = generator.integers(len(SENTENCES), size=generator.integers(2, 30))
    text = b"".join(SENTENCES[pick] for pick in picks)
    return np.concatenate([[256], np.frombuffer(text, dtype=np.uint8)]).astype(np.uint16)
