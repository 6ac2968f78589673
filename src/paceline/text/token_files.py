"""Files of token ids that others made: nanoGPT's headerless .bin, llm.c's shards, .npy. `data prepare --ids-of` makes
shards of them. Pickles beside them are never read."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from paceline.core.errors import DataError
from paceline.data.shards import HEADER_BYTES, MAGIC, MAX_VOCAB_SIZE, SCAN_TOKENS, TOKEN_DTYPE, VERSION
from paceline.text.manifest import TokenizerEntry

SUFFIXES = (".bin", ".npy")
PICKLES = (".pkl", ".pickle")
WIDE_MAGIC, WIDE_VERSION = 20240801, 7  # llm.c's shards of 32-bit ids, made for Llama 3
VALIDATION_NAME = re.compile(r"(?:^|[^a-z])val(?:id|idation)?(?![a-z])", re.IGNORECASE)
META = "meta.pkl"
OF_CHARACTERS = (
    f"{META} beside ids, a pickle that is never opened, means that nanoGPT made them of characters, which no tokenizer "
    f"here has: prepare its input.txt instead"
)
MAKE_TEXT = "`paceline data prepare TEXT --out FOLDER --tokenizer gpt2`"


class Layout(NamedTuple):
    """Where the ids lie in a file."""

    start: int
    bytes: int
    dtype: str


def layout_of(path: Path) -> Layout:
    """Found from the header; a .bin without one holds 16-bit ids from its start. Refused where meta.pkl lies beside
    that: many ids of characters are ids of `bytes` and of `gpt2`, too."""
    try:
        layout = _npy_layout(path) if path.suffix == ".npy" else _bin_layout(path)
        if path.suffix == ".bin" and not layout.start and (path.parent / META).exists():
            raise DataError(f"{path}: {OF_CHARACTERS}; if they are of the --ids-of after all, move {META} away")
        return layout
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check the path") from None


def _npy_layout(path: Path) -> Layout:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        said = "it holds pickled objects, which are never read" if "Python objects" in str(error) else str(error)
        raise DataError(f"{path}: not a readable .npy file ({said}); save the ids as an array of integers") from None
    if array.dtype.kind not in "iu" or not array.flags.c_contiguous:
        raise DataError(f"{path}: an array of {array.dtype}, not of token ids; save them as an array of integers")
    return Layout(array.offset, array.nbytes, array.dtype.str)


def _bin_layout(path: Path) -> Layout:
    size = path.stat().st_size
    with open(path, "rb") as file:
        content = file.read(HEADER_BYTES)
    header = np.frombuffer(content[: len(content) // 4 * 4], "<i4")
    for magic, version, dtype in ((MAGIC, VERSION, TOKEN_DTYPE), (WIDE_MAGIC, WIDE_VERSION, np.dtype("<u4"))):
        if len(header) == HEADER_BYTES // 4 and tuple(header[:2]) == (magic, version):
            expected = int(header[2]) * dtype.itemsize
            if size != HEADER_BYTES + expected:
                raise DataError(f"{path}: {size:,} bytes, but its header counts {header[2]:,} tokens; fetch it again")
            return Layout(HEADER_BYTES, expected, dtype.str)
    ids = header.view("<u2")
    if len(ids) and ids[1::2].max() <= 1 and ids[::2].max() > 1:
        raise DataError(f"{path}: seems to hold 32-bit ids without a header; save them as .npy")
    if size % TOKEN_DTYPE.itemsize or not size:
        raise DataError(f"{path}: {size:,} bytes, which are no 16-bit ids; fetch it again")
    return Layout(0, size, TOKEN_DTYPE.str)


def is_validation(name: str) -> bool:
    return VALIDATION_NAME.search(Path(name).stem) is not None


def id_blocks(path: Path, layout: Layout, tokenizer: TokenizerEntry) -> Iterator[np.ndarray]:
    """The ids, (n,) uint16, in blocks. An id that the tokenizer does not have is refused."""
    dtype = np.dtype(layout.dtype)
    with open(path, "rb") as file:
        file.seek(layout.start)
        for first in range(0, layout.bytes // dtype.itemsize, SCAN_TOKENS):
            count = min(SCAN_TOKENS, layout.bytes // dtype.itemsize - first)
            ids = np.frombuffer(file.read(count * dtype.itemsize), dtype)
            wrong = np.flatnonzero((ids < 0) | (ids >= tokenizer.vocab_size))
            if len(wrong):
                strange = f"token {first + int(wrong[0]):,} has id {ids[wrong[0]]}"
                known = f"not one of the {tokenizer.vocab_size:,} of {tokenizer.name}"
                cure = f"name the tokenizer that made the ids with --ids-of, or prepare the text: {MAKE_TEXT}"
                raise DataError(f"{path}: {strange}, {known}; {cure}")
            yield ids.astype(TOKEN_DTYPE)


def how_to_convert(path: Path, *, named: Path) -> str | None:
    """What a file of ids that is no shard is, and the command that makes shards of it, or of the folder `named`."""
    if path.suffix in PICKLES and path == named:
        beside = f"ids beside it are read with --ids-of, but {OF_CHARACTERS}"
        return f"a pickle, which is never opened, since that can run code; {beside}"
    if path.suffix not in SUFFIXES:
        return None
    try:
        with open(path, "rb") as file:
            magic = int.from_bytes(file.read(4), "little")
    except OSError:  # whoever opens it says what is wrong
        return None
    command = f"`paceline data prepare {shlex.quote(str(named))} --out FOLDER --ids-of"
    if path.suffix == ".bin" and magic == MAGIC:
        return None
    if path.suffix == ".bin" and magic == WIDE_MAGIC:
        small = f"if all are below {MAX_VOCAB_SIZE:,}, {command} TOKENIZER` makes shards of it"
        return f"llm.c's shard of 32-bit ids; {small}; those of Llama 3 are not, so prepare the text again: {MAKE_TEXT}"
    kind = "an array" if path.suffix == ".npy" else "no header of a shard, so 16-bit token ids as nanoGPT's"
    beside = f"; {OF_CHARACTERS}" if (path.parent / META).exists() else ""
    return f"{kind}; {command} gpt2` makes shards of ids of GPT-2's tokenizer{beside}"
