"""Whatever the text, encoding and decoding give it back, and end-of-text is never spelled by accident."""

import json
import os
import random
from pathlib import Path

import numpy as np
import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

from data.samples import SAMPLE_TEXTS
from paceline.core.errors import ConfigError, DataError, PacelineError
from paceline.text.tokenizer import (
    FILE_NAME,
    LONG_RUN,
    LONGEST_WORD,
    ByteTokenizer,
    TiktokenTokenizer,
    Tokenizer,
    byte_letters,
    gpt2_tokenizer,
    load_tokenizer,
    train_tokenizer,
)

TRAINING_TEXTS = ["the theory of the thing, they say, is there: " * 20, "it's the end <|endoftext|> of the text\n" * 20]
GPT2_WORDS = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""


def in_tiktoken(trained: Tokenizer) -> TiktokenTokenizer:
    """The trained BPE's merges in tiktoken's form: GPT-2's arrangement (end-of-text last) without its download."""
    ranks = {value: rank for rank, value in enumerate(trained.token_bytes[1:])}
    special = {"<|endoftext|>": len(ranks)}
    return TiktokenTokenizer(
        "small", tiktoken.Encoding("small", pat_str=GPT2_WORDS, mergeable_ranks=ranks, special_tokens=special)
    )


TOKENIZERS: dict[str, Tokenizer] = {
    "bytes": ByteTokenizer(),
    "bpe-280": train_tokenizer("bpe-280", TRAINING_TEXTS),
    "tiktoken": in_tiktoken(train_tokenizer("bpe-280", TRAINING_TEXTS)),
}
each_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS.keys())


@each_tokenizer
@given(text=st.text(max_size=80))
def test_any_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode_bytes(ids) == text.encode()
    assert tokenizer.end_of_text not in ids


@each_tokenizer
def test_the_ways_to_encode_agree(tokenizer: Tokenizer) -> None:
    singly = [tokenizer.encode(text) for text in SAMPLE_TEXTS]
    assert [tokenizer.encode_array(text).tolist() for text in SAMPLE_TEXTS] == singly
    assert tokenizer.encode_array("x").dtype == np.uint16
    assert [tokenizer.decode(ids) for ids in singly] == SAMPLE_TEXTS


@each_tokenizer
def test_byte_lengths_add_up_to_the_text(tokenizer: Tokenizer) -> None:
    lengths = tokenizer.token_byte_lengths()
    assert lengths.shape == (tokenizer.vocab_size,)
    assert lengths[tokenizer.end_of_text] == 0
    for text in SAMPLE_TEXTS:
        assert lengths[[tokenizer.end_of_text, *tokenizer.encode(text)]].sum() == len(text.encode())


@each_tokenizer
def test_end_of_text_is_shown_but_has_no_bytes(tokenizer: Tokenizer) -> None:
    ids = [tokenizer.end_of_text, *tokenizer.encode("a"), tokenizer.end_of_text]
    assert tokenizer.decode(ids) == "<|endoftext|>a<|endoftext|>"
    assert tokenizer.decode_bytes(ids) == b"a"


def test_the_ids_of_end_of_text_are_the_documented_ones() -> None:
    assert (ByteTokenizer().end_of_text, ByteTokenizer().vocab_size) == (256, 257)
    trained = TOKENIZERS["bpe-280"]
    assert (trained.end_of_text, trained.vocab_size) == (0, 280)


def test_merges_are_used() -> None:
    assert len(TOKENIZERS["bpe-280"].encode(" the the the")) == 3


def test_two_libraries_give_the_same_tokens_for_the_same_merges() -> None:
    """tiktoken's ids lie one below, because its end-of-text stands last."""
    for text in SAMPLE_TEXTS:
        ours = TOKENIZERS["bpe-280"].encode(text)
        assert [i - 1 for i in ours] == TOKENIZERS["tiktoken"].encode(text)


def test_training_is_deterministic_and_follows_the_text() -> None:
    again = train_tokenizer("bpe-280", TRAINING_TEXTS)
    other = train_tokenizer("bpe-280", TRAINING_TEXTS[:1])
    assert again.fingerprint == TOKENIZERS["bpe-280"].fingerprint
    assert other.fingerprint != again.fingerprint


