"""A step is cut to fit into the memory there is; what it computes stays the same, and the run says what was done."""

import itertools
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.backends import lm_head
from paceline.backends.registry import Chosen
from paceline.checkpoint.run_folder import RunFolder
from paceline.core.errors import ConfigError, PacelineError
from paceline.core.probe import Choice
from paceline.metrics.card import read_card
from paceline.parallel import memory_fit
from paceline.parallel.batch_split import rank_batch
from paceline.parallel.machine import inspect_machine
from paceline.parallel.memory_fit import REMEMBERED, Fit, Limits, key_of, plan_of, recall, remember
from paceline.parallel.memory_plans import MemoryPlan, Planned, first_that_fits, memory_plans
from paceline.recipes.presets import preset
from paceline.settings.run import RunConfig
from paceline.settings.schedule import StepSettings
from paceline.train import assemble as fitted_runs
from paceline.train import memory_trial
from paceline.train.assemble import Assembly
from paceline.train.gradient_step import GradientStep
from paceline.train.memory_trial import is_out_of_memory
from paceline.train.run import resume_run
from train.tiny import losses, run, tiny_config, weights

GIB = 2**30


def chosen(attention: str, qkv: str, mlp: str, lm_head: str) -> Chosen:
    named = {"attention": attention, "qkv": qkv, "mlp": mlp, "lm_head": lm_head}
    choices = {operation: Choice(name=name, reason="for a test") for operation, name in named.items()}
    plain = Choice(name="reference", reason="for a test")
    return Chosen(matmul=plain, orthogonalise=plain, row_update=plain, **choices)


HOPPER = chosen("ranges", "fused", "fused", "fused")
OLDER = chosen("flex", "reference", "reference", "reference")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / REMEMBERED


def planned(config: RunConfig, having: Chosen, world: int = 1) -> Planned:
    """As a run plans it, on a machine with these back ends."""
    return Planned(config=config, backends=having, world=world)


def peaks_of(of: Planned) -> list[int]:
    return [of.memory(plan).peak for plan in memory_plans(of)]


def plan_within(name: str, having: Chosen, gib: float) -> str:
    of = planned(preset(name), having)
    number = first_that_fits(peaks_of(of), int(gib * GIB))
    return "nothing fits" if number is None else str(memory_plans(of)[number])


# ---- the plans


def test_the_plans_of_record_18_are_ordered_by_what_they_cost() -> None:
    assert [str(plan) for plan in memory_plans(planned(preset("r18-softcap"), HOPPER))] == [
        "micro-batches of 262,144 tokens",
        "micro-batches of 131,072 tokens",
        "micro-batches of 65,536 tokens",
        "micro-batches of 65,536 tokens, recomputed blocks",
        "micro-batches of 65,536 tokens, recomputed blocks, a fused lm_head in chunks of 2,048 tokens",
    ]
    assert [str(plan) for plan in memory_plans(planned(preset("r18-softcap"), OLDER))] == [
        "micro-batches of 65,536 tokens",
        "micro-batches of 65,536 tokens, a chunked lm_head in chunks of 1,024 tokens",
        "micro-batches of 65,536 tokens, recomputed blocks, a chunked lm_head in chunks of 1,024 tokens",
    ]


def test_short_sequences_go_down_to_one_before_anything_is_computed_again() -> None:
    sizes = [plan.micro_tokens for plan in memory_plans(planned(preset("r05-modern-arch"), OLDER))]
    assert sizes == [65_536, 32_768, 16_384, 8_192, 4_096, 2_048, 1_024, 1_024]


def test_heads_are_known_by_what_they_do_and_not_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    def described(having: Chosen) -> list[str]:
        return [str(plan) for plan in memory_plans(planned(preset("r18-softcap"), having))]

    usual = [described(having) for having in (HOPPER, OLDER)]
    renamed = tuple(replace(head, name=f"{head.name}-2") for head in lm_head.BACKENDS)
    monkeypatch.setattr(lm_head, "BACKENDS", renamed)
    other = [
        chosen(*names, f"{head}-2")
        for *names, head in (("ranges", "fused", "fused", "fused"), ("flex", "reference", "reference", "reference"))
    ]
    found = [described(having) for having in other]
    assert found == [[plan.replace(" lm_head", "-2 lm_head") for plan in plans] for plans in usual]


@pytest.mark.parametrize("world", [1, 2, 8])
@pytest.mark.parametrize("name", ["demo", "r05-modern-arch", "r18-softcap"])
def test_the_first_plan_is_the_run_without_limits_and_every_plan_divides_the_share(name: str, world: int) -> None:
    config = preset(name)
    share = rank_batch(config.batch, world)
    plans = memory_plans(planned(config, OLDER, world))
    assert plans[0].micro_tokens == share.micro_sequences * share.sequence_tokens
    assert not plans[0].recompute
    assert all(share.tokens % plan.micro_tokens == 0 for plan in plans)
    assert all(plan.micro_tokens % share.sequence_tokens == 0 for plan in plans)


