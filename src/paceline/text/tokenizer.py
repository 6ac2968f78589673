"""Text to token ids and back: GPT-2's BPE, a byte-level BPE trained on the data or elsewhere, or raw bytes.

All know each token as the bytes it stands for: decoding is a table lookup, only encoding asks a library. End-of-text is
never produced by encoding: the characters `<|endoftext|>` in a text come back as they were. A trained BPE gives
end-of-text id 0, then the 256 bytes, then its merges; training is deterministic. Ids must fit into uint16.
"""

import hashlib
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from paceline.core.errors import ConfigError, DataError, PacelineError
from paceline.core.files import write_json
from paceline.core.schema import read_json
from paceline.data.shards import MAX_VOCAB_SIZE, TOKEN_DTYPE
from paceline.settings.data import is_path
from paceline.text.config import GPT2_END_OF_TEXT

FILE_NAME = "tokenizer.json"
END_OF_TEXT = "<|endoftext|>"
LONGEST_WORD = 1000  # bytes, in training: its time grows with their square, and text without spaces is one word
END_OF_TEXTS = {"gpt2": GPT2_END_OF_TEXT, "bytes": 256}  # of those known by name alone; it is their last id
GPT2_FINGERPRINT = "de44a8655f3c919d2f6f332341c6e504"
LONG_RUN = re.compile(rf"(?<!\S)\S{{{LONGEST_WORD // 4}}}|(?<!\s)\s{{{LONGEST_WORD // 4}}}")
"""What every word beyond that holds: a character has up to 4 bytes."""


class Tokenizer(ABC):
    """One vocabulary. `token_bytes[i]` is what token i stands for; end-of-text stands for nothing."""

    name: str
    end_of_text: int
    token_bytes: list[bytes]
    rules: dict[str, Any] | None = None  # what encoding needs beyond the table, as JSON: the merges of a trained BPE
    saves_table = False  # 0.7 MB, so that GPT-2's tokenizer can be had where its files are not
    end_of_text_word: str = END_OF_TEXT  # how files for other programs spell end-of-text

    @abstractmethod
    def encode_array(self, text: str) -> np.ndarray:
        """Token ids of `text`, (n,) uint16, without end-of-text. The fast way: no Python list is made."""

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.encode_array(text).tolist()
        return ids

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The text's bytes; end-of-text adds none, so the length is the sum of `token_byte_lengths`."""
        return b"".join(map(self.token_bytes.__getitem__, ids))

    def decode(self, ids: Iterable[int]) -> str:
        """Text for people: end-of-text shows as `<|endoftext|>`, and bytes that are not UTF-8 as U+FFFD."""
        shown = (END_OF_TEXT.encode() if i == self.end_of_text else self.token_bytes[i] for i in ids)
        return b"".join(shown).decode("utf-8", errors="replace")

    def token_byte_lengths(self) -> np.ndarray:
        """Bytes each token stands for, (vocab_size,) int64: the divisor of bits per byte. End-of-text counts 0."""
        return np.fromiter(map(len, self.token_bytes), dtype=np.int64)

    @property
    def vocab_size(self) -> int:
        return len(self.token_bytes)

    @cached_property
    def fingerprint(self) -> str:
        """Equal for two tokenizers only if they give the same ids for every text."""
        return fingerprint_of(self.token_bytes, self.end_of_text, self.rules)

    def save(self, folder: Path) -> None:
        """Write `tokenizer.json`, from which `load_tokenizer` makes an equal one without a network."""
        facts = {name: getattr(self, name) for name in ("name", "end_of_text", "vocab_size", "fingerprint", "rules")}
        if self.saves_table:
            letters = byte_letters()
            facts["vocabulary"] = ["".join(map(letters.__getitem__, token)) for token in self.token_bytes]
        write_json(folder / FILE_NAME, facts)


def fingerprint_of(token_bytes: list[bytes], end_of_text: int, rules: dict[str, Any] | None) -> str:
    lengths = np.fromiter(map(len, token_bytes), dtype=np.int64).tobytes()
    content = [lengths, *token_bytes, str(end_of_text).encode(), json.dumps(rules).encode()]
    return hashlib.blake2b(b"".join(content), digest_size=16).hexdigest()


