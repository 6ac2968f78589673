"""What each record did to time, steps and memory as a whole, from the public logs on eight H100. No torch.

A technique is rarely alone in its record, so these are the bounds within which it can have acted.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Total:
    """Means over a record's logs. Train time leaves out the first ten steps."""

    steps: int
    train_s: float
    step_ms: float
    val_loss: float
    peak_mib: int | None = None
    """None: not in the logs."""


TOTALS: dict[int, Total] = {
    4: Total(steps=6200, train_s=1339.07, step_ms=216.33, val_loss=3.2785),
    5: Total(steps=5100, train_s=910.55, step_ms=178.89, val_loss=3.2741),
    13: Total(steps=1750, train_s=279.56, step_ms=160.67, val_loss=3.2770),
    14: Total(steps=1530, train_s=264.63, step_ms=174.10, val_loss=3.2776),
    15: Total(steps=1480, train_s=236.86, step_ms=161.13, val_loss=3.2785),
    16: Total(steps=1480, train_s=231.01, step_ms=157.15, val_loss=3.2785, peak_mib=34_239),
    17: Total(steps=1490, train_s=213.12, step_ms=144.00, val_loss=3.2794, peak_mib=31_361),
    18: Total(steps=1390, train_s=204.34, step_ms=148.08, val_loss=3.2785, peak_mib=31_563),
}

NEIGHBOURS = {5: 4, 14: 13, 15: 14, 16: 15, 17: 16, 18: 17}
"""Records whose direct predecessor is among them."""


def whole_record(record: int) -> str | None:
    """What a record as a whole did, in one sentence; None if its predecessor's logs are not among these."""
    if record not in NEIGHBOURS:
        return None
    before, after = TOTALS[NEIGHBOURS[record]], TOTALS[record]
    changes = [
        f"{before.steps:,} → {after.steps:,} steps",
        f"{before.step_ms:.2f} → {after.step_ms:.2f} ms a step",
        f"{before.train_s:.2f} → {after.train_s:.2f} s",
        f"loss {before.val_loss:.4f} → {after.val_loss:.4f}",
    ]
    if before.peak_mib and after.peak_mib:
        changes.append(f"peak memory {before.peak_mib:,} → {after.peak_mib:,} MiB")
    return f"Record {record} as a whole, against record {NEIGHBOURS[record]}: {', '.join(changes)}."
