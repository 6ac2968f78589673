"""Settings of loop, records and rates that cannot work are refused with their flag."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import ConfigError
from paceline.recipes.presets import preset
from paceline.settings.data import BatchConfig
from paceline.settings.model import LossTerm
from paceline.settings.optim import AdamConfig, GroupConfig, MuonConfig
from paceline.settings.parallel import ParallelConfig
from paceline.settings.run import MetricsConfig, TrainConfig
from paceline.settings.schedule import Stage, schedule


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        (MetricsConfig(), "every", 0),
        (TrainConfig(), "threads", 0),
        (TrainConfig(), "threads", 5000),
        (TrainConfig(), "untimed_steps", -1),
        (TrainConfig(), "stop_after", 0),
        (MuonConfig(), "lr", -0.1),
        (MuonConfig(), "lr", math.nan),
        (MuonConfig(), "weight_decay", math.inf),
        (MuonConfig(), "momentum_warmup_steps", -1),
        (AdamConfig(), "embedding_lr", -1.0),
        (AdamConfig(), "lm_head_lr", math.nan),
        (AdamConfig(), "weight_decay", -0.1),
        (AdamConfig(), "eps", math.nan),
    ],
)
def test_a_setting_that_cannot_work_is_refused_with_its_flag(config: object, field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field.replace("_", "-")):
        replace(config, **{field: value})  # type: ignore[type-var]


def test_a_group_that_the_model_has_not_is_refused_with_the_config() -> None:
    """Before any device is looked at."""
    demo = preset("demo")
    with pytest.raises(ConfigError, match=r"optim\.groups: 'copy_head' is no group of this model"):
        replace(demo, optim=replace(demo.optim, groups=(GroupConfig(name="copy_head"),)))


def test_a_loss_term_named_twice_is_refused_with_the_config() -> None:
    """Its mean has one place in the metrics."""
    demo, term = preset("demo"), LossTerm(name="z_loss", weight=0.1)
    with pytest.raises(ConfigError, match=r"model\.loss_terms: a term is named twice"):
        replace(demo, model=replace(demo.model, loss_terms=(term, replace(term, weight=0.2))))


def test_end_of_text_is_a_token_of_the_vocabulary() -> None:
    demo = preset("demo")
    last = demo.model.vocab_size - 1
    assert replace(demo, data=replace(demo.data, end_of_text=last)).data.end_of_text == last
    with pytest.raises(ConfigError, match=f"--data.end-of-text {last + 1} is not below --model.vocab-size"):
        replace(demo, data=replace(demo.data, end_of_text=last + 1))


@given(sequences=st.integers(1, 300), length=st.sampled_from([1, 128, 1000, 65_536, 65_537]))
def test_a_forward_pass_takes_as_many_sequences_as_divide_the_batch_and_fit(sequences: int, length: int) -> None:
    fitting = [n for n in range(1, sequences + 1) if sequences % n == 0 and n * length <= 65_536]
    assert BatchConfig(tokens=sequences * length, sequence_tokens=length).micro_sequences == max(fitting, default=1)


@given(before=st.integers(1, 60), micro=st.integers(1, 60), after=st.integers(1, 60))
def test_a_batch_of_another_size_keeps_the_largest_micro_batch_that_divides_it(
    before: int, micro: int, after: int
) -> None:
    batch = BatchConfig(tokens=before * micro * 8, sequence_tokens=8, micro_tokens=micro * 8).with_tokens(after * 8)
    assert batch.sequences == after
    assert batch.micro_sequences == max(n for n in range(1, min(micro, after) + 1) if after % n == 0)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"tokens": 1000, "sequence_tokens": 300}, "--batch.tokens 1,000 is not a multiple .*; use 900 or"),
        ({"tokens": 100, "sequence_tokens": 300}, "use 300 or"),
        ({"tokens": 1200, "sequence_tokens": 300, "micro_tokens": 0}, "--batch.micro-tokens 0 must be"),
        ({"tokens": 1200, "sequence_tokens": 300, "micro_tokens": 400}, "--batch.micro-tokens 400 must be"),
        ({"tokens": 1200, "sequence_tokens": 300, "micro_tokens": 900}, "--batch.micro-tokens 900 must be"),
    ],
)
def test_a_batch_that_cannot_be_cut_is_refused(values: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        BatchConfig(**values)


@pytest.mark.parametrize(
    ("parallel", "flag"),
    [(ParallelConfig(fsdp=True), "--parallel.fsdp"),
     (ParallelConfig(context_parallel=2), "--parallel.context-parallel 2")],
)  # fmt: skip
def test_diagnostics_and_collective_forward_passes_exclude_each_other(parallel: ParallelConfig, flag: str) -> None:
    record = replace(preset("r18-softcap"), parallel=parallel)
    with pytest.raises(ConfigError, match=f"--metrics.diagnostics .* {flag} leaves on no rank"):
        replace(record, metrics=replace(record.metrics, diagnostics=True))


def test_candidates_of_a_sampled_softmax_fit_the_head_and_whole_sequences() -> None:
    record = preset("r18-softcap")
    with pytest.raises(ConfigError, match=r"--model.candidates 50,305 exceeds the 50,304 rows of the head"):
        replace(record.model, candidates=50_305)
    sampled = replace(record, model=replace(record.model, candidates=12_288))
    with pytest.raises(ConfigError, match=r"--parallel.context-parallel 2: --model.candidates are those of a whole"):
        replace(sampled, parallel=ParallelConfig(context_parallel=2))
    stages = (Stage(share=0.9), Stage(share=0.1, candidates=0))
    steps = replace(sampled, stages=stages, steps=10)
    assert [schedule(steps, step).candidates for step in (0, 8, 9, 10)] == [12_288, 12_288, 0, 0]
    with pytest.raises(ConfigError, match=r"stages: stage 2 has 60,000 candidates of 50,304 rows"):
        replace(sampled, stages=(stages[0], Stage(share=0.1, candidates=60_000)))
