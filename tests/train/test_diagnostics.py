"""What the diagnostics report is what they claim to measure, and a run that is measured is the run that is not."""

import copy
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from model.small import END_OF_TEXT, in_fp32, random_tokens, shaken, small, windows
from paceline.core.signals import StopRequest
from paceline.data.feed import DeviceBatch
from paceline.evaluate.validation import block_share
from paceline.metrics.metrics_file import read_metrics
from paceline.model.attention import attention_of, plan_reference
from paceline.model.gpt import GPT
from paceline.model.masks import MaskRule, dense_mask, document_ids
from paceline.parallel.machine import inspect_machine
from paceline.parallel.ranks import Ranks
from paceline.settings.backends import LmHeadConfig
from paceline.settings.model import LayerConfig, ModelConfig, WindowConfig
from paceline.settings.run import BadStepsConfig, RunConfig
from paceline.settings.schedule import schedule
from paceline.train import diagnostics
from paceline.train.assemble import assemble
from paceline.train.diagnostics import MicroGradients, model_extremes, noise_scale_tokens
from paceline.train.gradient_step import GradientStep, accumulate_gradient
from train.tiny import losses, run, tiny_config, weights

NAMES = {
    "gradient_norm",
    "gradient_variance",
    "noise_scale_tokens",
    "largest_logit",
    "largest_score",
    "update_ratio_matrices",
    "update_ratio_embeddings",
    "update_ratio_value_embeddings",
    "update_ratio_lm_head",
    "update_ratio_scalars",
}


NO_TERMS = torch.zeros(0)
"""The weights of no loss terms."""


def measured(config: RunConfig, *, every: int = 1) -> RunConfig:
    return replace(config, metrics=replace(config.metrics, diagnostics=True, every=every))


def extras(folder: Path) -> dict[int, dict[str, Any]]:
    return {record.step: record.extra for record in read_metrics(folder)[0]}


# ---- a measured run


def test_a_measured_run_has_the_bits_of_an_unmeasured_one(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "data", steps=6)
    run(config, tmp_path / "plain")
    run(measured(config), tmp_path / "measured")
    assert losses(tmp_path / "plain") == losses(tmp_path / "measured")
    one, other = weights(tmp_path / "plain"), weights(tmp_path / "measured")
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert all(extra == {} for extra in extras(tmp_path / "plain").values())
    for extra in extras(tmp_path / "measured").values():
        assert extra.keys() == NAMES
        assert all(isinstance(value, float) for value in extra.values())
    first, last = (extras(tmp_path / "measured")[step] for step in (1, 6))
    assert first["largest_logit"] == 0.0  # a head of zeros, as the loss of the first step sees it
    assert min(last["gradient_norm"], last["gradient_variance"], last["largest_logit"], last["largest_score"]) > 0


def test_one_micro_batch_tells_nothing_about_noise(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "data", steps=2)
    run(measured(replace(config, batch=replace(config.batch, micro_tokens=None))), tmp_path / "run")
    for extra in extras(tmp_path / "run").values():
        assert extra.keys() == NAMES
        assert extra["gradient_variance"] is extra["noise_scale_tokens"] is None


def test_only_recorded_steps_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    plain = diagnostics.model_extremes
    monkeypatch.setattr(diagnostics, "model_extremes", lambda *given: calls.append(given) or plain(*given))
    run(measured(tiny_config(tmp_path / "data", steps=5), every=3), tmp_path / "run")
    assert list(extras(tmp_path / "run")) == [3, 5]
    assert len(calls) == 2


class Operations(TorchDispatchMode):
    """Counts every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_switched_off_a_step_is_gradient_and_update_and_no_other_operation(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "data", bad_steps=BadStepsConfig(skip=False))
    tokens = torch.randint(0, 257, (4, 256), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    batch = DeviceBatch(tokens, tokens.roll(-1).long())

    def gradient_step(config: RunConfig) -> GradientStep:
        assembled = assemble(*inspect_machine(config))
        return GradientStep(assembled, StopRequest())

    counts: dict[str, Counter[str]] = {}
    for name, measure in (("off", False), ("on", True)):
        subject = gradient_step(config)
        with Operations() as seen:
            subject.take(schedule(config, 0), batch, measure=measure)
        counts[name] = seen.count
    bare = gradient_step(config)
    with Operations() as seen:
        bare.named(accumulate_gradient(bare.run.model, batch, bare.windows, bare.loss_weights, micro_sequences=2))
        bare.run.optimizer.step(schedule(config, 0).groups)
    assert counts["off"] == seen.count
    assert counts["on"].total() > counts["off"].total()


def test_the_model_does_not_know_of_them(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "data", lm_head=LmHeadConfig(backend="reference"))
    off, on = (assemble(*inspect_machine(c)).model for c in (config, measured(config)))
    assert on.plan is off.plan
    assert on.loss is off.loss
    assert [name for name, _ in on.named_parameters()] == [name for name, _ in off.named_parameters()]


# ---- the figures


def following(tokens: Tensor) -> Tensor:
    return tokens.roll(-1, dims=1)


def gradient_of(model: GPT, tokens: Tensor) -> Tensor:
    """Gradient of the mean loss as one fp64 vector."""
    parameters = list(model.parameters())
    found = torch.autograd.grad(model(tokens, following(tokens), windows(128)).main.mean(), parameters)
    return torch.cat([grad.flatten().double() for grad in found])


@pytest.mark.parametrize("micro", [1, 2])
def test_norm_and_variance_are_those_of_the_sample_of_micro_batches(micro: int) -> None:
    """The spread of the g about their mean, divided by n - 1 for the spread and by n for that of the mean."""
    model = shaken(in_fp32(small("r16-block-mask")))
    tokens = random_tokens(6, 128)
    each = torch.stack([gradient_of(model, part) for part in tokens.split(micro)])
    count, mean = len(each), each.mean(0)
    expected = (each - mean).square().sum() / (count - 1) / count

    model.zero_grad()
    batch = DeviceBatch(tokens, following(tokens))
    with MicroGradients(model.parameters()) as micros:
        accumulate_gradient(model, batch, windows(128), NO_TERMS, micro_sequences=micro)
    norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
    assert norm.item() == pytest.approx(mean.norm().item(), rel=1e-4)
    variance = micros.variance(norm)
    assert variance is not None
    assert variance.item() == pytest.approx(expected.item(), rel=1e-3)
    scale = noise_scale_tokens(norm, variance, tokens.numel())
    assert scale is not None
    assert scale.item() == pytest.approx((768 * expected / (mean.square().sum() - expected)).item(), rel=1e-2)


def test_equal_micro_batches_have_no_variance() -> None:
    model = shaken(small("r18-softcap"))
    tokens = random_tokens(1, 128).expand(4, -1)
    with MicroGradients(model.parameters()) as micros:
        accumulate_gradient(model, DeviceBatch(tokens, tokens), windows(128), NO_TERMS, micro_sequences=1)
    norm = torch.cat([p.grad.flatten().float() for p in model.parameters() if p.grad is not None]).norm()
    variance = micros.variance(norm)
    assert variance is not None
    assert abs(variance.item()) < 1e-5 * norm.item() ** 2


def dense_extremes(model: GPT, tokens: Tensor, window: Tensor) -> tuple[float, float]:
    """The same by a dense mask, all scores and all logits at once, in fp64."""
    config = model.config
    documents = document_ids(tokens, END_OF_TEXT) if config.document_mask else None
    mask = dense_mask(MaskRule.of(config), documents, tokens.size(1), window)
    plain, scores = plan_reference(config, documents, tokens.size(1), window[None]), []

    def attend(layer: LayerConfig, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shape = attention_of(layer)
        heads = torch.arange(shape.num_heads) // (shape.num_heads // shape.kv_heads)
        products = q.double().transpose(1, 2) @ k[:, :, heads].double().permute(0, 2, 3, 1) / shape.qk_dim**0.5
        scores.append(products[mask[:, None].expand_as(products)].abs().max().item())
        return plain(layer, q, k, v)

    with torch.no_grad():
        x = model.stream(tokens, attend, slice(tokens.size(1)))
        uncapped = copy.copy(model)
        uncapped.bounds = None, 0.0
        return max(scores), uncapped.head_of(x).abs().max().item()


CASES: dict[str, ModelConfig] = {
    "causal": small("r05-modern-arch"),
    "tokens": small("r14-value-embed"),
    "tokens in blocks": small("r15-unet-values"),
    "blocks": small("r18-softcap"),
    "grouped heads": replace(small("r18-softcap"), num_kv_heads=2),
    "documents only": replace(small("r18-softcap"), window=WindowConfig(unit="none")),
    "short window": replace(small("r18-softcap"), window=WindowConfig(unit="blocks", growth_tokens=0)),
}


@pytest.mark.parametrize("case", CASES)
def test_scores_and_logits_are_the_largest_that_count(case: str) -> None:
    model = shaken(CASES[case])
    tokens, window = random_tokens(1, 640), torch.tensor(128)
    score, logit = dense_extremes(model, tokens, window)
    found = model_extremes(model, DeviceBatch(tokens, tokens), windows(128))
    assert isinstance(found["largest_score"], Tensor)
    assert isinstance(found["largest_logit"], Tensor)
    assert found["largest_score"].item() == pytest.approx(score, rel=1e-5)
    assert found["largest_logit"].item() == pytest.approx(logit, rel=1e-5)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("query", "key"), [(0, 0), (1, 0), (255, 200), (256, 200), (639, 639), (639, 600)])
def test_the_largest_score_is_found_wherever_it_is(case: str, query: int, key: int) -> None:
    """Also at the first key, and where blocks of queries meet."""
    config = CASES[case]
    layer = config.layers[0]
    shape = attention_of(layer)
    q, k = torch.zeros(1, 640, shape.num_heads, shape.qk_dim), torch.zeros(1, 640, shape.kv_heads, shape.qk_dim)
    q[0, query, -1], k[0, key, -1] = 3.0, -2.0
    documents = torch.zeros(1, 640, dtype=torch.int32)
    found = diagnostics.largest_score(config, layer, q, k, documents, torch.tensor(128))
    seen = dense_mask(MaskRule.of(config), documents, 640, torch.tensor(128))[0, query, key]
    assert found.item() == pytest.approx(6.0 * shape.qk_dim * shape.scale if seen else 0.0)


def test_a_score_that_is_masked_does_not_count() -> None:
    model = shaken(small("r18-softcap"))
    tokens = random_tokens(1, 640)
    found = [model_extremes(model, DeviceBatch(tokens, tokens), windows(w))["largest_score"] for w in (128, 640)]
    assert found[0] < found[1]  # type: ignore[operator]


@dataclass(frozen=True)
class Alone(Ranks):
    """A rank whose values nobody else's join."""

    def largest_(self, values: Tensor) -> Tensor:
        return values


