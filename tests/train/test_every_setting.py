"""Every setting that may change a run reaches it, or leaves its bits alone.

One row a field: another value, and what that does to three steps of a small record in which every technique is on and
every weight acts from the start. A new field without a row fails. What a technique does in detail is proved beside its
code; this is the proof that its switch is connected, and that what promises to change nothing keeps the promise.
"""

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from paceline.core.schema import flatten
from paceline.lab.technique import with_values
from paceline.settings.data import BatchConfig
from paceline.settings.run import RunConfig
from train.tiny import losses, narrow_record, run, weights

TESTS = Path(__file__).parents[1]
ROOMS = ("model.", "optim.", "data.", "batch.", "train.", "stages", "bad_steps.", "evaluate.")
Effect = Literal["another run", "the same up to rounding", "the same bits"]


@dataclass(frozen=True)
class Row:
    value: Any
    effect: Effect = "another run"
    given: Mapping[str, Any] = field(default_factory=dict)
    """Settings of both runs, without which the field has nothing to do."""
    also: Mapping[str, Any] = field(default_factory=dict)
    """What must change with it."""


LOW_PRODUCTS = "model/test_records.py::test_logits_in_the_records_own_formats"
"""Products in bf16: a CPU run computes them in fp32."""

ELSEWHERE = {
    "model.precision.mode": LOW_PRODUCTS,
    "model.precision.compute": LOW_PRODUCTS,
    "optim.muon.ns_dtype": "optim/test_optimizer.py::test_bf16_products_need_both_the_setting_and_the_device",
    "optim.muon.ns_norm_of": "optim/test_optimizer.py::test_the_side_of_the_norm_reaches_the_iteration",
    "data.dir": "data/test_batches.py::test_a_folder_opens_in_name_order",
    "data.train": "data/test_batches.py::test_a_folder_opens_in_name_order",
    "data.val": "data/test_batches.py::test_a_folder_opens_in_name_order",
    "data.end_of_text": "text/test_builtin.py::test_another_end_of_text_is_refused",
    "data.tokenizer": "text/test_tokenizer.py::test_unknown_and_oversized_names_are_refused",
    "train.device": "train/test_run.py::test_cuda_is_refused_in_one_line_where_there_is_none",
    "train.compile": "train/test_compile.py::test_two_shallow_presets_train_as_one_graph",
    "train.coordinate_descent": "train/test_machine_switches.py::test_the_compiler_tunes_only_if_asked_to",
    "train.skip_guards": "train/test_machine_switches.py::test_after_five_steps_guards_are_skipped_and_no_bit_changes",
    "train.cuda_graph": "train/test_cuda_graph.py::test_a_gradient_is_captured_where_one_gpu_launches_compiled_code",
    "train.memory_limit_gib": (
        "train/test_memory_fit.py::test_a_limit_that_asks_for_recomputation_gives_the_same_losses"
    ),
    "train.stop_after": "train/test_run.py::test_launches_of_so_many_steps_each_make_the_uninterrupted_run",
}

AVERAGED = {"optim.average.tau_steps": 2.0, "optim.average.start_share": 0.0}

