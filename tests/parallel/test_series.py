"""A step, a run and its validation are the same for any number of ranks; what each rank does of it.

All experiments run in one launch of torchrun (`series.py`); these are their judges."""

import json
import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.checkpoint import store
from paceline.checkpoint.run_folder import RunFolder
from paceline.metrics.card import read_card
from paceline.metrics.metrics_file import EvalMetrics, StepMetrics, read_metrics
from parallel import same_run
from parallel.launch import torchrun
from parallel.same_run import ALL, SAMPLE, name_of
from parallel.series import SEQUENCES, SLOW_SUM_S, STACKS, STEPS
from train.tiny import weights, write_text_shards

pytestmark = pytest.mark.journey
CUTS = ("whole", "micro")
"""A rank's share in one micro-batch, or in as many as it has sequences."""


class Series:
    """What one launch has left behind."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.folder, self.ranks = folder, ranks
        self.worlds = range(2, ranks + 1)

    def seen(self, name: str) -> list[Any]:
        """By rank."""
        paths = sorted(self.folder.glob(f"{name}.*.pickle"))
        return [pickle.loads(path.read_bytes()) for path in paths]

    def records(self, name: str) -> tuple[list[StepMetrics], list[EvalMetrics]]:
        return read_metrics(self.folder / name)

    def losses(self, name: str) -> list[float | None]:
        return [record.train_loss for record in self.records(name)[0]]


@pytest.fixture(scope="module", params=[3, pytest.param(4, marks=pytest.mark.slow)])
def series(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Series:
    folder = tmp_path_factory.mktemp("series")
    write_text_shards(folder / "data")
    launch = torchrun(4, "parallel.series", folder / "data", folder, request.param)
    said, _ = launch.communicate()
    assert launch.returncode == 0, said
    return Series(folder, request.param)


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest relative difference of two models' tensors."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).norm() / other[name].norm()) for name in one)


# ---- the same for any number of ranks


def test_ranks_together_read_the_batch_of_one(series: Series) -> None:
    alone = torch.stack(series.seen("whole-1")[0]["tokens"])
    assert alone.shape[:2] == (STEPS, SEQUENCES)
    for world in series.worlds:
        for cut in CUTS:
            shares = [torch.stack(rank["tokens"]) for rank in series.seen(f"{cut}-{world}")]
            assert {share.shape[1] for share in shares} == {SEQUENCES // world}
            assert torch.equal(torch.cat(shares, dim=1), alone)


def test_losses_and_weights_are_those_of_one_process(series: Series) -> None:
    alone = series.seen("whole-1")[0]["weights"]
    for world in (1, *series.worlds):
        for cut in CUTS:
            name = f"{cut}-{world}"
            assert series.losses(name) == pytest.approx(series.losses("whole-1"), rel=2e-6)  # 2e-7 seen
            assert distance(series.seen(name)[0]["weights"], alone) < 2e-5  # 2e-6 seen


def test_ranks_micro_batches_and_shards_change_nothing_but_the_last_digits(series: Series) -> None:
    """The same 20 steps as 1, 2, 3 and 4 ranks, in 1, 2 and 8 micro-batches, with nothing, Adam's moments of the tables
    or everything in shards."""

    def read(name: str) -> Tensor:
        return torch.cat(series.seen(name), dim=1)

    first = name_of(SAMPLE[0])
    expected, validated = series.losses(first), series.records(first)[1][-1].val_loss
    assert read(first).shape == (20, 96, same_run.LENGTH)
    assert len(expected) == 20
    for name in map(name_of, SAMPLE if series.ranks < 4 else ALL):
        assert torch.equal(read(name), read(first)), name
        assert series.losses(name) == pytest.approx(expected, rel=1e-5), name
        assert series.records(name)[1][-1].val_loss == pytest.approx(validated, rel=1e-5), name
        assert distance(weights(series.folder / name), weights(series.folder / first)) < 1e-4, name


def test_all_ranks_end_with_the_same_bits(series: Series) -> None:
    for world in series.worlds:
        first, *others = (rank["weights"] for rank in series.seen(f"micro-{world}"))
        assert len(others) == world - 1
        assert all(torch.equal(first[name], other[name]) for other in others for name in first)


def test_a_validation_split_over_ranks_is_that_of_one(series: Series) -> None:
    alone = series.records("whole-1")[1]
    assert [record.step for record in alone] == [0, 5, 10]
    for world in series.worlds:
        found = series.records(f"micro-{world}")[1]
        for value in ("val_loss", "val_bpb"):
            expected = [getattr(record, value) for record in alone]
            assert [getattr(record, value) for record in found] == pytest.approx(expected, rel=1e-6)


def test_padded_targets_count_for_nobody(series: Series) -> None:
    """Ranks have different numbers of them, and the mean is over those of all."""
    assert series.losses("padded-2") == pytest.approx(series.losses("padded-1"), rel=2e-6)
    assert distance(series.seen("padded-2")[0]["weights"], series.seen("padded-1")[0]["weights"]) < 2e-5


def test_a_parameter_that_the_loss_does_not_reach_is_no_hindrance(series: Series) -> None:
    """Record 13's first block mixes its values with themselves, so its scalar has no gradient."""
    one, two = (series.seen(f"residual-{world}") for world in (1, 2))
    assert [len(rank["tokens"]) for rank in two] == [2, 2]
    assert series.losses("residual-2") == pytest.approx(series.losses("residual-1"), rel=1e-5)
    name = "blocks.0.attention.value_mix"
    assert torch.equal(two[1]["weights"][name], one[0]["weights"][name])


