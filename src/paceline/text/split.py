"""Which text validates: whole documents by the hash of their text, and the end of one where whole ones do not fit.

`plan_split` measures the documents first. In the order of their hashes they go to validation until it has its share of
the bytes: equal texts stay on one side, and the order of files means nothing. All of the input is looked at, since a
large document may come last; where no line of JSON is large, the hash alone gives about that share.
"""

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Literal

from paceline.text.manifest import ValSplit

Side = Literal["train", "val"]
LEAST_VAL_BYTES = 4096  # text that makes a few sequences of 256 tokens, for validation of a small input
SHORTEST_CUT_BYTES = 512  # a shorter document is not cut in two
TOLERANCE = 0.25  # validation may miss its share by this part of it before a document is cut
ENOUGH_DOCUMENTS = 50  # as many documents of equal size in validation, and the hash alone misses the share by 14 %
MOST_HELD = 200_000  # documents with sizes of their own, the largest; the others are sums over 65,536 ranges of hashes
RANGE_BITS = 48


def split_number(text: bytes) -> int:
    """The hash of a text, below 2^64; those of the lowest numbers go to validation."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8, person=b"split").digest(), "big")


def choose_side(number: int, share: float) -> Side:
    """Equal texts go to one side, on every machine and in every order of files."""
    return "val" if number < share * 2**64 else "train"


def hash_is_enough(total: int, squares: float, share: float) -> bool:
    """Whether the hash alone gives about `share` of documents with this sum of bytes and of their squares."""
    return total * total * share >= ENOUGH_DOCUMENTS * squares > 0


def wanted_bytes(total: int, share: float) -> int:
    """What validation gets of `total` bytes."""
    return int(min(max(share * total, LEAST_VAL_BYTES), total / 2))


def plan_split(documents: Iterable[tuple[int, int]], share: float, *, until_enough: bool = False) -> ValSplit:
    """How to give validation `share` of the bytes of `documents`, each as its number and size. What there is twice
    counts twice and stays together. `until_enough`: stop where the hash alone gives that of what was seen."""
    sizes: dict[int, tuple[int, int]] = {}
    sums: dict[int, int] = defaultdict(int)
    total = squares = 0
    for number, size in documents:
        total += size
        squares += size * size
        if until_enough and hash_is_enough(total, squares, share):
            return ValSplit(share=share)
        if size:
            sizes[number] = (size, sizes.get(number, (size, 0))[1] + 1)
        if len(sizes) > MOST_HELD:
            _sum_up_the_smaller(sizes, sums)
    if sums:
        _sum_up_the_smaller(sizes, sums)  # what is held then does not depend on the order
    ranges = [((at + 1 << RANGE_BITS) - 1, size, 0) for at, size in sums.items()]
    wanted = wanted_bytes(total, share)
    taken, below = 0, 0.0
    for number, size, copies in sorted([*ranges, *((number, *held) for number, held in sizes.items())]):
        missing, added = wanted - taken, size * max(1, copies)
        if missing <= 0:
            break
        if added - missing <= min(missing, TOLERANCE * wanted):
            taken += added
        elif missing <= TOLERANCE * wanted:
            break
        elif copies and size >= SHORTEST_CUT_BYTES:
            end = int(missing / copies)
            return ValSplit(share=below, cut=f"{number:016x}", cut_at=size - end, cut_bytes=end)
        elif taken or len(sizes) == 1:
            break
        else:
            taken = total
        below = math.nextafter(number / 2**64, 1.0)  # above it, however it was rounded
    return ValSplit(share=below)


def _sum_up_the_smaller(sizes: dict[int, tuple[int, int]], sums: dict[int, int]) -> None:
    for number in sorted(sizes, key=lambda number: (sizes[number][0], number))[: -(MOST_HELD // 2)]:
        size, copies = sizes.pop(number)
        sums[number >> RANGE_BITS] += size * copies


class Sides:
    """Tells the side of each part of one document, and cuts where the split says so."""

    def __init__(self, split: ValSplit, side: Side | None) -> None:
        self.split, self.side = split, side
        self.left: int | None = None  # bytes of a document to be cut that stay in training

    def of(self, text: bytes) -> list[tuple[Side, bytes]]:
        """The parts of the document's next piece; two where it is cut."""
        if self.side is None:
            number = split_number(text)
            self.side = choose_side(number, self.split.share)
            if f"{number:016x}" == self.split.cut:
                self.left = self.split.cut_at
        if self.left is None:
            return [(self.side, text)]
        if len(text) <= self.left:
            self.left -= len(text)
            return [(self.side, text)]
        end_of_line = text.find(b"\n", self.left, self.left + self.split.cut_bytes // 4)
        place = end_of_line + 1 if end_of_line >= 0 else self.left + cut_in_line(text[self.left :])
        self.side, self.left = "val", None
        parts: list[tuple[Side, bytes]] = [("train", text[:place]), ("val", text[place:])]
        return [part for part in parts if part[1]]


def cut_in_line(line: bytes) -> int:
    """A place in the line to cut it: after a space, else before a character; its length where only blanks would follow.
    The line may begin inside a character."""
    text = line.rstrip()
    characters = (place for place, byte in enumerate(text) if byte & 0xC0 != 0x80)  # not a later byte of one
    return text.find(b" ") + 1 or next(characters, len(line))
