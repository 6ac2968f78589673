"""Back ends: which one `auto` takes and why, that a named one is used or refused, and that an entry is all it takes to
add one."""

import ast
import importlib
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import paceline
from model.small import random_tokens, shaken, small, windows
from paceline.backends.registry import FLAGS, OPERATIONS, Backend, Operation, Request, backends, choose, find, suited
from paceline.commands.doctor import as_text, diagnose
from paceline.core import probe
from paceline.core.errors import ConfigError
from paceline.model.gpt import GPT, Seams
from paceline.parallel.machine import choose_backends
from paceline.parallel.memory_model import Execution, step_memory
from paceline.recipes.presets import PRESETS, preset
from paceline.settings.data import BatchConfig
from paceline.settings.model import LayerOverride, ModelConfig
from paceline.settings.optim import OptimConfig

R18 = preset("r18-softcap").model
NO_GPU = probe.Verdict(name="cuda", usable=False, reason="no NVIDIA GPU is visible")
GPU = probe.Verdict(name="cuda", usable=True, reason="a GPU, capability 9.0")


def on_cpu(model: ModelConfig = R18, **changes: Any) -> Request:
    return Request(model=model, device="cpu", compute="fp32", **changes)


def on_gpu(model: ModelConfig = R18, **changes: Any) -> Request:
    return Request(**{"model": model, "device": "cuda", "compute": "bf16", "compiled": True, **changes})


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with an H200, its compilers and FlashAttention in both versions."""
    monkeypatch.setattr(probe, "cuda", lambda: GPU)
    monkeypatch.setattr(probe, "triton", lambda: probe.Verdict(name="triton", usable=True, reason="version 3.6"))
    monkeypatch.setattr(probe.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(probe.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(probe, "_load_fa3", lambda library: None)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    monkeypatch.setattr("torch.backends.cuda.is_flash_attention_available", lambda: True)
    return monkeypatch


# ---- what auto takes


def test_attention_falls_back_only_when_nobody_named_it() -> None:
    chosen = choose("attention", "auto", on_cpu())
    assert chosen.name == "reference"
    assert "backward" in chosen.reason
    with pytest.raises(ConfigError, match=r"--attention\.backend flex"):
        choose("attention", "flex", on_cpu())


@pytest.mark.parametrize("has_compiler", [True, False])
def test_on_a_gpu_flex_is_taken_if_it_can_be_compiled(has_compiler: bool, hopper: pytest.MonkeyPatch) -> None:
    hopper.setattr(probe.shutil, "which", lambda name: f"/bin/{name}" if has_compiler else None)
    request = on_gpu(custom_kernels=False)
    assert choose("attention", "auto", request).name == ("flex" if has_compiler else "reference")
    assert choose("attention", "reference", request).name == "reference"
    narrow = on_gpu(small("r18-softcap", head_dim=8), custom_kernels=False)
    assert choose("attention", "auto", narrow).name == "reference"
    with pytest.raises(ConfigError, match=r"no kernel for --model\.head-dim 8"):
        choose("attention", "flex", narrow)


@pytest.mark.usefixtures("hopper")
def test_uncompiled_flex_is_used_by_name_only() -> None:
    """Uncompiled it holds all T² scores."""
    request = on_gpu(compiled=False, custom_kernels=False)
    chosen = choose("attention", "auto", request)
    assert chosen.name == "reference"
    assert "--train.compile" in chosen.reason
    assert choose("attention", "flex", request).name == "flex"


@pytest.mark.usefixtures("hopper")
def test_our_kernels_are_taken_where_they_work_and_know_the_model() -> None:
    ours = {"attention": "ranges", "qkv": "fused", "mlp": "fused", "lm_head": "fused", "orthogonalise": "fused"}
    for operation, name in ours.items():
        assert choose(operation, "auto", on_gpu()).name == name
        chosen = choose(operation, "auto", on_gpu(custom_kernels=False))
        assert not find(operation, chosen.name).custom, "--train.no-custom-kernels"
        assert choose(operation, name, on_gpu(custom_kernels=False)).name == name, "by name all the same"
    passed_over = choose("mlp", "auto", on_gpu(replace(R18, activation="gelu")))
    assert passed_over.name == "reference"
    assert "not fused: it knows relu2 only" in passed_over.reason


@pytest.mark.usefixtures("hopper")
def test_the_output_layer_goes_by_chunks_where_no_compiler_fuses_cap_and_loss() -> None:
    plain = {"custom_kernels": False}
    assert choose("lm_head", "auto", on_gpu(**plain)).name == "reference"
    assert choose("lm_head", "auto", on_gpu(**plain, compiled=False)).name == "chunked"
    asked = choose("lm_head", "auto", on_gpu(**plain, lm_head_chunk_tokens=512))
    assert asked.name == "chunked"
    assert "--lm-head.chunk-tokens" in asked.reason
    assert choose("lm_head", "chunked", on_gpu()).name == "chunked"


def test_an_older_card_falls_back_and_says_why(hopper: pytest.MonkeyPatch) -> None:
    hopper.setattr("torch.cuda.get_device_capability", lambda: (8, 6))
    chosen = choose("lm_head", "auto", on_gpu())
    assert chosen.name == "reference"
    assert "8.6" in chosen.reason
    with pytest.raises(ConfigError, match=r"--lm-head\.backend fused cannot be used: capability 8\.6"):
        choose("lm_head", "fused", on_gpu())


def test_a_cpu_has_no_kernels_of_ours() -> None:
    assert choose("lm_head", "auto", on_cpu()).name == "chunked"
    for operation, name in (("attention", "ranges"), ("qkv", "fused"), ("mlp", "fused"), ("lm_head", "fused")):
        with pytest.raises(ConfigError, match=rf"{FLAGS[operation]} {name} cannot be used: our kernels need a GPU"):
            choose(operation, name, on_cpu())


@pytest.mark.parametrize("name", list(PRESETS))
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("custom", [False, True])
def test_auto_finds_a_back_end_for_every_preset_on_a_cpu(name: str, compiled: bool, custom: bool) -> None:
    config = preset(name)
    config = replace(config, train=replace(config.train, compile=compiled, custom_kernels=custom))
    chosen, request = choose_backends(config, "cpu", "fp32")
    for operation in OPERATIONS:
        choice = getattr(chosen, operation)
        assert choice.name in [backend.name for backend in backends(operation)]
        assert choice.reason
        assert callable(chosen.build(operation, request))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_auto_goes_down_the_list_and_ends_with_one_that_always_works(
    operation: Operation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries are taken away one by one; those that are not automatic are never taken."""
    module = importlib.import_module(f"paceline.backends.{operation}")
    usable = [replace(entry, why_not=lambda _: None, pays_not=lambda _: None) for entry in module.BACKENDS]
    automatic = [entry.name for entry in usable if entry.automatic]
    for name in automatic:
        monkeypatch.setattr(module, "BACKENDS", tuple(usable))
        assert choose(operation, "auto", on_cpu()).name == name
        usable = [replace(e, why_not=lambda _: "taken away") if e.name == name else e for e in usable]
    monkeypatch.undo()
    last = backends(operation)[-1]
    assert last.name == automatic[-1] == "reference"
    assert not last.custom
    for request in (on_cpu(), on_gpu(), on_gpu(compute="fp32", compiled=False, deterministic=True, matmul="other")):
        assert last.why_not(request) is None
        assert last.pays_not(request) is None