@pytest.mark.parametrize("having", [HOPPER, OLDER], ids=["hopper", "older"])
@pytest.mark.parametrize("name", ["demo", "r04-muon", "r14-value-embed", "r18-softcap"])
def test_no_plan_takes_more_than_the_one_before(name: str, having: Chosen) -> None:
    of = planned(preset(name), having)
    peaks = peaks_of(of)
    assert peaks == sorted(peaks, reverse=True)
    assert all(lower.below(plan) for plan, lower in itertools.pairwise(memory_plans(of)))


def test_what_the_user_states_is_in_every_plan() -> None:
    config = preset("r05-modern-arch")
    stated = replace(config, batch=replace(config.batch, micro_tokens=4_096))
    assert {plan.micro_tokens for plan in memory_plans(planned(stated, OLDER))} == {4_096}
    named = replace(config, lm_head=replace(config.lm_head, backend="reference"))
    assert {plan.lm_head for plan in memory_plans(planned(named, OLDER))} == {"reference"}
    cut = replace(config, lm_head=replace(config.lm_head, chunk_tokens=512))
    assert {plan.lm_head_chunk_tokens for plan in memory_plans(planned(cut, HOPPER))} == {512}


@pytest.mark.parametrize(
    ("having", "gib", "expected"),
    [
        (HOPPER, 80, "micro-batches of 262,144 tokens"),
        (HOPPER, 48, "micro-batches of 131,072 tokens"),
        (HOPPER, 24, "micro-batches of 65,536 tokens"),
        (HOPPER, 12, "micro-batches of 65,536 tokens, recomputed blocks"),
        (HOPPER, 8, "micro-batches of 65,536 tokens, recomputed blocks"),
        (OLDER, 40, "micro-batches of 65,536 tokens"),
        (OLDER, 24, "micro-batches of 65,536 tokens, a chunked lm_head in chunks of 1,024 tokens"),
        (OLDER, 12, "micro-batches of 65,536 tokens, recomputed blocks, a chunked lm_head in chunks of 1,024 tokens"),
        (OLDER, 8, "micro-batches of 65,536 tokens, recomputed blocks, a chunked lm_head in chunks of 1,024 tokens"),
        (OLDER, 4, "nothing fits"),
    ],
)
def test_record_18_runs_on_small_gpus(having: Chosen, gib: float, expected: str) -> None:
    assert plan_within("r18-softcap", having, gib) == expected


def test_nothing_is_left_out_where_the_system_does_not_tell_its_memory() -> None:
    assert first_that_fits([10, 5], None) == 0
    assert first_that_fits([100, 50], 100) == 1  # not to the last byte
    assert first_that_fits([100, 99], 100) is None


# ---- what was found out before

PLAN = MemoryPlan(micro_tokens=512, recompute=True, lm_head="chunked", lm_head_chunk_tokens=64)


def test_a_choice_is_remembered_while_memory_is_about_the_same() -> None:
    remember("here", PLAN, 10 * GIB)
    remember("there", replace(PLAN, recompute=False), None)
    assert recall("here", 10 * GIB) == PLAN
    assert recall("here", int(10.5 * GIB)) == PLAN
    assert recall("here", 20 * GIB) is None
    assert recall("here", 5 * GIB) is None
    assert recall("elsewhere", 10 * GIB) is None
    assert recall("there", None) == replace(PLAN, recompute=False)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"here": 3}', '{"here": {"plan": {"micro_tokens": "many"}, "available": 1}}']
)
def test_a_damaged_memory_is_no_memory(text: str, cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_text(text)
    assert recall("here", 1) is None
    remember("here", PLAN, 1)
    assert recall("here", 1) == PLAN


def test_a_cache_that_cannot_be_written_is_no_error(cache: Path) -> None:
    cache.parent.write_text("a file where the folder should be")
    remember("here", PLAN, 1)
    assert recall("here", 1) is None


def test_the_plan_of_an_older_card_is_understood() -> None:
    assert plan_of({"micro_tokens": 512, "recompute": True, "head": "chunked", "head_chunk_tokens": 64}) == PLAN
    assert plan_of(asdict(PLAN)) == PLAN
    assert plan_of(None) is None


# ---- whole runs on a CPU


def unstated(folder: Path, *, limit_gib: float | None = None, steps: int = 4) -> RunConfig:
    config = tiny_config(folder, steps=steps)
    train = replace(config.train, memory_limit_gib=limit_gib)
    return replace(config, batch=replace(config.batch, micro_tokens=None), train=train)


def limit_for(config: RunConfig, number: int) -> float:
    """A limit that lets plan `number` through and not the one before."""
    having = chosen("reference", "reference", "reference", "chunked")
    peaks = peaks_of(planned(config, having))
    assert peaks[number] < 0.99 * peaks[number - 1]
    return peaks[number] * 1.005 / 0.92 / GIB


def test_a_limit_that_asks_for_recomputation_gives_the_same_losses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = unstated(tmp_path / "data")
    top = run(config, tmp_path / "free")
    assert top.run.config.batch.micro_tokens == 1024
    limited = unstated(tmp_path / "data", limit_gib=limit_for(config, 3))
    capsys.readouterr()
    done = run(limited, tmp_path / "limited")
    assert (done.run.config.batch.micro_tokens, done.run.config.train.recompute) == (256, True)
    said = "micro-batches of 256 tokens, recomputed blocks: "
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith(said)]
    assert "available; micro-batches of 1,024 tokens would take" in line
    card = read_card(tmp_path / "limited")
    assert line in card.notes
    assert card.fit == {"micro_tokens": 256, "recompute": True, "lm_head": "chunked", "lm_head_chunk_tokens": None}
    assert losses(tmp_path / "limited") == pytest.approx(losses(tmp_path / "free"), rel=5e-4)


