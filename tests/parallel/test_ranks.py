"""Who a process is, what it does of a step and of Muon's work, and mistakes reported before anything starts."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis.strategies import integers, lists

from paceline.core.errors import ConfigError
from paceline.core.probe import Verdict
from paceline.optim.rule import all_here
from paceline.parallel.batch_split import rank_batch
from paceline.parallel.context_parallel import halo_sizes
from paceline.parallel.embedding_sync import rows_of
from paceline.parallel.gradients import replicate
from paceline.parallel.machine import inspect_machine
from paceline.parallel.muon_sharding import deal, share_muon_work
from paceline.parallel.ranks import SINGLE_PROCESS, DeferredAny, Ranks, ranks_from_environment
from paceline.parallel.rendezvous import joined
from paceline.recipes.presets import preset
from paceline.settings.data import BatchConfig
from paceline.settings.parallel import ParallelConfig
from paceline.settings.run import TrainConfig
from train.tiny import tiny_config


def test_torchrun_says_which_rank_a_process_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    assert ranks_from_environment() == Ranks(rank=5, world=8, local_rank=1)
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(ConfigError, match="WORLD_SIZE='many'"):
        ranks_from_environment()


def test_a_cluster_that_numbers_its_machines_is_not_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert ranks_from_environment() == SINGLE_PROCESS


def test_a_single_process_exchanges_nothing() -> None:
    """Neither a process group nor a wrapper, and no method waits for one."""
    model, values = torch.nn.Linear(2, 2), torch.tensor([3.0])
    with joined(SINGLE_PROCESS, torch.device("cpu"), {}, ParallelConfig()):
        assert not torch.distributed.is_initialized()
        assert SINGLE_PROCESS.sum_(values) is values
        assert SINGLE_PROCESS.largest_(values) is values
        assert SINGLE_PROCESS.from_first(lambda: "found") == "found"
        SINGLE_PROCESS.wait_for_all()
    assert replicate(model, SINGLE_PROCESS, ParallelConfig()) is model
    assert share_muon_work(SINGLE_PROCESS) is all_here
    vote = DeferredAny(SINGLE_PROCESS)
    assert [vote(True), vote(False)] == [True, False]


# ---- shares of a batch


@given(world=integers(1, 9), each=integers(1, 12), length=integers(1, 300))
def test_shares_are_equal_and_micro_batches_divide_them(world: int, each: int, length: int) -> None:
    batch = BatchConfig(tokens=world * each * length, sequence_tokens=length)
    share = rank_batch(batch, world)
    assert share.tokens * world == batch.tokens
    assert share.sequences % share.micro_sequences == 0


def test_a_micro_batch_is_never_larger_than_the_share() -> None:
    batch = BatchConfig(tokens=2048, sequence_tokens=256, micro_tokens=1024)
    assert [rank_batch(batch, world).micro_sequences for world in (1, 2, 4, 8)] == [4, 4, 2, 1]


@pytest.mark.parametrize(
    ("tokens", "micro", "world", "words"),
    [
        (1024, None, 3, "--batch.tokens 1,024: 4 sequences of 256 tokens cannot be shared equally by 3 ranks; "
                        "use 768 or 1,536, or another --nproc-per-node"),
        (512, None, 3, "use 768, or another"),
        (3072, 1024, 2, "--batch.micro-tokens 1,024 does not divide 1,536, the tokens of a step on each of 2 ranks; "
                        "use 768"),
    ],
)  # fmt: skip
def test_a_batch_that_ranks_cannot_share(
    tokens: int, micro: int | None, world: int, words: str, tmp_path: Path
) -> None:
    config = tiny_config(tmp_path)
    batch = BatchConfig(tokens=tokens, sequence_tokens=256, micro_tokens=micro)
    with pytest.raises(ConfigError) as error:
        inspect_machine(replace(config, batch=batch), Ranks(rank=0, world=world))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_patience_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--parallel\.timeout-s 0"):
        ParallelConfig(timeout_s=0)


# ---- shares of Muon's work


@given(counts=lists(integers(1, 60), max_size=6), world=integers(1, 17))
def test_every_matrix_is_dealt_once_and_no_rank_has_two_more_than_another(counts: list[int], world: int) -> None:
    dealt = deal(counts, world)
    for count, shares in zip(counts, dealt, strict=True):
        assert [i for share in shares for i in range(count)[share]] == list(range(count))
    totals = [sum(shares[rank].stop - shares[rank].start for shares in dealt) for rank in range(world)]
    assert max(totals) - min(totals) <= 1


@given(rows=integers(1, 300), world=integers(1, 40))
def test_every_row_of_a_table_has_one_rank(rows: int, world: int) -> None:
    dealt = [rows_of(rank, world, rows) for rank in range(world)]
    assert [row for share in dealt for row in range(rows)[share]] == list(range(rows))


def test_record_18_on_eight_ranks() -> None:
    """44 square matrices and 12 each of the MLP's: as equal as 68 can be."""
    sizes = [[share.stop - share.start for share in shares] for shares in deal([44, 12, 12], 8)]
    assert sizes == [[6, 6, 6, 6, 5, 5, 5, 5], [1, 1, 1, 1, 2, 2, 2, 2], [2, 2, 2, 2, 1, 1, 1, 1]]


