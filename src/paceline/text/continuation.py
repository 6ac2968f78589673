"""How a preparation begins: anew, from where an earlier run stopped, or not at all.

It continues only if the result is what one uninterrupted run would give: the same options, finished shards, tokenizer
and text that it was trained on. Whether the input before the stopping place is the same is found out while reading it
(`prepare.py`). As long as no shard is finished it begins anew, with whatever options are given.
"""

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from paceline.core import lock
from paceline.core.errors import ConfigError, DataError, PacelineError
from paceline.core.files import blake2b_of
from paceline.core.schema import changes
from paceline.text.byte_streams import check_encoding
from paceline.text.config import PrepareConfig
from paceline.text.manifest import (
    FILE_NAME,
    DatasetManifest,
    Options,
    TokenizerEntry,
    ValSplit,
    read_dataset,
    write_dataset,
)
from paceline.text.separator import compile_separator
from paceline.text.sources import BadText, Reader, Source
from paceline.text.split import plan_split
from paceline.text.tokenizer import FILE_NAME as TOKENIZER_FILE
from paceline.text.tokenizer import GPT2, Tokenizer, identity_of, load_tokenizer, train_tokenizer

FOREIGN = (TOKENIZER_FILE, "config.json", "card.json")  # what the folder of a run or of an exported model holds
TRAINING_BYTES = 64 << 20  # from the start of the training side, for a tokenizer; more changes few merges


def begin(folder: Path, config: PrepareConfig, sources: list[Source]) -> DatasetManifest:
    """The manifest to continue from, or a new one, with the tokenizer in its place."""
    _refuse_foreign(folder)
    for leftover in folder.glob(".*.tmp"):  # of a run that was killed
        leftover.unlink()
    if config.overwrite:
        _clear(folder, config.name)
    if (found := read_dataset(folder)) is not None:
        if found.shards:
            _check_continuation(folder, found, config, sources)
            return found
        for unlisted in _shard_files(folder, found.options.name):  # its run ended before the manifest knew it
            unlisted.unlink()
    if strangers := sorted(_shard_files(folder, config.name)):
        raise stranger(strangers[0], "use another --out or --name, or --overwrite to delete it")
    split = _plan(config, sources)
    tokenizer, training_text = _make_tokenizer(config, sources, split)
    made = identity_of(tokenizer) if tokenizer else GPT2
    entry = TokenizerEntry(**vars(made), training_text=training_text)
    manifest = DatasetManifest(options=_options(config), tokenizer=entry, split=split)
    write_dataset(folder, manifest)  # first: a tokenizer without it would look like another's
    if tokenizer:
        tokenizer.save(folder)
    return manifest


def _refuse_foreign(folder: Path) -> None:
    """Refuse a folder that holds a run or an exported model, which would lose its tokenizer to the data's."""
    found = [path for name in FOREIGN if (path := folder / name).exists()]
    if found and not (folder / FILE_NAME).exists():
        raise stranger(found[0], "the folder is not one of prepared data, use another --out")


def stranger(path: Path, cure: str) -> DataError:
    return DataError(f"{path}: there already, and no {FILE_NAME} accounts for it; {cure}")


def _check_continuation(folder: Path, found: DatasetManifest, config: PrepareConfig, sources: list[Source]) -> None:
    """Refuse to continue with other options, a damaged shard, or another text for the tokenizer."""
    before = found.options
    if before.skip_bad:  # said by an older version, too, which had no --on-bad-text
        before = dataclasses.replace(before, on_bad_text="skip-line")
    if changed := changes(before, _options(config)):
        flag, begun = changed[0].field.replace("_", "-"), f"{folder / FILE_NAME} was begun with {changed[0].before}"
        cure = "use that, another --out, or begin again with --overwrite"
        raise ConfigError(f"--{flag} {changed[0].after}: {begun}; {cure}")
    for shard in found.shards:
        path = folder / shard.file
        if not path.exists() or blake2b_of(path) != shard.blake2b:
            raise DataError(f"{path}: missing or damaged since it was written; begin again with --overwrite")
    of_ids = config.ids_of and not (folder / TOKENIZER_FILE).exists()  # they need none
    if not of_ids and load_tokenizer(folder, found.tokenizer.name).fingerprint != found.tokenizer.fingerprint:
        raise DataError(f"{folder}: its shards were made with another tokenizer; begin again with --overwrite")
    if found.split and not found.complete and _plan(config, sources) != found.split:
        raise input_changed(folder, "other documents would go to validation")
    expected = found.tokenizer.training_text
    if expected and _hash_of(_training_text(config, sources, found.splits_by, reader_of(config, found))) != expected:
        raise input_changed(folder, what="the text that its tokenizer was trained on")


