"""The baselines as their sources state them, and as diffs of named techniques."""

import subprocess
import sys

from paceline.cli import main
from paceline.lab.ablate.parts import parts_of
from paceline.recipes.presets import preset
from paceline.settings.schedule import schedule
from paceline.settings.spec import describe


def test_r01_has_the_parameters_of_gpt2_and_the_numbers_of_llm_c() -> None:
    config = preset("r01-baseline")
    assert describe(config.model).numel() == 124_439_808
    assert (config.batch.tokens, config.batch.sequence_tokens, config.steps) == (524_288, 1024, 18_865)
    first, last = schedule(config, 0), schedule(config, config.steps - 1)
    assert {group.lr for group in schedule(config, 700).groups.values()} == {6e-4}
    assert {(group.beta1, group.beta2, group.eps) for group in first.groups.values()} == {(0.9, 0.95, 1e-8)}
    assert {name for name, group in first.groups.items() if group.weight_decay == 0.0} == {"vectors"}
    assert (first.lr_scale, config.optim.clip_norm) == (1 / 700, 1.0)
    assert 0 < last.lr_scale < 1e-7


def test_llama_style_is_a_llama_of_768_by_12() -> None:
    model = preset("llama-style").model
    assert (model.width, model.num_layers, model.num_heads, model.mlp_width) == (768, 12, 12, 2048)
    assert describe(model).numel() == 2 * 50_257 * 768 + 12 * (4 * 768**2 + 3 * 768 * 2048) + 25 * 768


def test_the_way_from_r01_to_record_4_is_a_list_of_techniques() -> None:
    parts = {part.key: part for part in parts_of(preset("r01-baseline"), preset("r04-muon"))}
    assert set(parts) == {
        "muon", "branch-scale", "no-layer-norm", "no-biases", "no-tanh-gelu", "no-small-start", "no-learned-positions",
        "no-one-rate", "no-weight-decay", "no-undecayed-vectors", "no-rate-warmup", "no-gradient-clipping",
        "no-cosine+rest",
    }  # fmt: skip
    unnamed = set(parts["no-cosine+rest"].before) - {"optim.schedule.shape", "optim.schedule.cooldown_share"}
    assert unnamed == {"optim.schedule.cooldown_steps"}


def test_a_diff_names_the_techniques_on_either_side() -> None:
    command = [sys.executable, "-m", "paceline.cli", "diff", "r01-baseline", "r04-muon"]
    said = " ".join(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    assert "techniques of r01-baseline only: Layer norm; Biases; GELU by tanh;" in said
    assert "techniques of r04-muon only: Scaled attention branch; Muon" in said
    assert main(["diff", "demo", "demo"]) == 0
