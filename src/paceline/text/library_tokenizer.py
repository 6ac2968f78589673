"""Tokenizers that other programs wrote: what `save_pretrained` leaves, a tokenizer.json of the tokenizers library, or
the two files that GPT-2 was published as (vocab.json and merges.txt, first called encoder.json and vocab.bpe).

Only byte-level BPEs are read: every text comes back, and bits per byte have a meaning. What spells a special token in a
text stays text, and no space is put before a text. A normaliser is kept, so of a text that it changes the changed one
comes back. GPT-2's own vocabulary, however it is stored, is the tokenizer gpt2.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from paceline.core.errors import DataError, PacelineError, optional_module
from paceline.core.schema import read_json
from paceline.data.shards import TOKEN_DTYPE
from paceline.text.tokenizer import (
    END_OF_TEXT,
    GPT2_FINGERPRINT,
    TiktokenTokenizer,
    Tokenizer,
    byte_letters,
    bytes_of,
    check_size,
    fingerprint_of,
)

VOCABULARY_FILES = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))
USUAL_ENDS = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "[EOS]")


class LibraryTokenizer(Tokenizer):
    def __init__(self, name: str, library: dict[str, Any], end_of_text: int) -> None:
        """`library` is a whole tokenizer.json."""
        import tokenizers

        self.name, self.end_of_text, self.library = name, end_of_text, library
        self.rules = {"library": library, "end_of_text": end_of_text}
        added = {token["id"]: token["content"] for token in library["added_tokens"]}
        self._library = tokenizers.Tokenizer.from_str(json.dumps(library))
        self._library.encode_special_tokens = True  # as text, if a text spells one
        own = {word: index for word, index in library["model"]["vocab"].items() if index not in {*added, end_of_text}}
        found = {index: bytes_of(word) for word, index in own.items()}
        found |= {index: word.encode() for index, word in added.items()} | {end_of_text: b""}
        self.token_bytes = [found.get(index, b"") for index in range(max(found) + 1)]
        self.end_of_text_word = next(word for word, index in _ids_of(library).items() if index == end_of_text)

    def encode_array(self, text: str) -> np.ndarray:
        found = self._library.encode_batch_fast([text], add_special_tokens=False)
        return np.asarray(found[0].ids, dtype=TOKEN_DTYPE)


def read_library(path: Path, library: dict[str, Any]) -> Tokenizer:
    """The tokenizer of a tokenizer.json, with what lies beside it."""
    try:
        if library["model"].get("type", "BPE") != "BPE" or "ByteLevel" not in json.dumps(library["pre_tokenizer"]):
            raise DataError(f"{path}: no byte-level BPE, so its tokens do not stand for bytes; use one of GPT-2's kind")
        words = _without_added_space(library["pre_tokenizer"])
        own = {"truncation": None, "padding": None, "post_processor": None, "pre_tokenizer": words}
        library = {"normalizer": None, "added_tokens": [], **library, **own}
        ids = _ids_of(library)
        check_size(str(path), size := max(ids.values()) + 1)
        if len(missing := set(byte_letters().values()) - set(library["model"]["vocab"])):
            raise DataError(f"{path}: has no token for {len(missing)} of the 256 bytes, so it cannot encode every text")
        found: Tokenizer = LibraryTokenizer(f"bpe-{size}", library, _end_of_text(path, ids))
        if _is_gpt2(found, library):
            return gpt2_of(library["model"]["vocab"])
    except PacelineError:
        raise
    except Exception as error:  # the library raises bare Exceptions
        raise DataError(f"{path}: no tokenizer that can be read ({type(error).__name__}: {error})") from None
    return found


def read_vocabulary_files(folder: Path) -> Tokenizer | None:
    """The tokenizer of a vocabulary and its merges, in a folder under their own names; None where they are not."""
    for names in VOCABULARY_FILES:
        vocabulary, merges = (folder / name for name in names)
        if vocabulary.is_file() and merges.is_file():
            return read_library(vocabulary, _library_of(vocabulary, merges))
    return None


def _library_of(vocabulary: Path, merges: Path) -> dict[str, Any]:
    ids = read_json(vocabulary)
    lines = merges.read_text(encoding="utf-8").split("\n")
    pairs = [line for line in lines if line.strip() and not line.startswith("#version")]
    end = next((word for word in USUAL_ENDS if word in ids), END_OF_TEXT)
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "added_tokens": [{"id": ids.get(end, len(ids)), "content": end, **special}],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": ids, "merges": pairs},
    }


def gpt2_of(vocabulary: dict[str, int]) -> TiktokenTokenizer:
    """GPT-2's tokenizer from its vocabulary; the order of ids is that of the merges."""
    tiktoken = tiktoken_module()
    from tiktoken_ext.openai_public import r50k_pat_str

    ranks = {bytes_of(word): rank for word, rank in vocabulary.items() if word != END_OF_TEXT}
    special = {END_OF_TEXT: len(ranks)}
    encoding = tiktoken.Encoding("gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens=special)
    return TiktokenTokenizer("gpt2", encoding)


def tiktoken_module() -> Any:
    missing = PacelineError("tokenizer gpt2: the package tiktoken is missing; pip install tiktoken")
    return optional_module("tiktoken", missing)


def _is_gpt2(found: Tokenizer, library: dict[str, Any]) -> bool:
    words = library["pre_tokenizer"]
    usual = words["type"] == "ByteLevel" and words.get("use_regex", True) and library["normalizer"] is None
    special = all(token["special"] for token in library["added_tokens"])
    return usual and special and fingerprint_of(found.token_bytes, found.end_of_text, None) == GPT2_FINGERPRINT


def _ids_of(library: dict[str, Any]) -> dict[str, int]:
    added = {token["content"]: token["id"] for token in library["added_tokens"]}
    return {**library["model"]["vocab"], **added}


def _without_added_space(part: Any) -> Any:
    """A pre-tokenizer that puts no space before a text: ours is encoded in pieces."""
    if isinstance(part, list):
        return [_without_added_space(one) for one in part]
    if not isinstance(part, dict):
        return part
    found = {name: _without_added_space(value) for name, value in part.items()}
    return {**found, "add_prefix_space": False} if "add_prefix_space" in found else found


def _end_of_text(path: Path, ids: dict[str, int]) -> int:
    for beside in ("tokenizer_config.json", "special_tokens_map.json"):
        file = path.with_name(beside)
        named = read_json(file).get("eos_token") if file.is_file() else None
        word = named.get("content") if isinstance(named, dict) else named
        if word in ids:
            return ids[word]
    if (usual := next((word for word in USUAL_ENDS if word in ids), None)) is None:
        cure = "name it as eos_token in a tokenizer_config.json beside it"
        raise DataError(f"{path}: no token of it is known to end a text; {cure}")
    return ids[usual]