@given(rows=integers(1, 70), world=integers(1, 9))
def test_rows_are_dealt_as_torch_deals_shards(rows: int, world: int) -> None:
    whole = torch.arange(rows)
    chunks = [chunk.tolist() for chunk in whole.chunk(world)]  # ranks beyond these keep none
    dealt = [whole[rows_of(rank, world, rows)].tolist() for rank in range(world)]
    assert dealt == chunks + [[]] * (world - len(chunks))


# ---- one sequence over several ranks


@given(blocks=integers(1, 6), parts=integers(1, 6), reach=integers(0, 4_000))
def test_a_halo_is_all_that_the_window_reaches_and_there_is(blocks: int, parts: int, reach: int) -> None:
    tokens = 128 * blocks
    for part in range(parts):
        sizes = halo_sizes(part, tokens, reach)
        assert sum(sizes) == min(reach, part * tokens)
        assert sizes[1:] == [tokens] * len(sizes[1:])  # whole slices, but for the farthest


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("r18-softcap", {"context_parallel": 0}, "--parallel.context-parallel 0 must be at least 1"),
        ("r18-softcap", {"context_parallel": 3}, "does not cut --batch.sequence-tokens 65,536 into whole blocks of "
                                                 "128; use sequences of 65,664"),
        ("r05-modern-arch", {"context_parallel": 2}, "--model.window.unit none lets every token see all before it"),
    ],
)  # fmt: skip
def test_a_split_that_makes_no_sense_is_refused(name: str, changes: dict[str, int], words: str) -> None:
    config = preset(name)
    with pytest.raises(ConfigError, match=re.escape(words)):
        replace(config, parallel=replace(config.parallel, **changes))


def test_ranks_that_cannot_share_sequences_are_refused() -> None:
    batch = BatchConfig(tokens=2048, sequence_tokens=512)
    for world in (1, 3):
        with pytest.raises(ConfigError, match=rf"--parallel\.context-parallel 2 does not divide .* ranks, {world};"):
            rank_batch(batch, world, 2)
    share = rank_batch(replace(batch, micro_tokens=1024), 4, 2)
    assert (share.sequences, share.micro_sequences, share.sequence_tokens) == (2, 2, 256)


def test_passes_of_several_ranks_are_not_compiled_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "paceline.parallel.machine.compiler", lambda _: Verdict(name="compiler", usable=True, reason="is here")
    )
    config = tiny_config(tmp_path, train=TrainConfig(device="cpu", compile=True))
    split = replace(config, parallel=ParallelConfig(context_parallel=2))
    resolved, machine = inspect_machine(split, Ranks(0, 2))
    assert not resolved.train.compile
    assert "not compiled, hence slower: under --parallel.context-parallel 2" in machine.lacks[0]
    for parallel in (ParallelConfig(), ParallelConfig(fsdp=True)):
        assert inspect_machine(replace(config, parallel=parallel), Ranks(0, 2))[0].train.compile
