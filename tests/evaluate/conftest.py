"""One small trained run for all tests that need one, and tokenizers of each kind that can be had."""

import os
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch

from paceline.text.tokenizer import ByteTokenizer, Tokenizer, gpt2_tokenizer, train_tokenizer
from train.tiny import run, tiny_config

GPT2_FILE = "6d1cbeee0f20b3d9449abfede4726ed8212e3aee"
"""Under which tiktoken keeps GPT-2's merges."""


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run; tests that write into it take a copy."""
    folder = tmp_path_factory.mktemp("trained")
    threads = torch.get_num_threads()
    run(tiny_config(folder / "data"), folder / "run")
    torch.set_num_threads(threads)
    return folder / "run"


@pytest.fixture(scope="session", params=["bytes", "bpe", "gpt2"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """GPT-2's needs a download, so a BPE by the same rules, trained on the built-in text, stands beside it."""
    if request.param == "bytes":
        return ByteTokenizer()
    if request.param == "bpe":
        return train_tokenizer("bpe-400", topics.values())
    if not (Path(os.environ.get("TIKTOKEN_CACHE_DIR", "/nowhere")) / GPT2_FILE).exists():
        pytest.skip("GPT-2's vocabulary is not in TIKTOKEN_CACHE_DIR and tests do not download")
    return gpt2_tokenizer()