class ByteTokenizer(Tokenizer):
    """Every byte a token, and end-of-text 256. Nothing to train, four times the tokens."""

    name = "bytes"
    end_of_text = END_OF_TEXTS["bytes"]

    def __init__(self) -> None:
        self.token_bytes = [bytes([value]) for value in range(256)] + [b""]

    def encode_array(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(TOKEN_DTYPE)


class TiktokenTokenizer(Tokenizer):
    """Any tiktoken encoding; `gpt2_tokenizer` makes the one that the records use."""

    saves_table = True

    def __init__(self, name: str, encoding: Any) -> None:
        check_size(name, encoding.n_vocab)
        self.name = name
        self.end_of_text = encoding.eot_token
        self.token_bytes = [b""] * encoding.n_vocab
        for value in encoding.token_byte_values():  # sorted by bytes, not by id
            self.token_bytes[encoding.encode_single_token(value)] = value
        self._encoding = encoding

    def encode_array(self, text: str) -> np.ndarray:
        ids = self._encoding.encode_to_numpy(text, disallowed_special=())
        return np.asarray(ids, dtype=TOKEN_DTYPE)


class TrainedTokenizer(Tokenizer):
    """A byte-level BPE in the tokenizers library, with GPT-2's rule for cutting text into words."""

    end_of_text = 0

    def __init__(self, name: str, vocabulary: list[str], merges: list[list[str]]) -> None:
        """`vocabulary` in id order and `merges` in order of rank, in the printable letters of byte-level BPE."""
        import tokenizers

        check_size(name, len(vocabulary))
        self.name = name
        self.rules = {"vocabulary": vocabulary, "merges": merges}
        self.token_bytes = [b"", *map(bytes_of, vocabulary[1:])]
        ids = {token: index for index, token in enumerate(vocabulary)}
        if len(ids) < len(vocabulary) or not all(
            left in ids and right in ids and left + right in ids for left, right in merges
        ):
            raise ValueError("a token stands twice in it, or a merge has none")  # at which the library would panic
        model = tokenizers.models.BPE(vocab=ids, merges=[(left, right) for left, right in merges])
        self._library = tokenizers.Tokenizer(model)  # end-of-text is no added token here, so text cannot spell it
        self._library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)

    def encode_array(self, text: str) -> np.ndarray:
        return np.asarray(self._library.encode_batch_fast([text])[0].ids, dtype=TOKEN_DTYPE)


def train_tokenizer(name: str, texts: Iterable[str]) -> TrainedTokenizer:
    """Train `bpe-N` on `texts`, on long words in parts. A text too small for N merges gives a smaller vocabulary."""
    import tokenizers

    texts = list(texts)
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    words = library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    if any(map(LONG_RUN.search, texts)):  # only then: it slows training down and does nothing to ordinary text
        parts = tokenizers.pre_tokenizers.Split(tokenizers.Regex(f".{{1,{LONGEST_WORD}}}"), behavior="isolated")
        library.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([words, parts])
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=trained_size(name),
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(byte_letters().values()),
        show_progress=False,
    )
    library.train_from_iterator(texts, trainer)
    model = json.loads(library.to_str())["model"]
    return TrainedTokenizer(name, sorted(model["vocab"], key=model["vocab"].__getitem__), model["merges"])


def trained_size(name: str) -> int:
    """The N of `bpe-N`."""
    found = re.fullmatch(r"bpe-(\d{3,5})", name, re.ASCII)
    if not found or not 257 <= int(found[1]) <= MAX_VOCAB_SIZE:
        known = f"gpt2, bytes, bpe-N with 257 <= N <= {MAX_VOCAB_SIZE}, or the path of a tokenizer.json or its folder"
        raise ConfigError(f"tokenizer {name!r:.60}: not known; use {known}")
    return int(found[1])


def gpt2_tokenizer(folder: Path | None = None) -> Tokenizer:
    """GPT-2's BPE, from its two files in `folder` or $TIKTOKEN_CACHE_DIR, or as tiktoken has it, which may download."""
    from paceline.text.library_tokenizer import read_vocabulary_files, tiktoken_module

    for place in (folder, os.environ.get("TIKTOKEN_CACHE_DIR")):
        if place and (found := read_vocabulary_files(Path(place))) is not None:
            if found.name != "gpt2":
                raise DataError(f"tokenizer gpt2: the vocabulary in {place} is not GPT-2's; put GPT-2's files there")
            return found
    try:
        encoding = tiktoken_module().get_encoding("gpt2")
    except (OSError, ValueError) as error:  # requests' errors are OSErrors; a wrong hash in the cache is a ValueError
        reason = (str(error).splitlines() or [type(error).__name__])[0][:120]
        raise PacelineError(
            f"tokenizer gpt2: its vocabulary could not be loaded ({reason}); connect once, or point TIKTOKEN_CACHE_DIR "
            f"to a folder with GPT-2's vocab.json and merges.txt, also called encoder.json and vocab.bpe"
        ) from None
    return TiktokenTokenizer("gpt2", encoding)


