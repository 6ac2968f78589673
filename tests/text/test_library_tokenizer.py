"""A tokenizer that another program wrote is read like one of ours, and gives every text back."""

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data.samples import SAMPLE_TEXTS
from paceline.core.errors import ConfigError, PacelineError
from paceline.evaluate.export.tokenizer_files import library_tokenizer
from paceline.text import library_tokenizer as library
from paceline.text.config import PrepareConfig
from paceline.text.prepare import prepare
from paceline.text.stats import stats
from paceline.text.tokenizer import Tokenizer, carried_identity, fingerprint_of, gpt2_tokenizer, load_tokenizer
from paceline.text.verify import verify
from text.foreign import TEXTS, saved_by_a_library, two_files


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(saved_by_a_library(tmp_path_factory.mktemp("hf") / "tok"), "")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.one_of(st.text(max_size=80), st.lists(st.sampled_from(["</s>", "<|im_start|>", "\t\t", " a"])).map("".join))
)
def test_any_text_comes_back_and_spells_no_special_token(read: Tokenizer, text: str) -> None:
    ids = read.encode(text)
    assert read.decode_bytes(ids) == text.encode()
    assert not {read.end_of_text, read.end_of_text + 1} & set(ids)


def test_ids_are_those_of_the_library(tmp_path: Path, read: Tokenizer) -> None:
    theirs = tokenizers.Tokenizer.from_file(str(saved_by_a_library(tmp_path / "tok") / "tokenizer.json"))
    for text in [*SAMPLE_TEXTS, "a\t\tb"]:
        assert read.encode(text) == theirs.encode(text, add_special_tokens=False).ids
    size = theirs.get_vocab_size()
    assert (read.vocab_size, read.end_of_text, read.name) == (size, size - 3, f"bpe-{size}")


def test_no_space_is_put_before_a_text(tmp_path: Path, read: Tokenizer) -> None:
    spacing = load_tokenizer(saved_by_a_library(tmp_path / "tok", space=True), "")
    assert spacing.encode("theory") == read.encode("theory")


@pytest.mark.parametrize("how", ["folder", "file", "two files", "two files by their first names"])
def test_a_tokenizer_is_named_by_its_folder_or_file(tmp_path: Path, how: str) -> None:
    where = tmp_path / "tok"
    if how.startswith("two"):
        two_files(where, names=("encoder.json", "vocab.bpe") if "first" in how else ("vocab.json", "merges.txt"))
    else:
        where = saved_by_a_library(where) / ("tokenizer.json" if how == "file" else "")
    found = load_tokenizer(None, str(where))
    assert found.decode(found.encode(TEXTS[0])) == TEXTS[0]
    assert len(found.encode(" the the the")) == 3
    with pytest.raises(ConfigError, match=r"elsewhere.*does not exist"):
        load_tokenizer(None, str(tmp_path / "elsewhere"))


def test_data_are_prepared_with_it_and_carry_it(tmp_path: Path, read: Tokenizer) -> None:
    (tmp_path / "a.txt").write_text("\n".join(TEXTS))
    tok = str(saved_by_a_library(tmp_path / "tok"))
    manifest = prepare(
        PrepareConfig(inputs=(str(tmp_path / "a.txt"),), out=str(tmp_path / "d"), tokenizer=tok, val_share=0.5)
    )
    carried = carried_identity(tmp_path / "d")
    assert carried is not None
    assert (carried.fingerprint, carried.vocab_size, carried.end_of_text) == (
        read.fingerprint,
        read.vocab_size,
        read.end_of_text,
    )
    assert manifest.tokenizer.fingerprint == load_tokenizer(tmp_path / "d", "").fingerprint == read.fingerprint
    assert verify(tmp_path / "d").ok
    assert stats(tmp_path / "d").total.documents == 2


def test_an_export_has_the_tokenizer_as_it_was(read: Tokenizer) -> None:
    theirs = tokenizers.Tokenizer.from_str(json.dumps(library_tokenizer(read)))
    assert read.end_of_text_word == "</s>"
    assert theirs.encode("</s>the theory").ids == [read.end_of_text, *read.encode("the theory")]
    assert theirs.decode(read.encode("a\t\tb 日")) == "a\t\tb 日"


@pytest.mark.parametrize("names", library.VOCABULARY_FILES)
def test_gpt2s_own_files_are_gpt2_wherever_they_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, str]
) -> None:
    folder = two_files(tmp_path / "plain", names=names)
    found = load_tokenizer(folder, "")
    assert found.name == "bpe-280"
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(folder))
    with pytest.raises(PacelineError, match="not GPT-2's"):
        gpt2_tokenizer()
    table = fingerprint_of(found.token_bytes, found.end_of_text, None)
    monkeypatch.setattr(library, "GPT2_FINGERPRINT", table)  # as if these were GPT-2's
    for gpt2 in (load_tokenizer(folder, ""), gpt2_tokenizer()):
        assert (gpt2.name, gpt2.fingerprint) == ("gpt2", table)
        assert [gpt2.encode(text) for text in SAMPLE_TEXTS] == [found.encode(text) for text in SAMPLE_TEXTS]


def test_a_saved_gpt2_needs_neither_network_nor_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = load_tokenizer(two_files(tmp_path / "plain"), "")
    monkeypatch.setattr(library, "GPT2_FINGERPRINT", fingerprint_of(found.token_bytes, found.end_of_text, None))
    (tmp_path / "run").mkdir()
    load_tokenizer(tmp_path / "plain", "").save(tmp_path / "run")
    monkeypatch.setattr("tiktoken.get_encoding", lambda name: pytest.fail(f"{name} was asked for"))
    again = load_tokenizer(tmp_path / "run", "gpt2")
    assert (again.name, again.encode(TEXTS[0])) == ("gpt2", found.encode(TEXTS[0]))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": {"type": "WordPiece", "vocab": {}}}, "no byte-level BPE"),
        ({"pre_tokenizer": {"type": "Metaspace"}}, "no byte-level BPE"),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}, "255 of the 256 bytes"),
        ({"model": {"type": "BPE", "vocab": {"日": 0}}}, "tokenizer.json"),
        ({"pre_tokenizer": None}, "no byte-level BPE"),
        ({"added_tokens": 3}, "no tokenizer that can be read"),
        ({"added_tokens": []}, "known to end a text"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(tmp_path: Path, change: dict[str, object], said: str) -> None:
    path = saved_by_a_library(tmp_path / "tok") / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(PacelineError, match=said) as caught:
        load_tokenizer(path, "")
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