ROWS: dict[str, Row] = {
    "model.vocab_size": Row(500),
    "model.embedding_multiple": Row(1, "the same up to rounding"),  # no token names the rows of the padding
    "model.lm_head_multiple": Row(1),
    "model.width": Row(24, also={"model.head_dim": 4}),
    "model.num_layers": Row(6),
    "model.num_heads": Row(12, also={"model.head_dim": 4}),
    "model.num_kv_heads": Row(2),
    "model.head_dim": Row(16, also={"model.num_heads": 3}),
    "model.mlp_ratio": Row(2),
    "model.qkv": Row("fused"),
    "model.qk_matrix_heads": Row(1),
    "model.activation": Row("gelu"),
    "model.biases": Row(True),
    "model.norm": Row("rms_weighted"),
    "model.positions": Row("learned"),
    "model.dropout": Row(0.1),
    "model.matrix_init": Row("gpt2"),
    "model.zero_init_outputs": Row(True),
    "model.attention_branch_scale": Row(0.5),
    "model.norm_eps": Row(1e-6),
    "model.qk_norm": Row("none"),
    "model.qk_norm_eps": Row(1e-6),
    "model.rotary.base": Row(10_000.0),
    "model.rotary.rotary_fraction": Row(1.0),
    "model.rotary.spacing": Row("open"),
    "model.rotary.frequency_dtype": Row("bf16", given={"model.rotary.rotary_fraction": 1.0}),  # two pairs turn exactly
    "model.rotary.table_dtype": Row("bf16"),
    "model.rotary.arithmetic": Row("activation", "the same bits"),  # activations are fp32 on a CPU
    "model.rotary.max_tokens": Row(512, "the same bits"),
    "model.tied_lm_head": Row(True),
    "model.embedding_init": Row("uniform"),
    "model.lm_head_init": Row("zeros"),
    "model.embedding_norm": Row(False),
    "model.x0_mix": Row(False),
    "model.unet_skips": Row(False),
    "model.value_path": Row("plain"),
    "model.value_ends": Row(2),
    "model.value_lambdas": Row(1),
    "model.value_storage": Row("chunks", given={"model.value_ends": 2}),
    "model.layers_without_attention": Row(()),
    "model.value_layers": Row([1], given={"model.value_path": "listed", "model.value_layers": [0]}),
    "model.value_gates": Row(True),
    "model.value_init_std": Row(0.1),
    "model.smear": Row(True),
    "model.ngrams.bigram_rows": Row(64),
    "model.ngrams.trigram_rows": Row(64),
    "model.ngrams.sign_rows": Row(64, given={"model.ngrams.bigram_rows": 64}),
    "optim.adam.mix_lr": Row(0.01, given={"model.mixes": [{"before": 1, "sources": [-1], "starts": [0.5]}]}),
    "model.attention_output_starts": Row(True, given={"model.zero_init_outputs": True}),
    "model.residual_scales": Row(True),
    "model.skip": Row([0, 2], given={"model.unet_skips": False}),
    "model.backout_layer": Row(1),
    "model.softcap": Row(None),
    "model.candidates": Row(200),
    "model.document_mask": Row(False),
    "model.window.unit": Row("none"),
    "model.window.start_tokens": Row(256),
    "model.window.growth_tokens": Row(0),
    "model.window.quantum_tokens": Row(64, given={"model.window.unit": "tokens", "model.window.growth_tokens": 100}),
    "model.long_window": Row(
        {"unit": "blocks", "start_tokens": 256, "growth_tokens": 0},
        given={
            "model.long_window": {"unit": "blocks", "start_tokens": 128, "growth_tokens": 0},
            "model.layer_overrides": [{"layers": [0, 1], "window": "long"}],
        },
    ),
    "model.layer_overrides": Row([{"layers": [0], "mlp_width": 32}]),
    "model.mixes": Row([{"before": 1, "sources": [-1], "starts": [0.5]}]),
    "model.softcap_shift": Row(5.0),
    "model.loss_terms": Row([{"name": "z_loss", "weight": 0.01}]),
    "model.precision.embeddings": Row("fp32"),
    "model.precision.scalars": Row("bf16"),
    "model.precision.round_matrices_at_init": Row(True),
    "optim.matrices": Row("adamw"),
    "optim.muon.lr": Row(0.01),
    "optim.muon.momentum": Row(0.5),
    "optim.muon.momentum_start": Row(0.5),
    "optim.muon.momentum_warmup_steps": Row(2),
    "optim.muon.momentum_warmup_share": Row(0.5, also={"optim.muon.momentum_warmup_steps": 0}),
    "optim.muon.momentum_cooldown_share": Row(0.9),
    "optim.muon.momentum_form": Row("sum"),
    "optim.muon.scale_rule": Row("longest_side"),
    "optim.muon.mlp_output_rate": Row(4.0),
    "optim.muon.ns_steps": Row(3),
    "optim.muon.ns_maps": Row("polar_express"),
    "optim.muon.row_beta2": Row(0.9),
    "optim.muon.cautious_decay": Row(True, given={"optim.muon.weight_decay": 0.5}),
    "optim.muon.ns_association": Row("product_first", "the same up to rounding"),
    "optim.muon.weight_decay": Row(0.5),
    "optim.adam.embedding_lr": Row(0.1),
    "optim.adam.lm_head_lr": Row(0.1),
    "optim.adam.scalar_lr": Row(0.1),
    "optim.adam.matrix_lr": Row(0.1, given={"optim.matrices": "adamw"}),
    "optim.adam.vector_lr": Row(0.1, given={"model.norm": "layer"}),
    "optim.adam.gate_lr": Row(0.1, given={"model.value_gates": True}),
    "optim.adam.ngram_lr": Row(0.1, given={"model.ngrams.bigram_rows": 64}),
    "optim.adam.beta1": Row(0.5),
    "optim.adam.beta2": Row(0.5),
    "optim.adam.eps": Row(0.1),
    "optim.adam.weight_decay": Row(0.5),
    "optim.adam.decay_vectors": Row(False, given={"optim.adam.weight_decay": 0.5}),
    "optim.schedule.warmup_steps": Row(2),
    "optim.schedule.shape": Row("cosine"),
    "optim.schedule.cooldown_steps": Row(
        3, given={"optim.schedule.cooldown_share": None, "optim.schedule.cooldown_steps": 1}
    ),
    "optim.schedule.cooldown_share": Row(1.0),
    "optim.schedule.floor": Row(0.9),
    "optim.groups": Row([{"name": "lm_head", "beta1": 0.5}]),
    "optim.average.tau_steps": Row(2.0, given={"optim.average.start_share": 0.0}),
    "optim.average.tau_share": Row(0.9, given={"optim.average.start_share": 0.0}),
    "optim.average.start_share": Row(0.0, given={"optim.average.tau_steps": 2.0}),
    "optim.average.blend": Row(0.5, given=AVERAGED),
    "optim.average.rescale": Row(False, given=AVERAGED),
    "optim.average.groups": Row(["matrices"], given=AVERAGED),
    "optim.clip_norm": Row(1e-3),
    "data.order": Row("sequential"),
    "data.align_documents": Row(True),
    "data.one_pass": Row(True, "the same bits"),
    "batch.tokens": Row(1024),
    "batch.sequence_tokens": Row(128),
    "batch.micro_tokens": Row(256, "the same up to rounding"),
    "train.untimed_steps": Row(0, "the same bits"),
    "train.deterministic": Row(True, "the same bits"),
    "train.custom_kernels": Row(False, "the same bits"),  # a CPU has none
    "train.recompute": Row(True, "the same bits"),
    "train.expandable_segments": Row(True, "the same bits"),
    "train.threads": Row(2, "the same up to rounding"),
    "stages": Row([{"share": 0.34, "lr": 0.5}, {"share": 0.66}]),
    "bad_steps.skip": Row(False, "the same bits"),  # a healthy run; for the others see test_bad_steps.py
    "bad_steps.spike": Row(6.0, "the same bits"),
    "bad_steps.limit": Row(1, "the same bits"),
    "evaluate.every": Row(1, "the same bits"),
    "evaluate.tokens": Row(1024, "the same bits"),
}


