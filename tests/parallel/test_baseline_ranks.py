"""The baselines, with dropout, and a sampled softmax, by several ranks: replicas, shared rows, shards of everything,
slices of a sequence."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.checkpoint.run_folder import RunFolder
from paceline.core.schema import from_dict, to_dict
from paceline.parallel.ranks import ranks_from_environment
from paceline.recipes.presets import preset
from paceline.settings.data import BatchConfig
from paceline.settings.model import WindowConfig
from paceline.settings.parallel import ParallelConfig
from paceline.settings.run import CheckpointConfig, RunConfig
from paceline.settings.schedule import Stage
from paceline.train.run import resume_run, start_run
from parallel.launch import torchrun
from parallel.series import fresh_corner
from train.tiny import losses, narrow_record, weights

pytestmark = pytest.mark.journey
WAYS = {
    "replicas": ParallelConfig(),
    "rows": ParallelConfig(zero1=True),
    "shards": ParallelConfig(fsdp=True),
    "slices": ParallelConfig(context_parallel=2),
}


def config_of(name: str, data: Path, way: ParallelConfig) -> RunConfig:
    """Four steps of two layers; a window, so that a sequence can be cut."""
    config = narrow_record(name, data, steps=4)
    window = WindowConfig(unit="tokens", start_tokens=64, growth_tokens=64, quantum_tokens=64)
    model = replace(config.model, num_layers=2, dropout=0.2, window=window, qkv="separate")
    batch = BatchConfig(tokens=1024, sequence_tokens=256, micro_tokens=512)
    rates = replace(preset(name).optim.schedule, warmup_steps=1)
    optim = replace(config.optim, schedule=rates)
    evaluate = replace(config.evaluate, tokens=256)
    return replace(config, model=model, batch=batch, optim=optim, evaluate=evaluate, parallel=way)


def sampled(folder: Path, way: ParallelConfig) -> RunConfig:
    """With a sampled softmax over another number of ids in each half of the run."""
    config = config_of("llama-style", folder / "data", way)
    stages = (Stage(share=0.5), Stage(share=0.5, candidates=100))
    return replace(config, model=replace(config.model, candidates=64), stages=stages)


def main(folder: Path) -> None:
    """What each rank does: every run of `runs.json`."""
    ranks = ranks_from_environment()
    for name, config in json.loads((folder / "runs.json").read_text()).items():
        read = from_dict(RunConfig, config)
        with fresh_corner(ranks, name):
            start_run(read, RunFolder(folder / name), ranks)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("baselines")
    configs = {
        f"{name}-{way}": to_dict(config_of(name, folder / "data", how))
        for name in ("r01-baseline", "llama-style")
        for way, how in WAYS.items()
    }
    configs |= {f"sampled-{way}": to_dict(sampled(folder, WAYS[way])) for way in ("replicas", "shards")}
    (folder / "runs.json").write_text(json.dumps(configs))
    launch = torchrun(2, "parallel.test_baseline_ranks", folder)
    said, _ = launch.communicate()
    assert launch.returncode == 0, said
    return folder


@pytest.mark.parametrize("name", ["r01-baseline", "llama-style"])
def test_two_ranks_train_as_one_does_dropout_included(name: str, runs: Path) -> None:
    config = config_of(name, runs / "data", ParallelConfig())
    start_run(config, RunFolder(runs / name))
    assert losses(runs / name)[-1] < losses(runs / name)[0]  # type: ignore[operator]
    for way in WAYS:
        assert losses(runs / f"{name}-{way}") == pytest.approx(losses(runs / name), rel=1e-5), way
        for key, tensor in weights(runs / f"{name}-{way}").items():
            off = (tensor - weights(runs / name)[key]).abs()
            if "key_bias" not in key:  # whose gradient is rounding
                assert off.mean() < 1e-5, (way, key)


@pytest.mark.parametrize("other", ["micro-batches", "replicas", "shards"])
def test_candidates_are_those_of_the_sequence_however_the_batch_is_cut(other: str, runs: Path, tmp_path: Path) -> None:
    config = sampled(runs, ParallelConfig())
    start_run(config, RunFolder(tmp_path / "whole"))
    if other == "micro-batches":
        batch = replace(config.batch, micro_tokens=256)
        start_run(replace(config, batch=batch), RunFolder(tmp_path / "cut"))
    cut = tmp_path / "cut" if other == "micro-batches" else runs / f"sampled-{other}"
    assert losses(cut) == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)
    all_ids = replace(config, model=replace(config.model, candidates=None), stages=())
    start_run(all_ids, RunFolder(tmp_path / "all"))
    for mine, of_all in zip(losses(cut), losses(tmp_path / "all"), strict=True):
        assert mine < of_all - 0.1  # type: ignore[operator]


@pytest.mark.parametrize("name", ["r01-baseline", "llama-style"])
def test_a_resumed_run_drops_what_the_uninterrupted_one_drops(name: str, tmp_path: Path) -> None:
    config = config_of(name, tmp_path / "data", ParallelConfig())
    config = replace(config, checkpoint=CheckpointConfig(every=2))
    start_run(config, RunFolder(tmp_path / "whole"))
    cut = replace(config, train=replace(config.train, stop_after=2))
    start_run(cut, RunFolder(tmp_path / "cut"))
    resume_run(config, RunFolder(tmp_path / "cut"))
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    whole, resumed = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert all(resumed[key].equal(whole[key]) for key in whole)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