def test_a_micro_batch_that_is_asked_for_is_taken_whatever_the_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = unstated(tmp_path / "data", limit_gib=1e-6, steps=1)
    stated = replace(config, batch=replace(config.batch, micro_tokens=512))
    done = run(stated, tmp_path / "run")
    line = "--train.memory-limit-gib 1e-06 is of no effect on a CPU: --batch.micro-tokens 512 says how a step is cut"
    assert line in capsys.readouterr().out.splitlines()
    assert done.run.config.batch.micro_tokens == 512
    assert not done.run.config.train.recompute
    with pytest.raises(ConfigError, match=r"--train\.memory-limit-gib 1e-06 is too little even for .* it needs .*iB"):
        run(config, tmp_path / "refused")


def test_a_resumed_run_is_cut_as_before(tmp_path: Path) -> None:
    config = unstated(tmp_path / "data")
    limited = unstated(tmp_path / "data", limit_gib=limit_for(config, 3))
    run(limited, tmp_path / "whole")
    run(replace(limited, train=replace(limited.train, stop_after=2)), tmp_path / "cut")
    done = resume_run(config, RunFolder(tmp_path / "cut"))  # there is room now, but the bits shall stay
    assert done.run.config.train.recompute
    assert any("recomputed blocks: as before" in note for note in done.run.machine.notes)
    one, other = weights(tmp_path / "cut"), weights(tmp_path / "whole")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_resumed_run_that_is_cut_otherwise_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = unstated(tmp_path / "data", steps=2)
    run(replace(config, train=replace(config.train, stop_after=1)), tmp_path / "run")
    capsys.readouterr()
    resume_run(replace(config, batch=replace(config.batch, micro_tokens=256)), RunFolder(tmp_path / "run"))
    line = "cut otherwise than before: micro-batches of 256 tokens: asked for"
    assert line in capsys.readouterr().out.splitlines()
    assert line in read_card(tmp_path / "run").notes


def test_a_lower_cut_that_was_remembered_after_running_out_goes_before_that_of_the_card(tmp_path: Path) -> None:
    config = unstated(tmp_path / "data")
    resolved, machine = inspect_machine(config)
    of, limits = (
        Planned(config=resolved, backends=machine.backends, world=1),
        Limits(device=machine.device, limit_gib=None),
    )
    plans, peaks = memory_plans(of), peaks_of(of)
    for known, expected in ((plans[2], 2), (plans[0], 1), (None, 1)):
        number, _ = memory_fit._choose(of, limits, plans, peaks, 2 * max(peaks), known=known, before=plans[1])
        assert number == expected


# ---- running out, by fault injection