def test_diagnostics_measure_the_global_batch(series: Series) -> None:
    one, two = ({r.step: r.extra for r in series.records(f"measured-{world}")[0]} for world in (1, 2))
    assert one.keys() == two.keys()
    for step in one:
        assert two[step].keys() == one[step].keys()
        for name, value in one[step].items():
            assert two[step][name] == pytest.approx(value, rel=1e-3), name
    plain = series.losses("micro-2")[:3]
    assert series.losses("measured-2")[0] == plain[0]


# ---- one exchange a step


@pytest.mark.parametrize("cut", CUTS)
def test_gradients_are_exchanged_once_a_step(series: Series, cut: str) -> None:
    """Every parameter goes over the wire once, though the share is cut into up to six micro-batches."""
    elements = sum(weight.numel() for weight in series.seen("whole-1")[0]["weights"].values())
    for world in series.worlds:
        assert [rank["exchanged"] for rank in series.seen(f"{cut}-{world}")] == [[elements] * STEPS] * world
    assert series.seen(f"{cut}-1")[0]["exchanged"] == [0] * STEPS


def test_gradients_are_views_of_the_buckets_if_asked(series: Series) -> None:
    for rank in series.seen("whole-2"):
        assert all((before, after) == (0, all_) for before, after, all_ in rank["in_buckets"])
    for rank in series.seen("micro-2"):  # kept between steps: else micro-batches would add up in memory of their own
        assert all((before, after) == (all_, all_) for before, after, all_ in rank["in_buckets"][1:])
    for cut in CUTS:
        for rank in series.seen(f"{cut}-no-views"):
            assert all((before, after) == (0, 0) for before, after, _ in rank["in_buckets"])
        assert series.losses(f"{cut}-no-views")[:2] == series.losses(f"{cut}-2")[:2]


# ---- Muon's work


def test_shared_matrices_are_all_of_them_each_done_once(series: Series) -> None:
    alone = series.seen("matrices-1")[0]["stacks"]
    assert [tuple(stack.shape) for stack in alone] == STACKS
    for world in series.worlds:
        ranks = series.seen(f"matrices-{world}")
        for rank in ranks:
            assert all(torch.equal(one, other) for one, other in zip(rank["stacks"], alone, strict=True))
        worked = [rank["worked"] for rank in ranks]
        assert sum(worked) == sum(count for count, _, _ in STACKS)
        assert max(worked) - min(worked) <= 1


# ---- the large tables


def test_shared_rows_of_the_tables_make_the_same_bits(series: Series) -> None:
    whole = series.seen("whole-3")[0]["weights"]
    for rank in series.seen("sharded-3"):
        assert all(torch.equal(rank["weights"][name], whole[name]) for name in whole)
    assert series.losses("sharded-3") == series.losses("whole-3")
    assert weights_equal(series, "clipped-sharded-2", "clipped-2")
    assert not weights_equal(series, "clipped-2", "whole-2")


def weights_equal(series: Series, one: str, other: str) -> bool:
    first, second = (series.seen(name)[0]["weights"] for name in (one, other))
    return all(torch.equal(first[name], second[name]) for name in first)


def test_a_checkpoint_is_the_same_file_however_rows_are_shared(series: Series) -> None:
    shared, plain = (RunFolder(series.folder / name).checkpoint(STEPS) for name in ("sharded-3", "whole-3"))
    for file in ("model-00001.safetensors", "optimizer-00001.safetensors"):
        assert (shared / file).read_bytes() == (plain / file).read_bytes()


def test_any_number_of_ranks_goes_on_where_three_with_shared_rows_were_cut(series: Series) -> None:
    assert len(series.records("cut-3")[0]) == 5
    alone = series.seen("resumed-1")[0]
    for world in (1, *series.worlds):
        ranks = series.seen(f"resumed-{world}")
        assert series.losses(f"resumed-{world}") == pytest.approx(series.losses("whole-3"), rel=2e-6)
        assert distance(ranks[0]["weights"], alone["weights"]) < 2e-5
        for name, elements in alone["moments"].items():
            kept = [rank["moments"][name] for rank in ranks]
            shared = name.endswith(".head") or ".embeddings." in name
            assert sum(kept) == (elements if shared else elements * world), name


