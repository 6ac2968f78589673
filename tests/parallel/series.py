"""What four processes do in one launch, since a launch costs seconds: every experiment of `test_series.py`.

Each is done by the first so many of them, which form a group of their own; the others go ahead. What they see goes into
one file per experiment and rank, and the tests judge it."""

import contextlib
import faulthandler
import gc
import io
import itertools
import math
import os
import pickle
import shutil
import signal
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from commands.test_bench import TINY
from model.small import windows
from paceline.checkpoint import store
from paceline.checkpoint.run_folder import RunFolder
from paceline.checkpoint.save import Saver
from paceline.cli import main as main_of_paceline
from paceline.core.environment import code_digest
from paceline.core.errors import PacelineError
from paceline.data.feed import DeviceBatch
from paceline.evaluate import validation
from paceline.metrics.card import read_card
from paceline.optim.rules import muon
from paceline.parallel import gradients, rendezvous
from paceline.parallel.embedding_sync import DeferredAllReduce, EmbeddingSync, part_here
from paceline.parallel.gradients import add_up
from paceline.parallel.machine import inspect_machine
from paceline.parallel.muon_sharding import share_muon_work
from paceline.parallel.ranks import DeferredAny, Ranks, ranks_from_environment
from paceline.parallel.rendezvous import joined, open_store
from paceline.settings.parallel import ParallelConfig
from paceline.settings.run import RunConfig
from paceline.train import gradient_step, hooks
from paceline.train.assemble import assemble
from paceline.train.gradient_step import accumulate_gradient
from paceline.train.loop import training_batches
from paceline.train.run import resume_run, start_run
from parallel import same_run
from train.tiny import narrow_record, tiny_config

STEPS = 10
HANGS_S = 120
"""After which a rank says where it stands in an experiment and ends; it may have to wait for others to begin."""
SEQUENCES, LENGTH = 12, 128
VALIDATED = 7
"""Sequences of a validation: no number of ranks has equal shares of it."""
SLOW_SUM_S = 0.02
CPU = torch.device("cpu")
STACKS = [(5, 8, 8), (1, 4, 8), (3, 8, 4), (12, 6, 6)]
"""(matrices, rows, columns): fewer than ranks, more, and multiples of them."""


