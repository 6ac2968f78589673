"""The records as presets: each is its predecessor plus what changed, so a record can be read as a diff.

Kept from the public logs: architecture, schedules, number formats, rates, step counts. On purpose different from the
originals, in all of them: the data order is record 18's rule (one common position for all ranks; the older ones let
two ranks run ahead at shard borders), the first batch is not repeated (records 4 and 5 did), validation runs without
autograd and in the training precision, and the gradient is the true mean over the global batch.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from paceline.core.schema import Change
from paceline.settings.data import BatchConfig, DataConfig
from paceline.settings.model import ModelConfig, PrecisionConfig, RotaryConfig, WindowConfig
from paceline.settings.optim import AdamConfig, MuonConfig, OptimConfig, ScheduleConfig
from paceline.settings.parallel import ParallelConfig
from paceline.settings.run import EvaluateConfig, RunConfig, TrainConfig

BF16_EPS = 2.0**-7
"""Machine ε of bf16: what the originals' norm used on bf16 inputs, by the framework default of their time."""
FP32_EPS = 2.0**-23


@dataclass(frozen=True)
class PublicResult:
    """What the public logs say of a record, on eight H100."""

    record: int
    predecessor: str | None
    minutes: float
    val_loss: float


PUBLIC = {
    "r04-muon": PublicResult(4, None, 22.3, 3.2785),
    "r05-modern-arch": PublicResult(5, "r04-muon", 15.2, 3.2741),
    "r13-window-warmup": PublicResult(13, "r05-modern-arch", 4.66, 3.2770),
    "r14-value-embed": PublicResult(14, "r13-window-warmup", 4.41, 3.2776),
    "r15-unet-values": PublicResult(15, "r14-value-embed", 3.95, 3.2785),
    "r16-block-mask": PublicResult(16, "r15-unet-values", 3.80, 3.2785),
    "r17-sparse-values": PublicResult(17, "r16-block-mask", 3.57, 3.2794),
    "r18-softcap": PublicResult(18, "r17-sparse-values", 3.4, 3.2785),
}


HISTORY = {
    "r16-block-mask": Change(field="(DDP broadcasts buffers)", before=True, after=False),
    "r18-softcap": Change(field="(Adam objects)", before="one a group", after="one in all"),
}
"""What a record changed in the original script without changing a number: a label in its diff, no setting here."""


def r04_muon() -> RunConfig:
    """Record 4: GPT-2's size with rotary positions, a tied head, and Muon for the block matrices."""
    return RunConfig(
        preset="r04-muon",
        steps=6200,
        model=ModelConfig(
            num_heads=12,
            head_dim=64,
            qkv="fused",
            activation="gelu",
            attention_branch_scale=1 / math.sqrt(24),
            norm_eps=1e-6,
            rotary=RotaryConfig(max_tokens=1024),
            tied_lm_head=True,
            embedding_init="uniform",
            precision=PrecisionConfig(mode="autocast", compute="bf16"),
        ),
        data=DataConfig(dir="data/fineweb10B", tokenizer="gpt2", end_of_text=50_256),
        batch=BatchConfig(tokens=524_288, sequence_tokens=1024),
        optim=OptimConfig(
            muon=MuonConfig(
                lr=0.00036,
                momentum_form="sum",
                scale_rule="longest_side",
                ns_association="product_first",
                ns_norm_of="unrounded",
            ),
            adam=AdamConfig(embedding_lr=0.0036, beta1=0.9),
            schedule=ScheduleConfig(cooldown_steps=1800, cooldown_share=None),
        ),
        train=TrainConfig(device="cuda", compile=True, coordinate_descent=True),
        evaluate=EvaluateConfig(every=125, tokens=10_485_760),
        parallel=ParallelConfig(bucket_views=False),
    )


def r05_modern_arch() -> RunConfig:
    """Record 5: padded vocabulary, six wide heads, ReLU², zero-initialised outputs, QK norm after rotary; shorter."""
    base = r04_muon()
    return replace(
        base,
        preset="r05-modern-arch",
        steps=5100,
        model=replace(
            base.model,
            embedding_multiple=128,
            lm_head_multiple=128,
            num_heads=6,
            head_dim=128,
            qkv="separate",
            activation="relu2",
            zero_init_outputs=True,
            attention_branch_scale=1.0,
            norm_eps=FP32_EPS,
            qk_norm="after_rotary",
            qk_norm_eps=BF16_EPS,
            rotary=replace(base.model.rotary, table_dtype="bf16", arithmetic="activation"),
        ),
        optim=replace(
            base.optim,
            muon=replace(base.optim.muon, ns_norm_of="rounded"),
            schedule=replace(base.optim.schedule, cooldown_steps=1450),
        ),
    )


