"""From the config to open data: the folder, its shards, its tokenizer."""

from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import ConfigError
from paceline.core.schema import read_json
from paceline.data.builtin import builtin_corpus
from paceline.data.config import BUILTIN, DataConfig
from paceline.data.corpus import Corpus, open_corpus
from paceline.data.tokenizer import FILE_NAME, Tokenizer, load_tokenizer


@dataclass(frozen=True, eq=False)
class Dataset:
    folder: Path
    train: Corpus
    val: Corpus
    config: DataConfig

    def tokenizer(self) -> Tokenizer:
        """Loaded on demand: training needs the ids only, and GPT-2's vocabulary may have to be downloaded."""
        return load_tokenizer(self.folder, self.config.tokenizer)


def open_dataset(data: DataConfig, vocab_size: int) -> Dataset:
    """Open what `data` names; ids must fit the vocabulary, and end-of-text be the one the data were made with."""
    folder = builtin_corpus(data.tokenizer) if data.dir == BUILTIN else Path(data.dir)
    train = open_corpus(folder, data.train, vocab_size)
    val = open_corpus(folder, data.val, vocab_size)
    _check_end_of_text(folder, data)
    return Dataset(folder=folder, train=train, val=val, config=data)


def _check_end_of_text(folder: Path, data: DataConfig) -> None:
    saved = folder / FILE_NAME
    expected = read_json(saved).get("end_of_text") if saved.exists() else data.end_of_text
    if expected != data.end_of_text:
        raise ConfigError(
            f"--data.end-of-text {data.end_of_text}: the documents in {folder} are opened by token {expected}; use that"
        )