def load_tokenizer(folder: Path | str | None, name: str) -> Tokenizer:
    """The tokenizer that `folder` carries, which may be its file itself; without a folder, or where it carries none,
    the one called `name`, or that the path `name` leads to."""
    for place in (folder, name if is_path(name) else None):
        if place is not None and (found := _read_carried(Path(place))) is not None:
            return found
    if name == "gpt2":
        return gpt2_tokenizer()
    if name == "bytes":
        return ByteTokenizer()
    if is_path(name):
        what = "holds no tokenizer.json, and no vocab.json with merges.txt" if Path(name).exists() else "does not exist"
        raise ConfigError(f"tokenizer {name}: {what}; name a folder that `save_pretrained` or `data prepare` wrote")
    trained_size(name)  # refuses names that are not known
    where = f"{folder} holds no {FILE_NAME}" if folder is not None else "no folder is given"
    how = "make the data with `data prepare`, or copy the tokenizer's file there"
    raise ConfigError(f"tokenizer {name}: a BPE is trained on its data, but {where}; {how}")


@dataclass(frozen=True)
class Identity:
    """What data and a model must know of the tokenizer of their ids."""

    name: str
    end_of_text: int
    vocab_size: int
    fingerprint: str | None = None  # None: not known

    @property
    def names(self) -> frozenset[str]:
        """How a shard's manifest may call it: by its fingerprint, or by name in those that were downloaded."""
        return frozenset({self.name, self.fingerprint}) if self.fingerprint else frozenset()


GPT2 = Identity("gpt2", GPT2_END_OF_TEXT, GPT2_END_OF_TEXT + 1, GPT2_FINGERPRINT)


def carried_identity(folder: Path) -> Identity | None:
    """Of the tokenizer that `folder` carries, as `load_tokenizer` finds it, if any. Ours are not loaded for it."""
    path = folder / FILE_NAME
    saved = read_json(path) if path.is_file() else None
    if saved is None or _is_library(saved):
        loaded = _read_carried(folder)
        return None if loaded is None else identity_of(loaded)
    name, end_of_text = (saved.get(key) if isinstance(saved, dict) else None for key in ("name", "end_of_text"))
    if not isinstance(end_of_text, int):
        raise DataError(f"{path}: not a saved tokenizer (no end_of_text); prepare the data again")
    size, rules = saved.get("vocab_size"), saved.get("rules")
    if not isinstance(size, int):  # of an older version
        size = len(rules["vocabulary"]) if isinstance(rules, dict) else end_of_text + 1
    return Identity(str(name), end_of_text, size, saved.get("fingerprint"))


def identity_of(tokenizer: Tokenizer) -> Identity:
    return Identity(tokenizer.name, tokenizer.end_of_text, tokenizer.vocab_size, tokenizer.fingerprint)


def _is_library(saved: Any) -> bool:
    """Whether a tokenizer.json is one of the tokenizers library."""
    return isinstance(saved, dict) and "model" in saved and "fingerprint" not in saved


def _read_carried(place: Path) -> Tokenizer | None:
    """The tokenizer in a folder or file; None where there is none."""
    from paceline.text.library_tokenizer import read_library, read_vocabulary_files

    path = place if place.is_file() else place / FILE_NAME
    if not path.is_file():
        return read_vocabulary_files(place)
    saved = read_json(path)
    return read_library(path, saved) if _is_library(saved) else _load_saved(path, saved)


def _load_saved(path: Path, saved: Any) -> Tokenizer:
    from paceline.text.library_tokenizer import LibraryTokenizer, gpt2_of

    try:
        name, rules = saved["name"], saved["rules"]
        tokenizer: Tokenizer
        if rules:
            tokenizer = (LibraryTokenizer if "library" in rules else TrainedTokenizer)(name, **rules)
        elif "vocabulary" in saved:
            tokenizer = gpt2_of({token: index for index, token in enumerate(saved["vocabulary"]) if token})
        else:
            tokenizer = gpt2_tokenizer(path.parent) if name == "gpt2" else load_tokenizer(None, name)
        expected = saved["fingerprint"]
    except PacelineError:
        raise
    except Exception as error:  # the library raises bare Exceptions for merges that do not fit the vocabulary
        why = f"{type(error).__name__}: {error}"
        raise DataError(f"{path}: not a saved tokenizer ({why}); prepare the data again") from None
    if tokenizer.fingerprint != expected:
        raise DataError(f"{path}: its tokenizer is not the one that was saved; it is damaged, prepare the data again")
    return tokenizer


def byte_letters() -> dict[int, str]:
    """The printable letter for each byte, as GPT-2 chose them: itself where printable, else from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [value for value in range(256) if value not in printable]
    return {value: chr(value) for value in printable} | {value: chr(256 + n) for n, value in enumerate(hidden)}


VALUES = {letter: value for value, letter in byte_letters().items()}


def bytes_of(letters: str) -> bytes:
    """What a token in such letters stands for."""
    return bytes(map(VALUES.__getitem__, letters))


def check_size(name: str, size: int) -> None:
    if size > MAX_VOCAB_SIZE:
        raise ConfigError(f"tokenizer {name}: {size:,} tokens; shards hold ids below {MAX_VOCAB_SIZE:,}, use fewer")
