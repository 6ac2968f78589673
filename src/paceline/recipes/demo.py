"""The demo: a small GPT with every technique of the newest record, trained on a CPU from built-in text in 90 s.

Two wide layers learn more in that time than four narrow ones: at 200 steps and equal time 1.837 bits per byte against
1.860, because products of width 192 use a CPU better (docs/experiments.md).
"""

from paceline.settings.data import BatchConfig, DataConfig
from paceline.settings.model import ModelConfig, RotaryConfig, WindowConfig
from paceline.settings.optim import AdamConfig, MuonConfig, OptimConfig, ScheduleConfig
from paceline.settings.run import EvaluateConfig, RunConfig


def demo() -> RunConfig:
    """Record 18's architecture at a width of 192, on the text that every Python installation carries."""
    return RunConfig(
        preset="demo",
        steps=310,
        model=ModelConfig(
            vocab_size=2048,
            width=192,
            num_layers=2,
            num_heads=3,
            head_dim=64,
            zero_init_outputs=True,
            qk_norm="before_rotary",
            rotary=RotaryConfig(base=1024.0, rotary_fraction=0.5, spacing="closed", max_tokens=4096),
            lm_head_init="zeros",
            embedding_norm=True,
            x0_mix=True,
            unet_skips=True,
            value_path="sparse",
            value_ends=1,
            softcap=15.0,
            document_mask=True,
            window=WindowConfig(unit="blocks", start_tokens=128, growth_tokens=384),  # all of it from a third on
        ),
        data=DataConfig(tokenizer="bpe-2048", end_of_text=0, order="shuffled"),
        batch=BatchConfig(tokens=2048, sequence_tokens=256),
        optim=OptimConfig(
            muon=MuonConfig(lr=0.06, momentum=0.85, momentum_start=0.85, ns_dtype="fp32"),
            adam=AdamConfig(embedding_lr=0.3, lm_head_lr=0.008, scalar_lr=0.04),
            schedule=ScheduleConfig(cooldown_share=0.4),
        ),
        evaluate=EvaluateConfig(every=155, tokens=0),
    )