@pytest.fixture
def gpu_like(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """A CPU on which a trial is made, always unsure, and every trial's micro-batch is noted."""
    tried: list[int | None] = []
    real_fit, real_trial = memory_fit.fit_memory, memory_trial.trial

    def as_on_a_gpu(planned: Planned, limits: Limits, *rest: Any) -> tuple[Assembly, Fit]:
        return real_fit(planned, replace(limits, device=torch.device("cuda")), *rest)

    def noted(run: Assembly) -> None:
        tried.append(run.micro_tokens)
        real_trial(run)

    monkeypatch.setattr(fitted_runs, "fit_memory", as_on_a_gpu)
    monkeypatch.setattr(memory_fit, "key_of", lambda planned, _: key_of(planned, torch.device("cpu")))
    monkeypatch.setattr(memory_fit, "SURE_SHARE", 0.0)
    monkeypatch.setattr(memory_trial, "trial", noted)
    monkeypatch.setattr(Limits, "available", lambda _: 64 * GIB)
    return tried


def test_a_trial_changes_no_bit_and_is_made_once(
    tmp_path: Path, gpu_like: list[int | None], monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    config = unstated(tmp_path / "data", steps=3)
    run(config, tmp_path / "tried")
    run(config, tmp_path / "remembered")
    assert len(gpu_like) == 1
    assert "remembered" in read_card(tmp_path / "remembered").notes[-1]
    cache.unlink()
    monkeypatch.setattr(memory_fit, "SURE_SHARE", 1.0)
    run(config, tmp_path / "untried")
    assert len(gpu_like) == 1
    assert losses(tmp_path / "tried") == losses(tmp_path / "untried") == losses(tmp_path / "remembered")


@pytest.mark.journey
def test_out_of_memory_at_the_start_costs_a_plan_and_no_run(
    tmp_path: Path, gpu_like: list[int | None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = memory_trial.trial

    def small_gpu(assembled: Assembly) -> None:
        real(assembled)
        if (assembled.config.batch.micro_tokens or 0) > 256:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(memory_trial, "trial", small_gpu)
    config = unstated(tmp_path / "data", steps=3)
    done = run(config, tmp_path / "run")
    assert done.exit_code == 0
    assert done.run.config.batch.micro_tokens == 256
    assert gpu_like == [1024, 512, 256]
    said = capsys.readouterr().out
    assert "out of memory with micro-batches of 1,024 tokens\n" in said
    assert "micro-batches of 256 tokens: out of memory with micro-batches of 512 tokens\n" in said
    again = run(config, tmp_path / "again")
    assert again.run.config.batch.micro_tokens == 256
    assert gpu_like == [1024, 512, 256]


@pytest.mark.journey
@pytest.mark.usefixtures("gpu_like")
def test_no_plan_left_is_one_line_with_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(_: Assembly) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(memory_trial, "trial", no_room)
    with pytest.raises(
        PacelineError, match=r"which takes the least memory; it needs .*; shorten --batch\.sequence-t"
    ) as e:
        run(unstated(tmp_path / "data", steps=1), tmp_path / "run")
    assert e.value.exit_code == 1


def run_out_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = GradientStep.take

    def take(self: GradientStep, settings: StepSettings, *rest: Any, **more: Any) -> object:
        if settings.step == step:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return real(self, settings, *rest, **more)

    monkeypatch.setattr(GradientStep, "take", take)


@pytest.mark.journey
def test_out_of_memory_later_names_what_would_fit_and_leaves_a_run_to_go_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(tmp_path / "data", steps=6)  # micro-batches of 512 by its own word
    run(config, tmp_path / "whole")
    with monkeypatch.context() as patched:
        run_out_at(4, patched)
        with pytest.raises(PacelineError) as caught:
            run(config, tmp_path / "run")
    assert caught.value.exit_code == 1
    message = str(caught.value)
    assert message.startswith("out of memory with micro-batches of 512 tokens; use --batch.micro-tokens 256 (")
    assert "\n" not in message
    card = read_card(tmp_path / "run")
    assert not card.finished
    assert card.fit == {"micro_tokens": 512, "recompute": False, "lm_head": "chunked", "lm_head_chunk_tokens": None}
    lower = replace(config, batch=replace(config.batch, micro_tokens=256))
    assert resume_run(lower, RunFolder(tmp_path / "run")).card.finished
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), rel=5e-4)


def test_a_choice_of_ours_that_fails_later_is_lowered_by_itself(
    tmp_path: Path, gpu_like: list[int | None], monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    config = unstated(tmp_path / "data", steps=2)
    with monkeypatch.context() as patched:
        run_out_at(1, patched)
        with pytest.raises(PacelineError, match=r"with micro-batches of 1,024 tokens; use --batch\.micro-tokens 512"):
            run(config, tmp_path / "run")
    (entry,) = json.loads(cache.read_text()).values()
    assert entry["plan"] == asdict(replace(PLAN, recompute=False, lm_head_chunk_tokens=None))
    assert run(config, tmp_path / "again").run.config.batch.micro_tokens == 512
    assert len(gpu_like) == 1


def test_at_one_sequence_the_advice_is_to_compute_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(tmp_path / "data", steps=1)
    run_out_at(0, monkeypatch)
    at_one = replace(config, batch=replace(config.batch, micro_tokens=256))
    with pytest.raises(PacelineError, match=r"256 tokens; use --train\.recompute"):
        run(at_one, tmp_path / "run")
    recomputed = replace(at_one, train=replace(config.train, recompute=True))
    with pytest.raises(PacelineError, match="which takes the least memory"):
        run(recomputed, tmp_path / "again")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
            True,
        ),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (MemoryError(), True),
        (RuntimeError("shapes do not match"), False),
        (ValueError("DefaultCPUAllocator"), False),
    ],
)
def test_which_errors_mean_out_of_memory(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected
