"""A config has the tokenizer, end of text and vocabulary of its data, unless the user says otherwise; what contradicts
the data is refused with the value to use. Every command gets there the same way."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.commands.ablate import _parsed, _plan
from paceline.commands.plan import PlanArgs
from paceline.commands.train import base_config, parse_arguments, parse_on_preset
from paceline.core.errors import ConfigError, DataError
from paceline.core.schema import changes, flatten, to_dict
from paceline.recipes.presets import preset
from paceline.settings.data import NAMED_TOGETHER
from paceline.settings.run import RunConfig
from paceline.text.config import PrepareConfig
from paceline.text.identity import check_identity
from paceline.text.prepare import prepare
from text.foreign import TEXTS, foreign_shards, saved_by_a_library

GPT2 = ("gpt2", 50_256, 50_257)
BYTES = ("bytes", 256, 257)


def config_of(*words: object) -> RunConfig:
    given = [str(word) for word in words]
    return parse_arguments(given, base_config(given)).config


def named(config: RunConfig) -> tuple[Any, ...]:
    values = dict(flatten(config))
    return tuple(values[name] for name in NAMED_TOGETHER)


def prepared(folder: Path, tokenizer: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "a.txt").write_text("\n".join(TEXTS))
    config = PrepareConfig(
        inputs=(str(folder / "a.txt"),), out=str(folder / "data"), tokenizer=tokenizer, val_share=0.5, workers=1
    )
    prepare(config)
    return folder / "data"


@pytest.fixture(scope="module")
def of_bytes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("bytes") / "it", "bytes")


@pytest.fixture(scope="module")
def of_gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return foreign_shards(tmp_path_factory.mktemp("gpt2") / "en")


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe-270", "bpe-4096", "of a library"])
@pytest.mark.parametrize("name", ["demo", "r18-softcap"])
def test_a_preset_follows_whatever_was_prepared(tmp_path: Path, tokenizer: str, name: str) -> None:
    made_by = str(saved_by_a_library(tmp_path / "tok")) if tokenizer == "of a library" else tokenizer
    folder = prepared(tmp_path / "it", made_by)
    entry = json.loads((folder / "dataset.json").read_text())["tokenizer"]
    expected = (entry["name"], entry["end_of_text"], entry["vocab_size"])
    assert named(config_of(name, "--data.dir", folder)) == expected
    (folder / "tokenizer.json").unlink()
    assert named(config_of(name, "--data.dir", folder)) == expected


def test_gpt2_shards_of_other_programs_are_known_by_their_ids(of_gpt2: Path) -> None:
    assert named(config_of("demo", "--data.dir", of_gpt2)) == GPT2
    assert named(config_of("r18-softcap", "--scale", "1/16", "--data.dir", of_gpt2)) == GPT2


def test_a_preset_of_the_datas_tokenizer_stays_as_it_is(of_gpt2: Path) -> None:
    for name in ("r18-softcap", "r14-value-embed", "r01-baseline"):
        found = changes(preset(name), config_of(name, "--data.dir", of_gpt2))
        assert [change.field for change in found] == ["data.dir"]


def test_a_padded_vocabulary_stays_on_data_of_its_tokenizer(tmp_path: Path, of_gpt2: Path, of_bytes: Path) -> None:
    padded = replace(preset("r18-softcap"), model=replace(preset("r18-softcap").model, vocab_size=50_304))
    (tmp_path / "config.json").write_text(json.dumps(to_dict(padded)))
    on = ("--config", tmp_path / "config.json", "--data.dir")
    assert named(config_of(*on, of_gpt2)) == ("gpt2", 50_256, 50_304)
    assert named(config_of(*on, of_bytes)) == BYTES


def test_the_built_in_text_is_made_by_the_tokenizer_that_is_named() -> None:
    assert named(config_of("demo")) == ("bpe-2048", 0, 2048)
    assert named(config_of("demo", "--data.tokenizer", "bytes")) == BYTES
    assert named(config_of("demo", "--data.tokenizer", "bpe-600")) == ("bpe-600", 0, 600)


@pytest.mark.parametrize("as_file", [False, True])
def test_what_the_user_states_stays(tmp_path: Path, of_bytes: Path, of_gpt2: Path, as_file: bool) -> None:
    def stating(folder: Path, vocab_size: int) -> RunConfig:
        if not as_file:
            return config_of("demo", "--data.dir", folder, "--model.vocab-size", vocab_size)
        (tmp_path / "own.toml").write_text(f'[data]\ndir = "{folder}"\n[model]\nvocab-size = {vocab_size}\n')
        return config_of("--config", tmp_path / "own.toml")

    assert named(stating(of_bytes, 2048)) == ("bytes", 256, 2048)
    assert named(stating(of_gpt2, 50_304)) == ("gpt2", 50_256, 50_304)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--data.end-of-text", 0), r"--data.end-of-text 0.*token 256; use that"),
        (("--model.vocab-size", 512, "--data.end_of_text=3"), r"--data.end-of-text 3.*token 256; use that"),
        (("--data.tokenizer", "gpt2"), r"--data.tokenizer gpt2.*tokens of bytes; use that"),
        (("--model.vocab-size", 200), r"--model.vocab-size 200; use 257 or more"),
        (("--model.vocab-size", 200, "--data.end-of-text", 1), r"--data.end-of-text 1.*token 256"),
    ],
)
def test_a_contradiction_names_the_value_to_use(of_bytes: Path, words: tuple[object, ...], said: str) -> None:
    for name in ("demo", "r18-softcap"):
        with pytest.raises(ConfigError, match=said):
            config_of(name, "--data.dir", of_bytes, *words)


def test_too_small_a_vocabulary_names_the_value_to_use(tmp_path: Path, of_gpt2: Path) -> None:
    folder = prepared(tmp_path / "it", "bpe-280")
    with pytest.raises(ConfigError, match=r"--model.vocab-size 100: bpe-280 has (\d+) tokens; use \1 or more"):
        config_of("demo", "--data.dir", folder, "--model.vocab-size", 100)
    for words, said in (
        (("--data.end-of-text", "1"), r"--data.end-of-text 1.*50256; use that"),
        (("--data.tokenizer", "bytes"), r"--data.tokenizer bytes.*tokens of gpt2"),
    ):
        with pytest.raises(ConfigError, match=said):
            config_of("demo", "--data.dir", of_gpt2, *words)


def test_shards_of_which_nothing_is_known_need_a_word_of_the_user(tmp_path: Path) -> None:
    folder = foreign_shards(tmp_path / "en", end=220, largest=250)
    with pytest.raises(ConfigError, match=r"which token opens a document.*--data.end-of-text"):
        config_of("demo", "--data.dir", folder)
    assert named(config_of("demo", "--data.dir", folder, "--data.end-of-text", 220)) == ("bpe-2048", 220, 2048)
    assert named(config_of("demo", "--data.dir", folder, "--data.tokenizer", "bytes")) == BYTES
    tok = saved_by_a_library(tmp_path / "tok")
    stated = config_of("demo", "--data.dir", folder, "--data.tokenizer", tok)
    assert stated.data.tokenizer == str(tok)
    assert stated.model.vocab_size == stated.data.end_of_text + 3 < 300


@pytest.mark.parametrize("end", [0, 50_256])
def test_shards_that_gpt2s_end_of_text_does_not_open_need_a_word_of_the_user(tmp_path: Path, end: int) -> None:
    """50,256 may be any token in them. A preset of GPT-2's tokens takes them as it did: a series has such shards."""
    folder = foreign_shards(tmp_path / "en", end=end, first=0 if end == 0 else 17)
    with pytest.raises(ConfigError, match=r"which token opens a document.*--data.end-of-text"):
        config_of("demo", "--data.dir", folder)
    assert named(config_of("demo", "--data.dir", folder, "--data.end-of-text", 50_256)) == GPT2
    assert named(paceline.configure("demo", {"data.dir": folder, "data.end_of_text": 50_256})) == GPT2
    assert named(config_of("r18-softcap", "--data.dir", folder)) == GPT2