class Watch:
    """What one rank does at each step of a run, seen from around the gradient."""

    def __init__(self, at_step: Callable[[int], None] = lambda _: None) -> None:
        self.at_step = at_step
        self.tokens: list[Tensor] = []
        self.exchanged: list[int] = []
        """Gradient elements that went through the exchange, by step."""
        self.in_buckets: list[tuple[int, int, int]] = []
        """Gradients whose memory is a bucket's: before the step and after it, of so many that are not tables'."""
        self._buckets: set[int] = set()

    def __enter__(self) -> "Watch":
        self._patches = [
            patch.object(gradient_step, "accumulate_gradient", self._gradient),
            patch.object(gradients, "add_up", self._exchange),
            patch.object(EmbeddingSync, "start_sums", self._sum_tables(EmbeddingSync.start_sums)),
        ]
        for each in self._patches:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._patches:
            each.stop()

    def _exchange(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # as DDP demands it
        self.exchanged[-1] += bucket.buffer().numel()
        self._buckets.add(bucket.buffer().untyped_storage().data_ptr())
        return add_up(state, bucket)

    def _sum_tables(self, start_sums: Callable[[EmbeddingSync], None]) -> Callable[[EmbeddingSync], None]:
        def counted(tables: EmbeddingSync) -> None:
            self.exchanged[-1] += sum(table.numel() for table in tables.params)
            start_sums(tables)

        return counted

    def _gradient(self, model: torch.nn.Module, batch: DeviceBatch, *given: Any, **options: Any) -> Tensor:
        self.at_step(len(self.tokens))
        self.model = weakref.ref(model)
        self.tokens.append(batch.tokens.clone())
        self.exchanged.append(0)
        before = self._held(model)
        self._buckets.clear()
        loss = accumulate_gradient(model, batch, *given, **options)
        tables = set()
        if isinstance(model, gradients.Replica) and model.tables is not None:
            tables = {id(table) for table in model.tables.params}
        asking = [p for p in model.parameters() if p.requires_grad and id(p) not in tables]
        self.in_buckets.append((before, self._held(model), len(asking)))
        return loss

    def _held(self, model: torch.nn.Module) -> int:
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        return sum(grad.untyped_storage().data_ptr() in self._buckets for grad in grads)

    def seen(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "exchanged": self.exchanged, "in_buckets": self.in_buckets}


def base(data: Path, *, micro_tokens: int | None = LENGTH) -> RunConfig:
    config = tiny_config(data, steps=STEPS)
    batch = replace(config.batch, tokens=SEQUENCES * LENGTH, sequence_tokens=LENGTH, micro_tokens=micro_tokens)
    model = replace(config.model, lm_head_init="uniform", zero_init_outputs=False)  # zeros: gradients of mere rounding
    evaluate = replace(config.evaluate, every=5, tokens=VALIDATED * LENGTH)
    rare = replace(config.checkpoint, every=None)
    return replace(config, model=model, batch=batch, evaluate=evaluate, checkpoint=rare)


def trained(config: RunConfig, folder: Path, ranks: Ranks, watch: Watch | None = None) -> dict[str, Any]:
    """A run, what each step saw, and the weights that this rank ends with."""
    with watch or Watch() as watched:
        done = start_run(config, RunFolder(folder), ranks)
    return watched.seen() | {
        "steps_done": done.card.steps_done,
        "exit_code": done.exit_code,
        "weights": weights_of(done.run.model),
        "wrapper_gone": watched.model() is None,
    }


def weights_of(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def stopped_and_resumed(config: RunConfig, folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Only the last rank receives the signal, in its fourth step."""

    def hear(step: int) -> None:
        if step == 3 and ranks.rank == ranks.world - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    cut = trained(config, folder, ranks, Watch(hear))
    with fresh_corner(ranks, "resumed"):
        done = resume_run(config, RunFolder(folder), ranks)
    return {"cut": cut["steps_done"], "exit_code": cut["exit_code"], "weights": weights_of(done.run.model)}


def bad_numbers(config: RunConfig, folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Only the last rank sees them: in its share of the loss of the second step, and in its own gradient of a table,
    before it joins the sum, in the fourth."""
    last, steps = ranks.rank == ranks.world - 1, itertools.count()

    def gradient(*given: Any, **options: Any) -> Tensor:
        loss = accumulate_gradient(*given, **options)
        return loss * math.nan if last and next(steps) == 1 else loss

    sums, plain = itertools.count(), EmbeddingSync.start_sums

    def start_sums(tables: EmbeddingSync) -> None:
        if last and next(sums) == 3:
            tables.params[0].grad[0] = math.nan
        plain(tables)

    with (
        patch.object(gradient_step, "accumulate_gradient", gradient),
        patch.object(EmbeddingSync, "start_sums", start_sums),
    ):
        done = start_run(config, RunFolder(folder), ranks)
    return {"skipped": done.card.skipped_steps, "weights": weights_of(done.run.model)}


@contextlib.contextmanager
def bad_shards(ranks: Ranks) -> Iterator[None]:
    """Only the last rank sees bad numbers: in its rows of a matrix's gradient in the second step, and in its own
    gradient of a scalar, before it joins the sum, in the fourth."""
    last, steps, sums, plain = (
        ranks.rank == ranks.world - 1,
        itertools.count(),
        itertools.count(),
        DeferredAllReduce.start_sums,
    )

    def gradient(model: torch.nn.Module, *given: Any, **options: Any) -> Tensor:
        loss = accumulate_gradient(model, *given, **options)
        if last and next(steps) == 1:
            part_here(the(model, "blocks.1.mlp.down").grad)[0, 0] = math.nan
        return loss

    def start_sums(late: DeferredAllReduce) -> None:
        if last and next(sums) == 3:
            next(param.grad for param in late.params if param.grad is not None)[0] = math.inf
        plain(late)

    with (
        patch.object(gradient_step, "accumulate_gradient", gradient),
        patch.object(DeferredAllReduce, "start_sums", start_sums),
    ):
        yield


def the(model: torch.nn.Module, name: str) -> torch.nn.Parameter:
    """A parameter by name, whatever is around its model."""
    return next(parameter for own, parameter in model.named_parameters() if own.endswith(name))


def spoilt_shards(config: RunConfig, folder: Path, ranks: Ranks) -> int:
    """A run with such numbers in one go, and one that is cut before the last of them and resumed."""
    with bad_shards(ranks):
        done = start_run(config, RunFolder(folder / "whole"), ranks)
    with bad_shards(ranks):
        cut = replace(config, train=replace(config.train, stop_after=3))
        with fresh_corner(ranks, "cut"):
            start_run(cut, RunFolder(folder / "cut"), ranks)
        with fresh_corner(ranks, "resumed"):
            resume_run(config, RunFolder(folder / "cut"), ranks)
    return done.card.skipped_steps


def exhausted(config: RunConfig, folder: Path, ranks: Ranks) -> str:
    """What a run says at its end in which the last rank's part of a weight has gone bad."""

    def gradient(model: torch.nn.Module, *given: Any, **options: Any) -> Tensor:
        if ranks.rank == ranks.world - 1:
            part_here(the(model, "blocks.1.mlp.down").detach()).fill_(math.nan)
        return accumulate_gradient(model, *given, **options)

    config = replace(config, bad_steps=replace(config.bad_steps, limit=1))
    with patch.object(gradient_step, "accumulate_gradient", gradient), contextlib.suppress(PacelineError):
        start_run(config, RunFolder(folder), ranks)
    gc.collect()  # first the wrapper around the model, which the error held
    dist.destroy_process_group()  # a run that fails leaves it, since others may not answer any more
    return read_card(folder).notes[-1] if ranks.is_main else ""


def given_up(config: RunConfig, folder: Path, ranks: Ranks) -> dict[str, Any]:
    """The last rank receives a signal when it begins the second validation, which is not finished."""
    validations = itertools.count()

    def validate(*given: Any, **options: Any) -> Any:
        if ranks.rank == ranks.world - 1 and next(validations) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return validation.validate(*given, **options)

    with patch.object(hooks, "validate", validate):
        cut = start_run(config, RunFolder(folder), ranks).card
    with fresh_corner(ranks, "validated"):
        done = resume_run(config, RunFolder(folder), ranks)
    return {"cut": (cut.steps_done, [row[0] for row in cut.losses]), "weights": weights_of(done.run.model)}


def resharded(folder: Path, ranks: Ranks) -> list[list[float]]:
    """A state sharded by columns is saved whole and fills tensors that are sharded by rows: this rank's part of it."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh  # takes a second

    with joined(ranks, CPU, {}, ParallelConfig()):
        mesh = init_device_mesh("cpu", (ranks.world,))
        columns = distribute_tensor(torch.arange(12.0).view(3, 4), mesh, [Shard(1)])
        state = store.Checkpoint(1, {"model": {"w": columns}, "optimizer": {"step": torch.tensor(1)}}, {})
        with Saver(RunFolder(folder), keep=2, writes=ranks.is_main) as saver:
            saver.save(state)
        ranks.wait_for_all()
        rows = distribute_tensor(torch.zeros(3, 4), mesh, [Shard(0)])
        store.load_weights_into(RunFolder(folder).checkpoint(1), {"w": rows})
        return rows.to_local().tolist()  # type: ignore[no-any-return]


def matrices(ranks: Ranks) -> dict[str, Any]:
    """Muon's work on stacks of different sizes, and how many matrices this rank worked on."""
    worked = []

    def doubled(stack: Tensor) -> Tensor:
        worked.append(len(stack))
        return (2 * stack).bfloat16().mT.contiguous().mT  # not contiguous, as a tall matrix's is

    given = [torch.arange(n * r * c, dtype=torch.float32).view(n, r, c) for n, r, c in STACKS]
    with joined(ranks, CPU, {}, ParallelConfig()):
        return {"stacks": list(share_muon_work(ranks)(doubled, given, [])), "worked": sum(worked)}


def order_of_a_step(config: RunConfig, folder: Path, ranks: Ranks) -> list[str]:
    """What happens to tables and matrices after the backward pass of one step, in order."""
    seen: list[str] = []

    def noting(owner: Any, name: str) -> Any:
        original = getattr(owner, name)

        def noted(*arguments: Any, **options: Any) -> Any:
            seen.append(name)
            return original(*arguments, **options)

        return patch.object(owner, name, noted)

    watched = ("start_sums", "await_gradients", "start_gather", "finish_gathers")
    with contextlib.ExitStack() as stack:
        for name in watched:
            stack.enter_context(noting(EmbeddingSync, name))
        for name in ("nesterov_", "move_"):
            stack.enter_context(noting(muon, name))
        start_run(replace(config, steps=1), RunFolder(folder), ranks)
    return [name for name, _ in itertools.groupby(seen)]


def resumed(config: RunConfig, cut: Path, folder: Path, ranks: Ranks) -> dict[str, Any]:
    """A run that other ranks have left behind, continued by these."""
    if ranks.is_main:
        shutil.copytree(cut, folder)
    done = resume_run(config, RunFolder(folder), ranks)
    moments = {name: slot.kept().numel() for name, slot in done.run.optimizer._slots().items() if "adam" in name}
    return {"weights": weights_of(done.run.model), "moments": moments}


def in_slices(data: Path, parts: int, **train: Any) -> RunConfig:
    """Sequences of four blocks, under windows that grow from one block to three, split over so many ranks."""
    config = replace(base(data), steps=4)
    window = replace(config.model.window, start_tokens=128, growth_tokens=3 * 128)
    return replace(
        config,
        model=replace(config.model, window=window),
        batch=replace(config.batch, tokens=4 * 512, sequence_tokens=512, micro_tokens=2 * 512),
        evaluate=replace(config.evaluate, every=None, tokens=3 * 512),
        train=replace(config.train, **train),
        parallel=replace(config.parallel, context_parallel=parts),
    )


def fully_sharded(config: RunConfig) -> RunConfig:
    return replace(config, parallel=replace(config.parallel, fsdp=True))


def batches_read(config: RunConfig, folder: Path, ranks: Ranks) -> Tensor:
    """The tokens of every step of a run, (steps, sequences, length), as this rank has read them."""
    tokens: list[Tensor] = []

    def gradient(model: torch.nn.Module, batch: DeviceBatch, *given: Any, **options: Any) -> Tensor:
        tokens.append(batch.tokens.clone())
        return accumulate_gradient(model, batch, *given, **options)

    with patch.object(gradient_step, "accumulate_gradient", gradient):
        start_run(config, RunFolder(folder), ranks)
    return torch.stack(tokens)


def gradient_norm(config: RunConfig, ranks: Ranks) -> float:
    """Of the first step. Losses and weights would hardly show a wrong scale: both optimizers normalise."""
    resolved, machine = inspect_machine(config, ranks)
    with joined(ranks, CPU, {}, ParallelConfig()):
        run = assemble(resolved, machine, ranks)
        batch, _ = next(training_batches(run))
        replica = gradients.replicate(run.forward, ranks, config.parallel, run.sync)
        accumulate_gradient(replica, batch, windows(LENGTH), torch.zeros(0), micro_sequences=2, ranks=ranks)
        norm = run.optimizer.gradient_norm().item()
        del replica  # before its group, or the two may wait for each other for ever
        return norm


def kept_in_shards(config: RunConfig, folder: Path, ranks: Ranks, cut: Path | None = None) -> dict[str, int]:
    """A run of shards, from its start or on from where others have cut one; elements of weights and slots that this
    rank has kept at its end."""
    if cut is None:
        run = start_run(config, RunFolder(folder), ranks).run
    else:
        if ranks.is_main:
            shutil.copytree(cut, folder)
        run = resume_run(config, RunFolder(folder), ranks).run
    own = {name: run.sync.own(weight, weight).numel() for name, weight in run.model.named_parameters()}
    return own | {name: slot.kept().numel() for name, slot in run.optimizer._slots().items()}


def commanded(words: dict[str, object], flags: list[str], verb: list[str], ranks: Ranks) -> str:
    """A command by these ranks, as torchrun would start it; what this rank prints."""
    argv = [*verb, "demo", *(str(word) for pair in (TINY | words).items() for word in pair), *flags]
    place = {"RANK": ranks.rank, "LOCAL_RANK": ranks.rank, "WORLD_SIZE": ranks.world}
    said = io.StringIO()
    with patch.dict(os.environ, {name: str(value) for name, value in place.items()}), contextlib.redirect_stdout(said):
        assert main_of_paceline(argv) == 0
    return said.getvalue()


def benched(words: dict[str, object], flags: list[str], ranks: Ranks) -> str:
    """`paceline bench step` where a sum over ranks is slow, so that noise cannot hide it."""
    all_reduce = dist.all_reduce

    def slow(*arguments: Any, **options: Any) -> Any:
        time.sleep(SLOW_SUM_S)
        return all_reduce(*arguments, **options)

    with patch.object(dist, "all_reduce", slow):
        return commanded(words, ["--no-profile", *flags], ["bench", "step"], ranks)


def votes(ranks: Ranks) -> list[bool]:
    """The last rank posts True at its second call."""
    with joined(ranks, CPU, {}, ParallelConfig()):
        vote = DeferredAny(ranks)
        return [vote(call == 1 and ranks.rank == ranks.world - 1) for call in range(4)]


def fresh_corner(ranks: Ranks, name: str) -> Any:
    """Groups of one launch share torchrun's store; while entered, a new one has names of its own there."""
    corner = dist.PrefixStore(name, open_store(ranks, HANGS_S))
    return patch.object(rendezvous, "open_store", lambda *_: corner)


def experiments(data: Path, out: Path, largest: int) -> dict[str, tuple[int, Callable[[Ranks], Any]]]:
    """Name to the number of ranks and what they do; what is tried for every number of ranks, up to the `largest`."""
    plain, whole = base(data), base(data, micro_tokens=None)
    found: dict[str, tuple[int, Callable[[Ranks], Any]]] = {}

    def run(name: str, world: int, config: RunConfig) -> None:
        found[name] = world, lambda ranks: trained(config, out / name, ranks)

    for world in range(1, largest + 1):
        run(f"micro-{world}", world, plain)
        run(f"whole-{world}", world, whole)
        found[f"matrices-{world}"] = world, matrices
    for name, config in (("micro", plain), ("whole", whole)):
        run(f"{name}-no-views", 2, replace(config, steps=3, parallel=replace(config.parallel, bucket_views=False)))
    padded = replace(plain, steps=3, data=replace(plain.data, align_documents=True))
    measured = replace(plain, steps=3, metrics=replace(plain.metrics, diagnostics=True))
    residual = narrow_record("r13-window-warmup", data, steps=2)
    for world in (1, 2):
        run(f"padded-{world}", world, padded)
        run(f"measured-{world}", world, measured)
        run(f"residual-{world}", world, residual)
    sharded = replace(whole, parallel=replace(whole.parallel, zero1=True))
    run("sharded-3", 3, sharded)
    clipped = replace(whole, steps=3, optim=replace(whole.optim, clip_norm=1e-3))
    run("clipped-2", 2, clipped)
    run("clipped-sharded-2", 2, replace(clipped, parallel=sharded.parallel))
    run("cut-3", 3, replace(sharded, train=replace(whole.train, stop_after=5)))
    for world in range(1, largest + 1):
        found[f"resumed-{world}"] = world, partial(resumed, sharded, out / "cut-3", out / f"resumed-{world}")
    shards = fully_sharded(plain)
    for name, world, config in (("residual", 2, residual), ("padded", 2, padded), ("clipped", 2, clipped)):
        found[f"{name}-shards"] = world, partial(kept_in_shards, fully_sharded(config), out / f"{name}-shards")
    bf16_tables = replace(narrow_record("r18-softcap", data, steps=2), train=replace(plain.train, recompute=True))
    run("bf16-tables", 2, bf16_tables)
    found["bf16-tables-shards"] = 2, partial(kept_in_shards, fully_sharded(bf16_tables), out / "bf16-tables-shards")
    cut = replace(shards, train=replace(plain.train, stop_after=5))
    found["cut-shards"] = 3, partial(kept_in_shards, cut, out / "cut-shards")
    found["one-after-shards"] = 1, partial(resumed, plain, out / "cut-shards", out / "one-after-shards")
    found["two-shards-after-three"] = (
        2,
        partial(kept_in_shards, shards, out / "two-shards-after-three", cut=out / "cut-shards"),
    )
    for name, world, config in (("alone", 1, plain), ("replicas", 2, plain), ("shards", 3, shards)):
        found[f"norm-{name}"] = world, partial(gradient_norm, config)
    for name, world, config in (
        ("slices-1", 1, in_slices(data, 1)),
        ("slices-2", 2, in_slices(data, 2)),
        ("slices-4", 4, in_slices(data, 4)),
        ("slices-2x2", 4, in_slices(data, 2, recompute=True)),
        ("slices-2x2-shards", 4, fully_sharded(in_slices(data, 2))),
    ):
        found[name] = world, partial(batches_read, config, out / name)
    for way in same_run.SAMPLE if largest < 4 else same_run.ALL:
        name, config = same_run.name_of(way), same_run.config_of(data, way)
        found[name] = way[1], partial(batches_read, config, out / name)
    for name, flags in (("bench", []), ("bench-shards", ["--parallel.fsdp"])):
        words = {"--data.dir": data, "--points": 1, "--repeats": 2, "--out": out / f"{name}.json"}
        found[name] = 2, partial(benched, words, flags)
    words = {"--data.dir": data, "--out": out / "command", "--steps": 2, "--evaluate.tokens": 768}
    found["command"] = 2, partial(commanded, words, ["--parallel.fsdp"], ["train"])
    found["order"] = 2, partial(order_of_a_step, sharded, out / "order")
    found["stopped"] = 2, lambda ranks: stopped_and_resumed(plain, out / "stopped", ranks)
    found["bad-numbers"] = 2, lambda ranks: bad_numbers(replace(plain, steps=5), out / "bad-numbers", ranks)
    guarded = fully_sharded(replace(plain, steps=5, checkpoint=replace(plain.checkpoint, every=1, keep=6)))
    found["spoilt-shards"] = 2, partial(spoilt_shards, guarded, out / "spoilt-shards")
    for name, config in (("shards", fully_sharded(plain)), ("slices", in_slices(data, 2))):
        found[f"exhausted-{name}"] = 2, partial(exhausted, config, out / f"exhausted-{name}")
    found["given-up"] = 2, lambda ranks: given_up(plain, out / "given-up", ranks)
    found["resharded"] = 2, lambda ranks: resharded(out / "resharded", ranks)
    found["votes"] = 3, votes
    return found


def main(data: Path, out: Path, largest: int) -> None:
    code_digest()  # now, and kept: someone may be editing while this runs
    gc.freeze()  # what was imported stays: the collections at each run's end need not look at it
    me = ranks_from_environment()
    for name, (world, experiment) in experiments(data, out, largest).items():
        if me.rank < world:
            faulthandler.dump_traceback_later(HANGS_S, exit=True)
            ranks = Ranks(rank=me.rank, world=world, local_rank=me.rank)
            with fresh_corner(ranks, name):
                (out / f"{name}.{me.rank}.pickle").write_bytes(pickle.dumps(experiment(ranks)))
            assert not dist.is_initialized(), "a run leaves no process group behind"


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
