"""`--init-from`: weights of a run or an export, and nothing else of it; `--resume --steps`: a run with more steps."""

import dataclasses
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.analysis.groups import experiment_key, why_left_out
from paceline.analysis.runs import read_run
from paceline.checkpoint import store
from paceline.checkpoint.run_folder import RunFolder
from paceline.cli import main
from paceline.evaluate.load import read_saved
from paceline.lab.compare.board import board
from paceline.metrics.card import RunCard, read_card
from paceline.metrics.metrics_file import read_metrics
from paceline.recipes.scaling import with_steps
from paceline.settings.run import read_config
from paceline.settings.schedule import schedule
from parallel.launch import torchrun
from train.killing import flags
from train.tiny import losses

STEPS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`old` is finished, and exported in both forms."""
    folder = tmp_path_factory.mktemp("warm")
    assert main(["train", "demo", "--out", str(folder / "old"), "--no-finish", *flags(folder, STEPS)]) == 0
    for to in ("hf", "safetensors"):
        assert main(["export", str(folder / "old"), "--to", to, "--out", str(folder / to)]) == 0
    return folder


def words(folder: Path, source: Path, out: Path, *more: str) -> list[str]:
    """A run of two steps that begins with these weights, and keeps a checkpoint of its start."""
    given = [*flags(folder, STEPS), "--steps", "2", "--seed", "7", "--checkpoint.keep", "9", *more]
    return ["train", "demo", "--init-from", str(source), "--out", str(out), "--no-finish", *given]


def start_of(run: Path) -> dict[str, Tensor]:
    return dict(store.load(RunFolder(run).checkpoint(0)).model)


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(argv) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


# ---- weights of another run


def test_a_run_and_its_exports_are_the_same_weights_with_one_hash(folder: Path, tmp_path: Path) -> None:
    old, cards = dict(read_saved(str(folder / "old")).checkpoint.model), list[RunCard]()
    for source, step in (("old", STEPS), ("hf", None), ("safetensors", None)):
        assert main(words(folder, folder / source, tmp_path / source)) == 0
        assert same(start_of(tmp_path / source), old)
        (first, *_), evaluations = read_metrics(tmp_path / source)
        assert (first.step, first.tokens, first.lr_scale) == (1, 512, 1.0)
        assert evaluations[0].val_loss == read_card(folder / "old").val_loss
        cards.append(read_card(tmp_path / source))
        assert cards[-1].init_from is not None
        assert (cards[-1].init_from.name, cards[-1].init_from.step) == (source, step)
        assert any("begins with the weights of" in note for note in cards[-1].notes)
    assert len({card.init_from.fingerprint for card in cards if card.init_from}) == 1


def test_a_run_that_averages_gives_the_weights_that_it_is_evaluated_with(folder: Path, tmp_path: Path) -> None:
    averaged = ["--optim.average.tau-steps", "3", "--optim.average.start-share", "0"]
    made = ["train", "demo", "--out", str(tmp_path / "a"), "--no-finish", *flags(folder, STEPS), *averaged]
    assert main(made) == 0
    assert main(words(folder, tmp_path / "a", tmp_path / "b")) == 0
    raw = dict(store.load(RunFolder(tmp_path / "a").checkpoint(STEPS)).model)
    assert not same(start_of(tmp_path / "b"), raw)
    assert same(start_of(tmp_path / "b"), dict(read_saved(str(tmp_path / "a")).checkpoint.model))


def test_a_missing_tensor_another_shape_and_one_too_many_are_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(words(folder, folder / "old", tmp_path / "x", "--model.activation", "swiglu"), capsys)
    assert "lacks blocks.0.mlp.gate (2 such tensors)" in said
    said = refused(words(folder, folder / "old", tmp_path / "x", "--model.no-x0-mix"), capsys)
    assert "has blocks.0.x0_mix (2 such tensors), for which this model has no place" in said
    said = refused(words(folder, folder / "old", tmp_path / "x", "--model.mlp-ratio", "2"), capsys)
    assert "blocks.0.mlp.up is (64, 16) there and (32, 16) here" in said
    cut = shutil.copytree(folder / "hf", tmp_path / "hf")
    tensors = load_file(cut / "model.safetensors")
    del tensors["embed_tokens.weight"]
    save_file(tensors, cut / "model.safetensors")
    assert "has no embed_tokens.weight" in refused(words(folder, cut, tmp_path / "x"), capsys)
    (cut / "model.safetensors").write_bytes(b"no tensors")
    assert "not a safetensors file" in refused(words(folder, cut, tmp_path / "x"), capsys)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("source", ["old", "hf", "safetensors"])
def test_weights_of_another_tokenizer_are_refused(
    source: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other, path = shutil.copytree(folder / source, tmp_path / "other"), tmp_path / "other" / "tokenizer.json"
    if source == "safetensors":
        path = path.with_name("architecture.json")
        path.write_text(json.dumps({**json.loads(path.read_text()), "tokenizer_fingerprint": "0" * 32}))
    elif source == "old":
        path.write_text(json.dumps({**json.loads(path.read_text()), "fingerprint": "0" * 32, "name": "bpe-257"}))
    else:
        saved = json.loads(path.read_text())
        vocabulary = saved["model"]["vocab"]
        first, second = list(vocabulary)[:2]
        vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
        path.write_text(json.dumps(saved))
    assert "trained with another tokenizer" in refused(words(folder, other, tmp_path / "x"), capsys)


def test_settings_that_no_shape_shows_are_noted(folder: Path, tmp_path: Path) -> None:
    assert main(words(folder, folder / "safetensors", tmp_path / "x", "--model.softcap", "None")) == 0
    assert "weights of safetensors, whose model.softcap was 15.0, not None" in read_card(tmp_path / "x").notes


def test_such_a_run_resumes_without_the_other_and_begins_anew_with_it_only(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    source = shutil.copytree(folder / "hf", tmp_path / "source")
    assert main(words(folder, source, whole)) == 0
    assert main(words(folder, source, cut, "--train.stop-after", "1")) == 0
    resume = ["train", "--resume", str(cut), "--no-finish"]
    assert "cut has begun" in refused([*resume, "--init-from", str(source)], capsys)
    shutil.rmtree(source)
    assert main([*resume, "--train.stop-after", "None"]) == 0
    assert losses(cut) == losses(whole)
    assert read_card(cut).init_from == read_card(whole).init_from
    assert "--restart: the run began with the weights of source" in refused([*resume, "--restart"], capsys)
    assert main([*resume, "--restart", "--init-from", str(folder / "hf")]) == 0
    assert losses(cut) == losses(whole)
    for checkpoint in RunFolder(whole).checkpoints():  # as if it was killed before the first
        shutil.rmtree(checkpoint)
    state = json.loads((cut / "set_aside_1" / "checkpoints" / "step_000000" / "state.json").read_text())
    RunFolder(whole).beginning.write_text(json.dumps(state))
    (whole / "card.json").unlink()
    (whole / "metrics.jsonl").unlink()
    again = ["train", "--resume", str(whole), "--no-finish"]
    assert "it begins with the weights of source" in refused(again, capsys)
    assert main([*again, "--init-from", str(folder / "safetensors")]) == 0
    assert losses(whole) == losses(cut)


@pytest.mark.parametrize(
    "sharding",
    [
        "--parallel.fsdp",
        *(pytest.param(flag, marks=pytest.mark.slow) for flag in ("--parallel.zero1", "--parallel.no-zero1")),
    ],
)
def test_two_ranks_begin_with_the_bits_of_one(sharding: str, folder: Path, tmp_path: Path) -> None:
    assert main(words(folder, folder / "hf", tmp_path / "one")) == 0
    launched = torchrun(2, "paceline.cli", *words(folder, folder / "hf", tmp_path / "two", sharding))
    said = launched.communicate()[0]
    assert launched.returncode == 0, said
    assert same(start_of(tmp_path / "two"), start_of(tmp_path / "one"))
    assert read_card(tmp_path / "two").init_from == read_card(tmp_path / "one").init_from
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


def test_such_runs_are_no_group_with_runs_from_scratch_and_no_row_of_a_board(folder: Path, tmp_path: Path) -> None:
    scratch, warm = tmp_path / "scratch", tmp_path / "warm"
    given = words(folder, folder / "old", warm, "--track", "tiny")
    assert main(given) == 0
    assert main([*given[:2], *given[4:5], str(scratch), *given[6:]]) == 0
    runs = [read_run(scratch), read_run(warm)]
    assert len({experiment_key(run) for run in runs}) == 2
    found = board([tmp_path], target=9.0)
    assert [row.runs for row in found.rows] == [["scratch"]]
    assert "began with the weights of old at step 6" in found.refused[0].why


# ---- more steps


def longer(folder: Path, tmp_path: Path, *more: str) -> Path:
    """`old` with twice the steps."""
    run = shutil.copytree(folder / "old", tmp_path / "run")
    assert main(["train", "--resume", str(run), "--no-finish", "--steps", str(2 * STEPS), *more]) == 0
    return run


def test_a_finished_run_goes_on_by_the_schedule_of_the_longer_run(folder: Path, tmp_path: Path) -> None:
    run = longer(folder, tmp_path)
    card, (steps, evaluations) = read_card(run), read_metrics(run)
    config = read_config(json.loads((run / "config.json").read_text()))
    planned = read_config(json.loads((folder / "old" / "config.json").read_text()))
    assert config == with_steps(planned, 2 * STEPS)
    assert [record.lr_scale for record in steps[:STEPS]] == [schedule(planned, n).lr_scale for n in range(STEPS)]
    later = [schedule(config, n) for n in range(STEPS, 2 * STEPS)]
    assert [record.lr_scale for record in steps[STEPS:]] == [settings.lr_scale for settings in later]
    assert [record.window_tokens for record in steps[STEPS:]] == [settings.windows["short"] for settings in later]
    assert (card.finished, card.steps, card.steps_done, card.extended) == (True, 12, 12, ((6, 6),))
    assert card.tokens == 12 * 512
    assert [record.step for record in evaluations] == [0, 6, 12]


def test_an_extension_that_stops_before_it_has_saved_goes_on_to_its_end(folder: Path, tmp_path: Path) -> None:
    whole = longer(folder, tmp_path)
    cut = longer(folder, tmp_path / "again", "--train.stop-after", "1")
    shutil.rmtree(RunFolder(cut).checkpoint(STEPS + 1))  # killed just before
    assert main(["train", "--resume", str(cut), "--no-finish", "--train.stop-after", "None"]) == 0
    assert losses(cut) == losses(whole)
    assert read_card(cut).extended == ((6, 6),)


def test_fewer_steps_are_refused_and_a_finished_run_says_how_to_go_on(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resume = ["train", "--resume", str(folder / "old"), "--no-finish"]
    assert "can only be given more" in refused([*resume, "--steps", "5"], capsys)
    assert "give it more with --steps N" in refused(resume, capsys)
    assert "give it more with --steps N" in refused([*resume, "--steps", "6"], capsys)


def test_a_rewind_before_the_cool_down_may_give_more_steps_as_well(folder: Path, tmp_path: Path) -> None:
    run = longer(folder, tmp_path, "--rewind", "5")
    card = read_card(run)
    assert (card.rewinds, card.extended, card.steps_done) == (1, ((5, 6),), 12)
    assert [record.step for record in read_metrics(run)[0]] == list(range(1, 13))


def test_stages_of_other_batches_do_not_change_the_tokens_that_were_read(folder: Path, tmp_path: Path) -> None:
    stages = [{"share": 0.5}, {"share": 0.5, "batch_tokens": 1024}]
    file = tmp_path / "staged.json"
    config = json.loads((folder / "old" / "config.json").read_text())
    file.write_text(json.dumps({**config, "stages": stages}))
    run = tmp_path / "run"
    assert main(["train", "--config", str(file), "--out", str(run), "--no-finish"]) == 0
    assert read_card(run).tokens == 3 * 512 + 3 * 1024
    assert main(["train", "--resume", str(run), "--no-finish", "--steps", "8"]) == 0
    assert read_card(run).tokens == 3 * 512 + 3 * 1024 + 2 * 1024


def test_an_extended_run_is_another_group_and_counts_only_if_asked_for(folder: Path, tmp_path: Path) -> None:
    run = read_run(longer(folder, tmp_path))
    planned = dataclasses.replace(run, card=replace(run.card, extended=()))
    assert experiment_key(run) != experiment_key(planned)
    assert "extended from 6 steps" in (why_left_out(run) or "")
    assert why_left_out(run, remade=True) is None
    assert why_left_out(planned) is None