def test_a_text_without_spaces_is_trained_on_in_parts() -> None:
    """As one word it would take time by the square of its length."""
    text = "".join(random.Random(0).choices("ACGT", k=30_000))
    parts = [text[start : start + LONGEST_WORD] for start in range(0, len(text), LONGEST_WORD)]
    found = train_tokenizer("bpe-512", [text])
    assert found.fingerprint == train_tokenizer("bpe-512", parts).fingerprint
    assert found.decode(found.encode(text)) == text


@pytest.mark.parametrize("word", ["A" * 1001, " " + "🙂" * 250, "日" * 334, "7" * 1001, "-" * 1001, "\n" * 1001])
def test_every_word_that_is_too_long_is_noticed(word: str) -> None:
    assert LONG_RUN.search(f"some {word} more")


def test_fingerprints_differ_between_tokenizers() -> None:
    assert len({tokenizer.fingerprint for tokenizer in TOKENIZERS.values()}) == 3


def test_a_small_text_gives_a_smaller_vocabulary() -> None:
    assert 257 <= train_tokenizer("bpe-5000", ["a b c"]).vocab_size < 300


@pytest.mark.parametrize("name", ["bytes", "bpe-280"])
def test_a_saved_tokenizer_loads_equal(tmp_path: Path, name: str) -> None:
    TOKENIZERS[name].save(tmp_path)
    loaded = load_tokenizer(tmp_path, "gpt2")  # the folder's own wins over the name
    assert (loaded.name, loaded.fingerprint) == (name, TOKENIZERS[name].fingerprint)
    assert [loaded.encode(text) for text in SAMPLE_TEXTS] == [TOKENIZERS[name].encode(text) for text in SAMPLE_TEXTS]


@pytest.mark.parametrize("damage", ["cut", "merge", "token", "not an object"])
def test_a_damaged_tokenizer_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    TOKENIZERS["bpe-280"].save(tmp_path)
    path = tmp_path / FILE_NAME
    saved = json.loads(path.read_text())
    if damage == "merge":
        saved["rules"]["merges"].pop()
    if damage == "token":
        saved["rules"]["vocabulary"][270] += "x"
    content = json.dumps([] if damage == "not an object" else saved)
    path.write_text(content[:-9] if damage == "cut" else content)
    with pytest.raises(PacelineError, match=FILE_NAME) as caught:
        load_tokenizer(tmp_path, "bytes")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("name", ["gpt3", "bpe-", "bpe-12", "bpe-65536", "bpe-x"])
def test_unknown_and_oversized_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        load_tokenizer(None, name)


def test_a_trained_tokenizer_needs_its_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="data prepare"):
        load_tokenizer(tmp_path, "bpe-280")


def test_a_vocabulary_past_uint16_is_refused() -> None:
    ranks = {n.to_bytes(3, "big"): n for n in range(65_535)}
    encoding = tiktoken.Encoding("big", pat_str=r"\S", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 65_535})
    with pytest.raises(ConfigError, match="65,536 tokens"):
        TiktokenTokenizer("big", encoding)


def test_every_byte_has_a_letter_of_its_own() -> None:
    letters = byte_letters()
    assert sorted(letters) == list(range(256))
    assert len(set(letters.values())) == 256


def test_gpt2_without_network_or_cache_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("tiktoken.registry.ENCODINGS", {})

    def no_network(*_: object) -> bytes:
        raise OSError("no route to host")

    monkeypatch.setattr("tiktoken.load.read_file", no_network)
    with pytest.raises(PacelineError, match="TIKTOKEN_CACHE_DIR"):
        gpt2_tokenizer()


def test_gpt2_is_gpt2() -> None:
    cached = Path(os.environ.get("TIKTOKEN_CACHE_DIR", "/nowhere")) / "6d1cbeee0f20b3d9449abfede4726ed8212e3aee"
    if not cached.exists():
        pytest.skip("GPT-2's vocabulary is not in TIKTOKEN_CACHE_DIR and tests do not download")
    tokenizer = gpt2_tokenizer()
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (50_257, 50_256)
    assert tokenizer.encode("Hello world") == [15496, 995]
    assert [tokenizer.decode(tokenizer.encode(text)) for text in SAMPLE_TEXTS] == SAMPLE_TEXTS


def test_a_fingerprint_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    TOKENIZERS["bpe-280"].save(tmp_path)
    saved = json.loads((tmp_path / FILE_NAME).read_text())
    saved["fingerprint"] = "0" * 32
    (tmp_path / FILE_NAME).write_text(json.dumps(saved))
    with pytest.raises(DataError, match="not the one that was saved"):
        load_tokenizer(tmp_path, "bpe-280")
