"""Small arithmetic shared by everyone, and numbers as people read them."""

BLOCK_TOKENS = 128  # granularity of block windows, block lists and aligned packing
IGNORE_TARGET = -100  # target of a position that does not count, as padding; torch's cross entropy ignores it


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def human_bytes(count: float) -> str:
    for unit, digits in (("B", 0), ("KiB", 1), ("MiB", 1)):
        if count < 1024:
            return f"{count:.{digits}f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def human_seconds(seconds: float) -> str:
    """12.3s, 4m05s, 2h07m."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s"


def human_count(count: float) -> str:
    """1,234 · 12.3 K · 124 M · 3.25 B."""
    for unit, least, size in (("B", 1e9, 1e9), ("M", 1e6, 1e6), ("K", 1e4, 1e3)):
        if count >= least:
            return f"{count / size:.3g} {unit}"
    return f"{count:,.0f}"