def input_changed(folder: Path, how: str = "", what: str = "the input") -> DataError:
    changed = f"{folder / FILE_NAME}: {what} has changed{how and f', {how}'}"
    return DataError(f"{changed}; give the old input, another --out, or begin again with --overwrite")


def reader_of(config: PrepareConfig, manifest: DatasetManifest | None = None) -> Reader:
    """A reader as the options say, by the rules of the version that began `manifest`."""
    options = _options(config)
    bad: BadText = config.on_bad_text
    if options.skip_bad:
        bad = "skip-file" if manifest and manifest.split is None else "skip-line"
    separator = config.document_separator
    return Reader(
        config.field,
        bad=bad,
        encoding=options.encoding,
        separator=None if separator is None else compile_separator(separator),
        tokenizer=manifest.tokenizer if manifest and config.ids_of else None,
    )


def _plan(config: PrepareConfig, sources: list[Source]) -> ValSplit:
    """The hash alone decides where the input cannot or need not be looked at beforehand. Of the hub first rows are."""
    share, reader = config.val_share, reader_of(config)
    no_look = share == 0 or any(source.only_once or source.side for source in sources)
    if no_look or reader.hash_is_enough(sources, share):
        return ValSplit(share=share)
    return plan_split(reader.documents(sources), share, until_enough=any(source.kind == "hf" for source in sources))


def _make_tokenizer(
    config: PrepareConfig, sources: list[Source], split: ValSplit
) -> tuple[Tokenizer | None, str | None]:
    """The tokenizer, None for ids of a GPT-2 whose files are not here, and the hash of the text it was trained on."""
    if config.ids_of == "gpt2":
        with contextlib.suppress(PacelineError):
            return load_tokenizer(None, "gpt2"), None
        return None, None
    if not config.tokenizer.startswith("bpe-"):
        named = config.tokenizer in ("gpt2", "bytes")
        return load_tokenizer(None if named else config.tokenizer, config.tokenizer), None
    texts = _training_text(config, sources, split, reader_of(config))
    return train_tokenizer(config.tokenizer, (text.decode() for text in texts)), _hash_of(texts)


def _training_text(config: PrepareConfig, sources: list[Source], split: ValSplit, reader: Reader) -> list[bytes]:
    if any(source.only_once for source in sources):
        why = "is trained on the text first, but standard input can be read only once"
        cure = "give a file, or --tokenizer gpt2, bytes or a folder that carries one"
        raise ConfigError(f"--tokenizer {config.tokenizer} {why}; {cure}")
    texts: list[bytes] = []
    size = 0
    for piece in reader.pieces(sources, split):
        if size >= TRAINING_BYTES:
            break
        if piece.side == "train":
            texts.append(piece.text)
            size += len(piece.text)
    return texts


def _hash_of(texts: Iterable[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for text in texts:
        digest.update(b"%d\n" % len(text))
        digest.update(text)
    return digest.hexdigest()


def _options(config: PrepareConfig) -> Options:
    said = {field.name: getattr(config, field.name) for field in dataclasses.fields(Options)}
    bad = "skip-line" if config.skip_bad else config.on_bad_text
    clear = {"skip_bad": bad == "skip-line", "on_bad_text": bad, "encoding": check_encoding(config.encoding)}
    return Options(**said | clear)


def _shard_files(folder: Path, name: str) -> list[Path]:
    return [path for side in ("train", "val") for path in folder.glob(f"{name}_{side}_*.bin*")]


def _clear(folder: Path, name: str) -> None:
    """Delete what a run of ours wrote; the manifest before the shards, which it lists, and after the tokenizer, which
    alone would look like another's."""
    names = {name}
    with contextlib.suppress(DataError):  # a damaged manifest is what --overwrite may be for
        names |= {found.options.name} if (found := read_dataset(folder)) else set()
    shards = [path for each in names for path in _shard_files(folder, each)]
    for path in (folder / TOKENIZER_FILE, folder / FILE_NAME, *shards):
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def only_writer(folder: Path, flag: str = "--out ") -> Iterator[None]:
    """Make the folder and hold it against a second writer. Readers of input and network name what fails there, so an
    OSError that comes here is about the folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{flag}{folder}: cannot be made a folder ({error.strerror}); name another") from None
    busy = DataError(f"{flag}{folder}: another process prepares data there; wait for it or name another")
    try:
        with lock.only_writer(folder, busy):
            yield
    except OSError as error:
        cure = "what is finished is kept, make room and run the same command again to continue"
        raise PacelineError(f"{flag}{folder}: cannot be written ({error.strerror or error}); {cure}") from error
