"""Predictions of the planner against everything that was measured, and what must hold where nothing was."""

import json
from dataclasses import replace

import numpy as np
import pytest

from model.small import RECORDS, small
from paceline.core.errors import ConfigError
from paceline.core.units import BLOCK_TOKENS
from paceline.lab.plan.efficiency import EFFICIENCIES, seconds, step_seconds, step_work
from paceline.lab.plan.gpus import GPUS, Cluster
from paceline.lab.plan.memory import memory, peak_gib, remedy
from paceline.lab.plan.network import sent_bytes
from paceline.lab.plan.predict import plan
from paceline.lab.plan.visits import DOCUMENT_TOKENS, LOG_SPREAD, visited_keys
from paceline.lab.plan.work import Profile, Setting, computation, gradient_bytes, optimizer, orthogonal_shapes
from paceline.metrics.flops import DENSE_BF16_FLOPS
from paceline.model.gpt import GPT
from paceline.recipes.presets import preset
from paceline.recipes.scaling import with_steps
from paceline.settings.data import BatchConfig
from paceline.settings.model import LayerOverride, ModelConfig, WindowConfig
from paceline.settings.optim import GroupConfig
from paceline.settings.parallel import ParallelConfig
from paceline.settings.run import RunConfig
from paceline.settings.schedule import Stage
from paceline.settings.spec import describe
from plan_fit import EIGHT_H100, ONE_H200, PUBLIC_STEPS_MS, STARTS, Figure, fit, step_figures
from plan_page import PUBLIC_PEAKS_MIB, Check, memory_checks, step_checks
from result_files import FOLDER

TOLERANCE = 0.15
R18 = Setting(config=preset("r18-softcap"), cluster=EIGHT_H100, profile="fast")
SCRIPT = replace(R18, profile="reference")
STEP_CHECKS, MEMORY_CHECKS = step_checks(), memory_checks()


# ---- against what was measured


@pytest.mark.parametrize("check", [*STEP_CHECKS, *MEMORY_CHECKS], ids=lambda check: check.source)
def test_predictions_are_within_15_percent_of_every_figure_and_without_having_seen_the_record(
    check: Check,
) -> None:
    for error in check.errors:
        assert abs(error) < TOLERANCE


def test_the_public_figures_are_all_held_against() -> None:
    """A figure that nobody compares would pass any test."""
    sources = " ".join(check.source for check in STEP_CHECKS)
    assert all(f"public log, {name}, 8 H100" in sources for name in RECORDS)
    assert len(PUBLIC_STEPS_MS) == 5
    assert len(PUBLIC_PEAKS_MIB) == 3


def measured_since() -> list[tuple[Figure, float]]:
    """What the newest result files of a checkout say of our own steps and what the planner says; none in an installed
    package."""
    found: list[tuple[Figure, float]] = []
    for name in ("h200-step-r18.json", "h200-track-r18.json"):
        if (FOLDER / name).exists():
            steps, peak = figures_of(json.loads((FOLDER / name).read_text()), name)
            found += [*((step, step_seconds(step.setting)) for step in steps), (peak, peak_gib(peak.setting))]
    return found


def figures_of(result: dict, name: str) -> tuple[list[Figure], Figure]:
    """Steps and peak in a result of `paceline bench step` (`step_s`, `windows`) or of a run on the track (`train_s`,
    `steps`)."""
    words = result.get("command", "")
    profile = "reference" if "no-custom-kernels" in (words if isinstance(words, str) else " ".join(words)) else "fast"
    config = with_steps(preset("r18-softcap"), 266)
    if "micro_tokens" in result and "step_s" not in result:  # the bench takes its peak in the preset's micro-batches
        config = replace(config, batch=replace(config.batch, micro_tokens=result["micro_tokens"]))
    at = Setting(config=config, cluster=ONE_H200, profile=profile)
    step_s = result.get("step_s") or result["train_s"] / (result["steps"] - at.config.train.untimed_steps)
    windows = [(row["tokens"], row["seconds"]) for row in result.get("windows", ())]
    steps = [
        Figure(f"{name}, mean", at, step_s),
        *(Figure(f"{name}, window {tokens}", replace(at, window_tokens=tokens), s) for tokens, s in windows),
    ]
    return steps, Figure(f"{name}, memory", at, result["peak_gib"])


