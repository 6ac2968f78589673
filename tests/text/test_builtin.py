"""The built-in corpus: the same every time, split so that validation text was not seen in training."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.core.errors import ConfigError, DataError, PacelineError
from paceline.core.files import blake2b_of
from paceline.data.shards import open_shard, positions_of
from paceline.settings.data import DataConfig
from paceline.text import tokenizer
from paceline.text.builtin import SHARED_WORDS, builtin_corpus, cluster_documents, extract_documents, split_documents
from paceline.text.dataset import open_dataset
from paceline.text.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def in_own_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(cache))


@pytest.fixture(scope="module")
def documents() -> list[str]:
    return extract_documents()


def runs_of_words(texts: list[str]) -> set[tuple[str, ...]]:
    """Every run of 13 words, the plain way: the twin of the hashed runs."""
    words = [re.findall(r"\w+", text.lower()) for text in texts]
    return {tuple(w[i : i + SHARED_WORDS]) for w in words for i in range(len(w) - SHARED_WORDS + 1)}


def test_no_run_of_13_words_is_on_both_sides(documents: list[str]) -> None:
    split = split_documents(documents)
    assert not runs_of_words(split.train) & runs_of_words(split.val)
    assert sorted(split.train + split.val) == sorted(documents)
    share = sum(map(len, split.val)) / sum(map(len, documents))
    assert 0.045 < share <= 0.05


def test_near_duplicates_are_linked_even_through_a_third() -> None:
    words = [f"word{n}" for n in range(60)]
    texts = [" ".join(words[:30]), "other " * 40, " ".join(words[10:50]), " ".join(words[30:]), "Other " * 40, "a b"]
    assert cluster_documents(texts) == [0, 1, 0, 0, 1, 5]


def test_twelve_words_in_common_do_not_link() -> None:
    common = [f"word{n}" for n in range(13)]
    assert cluster_documents([" ".join(["x", *common[:12], "y"]), " ".join(["p", *common[:12], "q"])]) == [0, 1]
    assert cluster_documents([" ".join(["x", *common, "y"]), " ".join(["p", *common, "q"])]) == [0, 0]


def test_short_texts_are_linked_only_when_equal() -> None:
    assert cluster_documents(["Return self.", "return  SELF", "Return other."]) == [0, 0, 2]


def test_docstrings_are_those_ast_walk_finds(documents: list[str]) -> None:
    """ast.walk visits everything and is the slow twin; here over one module with nested definitions."""
    import argparse
    import inspect

    tree = ast.parse(Path(argparse.__file__).read_text())
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef))
    found = {inspect.cleandoc(text).strip() for node in nodes if (text := ast.get_docstring(node, clean=False))}
    document = next(text for text in documents if text.startswith("Command-line parsing library"))
    assert len(found) > 10
    assert all(text in document for text in found)


def test_the_corpus_is_made_once_and_then_found(cache: Path) -> None:
    folder = builtin_corpus()
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert builtin_corpus() == folder
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert [path.name for path in cache.iterdir()] == [folder.name]  # nothing half-made left behind


def test_a_cache_that_cannot_be_written_is_one_line_with_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr("paceline.text.builtin.extract_documents", lambda: ["some words"])
    with pytest.raises(PacelineError, match=r"file: cannot hold the built-in data .* PACELINE_CACHE_DIR$"):
        builtin_corpus()


@pytest.mark.slow
def test_two_processes_racing_make_equal_corpora(tmp_path: Path) -> None:
    """Both start on an empty cache; the result equals the one made here, so the text is the same in every process."""
    code = "from paceline.text.builtin import builtin_corpus; print(builtin_corpus())"
    env = os.environ | {"PACELINE_CACHE_DIR": str(tmp_path), "PYTHONHASHSEED": "random"}
    racers = [subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE) for _ in range(2)]
    answers = [racer.communicate()[0].decode().strip() for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0]
    assert answers[0] == answers[1]
    assert [path.name for path in tmp_path.iterdir()] == [Path(answers[0]).name]

    def hashes(folder: Path) -> dict[str, str]:
        return {path.name: blake2b_of(path) for path in folder.iterdir()}

    assert hashes(Path(answers[0])) == hashes(builtin_corpus())


def test_the_shards_hold_the_documents(documents: list[str]) -> None:
    folder = builtin_corpus()
    split = split_documents(documents)
    tokenizer = load_tokenizer(folder, "")
    for name, texts in (("builtin_train_000001.bin", split.train), ("builtin_val_000000.bin", split.val)):
        shard = open_shard(folder / name)
        starts = positions_of(shard, tokenizer.end_of_text)
        assert shard.manifest is not None
        assert len(starts) == shard.manifest.documents == len(texts)
        assert tokenizer.decode_bytes(shard.tokens.tolist()) == "".join(texts).encode()


def test_cutting_long_words_does_not_change_a_merge(documents: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The corpus has no word that training would cut, so the rule is not used; used all the same, it does nothing."""
    texts = split_documents(documents).train
    assert not any(map(tokenizer.LONG_RUN.search, texts))
    plain = tokenizer.train_tokenizer("bpe-2048", texts)
    monkeypatch.setattr(tokenizer, "LONG_RUN", re.compile(""))
    assert tokenizer.train_tokenizer("bpe-2048", texts).fingerprint == plain.fingerprint


def test_the_default_config_opens_it() -> None:
    dataset = open_dataset(DataConfig(), 2048)
    assert dataset.tokenizer().vocab_size == 2048
    assert sum(dataset.train.lengths) > 10 * sum(dataset.val.lengths) > 100_000


def test_a_damaged_cache_says_what_to_delete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / builtin_corpus().name
    shutil.copytree(builtin_corpus(), copy)
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path))
    (copy / "builtin_val_000000.bin").write_bytes(b"half")
    with pytest.raises(DataError, match=f"truncated.*delete {copy}"):
        open_dataset(DataConfig(), 2048)


def test_another_end_of_text_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--data.end-of-text 5.*token 0"):
        open_dataset(DataConfig(end_of_text=5), 2048)