def test_tables_travel_while_muon_works(series: Series) -> None:
    """Their gradients are not waited for before the matrices' update begins, nor their rows before it ends."""
    for seen in series.seen("order"):
        assert seen[:6] == ["start_sums", "nesterov_", "await_gradients", "start_gather", "move_", "finish_gathers"]


# ---- everything in shards


@pytest.mark.parametrize("name", ["residual", "padded", "clipped", "bf16-tables"])
def test_shards_of_everything_make_the_same_run(series: Series, name: str) -> None:
    """Unreached parameters, padding, a norm over all ranks, tables of another format under recomputation."""
    whole = f"{name}-2" if name != "bf16-tables" else name
    assert series.losses(f"{name}-shards") == pytest.approx(series.losses(whole), rel=2e-6)
    assert distance(weights(series.folder / f"{name}-shards"), weights(series.folder / whole)) < 2e-5
    found, expected = series.records(f"{name}-shards")[1], series.records(whole)[1]
    assert [e.val_loss for e in found] == pytest.approx([e.val_loss for e in expected], rel=2e-6)


def test_the_gradient_is_the_mean_over_the_global_batch_with_replicas_and_with_shards(series: Series) -> None:
    (alone,) = series.seen("norm-alone")
    for ranks in (series.seen("norm-replicas"), series.seen("norm-shards")):
        assert ranks == pytest.approx([alone] * len(ranks), rel=1e-5)