def test_predictions_are_within_15_percent_of_our_newest_results() -> None:
    for figure, predicted in measured_since():
        error = predicted / figure.measured - 1
        assert abs(error) < TOLERANCE, f"{figure.source}: {error:+.1%}; bring tools/plan_fit.py up to date"


def test_a_result_file_of_either_kind_is_understood() -> None:
    bench = {"step_s": 0.9, "peak_gib": 22.0, "windows": [{"tokens": 128, "seconds": 0.8}], "command": ["bench"]}
    (mean, window), peak = figures_of(bench, "step")
    assert (mean.measured, mean.setting.profile) == (0.9, "fast")
    assert (window.measured, window.setting.window_tokens) == (0.8, 128)
    assert peak.measured == 22.0
    track = {"train_s": 256.0, "steps": 266, "peak_gib": 31.0, "command": "train --train.no-custom-kernels"}
    (mean,), peak = figures_of(track, "track")
    assert (mean.measured, mean.setting.profile) == (1.0, "reference")
    assert peak.measured == 31.0


# ---- the fit


@pytest.mark.parametrize("profile", EFFICIENCIES)
def test_the_planner_has_the_efficiencies_of_the_fit(profile: Profile) -> None:
    """`python tools/plan_fit.py` prints them."""
    assert EFFICIENCIES[profile] == pytest.approx(fit(profile, step_figures()), rel=1e-4)


def test_the_fit_finds_the_efficiencies_that_made_the_figures() -> None:
    truth = {**STARTS["reference"], "products": 0.6, "attention": 0.25, "memory": 0.7}
    made = [replace(figure, measured=seconds(step_work(figure.setting), truth)) for figure in step_figures()]
    found = fit("reference", made)
    for figure in made:
        if figure.setting.profile == "reference":
            assert seconds(step_work(figure.setting), found) == pytest.approx(figure.measured, rel=0.02)
    assert found["attention"] == pytest.approx(0.25, rel=0.1)  # windows of one preset tell it apart from the rest


def test_without_figures_the_fit_stays_where_it_starts() -> None:
    assert fit("fast", []) == pytest.approx(STARTS["fast"])


# ---- what is counted


def test_visited_keys_are_those_of_a_mask_over_random_documents() -> None:
    """Documents drawn as the formula assumes; blocks counted as the kernels' block lists do."""
    blocks, rng = 65_536, np.random.default_rng(0)
    mu = np.log(DOCUMENT_TOKENS) - LOG_SPREAD**2 / 2
    lengths = np.maximum(1, rng.lognormal(mu, LOG_SPREAD, size=30_000)).astype(int)
    documents = np.repeat(np.arange(len(lengths)), lengths)[: blocks * BLOCK_TOKENS].reshape(blocks, BLOCK_TOKENS)
    first, last = documents[:, 0], documents[:, -1]
    model = ModelConfig(document_mask=True, window=WindowConfig(unit="blocks"))
    for window in (1, 2, 7, 14):
        visited = sum(np.sum(last[: blocks - back] >= first[back:]) for back in range(window)) / blocks
        predicted = visited_keys(model, window * BLOCK_TOKENS, blocks * BLOCK_TOKENS, DOCUMENT_TOKENS)
        assert predicted == pytest.approx(visited * BLOCK_TOKENS, rel=0.03)  # 13,000 long-tailed lengths


def test_without_documents_and_window_attention_visits_the_lower_triangle_of_blocks() -> None:
    assert visited_keys(ModelConfig(), 0, 1024, DOCUMENT_TOKENS) == 128 * 4.5