# ---- who is refused, and why

TOKENS_WINDOW = preset("r14-value-embed").model
HALF = (LayerOverride(layers=(3,), v_dim=64),)
NARROW = (LayerOverride(layers=(3,), mlp_width=100),)
WHY_NOT: list[tuple[Operation, str, Request, str]] = [
    ("attention", "ranges", on_gpu(compute="fp32"), "it computes in bf16, not fp32"),
    ("attention", "ranges", on_gpu(preset("r05-modern-arch").model), "a plainly causal mask"),
    ("attention", "ranges", on_gpu(small("r18-softcap", head_dim=32)), "not --model.head-dim 32"),
    ("attention", "ranges", on_gpu(replace(R18, layer_overrides=HALF)), "queries of 128 with values of 64"),
    ("attention", "flex", on_gpu(small("r18-softcap", head_dim=8)), "no kernel for --model.head-dim 8"),
    ("attention", "varlen", on_gpu(R18), "--model.window.unit blocks"),
    ("attention", "varlen", on_gpu(TOKENS_WINDOW, deterministic=True), "--train.deterministic is on"),
    ("attention", "fa3", on_gpu(preset("r15-unet-values").model), "--model.window.unit tokens_in_blocks"),
    ("attention", "fa3", on_gpu(TOKENS_WINDOW, deterministic=True), "--train.deterministic is on"),
    ("qkv", "fused", on_gpu(compute="fp32"), "it computes in bf16, not fp32"),
    ("qkv", "fused", on_gpu(matmul="other"), "single products are computed by other"),
    ("qkv", "fused", on_gpu(preset("r05-modern-arch").model), "not --model.qk-norm after_rotary"),
    ("qkv", "fused", on_gpu(preset("r13-window-warmup").model), "not --model.value-path residual"),
    ("qkv", "fused", on_gpu(replace(R18, value_lambdas=1)), "by two scalars or gates only"),
    ("qkv", "fused", on_gpu(small("r18-softcap", head_dim=48)), "--model.head-dim 48 is not a power of two"),
    ("qkv", "fused", on_gpu(replace(R18, layer_overrides=HALF)), "or not that of the values"),
    ("mlp", "fused", on_gpu(compute="fp32"), "it computes in bf16, not fp32"),
    ("mlp", "fused", on_gpu(matmul="other"), "single products are computed by other"),
    ("mlp", "fused", on_gpu(replace(R18, activation="gelu")), "not --model.activation gelu"),
    ("mlp", "fused", on_gpu(small("r18-softcap", head_dim=2)), "--model.width 12 is not a multiple of 8"),
    ("mlp", "fused", on_gpu(replace(R18, layer_overrides=NARROW)), "layer 3 is 100 wide"),
    ("lm_head", "fused", on_gpu(compute="fp32"), "it computes in bf16, not fp32"),
    ("lm_head", "reference", on_gpu(lm_head_chunk_tokens=64), "--lm-head.chunk-tokens 64 is of no use"),
    ("orthogonalise", "fused", on_gpu(compute="fp32"), "it computes in bf16, not fp32"),
]  # fmt: skip


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("operation", "name", "request_", "why"), WHY_NOT, ids=[f"{w[1]}: {w[3]}" for w in WHY_NOT])
def test_a_back_end_that_does_not_fit_says_why_and_is_refused_by_name(
    operation: Operation, name: str, request_: Request, why: str
) -> None:
    assert why in str(find(operation, name).why_not(request_))
    with pytest.raises(ConfigError) as refused:
        choose(operation, name, request_)
    message = str(refused.value)
    assert message.startswith(f"{FLAGS[operation]} {name} cannot be used: ")
    assert why in message
    assert "\n" not in message
    assert choose(operation, "auto", request_).name != name


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_back_end_is_used_by_name_where_it_fits(operation: Operation) -> None:
    """Record 14, whose windows are counted in tokens, with two mixing scalars fits all of them."""
    for backend in backends(operation):
        chosen = choose(operation, backend.name, on_gpu(replace(TOKENS_WINDOW, value_lambdas=2)))
        assert chosen.name == backend.name
        assert f"{FLAGS[operation]} {backend.name}" in chosen.reason


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_name_that_nobody_has_is_refused_with_those_that_there_are(operation: Operation) -> None:
    with pytest.raises(ConfigError) as refused:
        choose(operation, "abacus", on_cpu())
    names = ", ".join(backend.name for backend in backends(operation))
    assert str(refused.value) == f"{FLAGS[operation]} abacus: no such back end; there are auto, {names}"


