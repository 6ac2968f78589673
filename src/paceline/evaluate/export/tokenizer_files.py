"""Our tokenizers as files that transformers loads: tokenizer.json of the tokenizers library, and its settings.

All kinds are byte-level BPEs there; raw bytes are one without merges. A text's ids are its own, so that
lm-evaluation-harness asks the exported model what it asks ours. `pipeline` puts the `prefix` of config.json before a
prompt, which is end-of-text spelled out, so texts that spell it are read as that token, as by GPT-2's tokenizer.
"""

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

from paceline.text.library_tokenizer import LibraryTokenizer
from paceline.text.tokenizer import END_OF_TEXT, ByteTokenizer, Tokenizer, byte_letters

Pair = tuple[str, str]
LETTERS = byte_letters()


def library_tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    """tokenizer.json: gives the ids of `tokenizer` for every text."""
    import tokenizers

    if isinstance(tokenizer, LibraryTokenizer):
        whole = tokenizers.Tokenizer.from_str(json.dumps(tokenizer.library))
        whole.add_special_tokens([tokenizer.end_of_text_word])
        as_read: dict[str, Any] = json.loads(whole.to_str())
        return as_read
    vocabulary = {_spelled(token): index for index, token in enumerate(tokenizer.token_bytes)}
    vocabulary = {word: index for word, index in vocabulary.items() if index != tokenizer.end_of_text}
    vocabulary[END_OF_TEXT] = tokenizer.end_of_text
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges_of(tokenizer)))
    words = not isinstance(tokenizer, ByteTokenizer)
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    library.decoder = tokenizers.decoders.ByteLevel()
    library.add_special_tokens([END_OF_TEXT])
    found: dict[str, Any] = json.loads(library.to_str())
    return found


def tokenizer_config(sequence_tokens: int, end_of_text: str = END_OF_TEXT) -> dict[str, Any]:
    """tokenizer_config.json. Batches are padded on the left, where generation wants it."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **dict.fromkeys(("bos_token", "eos_token", "pad_token"), end_of_text),
        "padding_side": "left",
        "model_max_length": sequence_tokens,
        "clean_up_tokenization_spaces": False,
    }


def merges_of(tokenizer: Tokenizer) -> list[Pair]:
    """The merges in order of rank, in the letters of byte-level BPE: as a trained BPE keeps them, or read off the order
    of the ids."""
    if tokenizer.rules is None:
        return list(_merges_by_rank(tokenizer.token_bytes))
    return [(left, right) for left, right in tokenizer.rules["merges"]]


def _spelled(token: bytes) -> str:
    return "".join(map(LETTERS.__getitem__, token))


def _merges_by_rank(token_bytes: Sequence[bytes]) -> Iterator[Pair]:
    """A token's last merge joins the two parts that all merges of lower rank leave of its bytes."""
    rank_of = {token: rank for rank, token in enumerate(token_bytes) if token}
    for token, rank in rank_of.items():
        if len(token) > 1:
            left, right = _merged(token, rank_of, below=rank)
            yield _spelled(left), _spelled(right)


def _merged(token: bytes, rank_of: dict[bytes, int], *, below: int) -> list[bytes]:
    """What the merges of a rank under `below` make of the bytes, lowest rank first."""
    parts = [bytes([value]) for value in token]
    while True:
        joined = [rank_of.get(left + right, below) for left, right in itertools.pairwise(parts)]
        if not joined or (lowest := min(joined)) >= below:
            return parts
        at = joined.index(lowest)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