def test_every_rank_keeps_its_share_of_weights_and_slots(series: Series) -> None:
    saved = store.load(RunFolder(series.folder / "cut-shards").checkpoint(5))
    whole = {**saved.model, **saved.groups["optimizer"]}
    ranks = series.seen("cut-shards")
    for name in ranks[0]:
        kept = [rank[name] for rank in ranks]
        rows = -(-len(whole[name]) // 3)
        if whole[name].dim() == 2:
            assert kept[0] == rows * whole[name].size(1)
            assert sum(kept) == whole[name].numel()
        else:
            assert kept == [whole[name].numel()] * 3


def test_a_checkpoint_of_shards_is_resumed_by_any_ranks_with_or_without_shards(series: Series) -> None:
    for name in ("one-after-shards", "two-shards-after-three"):
        assert series.losses(name) == pytest.approx(series.losses("whole-1"), rel=2e-6), name
        assert distance(weights(series.folder / name), weights(series.folder / "whole-1")) < 2e-5


def test_a_command_with_shards_ends_with_a_sample_as_any_other(series: Series) -> None:
    """The first rank alone draws it, from the checkpoint, after all have parted."""
    first, second = series.seen("command")
    assert "command: finished, validation loss" in first
    assert second == ""
    assert isinstance(read_card(series.folder / "command").sample, str)


# ---- one sequence over several ranks


def test_ranks_of_one_sequence_read_its_slices(series: Series) -> None:
    (alone,) = series.seen("slices-1")
    assert torch.equal(torch.cat(series.seen("slices-4"), dim=2), alone)
    rows = [torch.cat(series.seen("slices-2x2")[first : first + 2], dim=2) for first in (0, 2)]
    assert torch.equal(torch.cat(rows, dim=1), alone)


@pytest.mark.parametrize("name", ["slices-2", "slices-4", "slices-2x2", "slices-2x2-shards"])
def test_a_split_sequence_makes_the_same_run(series: Series, name: str) -> None:
    """Its window reaches over up to three slices; documents go on across them; also with recomputed blocks and with
    everything in shards."""
    expected = series.records("slices-1")[1][-1].val_loss
    assert series.losses(name) == pytest.approx(series.losses("slices-1"), rel=2e-6)
    assert series.records(name)[1][-1].val_loss == pytest.approx(expected, rel=2e-6)
    assert distance(weights(series.folder / name), weights(series.folder / "slices-1")) < 2e-5


# ---- what it costs


@pytest.mark.parametrize("name", ["bench", "bench-shards"])
def test_a_benchmark_of_several_ranks_tells_the_communication_that_is_not_hidden(series: Series, name: str) -> None:
    result = json.loads((series.folder / f"{name}.json").read_text())
    assert result["ranks"] == 2
    assert SLOW_SUM_S < result["exposed_communication_s"] < result["step_s"]  # there are several a step
    assert result["communication_share"] == result["exposed_communication_s"] / result["step_s"]
    assert result["tokens_per_s"] == pytest.approx(512 / result["step_s"])  # of both
    first, second = series.seen(name)
    assert "of a step are not hidden" in first
    assert second == ""


# ---- stopping, and the files


def test_a_signal_to_one_rank_stops_all_at_the_same_step(series: Series) -> None:
    first, second = series.seen("stopped")
    assert (first["cut"], second["cut"]) == (5, 5)  # received in the fourth step, agreed on in the fifth
    assert second["exit_code"] == 128 + 15


def test_ranks_that_resume_end_with_the_bits_of_the_uninterrupted_run(series: Series) -> None:
    whole = series.seen("micro-2")[0]["weights"]
    for rank in series.seen("stopped"):
        assert all(torch.equal(rank["weights"][name], whole[name]) for name in whole)
    assert series.losses("stopped") == series.losses("micro-2")
    assert [e.val_loss for e in series.records("stopped")[1]] == [e.val_loss for e in series.records("micro-2")[1]]


def test_a_signal_in_a_validation_ends_it_for_all(series: Series) -> None:
    whole = series.seen("micro-2")[0]["weights"]
    for rank in series.seen("given-up"):
        assert rank["cut"] == (5, [0])
        assert all(torch.equal(rank["weights"][name], whole[name]) for name in whole)
    assert [e.val_loss for e in series.records("given-up")[1]] == [e.val_loss for e in series.records("micro-2")[1]]


def test_all_ranks_skip_the_steps_whose_numbers_are_bad_on_one(series: Series) -> None:
    first, second = series.seen("bad-numbers")
    assert first["skipped"] == second["skipped"] == 2
    assert all(torch.equal(first["weights"][name], second["weights"][name]) for name in first["weights"])
    assert all(weight.isfinite().all() for weight in first["weights"].values())
    assert [record.step for record in series.records("bad-numbers")[0] if record.train_loss is None] == [2]


def test_all_ranks_skip_a_step_if_one_shard_of_a_gradient_is_bad(series: Series) -> None:
    """In the second and the fourth step; each is saved, whole, while the next one runs."""
    assert series.seen("spoilt-shards") == [2, 2]
    run = RunFolder(series.folder / "spoilt-shards" / "whole")
    states = [store.load(run.checkpoint(step)) for step in range(1, 6)]
    for group in ("model", "optimizer"):
        saved = [state.groups[group] for state in states]
        unchanged = [all(torch.equal(one[name], two[name]) for name in one) for one, two in pairwise(saved)]
        assert unchanged == [True, False, True, False], group
        assert all(tensor.isfinite().all() for state in saved for tensor in state.values())


def test_shards_that_are_saved_and_resumed_make_the_bits_of_the_uninterrupted_run(series: Series) -> None:
    whole, cut = "spoilt-shards/whole", "spoilt-shards/cut"
    assert series.losses(cut) == series.losses(whole)
    assert read_card(series.folder / cut).skipped_steps == 2
    one, other = (store.load(RunFolder(series.folder / name).checkpoint(5)) for name in (whole, cut))
    for group in ("model", "optimizer", "bad_steps"):
        expected, found = one.groups[group], other.groups[group]
        assert all(torch.equal(found[name], expected[name]) for name in expected), group


@pytest.mark.parametrize("name", ["shards", "slices"])
def test_ranks_with_collective_forward_passes_agree_on_what_went_wrong(series: Series, name: str) -> None:
    said, _ = series.seen(f"exhausted-{name}")
    assert "the loss is not finite; first wrong in the forward pass: the weight blocks.1.mlp.down; data:" in said


def test_a_checkpoint_holds_the_random_states_of_every_rank(series: Series) -> None:
    found = store.load(RunFolder(series.folder / "micro-3").checkpoint(STEPS)).groups["random"]
    names = ("torch", "numpy", "numpy_normal", "python", "python_normal")
    assert {f"{rank}/{name}" for rank in range(3) for name in names} <= found.keys()


def test_a_state_of_any_sharding_fills_shards_of_rows(series: Series) -> None:
    assert series.seen("resharded") == [[[0, 1, 2, 3], [4, 5, 6, 7]], [[8, 9, 10, 11]]]


def test_all_answers_of_a_vote_are_equal(series: Series) -> None:
    assert series.seen("votes") == [[False, False, True, False]] * 3


def test_the_first_rank_alone_writes(series: Series) -> None:
    card = read_card(series.folder / "micro-3")
    assert card.ranks == 3
    assert "3 ranks: each takes 512 tokens of a step" in card.notes
    assert len(series.records("micro-3")[0]) == STEPS
    names = {path.name for path in (series.folder / "micro-3").iterdir()}
    assert names == {"card.json", "checkpoints", "config.json", "metrics.jsonl", "tokenizer.json"}


def test_no_gradient_wrapper_outlives_its_group(series: Series) -> None:
    """Such a one has been seen to wait for ever when it is let go."""
    assert all(rank["wrapper_gone"] for rank in series.seen("micro-2"))