def test_outside_of_the_registry_nothing_compares_names_of_back_ends() -> None:
    """`config.qkv` is how a model keeps its projections, and `fused` one of its values."""
    names = {backend.name for operation in OPERATIONS for backend in backends(operation)}
    source, found = Path(paceline.__file__).parent, []
    for path in source.rglob("*.py"):
        if path.parent.name == "backends":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Compare(left=left, comparators=[right]) if not ast.unparse(left).endswith("config.qkv"):
                    compared: list[ast.AST] = [left, right]
                case ast.Subscript(value=table, slice=key) if ast.unparse(table) != "Literal":
                    compared = [key]
                case ast.MatchValue(value=value):
                    compared = [value]
                case _:
                    continue
            constants = {each.value for part in compared for each in ast.walk(part) if isinstance(each, ast.Constant)}
            found += [f"{path.relative_to(source)}:{node.lineno} {ast.unparse(node)}"] if constants & names else []
    assert not found


# ---- elsewhere


@pytest.mark.parametrize(
    ("capability", "custom_kernels", "compute", "expected"),
    [
        (9, True, "bf16", {"attention": "ranges", "qkv": "fused", "mlp": "fused", "lm_head": "fused"}),
        (8, True, "bf16", {"attention": "ranges", "qkv": "reference", "mlp": "reference", "lm_head": "reference"}),
        (9, False, "bf16", {"attention": "flex", "qkv": "reference", "mlp": "reference", "lm_head": "reference"}),
        (9, True, "fp32", {"attention": "flex", "qkv": "reference", "mlp": "reference", "lm_head": "reference"}),
    ],
)
def test_what_a_gpu_elsewhere_would_take_is_known_here(
    capability: int, custom_kernels: bool, compute: Literal["bf16", "fp32"], expected: dict[Operation, str]
) -> None:
    """No GPU is here, and none is asked."""
    request = replace(on_gpu(compute=compute), custom_kernels=custom_kernels)
    assert {operation: suited(operation, request, capability).name for operation in expected} == expected


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("operation", "name", "request_", "why"), WHY_NOT, ids=[f"{w[1]}: {w[3]}" for w in WHY_NOT])
def test_what_is_against_a_back_end_elsewhere_is_what_is_against_it_here(
    operation: Operation, name: str, request_: Request, why: str
) -> None:
    if "deterministic" not in why:
        assert find(operation, name).misfit(request_) == find(operation, name).why_not(request_)