def test_the_counted_matrices_and_bytes_are_those_of_the_model() -> None:
    for name in RECORDS:
        run = preset(name)
        batch = BatchConfig(tokens=1024, sequence_tokens=1024)
        run = replace(run, model=small(name), batch=batch, data=replace(run.data, end_of_text=0))
        at = Setting(config=run, cluster=ONE_H200, profile="fast")
        named = dict(GPT(at.config.model, end_of_text=0).named_parameters())
        matrices = [weight for key, weight in named.items() if key.startswith("blocks.") and weight.dim() == 2]
        tables = [weight for key, weight in named.items() if key.startswith("embeddings.") or key == "head"]
        scalars = [weight for weight in named.values() if weight.dim() == 1]
        found = orthogonal_shapes(at.config)
        assert sum(r * c * n for (r, c), n in found.items()) == sum(w.numel() for w in matrices)
        assert gradient_bytes(at) == sum(weight.nbytes for weight in (*matrices, *scalars))
        assert gradient_bytes(at, tables=True) == sum(weight.nbytes for weight in tables)


def optimizer_bytes(at: Setting) -> float:
    return sum(work.seconds for work in optimizer(at) if work.resource == "memory") * at.bytes_per_s


def moved_by(at: Setting, *groups: GroupConfig) -> Setting:
    return replace(at, config=replace(at.config, optim=replace(at.config.optim, groups=groups)))


def test_every_group_is_updated_by_its_own_rule() -> None:
    """Adam crosses weight, gradient and two slots, Muon's copies in between; a sign with one fp32 slot is no Adam."""
    alone = replace(R18, cluster=ONE_H200)
    about = describe(R18.config.model)
    rest = about.nbytes() - about.nbytes("matrices")
    assert optimizer_bytes(alone) == pytest.approx(7 * rest + 10 * about.nbytes("matrices"))
    seldom = moved_by(alone, GroupConfig(name="lm_head", every=4))
    saved = optimizer_bytes(alone) - optimizer_bytes(seldom)
    assert saved == pytest.approx(7 * 3 / 4 * about.nbytes("lm_head"))
    by_adam = moved_by(alone, GroupConfig(name="matrices", rule="adam", lr=0.01))
    assert optimizer_bytes(by_adam) == pytest.approx(7 * about.nbytes())
    assert not orthogonal_shapes(by_adam.config)
    head = moved_by(alone, GroupConfig(name="lm_head", rule="muon", lr=0.01))
    extra = orthogonal_shapes(head.config) - orthogonal_shapes(alone.config)
    assert dict(extra) == {(50_304, 768): 1}


def test_tables_moved_by_rows_cost_what_a_step_looks_up_and_not_what_they_hold() -> None:
    names = ("embeddings", "value_embeddings")
    rows = moved_by(R18, *(GroupConfig(name=name, rule="adam_rows", lr=0.1) for name in names))
    wider = replace(rows, config=replace(rows.config, model=replace(rows.config.model, vocab_size=100_000)))
    head = describe(wider.config.model).nbytes("lm_head") - describe(R18.config.model).nbytes("lm_head")
    assert optimizer_bytes(wider) - optimizer_bytes(rows) == pytest.approx(7 * head)
    assert sent_bytes(wider) - sent_bytes(rows) == pytest.approx(7 / 8 * 2 * head)
    tokens = R18.config.batch.tokens
    looked_up = sent_bytes(rows) - 7 / 8 * 2 * (gradient_bytes(rows) + gradient_bytes(rows, tables=True))
    looked_up -= 7 / 8 * 2 * describe(R18.config.model).numel("matrices")
    assert looked_up == pytest.approx(7 / 8 * tokens * 4 * (8 + 768 * 2))  # four tables, in bf16
    doubled = replace(rows, config=replace(rows.config, batch=replace(rows.config.batch, tokens=2 * tokens)))
    more = optimizer_bytes(doubled) - optimizer_bytes(rows)
    assert more > tokens * 4 * 768 * 2 * (2 + 2 + 4)  # four tables: rows of weights and of gradients, and their sums