def test_of_the_global_batch_only_the_first_sequences_are_looked_at_on_any_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three sequences, of which rank 0 holds two and rank 1 one more of its two; ranks 2 and on hold none."""
    monkeypatch.setattr(diagnostics, "OBSERVED_TOKENS", 3 * 128)
    model = shaken(small("r18-softcap"))
    tokens = random_tokens(6, 128)
    each = [model_extremes(model, DeviceBatch(row, row), windows(128))["largest_score"] for row in tokens.split(1)]
    for rank, seen in enumerate([each[0:2], each[2:3], []]):
        mine = tokens[2 * rank : 2 * rank + 2]
        found = model_extremes(model, DeviceBatch(mine, mine), windows(128), Alone(rank, 3))["largest_score"]
        assert found == max(seen, default=0.0)


def test_a_model_without_attention_has_no_score() -> None:
    model = shaken(replace(small("r18-softcap"), layers_without_attention=tuple(range(12))))
    tokens = random_tokens(1, 128)
    assert model_extremes(model, DeviceBatch(tokens, tokens), windows(128))["largest_score"] is None


# ---- the share of full blocks


def test_the_share_of_full_blocks_is_counted_over_the_visited_ones(tmp_path: Path) -> None:
    config = small("r18-softcap")
    tokens, window = random_tokens(2, 1024, document_every=300), torch.tensor(384)
    mask = dense_mask(MaskRule.of(config), document_ids(tokens, END_OF_TEXT), 1024, window)
    blocks = mask.unflatten(1, (8, 128)).unflatten(3, (8, 128)).transpose(2, 3).flatten(3)
    full, visited = blocks.all(-1).sum(), blocks.any(-1).sum()
    found = block_share(config, tokens, window, end_of_text=END_OF_TEXT)
    assert found is not None
    assert found.item() == pytest.approx((full / visited).item())
    assert block_share(small("r05-modern-arch"), tokens, window, end_of_text=END_OF_TEXT) is None
    assert block_share(small("r14-value-embed"), tokens[:, :1000], window, end_of_text=END_OF_TEXT) is None


def test_every_validation_of_a_masked_preset_reports_it(tmp_path: Path) -> None:
    run(tiny_config(tmp_path / "data", steps=8), tmp_path / "run")
    shares = [record.extra["full_block_share"] for record in read_metrics(tmp_path / "run")[1]]
    assert shares[0] == 0.0  # one block a window: its diagonal is partial
    assert len(shares) == 3
    assert all(0.0 <= share < 1.0 for share in shares)


def test_of_two_windows_the_short_one_is_reported(tmp_path: Path) -> None:
    """Two blocks in one document: the short window sees the two diagonals, the long one a whole block, too."""
    config = tiny_config(tmp_path / "data", steps=1)
    long = replace(config.model.window, start_tokens=256, growth_tokens=0)
    model = replace(config.model, document_mask=False, long_window=long)
    assert config.batch.sequence_tokens == 256
    run(replace(config, model=model), tmp_path / "run")
    assert read_metrics(tmp_path / "run")[1][0].extra == {"full_block_share": 0.0}
    run(replace(config, model=replace(model, window=long)), tmp_path / "wide")
    assert read_metrics(tmp_path / "wide")[1][0].extra == {"full_block_share": pytest.approx(1 / 3)}
