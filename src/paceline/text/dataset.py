"""From the config to open data: the folder, its shards, its tokenizer."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import ConfigError, DataError
from paceline.data.corpus import Corpus
from paceline.data.shards import Shard, check_vocabulary, made_with_another, open_shard
from paceline.settings.data import BUILTIN, DataConfig
from paceline.text.builtin import builtin_corpus
from paceline.text.config import how_to_get
from paceline.text.token_files import how_to_convert
from paceline.text.tokenizer import FILE_NAME, Identity, Tokenizer, carried_identity, load_tokenizer


@dataclass(frozen=True, eq=False)
class Dataset:
    folder: Path
    train: Corpus
    val: Corpus
    config: DataConfig

    def tokenizer(self) -> Tokenizer:
        """Loaded on demand: training needs the ids only, and GPT-2's vocabulary may have to be downloaded."""
        tokenizer = load_tokenizer(self.folder, self.config.tokenizer)
        identity = (tokenizer.name, tokenizer.fingerprint)
        check_made_with(identity, f"tokenizer {tokenizer.name}", (*self.train.shards, *self.val.shards))
        return tokenizer


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
    if (carried := carried_identity(folder)) is not None:
        check_made_with(carried.names, str(folder / FILE_NAME), (*train.shards, *val.shards))
        check_end_of_text(data, carried)
    return Dataset(folder=folder, train=train, val=val, config=data)


def check_end_of_text(data: DataConfig, found: Identity) -> None:
    if found.end_of_text != data.end_of_text:
        opened = f"the documents in {data.dir} are opened by token {found.end_of_text}"
        raise ConfigError(f"--data.end-of-text {data.end_of_text}: {opened}; use that")


def open_corpus(folder: Path, pattern: str, vocab_size: int) -> Corpus:
    """Open the shards in `folder` that match `pattern`, in sorted name order, and check their ids."""
    check_folder(folder)
    try:
        paths = sorted(path for path in folder.glob(pattern) if path.is_file())
    except (ValueError, NotImplementedError) as error:
        why = f"{pattern!r} is no pattern of files ({error})"
        raise DataError(f"{folder}: {why}; change the pattern (--data.train, --data.val)") from None
    if not paths:
        none = f"no shard matches {pattern!r} ({len(list(folder.glob('*.bin')))} other .bin files there)"
        raise DataError(f"{folder}: {none}; change the pattern (--data.train, --data.val), or {how_to_get(folder)}")
    shards = tuple(map(open_or_convert, paths))
    for shard in shards:
        check_vocabulary(shard, vocab_size)
    return Corpus(shards=shards, vocab_size=vocab_size)


def open_or_convert(path: Path) -> Shard:
    """The shard; ids in a form of other programs are refused with the command that converts them."""
    try:
        return open_shard(path)
    except DataError as error:
        if path.is_file() and (how := how_to_convert(path, named=path.parent)):
            raise DataError(f"{error}; {how}") from None
        raise


def check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise DataError(f"{folder}: not a folder; --data.dir names one with shards, {how_to_get(folder)}")


def check_made_with(identity: Collection[str], called: str, shards: Iterable[Shard]) -> None:
    """Raise DataError if a shard says that another tokenizer made it: bits per byte would be wrong."""
    if other := made_with_another(shards, identity):
        wrong = f"{called}: not the tokenizer that {other.path} was made with"
        raise DataError(f"{wrong}; put that one back or prepare the data again")
