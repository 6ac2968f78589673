"""What must hold before and during the first updates: first losses in closed form, and who moves when."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from model.small import RECORDS, random_tokens, small, windows
from optim.building import optimizer_of, settings_of
from paceline.model.gpt import GPT
from paceline.recipes.presets import preset
from paceline.settings.model import ModelConfig
from paceline.settings.spec import describe

ZERO_HEAD = [name for name in RECORDS if name >= "r13"]
OUTPUTS = ("attention.output", "mlp.down")


def first_loss(config: ModelConfig, *, tokens: int) -> float:
    model = GPT(config, end_of_text=50_256)
    ids = torch.randint(0, 50_257, (1, tokens + 1), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return float(model(ids[:, :-1], ids[:, 1:], windows(128)).main.double().mean())


@pytest.mark.parametrize("name", ZERO_HEAD)
def test_a_zero_head_starts_at_the_logarithm_of_its_rows(name: str) -> None:
    """ln 50,304 with the full vocabulary, for any softcap, and for record 17's unpadded tables too."""
    config = small(name, head_dim=4, vocab_size=50_257)
    assert config.lm_head_rows == 50_304
    assert config.embedding_rows == (50_257 if name == "r17-sparse-values" else 50_304)
    assert first_loss(config, tokens=128) == pytest.approx(10.825840, abs=1.5e-6)


def record_5(*, norm_eps: float | None = None) -> ModelConfig:
    model = preset("r05-modern-arch").model
    precision = replace(model.precision, compute="fp32")
    return replace(model, num_layers=1, precision=precision, norm_eps=norm_eps or model.norm_eps)


def test_record_5_starts_at_sixteen() -> None:
    """Own-token logit 768 / sqrt(3 · 768) = 16, the others N(0, 1/3): ln(e¹⁶ + 50303 e^(1/6)) when the target is
    another token. Zero blocks, so one of the twelve is enough."""
    assert first_loss(record_5(), tokens=384) == pytest.approx(16.0067, abs=0.03)


def test_record_5_would_start_near_eleven_with_the_epsilon_of_bf16() -> None:
    assert first_loss(record_5(norm_eps=2.0**-7), tokens=64) == pytest.approx(11.0, abs=0.3)


class Run:
    """A narrow record, trained on one batch."""

    def __init__(self, name: str) -> None:
        self.model = GPT(small(name, vocab_size=400), end_of_text=7)
        parts = {spec.name: spec.parts for spec in describe(self.model.config).parameters if spec.parts}
        self.optimizer = optimizer_of(self.model.parameter_groups(), preset(name).optim, parts=parts)
        self.tokens = random_tokens(1, 128, vocab_size=400, document_every=50)

    def gradients(self) -> dict[str, Tensor]:
        self.optimizer.zero_grad()
        targets = self.tokens.roll(-1, dims=1)
        self.model(self.tokens, targets, windows(256)).main.mean().backward()
        named = self.model.named_parameters()
        return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in named}

    def step(self) -> dict[str, Tensor]:
        """One update; the gradients it used."""
        gradients = self.gradients()
        self.optimizer.step(settings_of(self.optimizer, momentum=0.85))
        return gradients

    def values(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}


def non_zero(tensors: dict[str, Tensor]) -> set[str]:
    return {name for name, tensor in tensors.items() if bool((tensor != 0).any())}


def moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    return {name for name in before if not torch.equal(before[name], after[name])}


@pytest.mark.parametrize("name", ZERO_HEAD)
def test_a_zero_head_lets_nobody_else_move_at_step_0(name: str) -> None:
    run = Run(name)
    before = run.values()
    assert non_zero(run.step()) == {"head"}
    assert moved(before, run.values()) == {"head"}, "a zero gradient gives a zero update, from Muon and from Adam"


@pytest.mark.parametrize("name", ZERO_HEAD)
def test_output_matrices_move_at_step_1_and_their_inputs_at_step_2(name: str) -> None:
    run = Run(name)
    every = set(run.values())
    run.step()
    second = non_zero(run.step())
    late = {"attention.query", "attention.key", "attention.value", "attention.value_mix", "mlp.up"}
    waiting = {p for p in every if p.endswith(tuple(late)) or p.startswith("embeddings.value")}
    assert second == every - waiting
    third = non_zero(run.gradients())
    idle = {"blocks.0.attention.value_mix"} if name == "r13-window-warmup" else set()  # mixes with itself
    assert third == every - idle


def test_record_5_first_moves_its_table_and_its_output_matrices() -> None:
    run = Run("r05-modern-arch")
    every = set(run.values())
    outputs = {p for p in every if p.endswith(OUTPUTS)}
    assert non_zero(run.step()) == {"embeddings.token"} | outputs
    assert non_zero(run.gradients()) == every


def test_record_4_moves_everything_at_once() -> None:
    run = Run("r04-muon")
    assert non_zero(run.gradients()) == set(run.values())


@pytest.mark.parametrize("name", ["r17-sparse-values", "r18-softcap"])
def test_layers_without_a_table_still_scale_their_values_and_leave_the_other_scalar_alone(name: str) -> None:
    run = Run(name)
    for _ in range(4):
        gradients = run.step()
    for layer in (3, 4, 5, 6, 8):
        kept, idle = gradients[f"blocks.{layer}.attention.value_mix"]
        assert kept != 0
        assert idle == 0
        assert run.values()[f"blocks.{layer}.attention.value_mix"][1] == 0.5
    for layer in (0, 1, 2, 9, 10, 11):
        assert (gradients[f"blocks.{layer}.attention.value_mix"] != 0).all()