def test_ids_above_gpt2s_are_found_wherever_they_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.text.identity.SCAN_TOKENS", 1000)
    with pytest.raises(ConfigError, match="which token opens a document"):
        config_of("demo", "--data.dir", foreign_shards(tmp_path / "en", largest=50_300))


def test_ids_above_gpt2s_are_not_taken_for_it(tmp_path: Path) -> None:
    folder = foreign_shards(tmp_path / "en", largest=60_000)
    for name in ("demo", "r18-softcap"):
        with pytest.raises(ConfigError, match="which token opens a document"):
            config_of(name, "--data.dir", folder)


def test_data_that_are_not_here_change_nothing(tmp_path: Path) -> None:
    """A plan, and a job for another machine, can be made without them."""
    assert named(config_of("demo", "--data.dir", tmp_path / "none")) == ("bpe-2048", 0, 2048)
    with pytest.raises(DataError, match="not a folder"):
        paceline.pretrain(paceline.configure("demo", {"data.dir": tmp_path / "none"}), out=tmp_path / "run")


def test_every_way_to_a_run_gives_the_same(tmp_path: Path, of_bytes: Path) -> None:
    words = ["demo", "--data.dir", str(of_bytes)]
    (tmp_path / "own.toml").write_text(f'preset = "demo"\n[data]\ndir = "{of_bytes}"\n')
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.json").write_text(json.dumps(to_dict(preset("demo"))))
    plan = parse_on_preset(PlanArgs, words, base_config(words), verb="plan", description="").config
    like = config_of("--like", tmp_path / "run", "--data.dir", of_bytes)
    python = paceline.configure("demo", {"data.dir": of_bytes})
    for config in (plan, like, python, config_of("--config", tmp_path / "own.toml")):
        assert config == config_of(*words)


