"""What people train today, as presets: the places from which a technique is ablated.

`r01-baseline` is what the records began with: GPT-2 124M as llm.c's run_gpt2_124M.sh trains it. Kept: architecture,
start, rates, schedule, decay, clipping, tokens of a step, number of steps. On purpose different: weights are fp32 and
products bf16, as in the records after it (llm.c keeps bf16 weights beside fp32 ones), and the order of data is that of
all presets. `llama-style` has the parts of a Llama at the same size, data and number of steps as record 4.
"""

from collections.abc import Callable
from dataclasses import replace

from paceline.recipes.records import r04_muon
from paceline.settings.model import ModelConfig, PrecisionConfig, RotaryConfig
from paceline.settings.optim import AdamConfig, OptimConfig, ScheduleConfig
from paceline.settings.run import RunConfig

MODEL = ModelConfig(
    num_heads=12,
    head_dim=64,
    matrix_init="gpt2",
    embedding_init="gpt2",
    rotary=RotaryConfig(max_tokens=1024),
    norm_eps=1e-5,
    precision=PrecisionConfig(mode="autocast", compute="bf16"),
)
"""What both have."""


def _adamw(base: OptimConfig, lr: float, schedule: ScheduleConfig) -> OptimConfig:
    """AdamW with one rate for all, decay of what has two dimensions, and clipping; Muon's settings stay `base`'s."""
    rates = AdamConfig(
        embedding_lr=lr,
        lm_head_lr=lr,
        scalar_lr=lr,
        matrix_lr=lr,
        vector_lr=lr,
        beta1=0.9,
        beta2=0.95,
        weight_decay=0.1,
        decay_vectors=False,
    )
    return replace(base, matrices="adamw", adam=rates, schedule=schedule, clip_norm=1.0)


def r01_baseline() -> RunConfig:
    """Record 1: GPT-2 124M as llm.c trains it. AdamW, learned positions, GELU, layer norm, biases, a tied head, warm-up
    and cosine; 10 billion tokens."""
    base = r04_muon()
    model = replace(
        MODEL, qkv="fused", activation="gelu_tanh", biases=True, norm="layer", positions="learned", tied_lm_head=True
    )
    schedule = ScheduleConfig(warmup_steps=700, shape="cosine", cooldown_share=1.0)
    evaluate = replace(base.evaluate, every=250)
    optim = _adamw(base.optim, 6e-4, schedule)
    return replace(base, preset="r01-baseline", steps=18_865, model=model, optim=optim, evaluate=evaluate)


def llama_style() -> RunConfig:
    """A small Llama: SwiGLU, RMS norm with weights, rotary positions, no biases, an untied head. AdamW with warm-up and
    cosine down to a tenth."""
    base = r04_muon()
    model = replace(MODEL, activation="swiglu", norm="rms_weighted", lm_head_init="gpt2")
    schedule = ScheduleConfig(warmup_steps=350, shape="cosine", cooldown_share=1.0, floor=0.1)
    return replace(base, preset="llama-style", model=model, optim=_adamw(base.optim, 6e-4, schedule))


BASELINES: dict[str, Callable[[], RunConfig]] = {"r01-baseline": r01_baseline, "llama-style": llama_style}