def test_each_window_kind_is_counted_in_its_own_layers() -> None:
    """A long window for layer 3 alone: of 11 layers with attention, one works on more keys."""
    fixed = {"growth_tokens": 0, "quantum_tokens": 128}
    short, long = (replace(R18.config.model.window, start_tokens=tokens, **fixed) for tokens in (128, 1_792))
    model = replace(R18.config.model, window=short)
    mixed = replace(model, long_window=long, layer_overrides=(LayerOverride(layers=(3,), window="long"),))

    def attention_s(model: ModelConfig, **changes: int) -> float:
        at = replace(R18, config=replace(R18.config, model=model), **changes)
        return sum(work.seconds for work in computation(at) if work.resource == "attention")

    all_short, all_long = attention_s(model), attention_s(replace(model, window=long))
    assert attention_s(mixed) == pytest.approx((10 * all_short + all_long) / 11)
    assert attention_s(mixed, step=7) == pytest.approx(attention_s(mixed))
    assert attention_s(mixed, window_tokens=128) == pytest.approx(all_short)


def test_a_step_of_a_stage_has_that_stages_batch_and_windows() -> None:
    stages = (Stage(share=0.5, batch_tokens=262_144, window_tokens=128), Stage(share=0.5, window_tokens=1_792))
    at = replace(R18, cluster=ONE_H200, config=replace(R18.config, stages=stages))
    first, last = (replace(at, step=step) for step in (0, R18.config.steps - 1))
    assert (first.tokens, at.tokens, last.tokens) == (262_144, 393_216, 524_288)
    found = plan(at)
    assert found.first_step_s == step_seconds(first) < found.step_s < found.last_step_s == step_seconds(last)
    whole = replace(R18, cluster=ONE_H200, window_tokens=1_792)
    assert step_seconds(last) == pytest.approx(step_seconds(whole))


def test_peaks_are_those_of_the_table_of_utilisation() -> None:
    assert {gpu.driver_name for gpu in GPUS.values()} <= set(DENSE_BF16_FLOPS)


# ---- how predictions move


def widened(config: RunConfig, factor: int) -> RunConfig:
    model = config.model
    return replace(config, model=replace(model, width=factor * model.width, num_heads=factor * model.num_heads))


def test_the_parts_of_a_step_add_up() -> None:
    found = plan(R18)
    parts = sum(found.compute_s.values()) + found.optimizer_s + found.exposed_communication_s
    assert found.step_s == pytest.approx(parts)
    assert found.memory_gib <= sum(found.memory_parts_gib.values())
    assert found.first_step_s < found.step_s < found.last_step_s
    assert found.communication_share == pytest.approx(found.exposed_communication_s / found.step_s)
    assert found.cost == pytest.approx(found.wall_s / 3600 * 8 * GPUS["h100"].price)


def test_more_gpus_finish_sooner_and_cost_no_less() -> None:
    plans = [plan(replace(R18, cluster=Cluster(gpu="h100", gpus=n))) for n in (1, 2, 4, 8)]
    assert [p.step_s for p in plans] == sorted((p.step_s for p in plans), reverse=True)
    assert [p.gpu_hours for p in plans] == sorted(p.gpu_hours for p in plans)
    assert plans[0].communication_bytes == plans[0].exposed_communication_s == 0


def test_a_ring_sends_each_gradient_twice_and_each_result_once() -> None:
    model = R18.config.model
    gradients = describe(model).nbytes()
    assert sent_bytes(R18) == pytest.approx(7 / 8 * (2 * gradients + 2 * describe(model).numel("matrices")))


def test_slow_networks_are_waited_for() -> None:
    config = replace(R18.config, batch=replace(R18.config.batch, tokens=1024 * 65_536))
    far = Cluster(gpu="h100", gpus=1024, interconnect_gb_s=5)
    slow = plan(replace(R18, config=config, cluster=far))
    quick = plan(replace(R18, config=config, cluster=replace(far, interconnect_gb_s=400)))
    assert slow.nodes == 128
    assert slow.communication_share > 0.5 > quick.communication_share
    assert slow.limit.startswith("Waiting for other GPUs takes")
    assert sum(slow.compute_s.values()) == sum(quick.compute_s.values())


