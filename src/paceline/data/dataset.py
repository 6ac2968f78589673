"""From the config to open data: the folder, its shards, its tokenizer."""

from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import ConfigError, DataError
from paceline.data.builtin import builtin_corpus
from paceline.data.config import BUILTIN, DataConfig
from paceline.data.corpus import Corpus, open_corpus
from paceline.data.tokenizer import Tokenizer, load_tokenizer, saved_end_of_text


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
    if data.dir != BUILTIN:
        return _open_folder(Path(data.dir), data, vocab_size)
    folder = builtin_corpus(data.tokenizer)
    try:
        return _open_folder(folder, data, vocab_size)
    except DataError as error:
        raise DataError(f"{error}; this is the built-in corpus: delete {folder} and it is made again") from None


def _open_folder(folder: Path, data: DataConfig, vocab_size: int) -> Dataset:
    train = open_corpus(folder, data.train, vocab_size)
    val = open_corpus(folder, data.val, vocab_size)
    _check_end_of_text(folder, data)
    return Dataset(folder=folder, train=train, val=val, config=data)


def _check_end_of_text(folder: Path, data: DataConfig) -> None:
    expected = saved_end_of_text(folder)
    if expected is not None and expected != data.end_of_text:
        raise ConfigError(
            f"--data.end-of-text {data.end_of_text}: the documents in {folder} are opened by token {expected}; use that"
        )
