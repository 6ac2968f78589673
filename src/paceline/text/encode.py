"""Chunks of text to token ids in several processes, results in the order of the chunks.

Processes, not threads: reading, JSON and joining hold the interpreter's lock. 100 MB become shards at 25 MB/s on two
cores, 1.03 times the rate of tiktoken's own thread pool, which only encodes. They are spawned, never forked. A worker
ends when its parent does, even by kill -9: the pool alone would leave it waiting for ever.
"""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np

from paceline.core.errors import PacelineError
from paceline.data.shards import TOKEN_DTYPE
from paceline.text.manifest import TokenizerEntry
from paceline.text.sources import Piece
from paceline.text.split import Side
from paceline.text.tokenizer import Tokenizer, load_tokenizer

CHUNKS_IN_FLIGHT_PER_WORKER = 3  # enough that a worker never waits for the reader; each holds about 1 MiB

Encoded = dict[Side, np.ndarray]


@dataclass(frozen=True)
class Chunk:
    """Consecutive pieces of the input. `digest` is the hash of the input up to its end."""

    number: int
    pieces: list[Piece]
    digest: str


def encode_pieces(tokenizer: Tokenizer | TokenizerEntry, pieces: list[Piece]) -> Encoded:
    """The token ids of each side, (n,) uint16, every document opened by end-of-text. An entry is enough for ids."""
    opening = np.array([tokenizer.end_of_text], dtype=TOKEN_DTYPE)
    parts: dict[Side, list[np.ndarray]] = {"train": [], "val": []}
    for piece in pieces:
        if piece.opens:
            parts[piece.side].append(opening)
        if isinstance(tokenizer, TokenizerEntry):
            parts[piece.side].append(np.frombuffer(piece.text, TOKEN_DTYPE))
        else:
            parts[piece.side].append(tokenizer.encode_array(piece.text.decode()))
    return {side: np.concatenate(found) if found else opening[:0] for side, found in parts.items()}


def encode_in_order(
    chunks: Iterable[Chunk], folder: Path, named: str | TokenizerEntry, workers: int
) -> Generator[tuple[Chunk, Encoded]]:
    """Each chunk with its tokens, by the tokenizer that `folder` carries or, where chunks hold ids, of this entry."""
    if workers == 1 or not isinstance(named, str):
        tokenizer = load_tokenizer(folder, named) if isinstance(named, str) else named
        for chunk in chunks:
            yield chunk, encode_pieces(tokenizer, chunk.pieces)
        return
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, spawn, initializer=_start_worker, initargs=(folder, named))
    try:
        yield from _encode_in_pool(pool, chunks, limit=workers * CHUNKS_IN_FLIGHT_PER_WORKER)
    except BrokenProcessPool:
        cure = "run the same command again to continue, with fewer --workers if it was memory"
        raise PacelineError(f"a tokenizing process was ended from outside (memory?); {cure}") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _encode_in_pool(pool: ProcessPoolExecutor, chunks: Iterable[Chunk], limit: int) -> Iterator[tuple[Chunk, Encoded]]:
    """The pool starts a process when it is given work, so a run that finds all done starts none."""
    nothing = np.zeros(0, dtype=TOKEN_DTYPE)
    none: Encoded = {"train": nothing, "val": nothing}
    pending: deque[tuple[Chunk, Future[Encoded] | None]] = deque()
    for chunk in chunks:
        pending.append((chunk, pool.submit(_encode_in_worker, chunk.pieces) if chunk.pieces else None))
        if len(pending) >= limit:
            first, future = pending.popleft()
            yield first, future.result() if future else none
    for first, future in pending:
        yield first, future.result() if future else none


_worker_tokenizer: Tokenizer | None = None  # set once in each worker process; unused in the parent


def _start_worker(folder: Path, name: str) -> None:
    global _worker_tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core for each worker
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker_tokenizer = load_tokenizer(folder, name)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _encode_in_worker(pieces: list[Piece]) -> Encoded:
    assert _worker_tokenizer is not None
    return encode_pieces(_worker_tokenizer, pieces)