def test_a_compiled_backward_pass_hides_no_exchange() -> None:
    eager = replace(SCRIPT, config=replace(R18.config, train=replace(R18.config.train, compile=False)))
    compiled, uncompiled = plan(SCRIPT), plan(eager)
    assert compiled.communication_s == uncompiled.communication_s
    assert compiled.exposed_communication_s > 2 * uncompiled.exposed_communication_s


def test_gradients_outside_of_their_buckets_are_held_twice_by_several_gpus_only() -> None:
    copied = replace(R18, config=replace(R18.config, parallel=replace(R18.config.parallel, bucket_views=False)))
    held, alone = plan(R18).memory_parts_gib["gradients"], Cluster(gpu="h100", gpus=1)
    assert plan(copied).memory_parts_gib["gradients"] == 2 * held
    assert plan(replace(copied, cluster=alone)).memory_parts_gib["gradients"] == held


def test_shared_moments_save_memory_and_cost_a_gather() -> None:
    shared = replace(R18, config=replace(R18.config, parallel=replace(R18.config.parallel, zero1=True)))
    tables = gradient_bytes(R18, tables=True)
    saved = (peak_gib(R18) - peak_gib(shared)) * 2**30
    assert saved == pytest.approx(7 / 8 * 2 * tables, rel=1e-6)
    assert sent_bytes(shared) - sent_bytes(R18) == pytest.approx(7 / 8 * tables)


def test_shards_save_memory_and_cost_gathers_of_all_weights() -> None:
    """Each of eight micro-batches on one of eight GPUs gathers blocks twice and tables once."""
    config = replace(R18.config, batch=replace(R18.config.batch, tokens=8 * R18.config.batch.tokens))
    many = replace(R18, config=widened(config, 4))
    shards = replace(many, config=replace(many.config, parallel=replace(config.parallel, fsdp=True)))
    assert peak_gib(shards) < peak_gib(many)
    weights = 2 * gradient_bytes(many) + gradient_bytes(many, tables=True)
    assert sent_bytes(shards) > 7 / 8 * 8 * weights
    assert memory(replace(shards, cluster=Cluster(gpu="h100", gpus=1))).gathered == 0


def test_slices_save_activations_and_cost_halos() -> None:
    """Four pairs of GPUs at two sequences each, instead of eight at one."""
    whole = replace(R18, config=replace(R18.config, train=replace(R18.config.train, compile=False)))
    batch = replace(whole.config.batch, micro_tokens=65_536)
    split = replace(whole, config=replace(whole.config, batch=batch, parallel=ParallelConfig(context_parallel=2)))
    assert split.tokens == whole.tokens
    assert split.micro_tokens == 32_768
    assert memory(split).activations == pytest.approx(memory(whole).activations / 2, rel=0.05)
    halos = 2 * 11 * 1_792 * 2 * 768 * 2  # sequences, layers with attention, tokens, keys and values in bf16
    assert sent_bytes(split) - sent_bytes(whole) == pytest.approx(7 / 8 * 2 * halos)  # there and back


def test_every_validation_is_a_forward_pass_over_its_tokens() -> None:
    """Record 18 validates before steps 0, 125, … 1375 and at the end, each time on 20 steps' worth of tokens."""
    found = plan(R18)
    assert found.validation_s == pytest.approx(13 * 20 / 3 * sum(found.compute_s.values()))
    assert found.wall_s == found.train_s + found.validation_s + found.start_s


def test_only_the_scripts_of_records_before_6_orthogonalise_everything_everywhere() -> None:
    at = Setting(config=preset("r05-modern-arch"), cluster=EIGHT_H100, profile="reference")
    shared = replace(at, config=replace(at.config, preset="mine"))
    assert plan(at).optimizer_s > 4 * plan(shared).optimizer_s
    assert plan(at).communication_bytes < plan(shared).communication_bytes