def every_technique_on(folder: Path) -> RunConfig:
    """Record 18 with four blocks, one of them without attention, and no zeros at the start."""
    record = narrow_record("r18-softcap", folder, steps=3)
    model = replace(
        record.model,
        num_layers=4,
        value_ends=1,
        layers_without_attention=(2,),
        lm_head_init="uniform",
        zero_init_outputs=False,
    )
    batch = BatchConfig(tokens=512, sequence_tokens=256)
    evaluate = replace(record.evaluate, tokens=256)
    return replace(record, model=model, batch=batch, evaluate=evaluate, train=replace(record.train, threads=1))


Result = tuple[list[float | None], dict[str, Tensor]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Mapping[str, Any]], Result]:
    """Losses of three steps and a validation, and the weights, of a run with these settings; each is trained once."""
    folder, seen = tmp_path_factory.mktemp("settings"), dict[str, Result]()
    base = every_technique_on(folder / "data")

    def result(values: Mapping[str, Any]) -> Result:
        if (key := repr(values)) not in seen:
            out = folder / str(len(seen))
            card = run(with_values(base, values), out).card
            seen[key] = [*losses(out), card.val_loss], weights(out)
        return seen[key]

    return result


def trained_alike(one: Result, other: Result) -> bool:
    """To the last bit; the validation may have been another."""
    (_, w), (_, v) = one, other
    return one[0][:3] == other[0][:3] and w.keys() == v.keys() and all(torch.equal(w[name], v[name]) for name in w)


def sampled(name: str) -> Any:
    """The optimizer's own suite moves weights by each of its rules; here they are the slow part."""
    return pytest.param(name, marks=pytest.mark.slow if name.startswith(("optim.muon.", "optim.adam.")) else ())


@pytest.mark.parametrize("name", list(map(sampled, ROWS)))
def test_another_value_does_what_the_row_says(name: str, results: Callable[[Mapping[str, Any]], Result]) -> None:
    row = ROWS[name]
    before = results(row.given)
    after = results({**row.given, **row.also, name: row.value})
    assert len(before[0]) == len(after[0]) == 4
    if row.effect == "another run":
        assert before[0] != pytest.approx(after[0], rel=1e-6)
    elif row.effect == "the same up to rounding":
        assert before[0] == pytest.approx(after[0], rel=1e-3)
    else:
        assert trained_alike(before, after)


def test_every_field_has_a_row_or_a_test_elsewhere(tmp_path: Path) -> None:
    fields = {name for name, _ in flatten(every_technique_on(tmp_path)) if name.startswith(ROOMS)}
    assert fields == ROWS.keys() | ELSEWHERE.keys(), "say in ROWS what another value does"
    assert not ROWS.keys() & ELSEWHERE.keys()


@pytest.mark.parametrize("name", ELSEWHERE)
def test_the_test_elsewhere_exists(name: str) -> None:
    file, _, test = ELSEWHERE[name].partition("::")
    body = ast.parse((TESTS / file).read_text(encoding="utf-8")).body
    assert test in {node.name for node in body if isinstance(node, ast.FunctionDef)}
