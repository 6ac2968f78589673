"""Data and tokenizers as other programs leave them, small."""

import json
from pathlib import Path

import numpy as np
import tokenizers

from paceline.data.shards import manifest_path
from paceline.text.shard_writer import write_shard
from paceline.text.tokenizer import train_tokenizer

TEXTS = ["the theory of the thing, they say, is there: " * 20, "it's the end <|endoftext|> of the text\n" * 20]


def foreign_shards(
    folder: Path, *, end: int = 50_256, largest: int = 50_256, first: int | None = None, size: int = 4096
) -> Path:
    """Shards of llm.c's kind: tokens alone. `first`: what opens them, if not end-of-text. `largest` comes last."""
    folder.mkdir(parents=True)
    for name in ("en_train_000001.bin", "en_val_000000.bin"):
        tokens = np.random.default_rng(0).integers(1, 200, size)
        tokens[500::500], tokens[-7], tokens[0] = end, largest, end if first is None else first
        write_shard(folder / name, tokens, documents=0, tokenizer="")
        manifest_path(folder / name).unlink()
    return folder


def saved_by_a_library(folder: Path, *, space: bool = False) -> Path:
    """What `save_pretrained` leaves of a byte-level BPE whose last ids are end-of-text, another special token and one
    of two tabs."""
    trained = train_tokenizer("bpe-280", TEXTS)
    assert trained.rules is not None
    words = [word for word in trained.rules["vocabulary"] if word != "<|endoftext|>"]
    model = tokenizers.models.BPE(
        vocab={word: index for index, word in enumerate(words)}, merges=[tuple(m) for m in trained.rules["merges"]]
    )
    library = tokenizers.Tokenizer(model)
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=space)
    library.decoder = tokenizers.decoders.ByteLevel()
    library.add_special_tokens(["</s>", "<|im_start|>"])
    library.add_tokens(["\t\t"])
    folder.mkdir(parents=True)
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    return folder


def two_files(folder: Path, *, names: tuple[str, str] = ("vocab.json", "merges.txt")) -> Path:
    """A byte-level BPE as GPT-2's was published: end-of-text last."""
    trained = train_tokenizer("bpe-280", TEXTS)
    assert trained.rules is not None
    words = [*trained.rules["vocabulary"][1:], "<|endoftext|>"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(json.dumps({word: index for index, word in enumerate(words)}))
    merges = "".join(f"{left} {right}\n" for left, right in trained.rules["merges"])
    (folder / names[1]).write_text(f"#version: 0.2\n{merges}", encoding="utf-8")
    return folder
