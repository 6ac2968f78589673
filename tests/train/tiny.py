"""Runs small enough to train in seconds: bytes as tokens, narrow models, shards of their own. And what they leave."""

from dataclasses import replace
from pathlib import Path

import numpy as np
from torch import Tensor

from paceline.checkpoint import store
from paceline.checkpoint.run_folder import RunFolder
from paceline.metrics.metrics_file import read_metrics
from paceline.recipes.presets import preset
from paceline.recipes.scaling import with_steps
from paceline.settings.data import BatchConfig, DataConfig
from paceline.settings.run import CheckpointConfig, EvaluateConfig, RunConfig, TrainConfig
from paceline.text.shard_writer import write_shard
from paceline.text.tokenizer import ByteTokenizer
from paceline.train.run import Finished, start_run

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
        train=TrainConfig(device="cpu", untimed_steps=2),
        evaluate=EvaluateConfig(every=4, tokens=0),
        checkpoint=CheckpointConfig(every=3, keep=2),
    )
    return replace(config, **changes)  # type: ignore[arg-type]


def narrow_record(name: str, folder: Path, *, steps: int) -> RunConfig:
    """A record with all its layers, rules and formats at a width of 48, on shards in `folder`. Unlike the demo, a
    record never changes."""
    write_text_shards(folder)
    record = with_steps(preset(name), steps)
    model = replace(record.model, vocab_size=257, width=48, head_dim=48 // record.model.num_heads)
    return replace(
        record,
        model=model,
        data=DataConfig(dir=str(folder), tokenizer="bytes", end_of_text=256, order="shuffled"),
        batch=BatchConfig(tokens=256, sequence_tokens=128),
        train=TrainConfig(device="cpu", untimed_steps=2),
        evaluate=EvaluateConfig(every=None, tokens=128),
    )


def run(config: RunConfig, folder: Path) -> Finished:
    return start_run(config, RunFolder(folder))


def losses(folder: Path) -> list[float | None]:
    return [record.train_loss for record in read_metrics(folder)[0]]


def weights(folder: Path) -> dict[str, Tensor]:
    newest, _ = store.newest_good(RunFolder(folder))
    return dict(store.load(newest).model)


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
