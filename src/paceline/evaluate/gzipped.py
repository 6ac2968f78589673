"""What gzip makes of the validation text: a figure that a reader can hold bits per byte against. No torch."""

import gzip
from collections.abc import Iterable

from paceline.data.corpus import IGNORED_TARGET, Batch
from paceline.data.tokenizer import Tokenizer

TEXT_BYTES = 1_000_000
"""No batch is read after so much text: that takes about 0.3 s, and more would change little, since gzip looks
back 32 KiB only."""


def gzip_bits_per_byte(batches: Iterable[Batch], tokenizer: Tokenizer) -> float | None:
    """Bits that `gzip -9` needs for a byte of the text that these batches ask for. None: they ask for none."""
    text = bytearray()
    for batch in batches:
        text += tokenizer.decode_bytes(batch.targets[batch.targets != IGNORED_TARGET].tolist())
        if len(text) >= TEXT_BYTES:
            break
    return 8 * len(gzip.compress(text, 9)) / len(text) if text else None
