"""A whole run: it learns, it repeats to the last bit, it resumes as if it had not stopped, it ends well when asked."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from model.small import windows
from paceline.checkpoint import store
from paceline.checkpoint.run_folder import RunFolder
from paceline.checkpoint.save import Saver
from paceline.cli import main
from paceline.core.errors import ConfigError, DataError
from paceline.core.signals import StopRequest
from paceline.data.feed import DeviceBatch
from paceline.data.shards import open_shard
from paceline.metrics.card import LOSS_COLUMNS, read_card
from paceline.metrics.deferred import DeferredMetrics, Values
from paceline.metrics.metrics_file import StepMetrics, read_metrics
from paceline.model.loss import Losses
from paceline.settings.run import CheckpointConfig, EvaluateConfig, RunConfig
from paceline.text.shard_writer import write_shard
from paceline.train.gradient_step import accumulate_gradient
from paceline.train.run import Options, resume_run
from train.tiny import losses, run, tiny_config, weights


def test_a_run_learns_and_its_card_says_so(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "data", steps=40)
    done = run(config, tmp_path / "run")
    card = read_card(tmp_path / "run")
    assert done.exit_code == 0
    assert card.finished
    first, last = card.losses[0], card.losses[-1]
    assert first[1] == pytest.approx(5.549, abs=1e-3)  # ln 257: a head of zeros predicts nothing
    assert last[1] < 3.5
    assert card.val_loss == last[1]
    assert card.val_bpb == pytest.approx(last[1] / 0.6931, rel=0.02)  # a token is a byte, but for end-of-text
    assert (card.steps, card.steps_done, card.tokens) == (40, 40, 40 * 1024)
    assert card.parameters == sum(p.numel() for p in done.run.model.parameters())
    assert card.peak_bytes
    assert card.tokens_per_s
    assert 0 < card.train_s < card.wall_s
    assert card.device == "cpu"
    written = json.loads((tmp_path / "run" / "card.json").read_text())
    assert {"preset", "track", "seed", "parameters", "steps", "tokens", "val_loss", "val_bpb"} <= set(written)
    assert {"train_s", "wall_s", "tokens_per_s", "peak_bytes", "data_fingerprint", "finished"} <= set(written)


def test_a_last_checkpoint_that_is_slow_to_write_is_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = Saver.wait
    monkeypatch.setattr(Saver, "wait", lambda self: (time.sleep(0.5), wait(self)))
    run(tiny_config(tmp_path / "data", steps=12), tmp_path / "a")
    card = read_card(tmp_path / "a")
    assert card.train_s is not None
    assert card.train_s < card.losses[-1][LOSS_COLUMNS.index("train_s")] + 0.3


def test_the_same_run_twice_gives_the_same_bits(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "data", steps=8)
    for name in ("a", "b"):
        run(config, tmp_path / name)
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert len(losses(tmp_path / "a")) == 8
    one, other = weights(tmp_path / "a"), weights(tmp_path / "b")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_another_seed_is_another_run(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "data", steps=3)
    run(config, tmp_path / "a")
    run(replace(config, seed=1), tmp_path / "b")
    assert losses(tmp_path / "a")[1:] != losses(tmp_path / "b")[1:]


def test_micro_batches_change_nothing_but_the_last_digits(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "data", steps=6)
    for micro in (256, 512, 1024):
        run(replace(config, batch=replace(config.batch, micro_tokens=micro)), tmp_path / str(micro))
    whole = losses(tmp_path / "1024")
    for micro in ("256", "512"):  # the optimizers normalise, so a gradient near 0 may change its sign in the last bit
        assert losses(tmp_path / micro) == pytest.approx(whole, rel=5e-4)


def test_the_gradient_is_the_mean_over_the_whole_batch_however_it_is_cut(tmp_path: Path) -> None:
    done = run(tiny_config(tmp_path / "data", steps=4), tmp_path / "run").run
    tokens = torch.randint(0, 257, (4, 256), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    targets = tokens.roll(-1).long()
    targets[0, 100:] = -100  # unequal counts in the micro-batches
    gradients = {}
    for micro in (1, 2, 4):
        batch = DeviceBatch(tokens, targets)
        accumulate_gradient(done.model, batch, windows(128), torch.zeros(0), micro_sequences=micro, padded=True)
        gradients[micro] = {name: p.grad for name, p in done.model.named_parameters()}
        done.optimizer.zero_grad()
    expected = done.model(tokens, targets, windows(128)).main.sum() / (targets >= 0).sum()
    expected.backward()
    for name, parameter in done.model.named_parameters():
        for micro in (1, 2, 4):
            torch.testing.assert_close(gradients[micro][name], parameter.grad, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    "stop_at",  # between checkpoints, at a validation, near the end
    [4, *(pytest.param(step, marks=pytest.mark.slow) for step in (1, 8, 11))],
)
def test_a_stopped_and_resumed_run_is_the_uninterrupted_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int
) -> None:
    config = tiny_config(tmp_path / "data")
    run(config, tmp_path / "whole")

    class StopAfter(StopRequest):
        """Asks to stop once the loop has done `stop_at` steps."""

        def __bool__(self) -> bool:
            return len(records) >= stop_at

    records: list[StepMetrics] = []
    plain = DeferredMetrics.step

    def counting(self: DeferredMetrics, record: StepMetrics, values: Values) -> None:
        records.append(record)
        plain(self, record, values)

    with monkeypatch.context() as patched:
        patched.setattr("paceline.core.signals.StopRequest", StopAfter)
        patched.setattr(DeferredMetrics, "step", counting)
        run(config, tmp_path / "cut")
    assert not read_card(tmp_path / "cut").finished
    assert len(losses(tmp_path / "cut")) == stop_at
    resume_run(config, RunFolder(tmp_path / "cut"))
    assert read_card(tmp_path / "cut").finished
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    evals = [[(e.step, e.val_loss) for e in read_metrics(tmp_path / name)[1]] for name in ("cut", "whole")]
    assert evals[0] == evals[1]
    one, other = weights(tmp_path / "cut"), weights(tmp_path / "whole")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_launches_of_so_many_steps_each_make_the_uninterrupted_run(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "data", steps=7)
    run(config, tmp_path / "whole")
    slices = replace(config, train=replace(config.train, stop_after=3))
    ends = [run(slices, tmp_path / "cut").card, *(resume_run(slices, RunFolder(tmp_path / "cut")).card for _ in "12")]
    assert [(card.steps_done, card.finished) for card in ends] == [(3, False), (6, False), (7, True)]
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


def unsaved_at_its_end(folder: Path) -> RunConfig:
    config = tiny_config(folder, steps=5, evaluate=EvaluateConfig(every=None, tokens=256))
    return replace(config, checkpoint=CheckpointConfig(at_end=False))


def test_a_run_that_saves_nothing_at_its_end_does_so_when_it_is_stopped(tmp_path: Path) -> None:
    config, whole, cut = unsaved_at_its_end(tmp_path / "data"), tmp_path / "whole", RunFolder(tmp_path / "cut")
    card = run(config, whole).card
    assert (card.finished, card.val_loss is not None) == (True, True)
    assert not RunFolder(whole).checkpoints()
    assert not run(replace(config, train=replace(config.train, stop_after=2)), cut.path).card.finished
    assert [path.name for path in cut.checkpoints()] == ["step_000002"]
    assert resume_run(config, cut).card.finished
    assert [path.name for path in cut.checkpoints()] == ["step_000002"]
    assert losses(cut.path) == losses(whole)


def test_what_would_read_the_checkpoint_that_was_not_saved_says_so_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, out = unsaved_at_its_end(tmp_path / "data"), tmp_path / "run"
    run(config, out)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    capsys.readouterr()
    for words in (
        ["train", "--resume", str(out)],
        ["train", "--resume", str(out), "--steps", "9"],
        ["train", "demo", "--init-from", str(out), "--out", str(tmp_path / "other")],
        ["evaluate", str(out)],
        ["sample", str(out)],
        ["export", str(out), "--out", str(tmp_path / "exported")],
    ):
        assert main(words) in (1, 2), words
        said = capsys.readouterr().err
        assert said.count("\n") == 1, said
        assert "--checkpoint.at-end" in said, words
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_a_damaged_checkpoint_is_passed_over_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_config(tmp_path / "data")
    run(config, tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    expected = losses(tmp_path / "run")
    assert [path.name for path in folder.checkpoints()] == ["step_000009", "step_000012"], "so many are kept"
    newest = folder.checkpoints()[-1] / "model-00001.safetensors"
    data = bytearray(newest.read_bytes())
    data[-1] ^= 1
    newest.write_bytes(data)
    resume_run(config, folder)
    said = capsys.readouterr().out
    assert "passed over step_000012: model-00001.safetensors: does not match its hash" in said
    assert "resumed from step_000009" in said
    assert losses(tmp_path / "run") == expected


def test_a_signal_ends_the_run_with_a_usable_checkpoint(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "data", steps=100_000)
    config = replace(config, checkpoint=replace(config.checkpoint, every=None))

    def interrupt() -> None:
        while not (tmp_path / "run" / "metrics.jsonl").exists() or len(losses(tmp_path / "run")) < 3:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)  # a shell in the background has it ignored
    threading.Thread(target=interrupt, daemon=True).start()
    done = run(config, tmp_path / "run")
    assert done.exit_code == 128 + signal.SIGINT
    card = read_card(tmp_path / "run")
    assert not card.finished
    assert store.newest_good(RunFolder(tmp_path / "run"))[0].name == f"step_{card.steps_done:06d}"
    assert signal.getsignal(signal.SIGINT) is before


def test_a_signal_during_compilation_ends_at_once_with_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler is a stand-in that receives the signal and would go on for minutes."""

    def compiled(model: torch.nn.Module, **_: object) -> Callable[..., Losses]:
        def call(*given: torch.Tensor) -> Losses:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
            return model(*given)  # type: ignore[no-any-return]

        return call if isinstance(model, torch.nn.Module) else model

    config = tiny_config(tmp_path / "data")
    asked = replace(config, train=replace(config.train, compile=True), evaluate=replace(config.evaluate, every=None))
    began = time.monotonic()
    with monkeypatch.context() as patched:
        patched.setattr(torch, "compile", compiled)
        assert run(asked, tmp_path / "run").exit_code == 128 + signal.SIGTERM
    assert time.monotonic() - began < 30
    assert [path.name for path in RunFolder(tmp_path / "run").checkpoints()] == ["step_000000"]
    resume_run(config, RunFolder(tmp_path / "run"))
    run(config, tmp_path / "whole")
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_a_token_past_the_vocabulary_is_named_before_anything_is_trained(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "data")
    config = replace(config, model=replace(config.model, vocab_size=200), data=replace(config.data, end_of_text=0))
    with pytest.raises((DataError, ConfigError), match="x_train_000001"):
        run(config, tmp_path / "run")


