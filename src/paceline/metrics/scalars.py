"""A record as the numbers that a tracker plots, under one set of names for all trackers."""

import math
from typing import TypeGuard

from paceline.metrics.records import EvalRecord, StepRecord


def scalars(record: StepRecord | EvalRecord) -> dict[str, float]:
    """Name to number. What is not known, or not finite, is left out: a curve with a gap can still be drawn."""
    named = _of_step(record) if isinstance(record, StepRecord) else _of_evaluation(record)
    return {name: float(value) for name, value in named.items() if _is_number(value)}


def _of_step(record: StepRecord) -> dict[str, object]:
    return {
        "train/loss": record.train_loss,
        "train/lr_scale": record.lr_scale,
        "train/window_tokens": record.window_tokens,
        "train/tokens": record.tokens,
        "train/tokens_per_s": record.tokens_per_s,
        "time/train_s": record.train_s,
        "time/wall_s": record.wall_s,
        **{f"train/{name}": value for name, value in record.extra.items()},
    }


def _of_evaluation(record: EvalRecord) -> dict[str, object]:
    return {
        "val/loss": record.val_loss,
        "val/bits_per_byte": record.val_bpb,
        **{f"val/{name}": value for name, value in record.extra.items()},
    }


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