def test_recomputation_saves_memory_and_costs_time() -> None:
    again = replace(R18, config=replace(R18.config, train=replace(R18.config.train, recompute=True)))
    assert plan(again).memory_gib < 0.6 * plan(R18).memory_gib
    assert plan(again).step_s > 1.1 * plan(R18).step_s


def test_a_head_of_odd_size_is_slow() -> None:
    model = R18.config.model
    odd = replace(R18, config=replace(R18.config, model=replace(model, lm_head_multiple=1)))
    assert sum(w.seconds for w in computation(odd)) > 1.05 * sum(w.seconds for w in computation(R18))


# ---- memory that does not suffice


@pytest.mark.parametrize(
    ("at", "said"),
    [
        (replace(SCRIPT, cluster=Cluster(gpu="3090", gpus=8)), "--lm-head.backend chunked"),
        (replace(SCRIPT, config=preset("r05-modern-arch"), cluster=Cluster(gpu="l4", gpus=8)), "--batch.micro-tokens"),
        (replace(R18, config=widened(R18.config, 4)), "--train.recompute"),
        (replace(R18, config=widened(R18.config, 8)), "--parallel.fsdp --train.recompute"),
        (  # where logits are not fused
            replace(R18, config=widened(R18.config, 16)),
            "--gpu b200 --parallel.fsdp --lm-head.backend chunked --train.recompute",
        ),
        (replace(R18, config=widened(R18.config, 32)), "a smaller model"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.cluster.gpu,
)
def test_the_smallest_remedy_is_named(at: Setting, said: str) -> None:
    found = plan(at)
    assert not found.fits
    assert found.remedy is not None
    assert found.remedy.startswith(said)


def test_a_remedy_in_flags_makes_the_run_fit() -> None:
    at = replace(SCRIPT, config=preset("r05-modern-arch"), cluster=Cluster(gpu="l4", gpus=8))
    micro = int(remedy(at).split()[-1])
    mended = replace(at, config=replace(at.config, batch=replace(at.config.batch, micro_tokens=micro)))
    assert plan(mended).fits


# ---- mistakes


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        ({"gpu": "h300", "gpus": 8}, "--gpu h300 is not in the table; did you mean h200?"),
        ({"gpu": "rtx4090", "gpus": 8}, "did you mean 4090?"),
        ({"gpu": "tpu-v5", "gpus": 8}, "there are b200, h200"),
        ({"gpu": "h100", "gpus": 0}, "--gpus 0 must be at least 1"),
        ({"gpu": "h100", "gpus": 12}, "--gpus 12 does not fill nodes of 8; use 8 or 16"),
        ({"gpu": "h100", "gpus": 8, "gpus_per_node": 0}, "--gpus-per-node 0 must be at least 1"),
        ({"gpu": "h100", "gpus": 8, "interconnect_gb_s": 0.0}, "--interconnect-gb-s 0.0 must be above 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_cluster_that_cannot_be_is_refused(cluster: dict, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Cluster(**cluster)
    assert said in str(refused.value)


def test_a_batch_that_gpus_cannot_share_is_refused_with_both_ways_out() -> None:
    with pytest.raises(
        ConfigError, match=r"--gpus 6 cannot share 8 sequences .* use --gpus 4, or --batch.tokens 786432"
    ):
        plan(replace(R18, cluster=Cluster(gpu="h100", gpus=6)))


def test_a_sampled_softmax_takes_the_time_of_the_logits_that_it_computes() -> None:
    def head_s(setting: Setting) -> float:
        return sum(work.seconds for work in computation(setting) if work.kind == "head_and_loss")

    stages = (Stage(share=0.5, candidates=12_576), Stage(share=0.5, candidates=0))
    base = preset("r18-softcap")
    config = replace(base, model=replace(base.model, candidates=12_576), stages=stages)
    last, first, mean = (replace(R18, config=config, step=step) for step in (config.steps - 1, 0, None))
    assert head_s(first) == pytest.approx(head_s(last) / 4, rel=0.01)
    assert head_s(mean) == pytest.approx(head_s(last) * 5 / 8, rel=0.01)