def test_a_run_that_would_read_twice_is_refused_on_one_pass(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "data", steps=1000)
    with pytest.raises(ConfigError, match=r"--data\.one-pass"):
        run(replace(config, data=replace(config.data, one_pass=True)), tmp_path / "run")


def test_one_pass_lets_a_run_go_on_to_its_end_and_refuses_a_rewind_past_it(tmp_path: Path) -> None:
    """The data are enough for the run and for no step more."""
    config = tiny_config(tmp_path / "data")
    tokens = open_shard(tmp_path / "data" / "x_train_000001.bin").tokens
    steps = (len(tokens) - 1) // 256 // 4
    config = replace(config, steps=steps, data=replace(config.data, one_pass=True))
    config = replace(
        config, evaluate=replace(config.evaluate, every=None), checkpoint=replace(config.checkpoint, every=1)
    )
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(ConfigError, match=f"one pass gives {steps} steps"):
        run(replace(config, steps=steps + 1), folder.path)
    run(replace(config, train=replace(config.train, stop_after=steps - 2)), folder.path)
    with pytest.raises(ConfigError, match=r"--data\.one-pass forbids"):
        resume_run(config, folder, options=Options(rewind=steps - 3))
    assert resume_run(config, folder).card.finished


def test_a_run_that_reads_its_text_often_says_so_once_and_on_its_card(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(tmp_path / "data", steps=5)
    path = tmp_path / "data" / "x_train_000001.bin"
    whole = open_shard(path)
    assert whole.manifest is not None
    write_shard(path, whole.tokens[:2100].copy(), documents=5, tokenizer=whole.manifest.tokenizer)
    run(config, tmp_path / "run")
    said = "the training text is read 2.5 times; --steps 2 is one pass\n"
    assert capsys.readouterr().out.count(said) == 1
    assert said.strip() in read_card(tmp_path / "run").notes


def test_aligned_documents_train_and_padding_does_not_count(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "data", steps=30)
    run(replace(config, data=replace(config.data, align_documents=True)), tmp_path / "run")
    found = losses(tmp_path / "run")
    assert found[0] == pytest.approx(5.549, abs=1e-3)  # the mean over counted targets, whatever the padding
    assert found[-1] is not None
    assert found[-1] < 4.0


def test_cuda_is_refused_in_one_line_where_there_is_none(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    config = tiny_config(tmp_path / "data")
    with pytest.raises(ConfigError, match=r"--train\.device cuda cannot be used"):
        run(replace(config, train=replace(config.train, device="cuda")), tmp_path / "run")