def test_importing_the_back_ends_does_not_import_torch() -> None:
    modules = ", ".join(["registry", *OPERATIONS])
    code = f"import sys; from paceline.backends import {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- one that a test adds

SEAMS = {"attention": "plan", "qkv": "attention", "mlp": "mlp", "lm_head": "lm_head", "matmul": "matmul"}
ADDED = ["attention", "qkv", "mlp", "lm_head"]


@pytest.fixture
def added(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Operation, Callable[[], int]]:
    """An operation with a back end of this test before all others, and how often its result was called."""
    operation: Operation = request.param
    module = importlib.import_module(f"paceline.backends.{operation}")
    calls = []

    def build(asked: Request) -> Any:
        plain = find(operation, "reference").build(asked)
        return lambda *arguments: (calls.append(1), plain(*arguments))[1]

    mine = Backend(name="abacus", build=build, reason=lambda _: "added by a test", kept=lambda _: 12_345.0)
    monkeypatch.setattr(module, "BACKENDS", (mine, *module.BACKENDS))
    return operation, lambda: len(calls)


@pytest.mark.parametrize("added", ADDED, indirect=True)
def test_an_added_back_end_is_chosen_and_computes_the_model(added: tuple[Operation, Callable[[], int]]) -> None:
    operation, calls = added
    chosen, request = choose_backends(preset("r18-softcap"), "cpu", "fp32")
    assert getattr(chosen, operation).name == "abacus"
    assert getattr(chosen, operation).reason == "added by a test"
    seams = Seams(**{seam: chosen.build(op, request) for op, seam in SEAMS.items()})
    plain, tokens = shaken(small("r18-softcap")), random_tokens(1, 128)
    model = GPT(plain.config, end_of_text=plain.end_of_text, seams=seams)
    model.load_state_dict(plain.state_dict())
    losses = [subject(tokens, tokens, windows(128)).main for subject in (model, plain)]
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)  # the output layer goes by chunks where it is not the one
    assert calls() == {"attention": 1, "qkv": 11, "mlp": 12, "lm_head": 1}[operation], "once, or in every layer"


@pytest.mark.parametrize("added", ADDED, indirect=True)
def test_the_memory_model_asks_an_added_back_end_what_it_keeps(
    added: tuple[Operation, Callable[[], int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    operation, _ = added
    batch = BatchConfig(tokens=4096, sequence_tokens=2048, micro_tokens=2048)

    def predicted(**names: str) -> tuple[int, int]:
        memory = step_memory(R18, OptimConfig(), batch, Execution(**names))
        return memory.activations, memory.head_kept

    if operation == "lm_head":
        assert predicted(lm_head="abacus")[1] == 12_345
        return
    with_mine, with_none = (predicted(**{operation: name})[0] for name in ("abacus", "reference"))
    assert with_mine != with_none
    module = importlib.import_module(f"paceline.backends.{operation}")
    doubled = replace(module.BACKENDS[0], kept=lambda _: 2 * 12_345.0)
    monkeypatch.setattr(module, "BACKENDS", (doubled, *module.BACKENDS[1:]))
    layers = 12 if operation == "mlp" else 11
    assert predicted(**{operation: "abacus"})[0] - with_mine == layers * 2048 * 12_345


@pytest.mark.parametrize("added", ADDED, indirect=True)
def test_the_doctor_names_an_added_back_end(
    added: tuple[Operation, Callable[[], int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(probe, "_exit_code_of", lambda code: -4)  # the trial of bf16 products takes 3 s
    monkeypatch.setattr(probe, "cuda", lambda: NO_GPU)
    probe._bf16_on_cpu.cache_clear()
    diagnosis = diagnose()
    probe._bf16_on_cpu.cache_clear()
    assert diagnosis.chosen[added[0]].name == "abacus"
    assert "added by a test" in as_text(diagnosis)
