"""transformers gives our ids for every text, opened by end-of-text if that is asked for, and every text back."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from data.samples import SAMPLE_TEXTS
from paceline.core.files import write_json
from paceline.evaluate.export.tokenizer_files import library_tokenizer, merges_of, tokenizer_config
from paceline.text.tokenizer import Tokenizer
from text.test_tokenizer import TOKENIZERS

ORDINARY_TEXTS = [text for text in SAMPLE_TEXTS if "<|endoftext|>" not in text]


@pytest.fixture(scope="module", params=TOKENIZERS)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, object]:
    """Each kind of tokenizer, and what transformers makes of its files."""
    ours, folder = TOKENIZERS[request.param], tmp_path_factory.mktemp("tokenizer")
    return ours, loaded(ours, folder)


def loaded(tokenizer: Tokenizer, folder: Path, **settings: bool) -> PreTrainedTokenizerFast:
    write_json(folder / "tokenizer.json", library_tokenizer(tokenizer))
    write_json(folder / "tokenizer_config.json", tokenizer_config(1024))
    return PreTrainedTokenizerFast.from_pretrained(folder, **settings)


def check(both: tuple[Tokenizer, PreTrainedTokenizerFast], text: str) -> None:
    ours, theirs = both
    ids = theirs(text)["input_ids"]
    assert ids == ours.encode(text)
    assert theirs.decode(ids, skip_special_tokens=True) == text


def test_end_of_text_spelled_out_is_that_token_so_that_a_pipeline_can_open_a_text(
    both: tuple[Tokenizer, PreTrainedTokenizerFast],
) -> None:
    ours, theirs = both
    assert theirs("<|endoftext|>the theory")["input_ids"] == [ours.end_of_text, *ours.encode("the theory")]
    assert theirs("<|endoftext|>", split_special_tokens=True)["input_ids"] == ours.encode("<|endoftext|>")


@pytest.mark.parametrize("text", [*ORDINARY_TEXTS, "", " it's  the\n\nend "])
def test_ids_are_ours_and_the_text_comes_back(both: tuple[Tokenizer, PreTrainedTokenizerFast], text: str) -> None:
    check(both, text)


@given(text=st.text(max_size=60))
@settings(max_examples=50)
def test_any_text_is_encoded_alike(both: tuple[Tokenizer, PreTrainedTokenizerFast], text: str) -> None:
    check(both, text)


def test_batches_are_padded_on_the_left_by_end_of_text(both: tuple[Tokenizer, PreTrainedTokenizerFast]) -> None:
    ours, theirs = both
    batch = theirs(["the", "the theory of the thing"], padding=True)
    short = ours.encode("the")
    filled = len(batch["input_ids"][0]) - len(short)
    assert batch["input_ids"][0] == [ours.end_of_text] * filled + short
    assert batch["attention_mask"][0] == [0] * filled + [1] * len(short)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_tokenizer_opens_texts_if_asked(name: str, tmp_path: Path) -> None:
    ours, theirs = TOKENIZERS[name], loaded(TOKENIZERS[name], tmp_path, add_bos_token=True)
    for text in ("", "the theory"):
        ids = theirs(text)["input_ids"]
        assert ids == [ours.end_of_text, *ours.encode(text)]
        assert theirs.decode(ids, skip_special_tokens=True) == text


def test_merges_are_found_again_in_the_order_of_the_ids() -> None:
    assert merges_of(TOKENIZERS["tiktoken"]) == merges_of(TOKENIZERS["bpe-280"])
    assert merges_of(TOKENIZERS["bytes"]) == []
