"""Input files as streams of UTF-8: unpacked, read in their encoding, bad bytes replaced where that was asked for.

All in blocks, whatever the size. What cannot be decoded stays a byte that is not UTF-8 (0xff for other encodings), so
that one place, the reader of lines and records, decides about bad text.
"""

import codecs
import io
import itertools
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import IO, Any

from paceline.core.errors import ConfigError, DataError, optional_module

BLOCK_BYTES = 1 << 20
PACKED_BYTES = 1 << 16  # read of a .zst file at a time: what it unpacks to is held
UNPACKED_BY = {".gz": "gzip", ".bz2": "bz2", ".xz": "lzma"}
PACKINGS = (*UNPACKED_BY, ".zst")
BAD_BYTES = re.compile("[\udc80-\udcff]+")  # what bytes that are no text become under "surrogateescape"


def blocks_of(file: IO[bytes], length: int = sys.maxsize) -> Iterator[bytes]:
    """The next `length` bytes of the file, a block at a time."""
    while block := file.read(min(BLOCK_BYTES, length)):
        length -= len(block)
        yield block


def unpacked(raw: IO[bytes], packing: str, place: str) -> IO[bytes]:
    if packing == ".zst":
        return io.BufferedReader(_Blocks(_zstd_blocks(raw, _zstd(place))))
    if not packing:
        return raw
    name = UNPACKED_BY[packing]  # a Python may have been built without it
    missing = DataError(f"{place}: this Python has no module {name} to read {packing}; unpack the file first")
    content: IO[bytes] = optional_module(name, missing).open(raw)
    return content


def read_errors() -> tuple[type[Exception], ...]:
    """What reading a damaged file raises."""
    loaded = {"lzma": "LZMAError", "compression.zstd": "ZstdError", "zstandard": "ZstdError"}
    found = [getattr(module, error) for name, error in loaded.items() if (module := sys.modules.get(name))]
    return (OSError, EOFError, zlib.error, *found)


def as_utf8(file: IO[bytes], encoding: str, count_replaced: Callable[[int], None] | None) -> IO[bytes]:
    """The file's text in UTF-8. With `count_replaced`, which counts them, each run of bad bytes becomes U+FFFD."""
    if encoding == "utf-8" and count_replaced is None:
        return file
    return io.BufferedReader(_Blocks(_utf8_blocks(file, encoding, count_replaced)))


def check_encoding(name: str) -> str:
    """The encoding's name in one spelling."""
    try:
        found = codecs.lookup(name)
        codecs.getincrementaldecoder(name)
        is_text: bool = found._is_text_encoding
    except (LookupError, ValueError):
        is_text = False
    if not is_text:
        raise ConfigError(f"--encoding {name!r}: not an encoding of text that Python knows; as utf-8, utf-16 or cp1252")
    return found.name


class _Blocks(io.RawIOBase):
    """An iterator of blocks as a file."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks, self._rest = blocks, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._rest = memoryview(block)
        taken = self._rest[: len(buffer)]
        buffer[: len(taken)] = taken
        self._rest = self._rest[len(taken) :]
        return len(taken)


def _utf8_blocks(file: IO[bytes], encoding: str, count_replaced: Callable[[int], None] | None) -> Iterator[bytes]:
    codecs.register_error("paceline_mark", _mark_bad)
    decoder = codecs.getincrementaldecoder(encoding)("surrogateescape" if encoding == "utf-8" else "paceline_mark")
    for block in itertools.chain(blocks_of(file), [b""]):
        text = decoder.decode(block, final=not block)
        if count_replaced is not None:
            text = replace_bad(text, count_replaced)
        yield text.encode("utf-8", "surrogateescape")


def replace_bad(text: str, count: Callable[[int], None]) -> str:
    """Each run of bad bytes as U+FFFD; `count` gets their number."""
    count(sum(map(len, BAD_BYTES.findall(text))))
    return BAD_BYTES.sub("\ufffd", text)


def _mark_bad(error: UnicodeError) -> tuple[str, int]:
    """As "surrogateescape", but also of bytes below 0x80, of which half a character of UTF-16 may consist."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\udcff" * (error.end - error.start), error.end


def _zstd(place: str) -> Callable[[], Any]:
    try:
        from compression import zstd  # type: ignore[import-not-found, unused-ignore]  # from Python 3.14 on
    except ImportError:
        missing = DataError(f"{place}: reading .zst needs the package zstandard; pip install 'paceline[data]'")
        zstandard = optional_module("zstandard", missing)
        return lambda: zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
    return partial(zstd.ZstdDecompressor, options={zstd.DecompressionParameter.window_log_max: 31})


def _zstd_blocks(raw: IO[bytes], new_frame: Callable[[], Any]) -> Iterator[bytes]:
    """A file is one frame or several, one after another."""
    frame = None
    while block := raw.read(PACKED_BYTES):
        while block:
            frame = frame or new_frame()
            yield frame.decompress(block)
            block, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame is not None:
        raise EOFError("it ends in the middle of a compressed frame")