def r13_window_warmup() -> RunConfig:
    """Record 13, eight records after 5. What they brought: 6 Muon's work shared by ranks · 7 a newer torch · 8 untied
    zero-initialised head, norm after the embedding, the aspect scale rule, other rates · 9 value residual, x0 mixing,
    softcap 30, momentum warm-up · 10 bf16 activations · 11 U-Net skips, rates 0.6 / 0.008 / 0.04 · 12 sequences of
    65,536 tokens with a document mask · 13 window warm-up, β₁ 0.8, Muon rate 0.05."""
    base = r05_modern_arch()
    return replace(
        base,
        preset="r13-window-warmup",
        steps=1750,
        model=replace(
            base.model,
            norm_eps=BF16_EPS,
            qk_norm="before_rotary",
            rotary=replace(base.model.rotary, max_tokens=65_536),
            tied_lm_head=False,
            embedding_init="normal",
            lm_head_init="zeros",
            embedding_norm=True,
            x0_mix=True,
            unet_skips=True,
            value_path="residual",
            value_lambdas=1,
            softcap=30.0,
            document_mask=True,
            window=WindowConfig(unit="tokens", start_tokens=64, growth_tokens=1728, quantum_tokens=64),
            precision=PrecisionConfig(
                mode="explicit", compute="bf16", embeddings="bf16", scalars="bf16", round_matrices_at_init=True
            ),
        ),
        batch=BatchConfig(tokens=524_288, sequence_tokens=65_536),
        optim=replace(
            base.optim,
            muon=replace(
                base.optim.muon,
                lr=0.05,
                momentum_start=0.85,
                momentum_warmup_steps=300,
                scale_rule="aspect",
                ns_association="polynomial_first",
            ),
            adam=replace(base.optim.adam, embedding_lr=0.6, lm_head_lr=0.008, scalar_lr=0.04, beta1=0.8),
            schedule=replace(base.optim.schedule, cooldown_steps=640),
        ),
    )


def r14_value_embed() -> RunConfig:
    """Record 14: twelve value tables, one per layer, in place of block 0's values; shorter."""
    base = r13_window_warmup()
    return replace(
        base,
        preset="r14-value-embed",
        steps=1530,
        model=replace(
            base.model,
            value_path="layerwise",
            value_storage="chunks",
            rotary=replace(base.model.rotary, frequency_dtype="bf16"),  # the module cast swept the frequencies along
        ),
        optim=replace(base.optim, schedule=replace(base.optim.schedule, cooldown_steps=600)),
    )


def r15_unet_values() -> RunConfig:
    """Record 15: six value tables used twice in mirrored order, two mixing scalars, averaged momentum, a window that
    its hand-built block list also cuts at block borders; shorter."""
    base = r14_value_embed()
    return replace(
        base,
        preset="r15-unet-values",
        steps=1480,
        model=replace(
            base.model,
            value_path="mirrored",
            value_lambdas=2,
            window=replace(base.model.window, unit="tokens_in_blocks"),
        ),
        optim=replace(base.optim, muon=replace(base.optim.muon, momentum_form="average")),
    )


def r16_block_mask() -> RunConfig:
    """Record 16: windows counted in blocks of 128 tokens with full and partial block lists, value tables kept apart,
    gradients as views of their buckets, guards skipped."""
    base = r15_unet_values()
    return replace(
        base,
        preset="r16-block-mask",
        model=replace(
            base.model,
            value_storage="tables",
            window=WindowConfig(unit="blocks", start_tokens=128, growth_tokens=1728, quantum_tokens=128),
        ),
        train=replace(base.train, skip_guards=True),
        parallel=ParallelConfig(bucket_views=True),
    )


def r17_sparse_values() -> RunConfig:
    """Record 17: three value tables for the first and last three layers, no attention in block 7, half of the rotary
    pairs at rest and the others from base 1024, embedding rows without padding; ten steps more."""
    base = r16_block_mask()
    return replace(
        base,
        preset="r17-sparse-values",
        steps=1490,
        model=replace(
            base.model,
            embedding_multiple=1,
            value_path="sparse",
            layers_without_attention=(7,),
            rotary=replace(
                base.model.rotary,
                base=1024.0,
                rotary_fraction=0.5,
                spacing="closed",
                frequency_dtype="fp32",
                arithmetic="fp32",
            ),
        ),
        train=replace(base.train, expandable_segments=True),
    )


def r18_softcap() -> RunConfig:
    """Record 18: logits capped at 15, only the tables in bf16, cool-down as a share of the run; shorter."""
    base = r17_sparse_values()
    return replace(
        base,
        preset="r18-softcap",
        steps=1390,
        model=replace(
            base.model,
            softcap=15.0,
            embedding_multiple=128,
            rotary=replace(base.model.rotary, table_dtype="fp32"),
            precision=replace(base.model.precision, scalars="fp32", round_matrices_at_init=False),
        ),
        optim=replace(base.optim, schedule=ScheduleConfig(cooldown_steps=None, cooldown_share=0.4)),
        train=replace(base.train, coordinate_descent=False, skip_guards=False, expandable_segments=False),
    )


MAKERS = (r04_muon, r05_modern_arch, r13_window_warmup, r14_value_embed, r15_unet_values, r16_block_mask,
          r17_sparse_values, r18_softcap)  # fmt: skip
RECORDS: dict[str, Callable[[], RunConfig]] = {make.__name__.replace("_", "-"): make for make in MAKERS}
"""By name; a new preset is a function that stands here."""