def test_runs_of_an_ablation_have_the_configs_that_were_planned(of_bytes: Path) -> None:
    for more in ([], ["--model.vocab-size", "2048"]):  # also where a stated value is the preset's
        words = ["demo", "--without", "muon", "--data.dir", str(of_bytes), "--seeds", "1", *more]
        plan = _plan(words, _parsed(words))
        assert {named(run.config)[:2] for run in plan.runs} == {BYTES[:2]}
        for run in plan.runs:
            assert config_of(*run.words) == run.config


def test_a_resumed_run_keeps_what_it_began_with(tmp_path: Path, of_gpt2: Path) -> None:
    """Of an older version it may have another end of text; --like begins anew with the right one."""
    began = replace(preset("demo"), data=replace(preset("demo").data, dir=str(of_gpt2)))
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.json").write_text(json.dumps(to_dict(began)))
    assert named(config_of("--resume", tmp_path / "run")) == named(began)
    assert named(config_of("--like", tmp_path / "run")) == GPT2


def test_python_states_settings_and_is_told_of_contradictions(of_bytes: Path) -> None:
    config = paceline.configure("demo", {"data.dir": of_bytes, "model.vocab_size": 2048})
    assert named(config) == ("bytes", 256, 2048)
    with pytest.raises(ConfigError, match="use that"):
        paceline.configure("demo", {"data.dir": of_bytes, "data.end_of_text": 0})
    with pytest.raises(ConfigError, match="tokens of bytes"):
        paceline.pretrain(replace(preset("demo"), data=replace(preset("demo").data, dir=str(of_bytes))))
    check_identity(config)


def test_what_changes_is_said_once_and_only_what_was_not_stated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("demo", "--data.dir", prepared(tmp_path / "it", "bytes"), "--model.vocab-size", 300)
    assert config_of(*words) == config_of(*words)
    said = capsys.readouterr().err
    assert said.count("holds tokens of bytes") == 1
    assert "--data.end-of-text 256 instead of 0" in said
    assert "vocab-size" not in said


def test_config_and_tokenizer_of_a_run_are_the_datas(tmp_path: Path, of_bytes: Path) -> None:
    small = {"steps": 2, "batch.tokens": 256, "evaluate.tokens": 256, "model.width": 48, "model.head_dim": 16}
    run = paceline.pretrain(paceline.configure("demo", {"data.dir": of_bytes, **small}), out=tmp_path / "run")
    saved = json.loads((tmp_path / "run/config.json").read_text())
    assert (saved["data"]["tokenizer"], saved["data"]["end_of_text"], saved["model"]["vocab_size"]) == BYTES
    assert run.card.val_bpb is not None
    assert run.loaded.tokenizer.name == "bytes"
    assert run.generate("a", tokens=3).startswith("a")
