"""`paceline`, which sends itself a signal at a chosen moment: `python -m train.victim PLACE CALL SIGNAL WORDS…`.

A place is a function of a run, and CALL counts its calls, so that a moment can be met again. Of several ranks only the
last receives the signal, or the first, where it alone comes to the place."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from paceline.checkpoint import save, tensors
from paceline.cli import main
from paceline.metrics.sinks import JsonlSink
from paceline.parallel.embedding_sync import EmbeddingSync
from paceline.train import gradient_step, hooks, run

PLACES: dict[str, tuple[Any, str]] = {
    "gradient": (gradient_step, "accumulate_gradient"),
    "update": (EmbeddingSync, "await_gradients"),  # Muon's momentum has moved, no matrix has
    "evaluation": (hooks, "validate"),
    "validated": (hooks, "block_share"),  # the losses are known, no line of metrics is written
    "record": (JsonlSink, "write"),
    "card": (run, "write_card"),
    "saving": (tensors, "write_tensors"),  # in the thread that writes
    "publishing": (save, "sync_folder"),
    "pruning": (save, "_prune"),
}


WRITING = ("record", "card", "saving", "publishing", "pruning")
"""Places to which only the first rank comes."""


@contextmanager
def struck(place: str, call: int, number: int) -> Iterator[None]:
    """While entered, the call with this number sends the signal; before one that kills, it does half of its work."""
    owner, name = PLACES[place]
    plain, calls = getattr(owner, name), [0]

    def watched(*given: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == call and _is_meant(place):
            if number == signal.SIGKILL:
                _half_done(place, given)
            os.kill(os.getpid(), number)
        return plain(*given, **options)

    with patch.object(owner, name, watched):
        yield


def _is_meant(place: str) -> bool:
    rank, world = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    return rank == (0 if place in WRITING else world - 1)


def _half_done(place: str, given: tuple[Any, ...]) -> None:
    if place == "record":
        given[0]._file.write(b'{"kind": "step", "st')
        given[0]._file.flush()
    if place == "saving":
        given[0].write_bytes(b"half of a file")


def strike(place: str, call: int, number: int, words: list[str]) -> None:
    """A process of its own that runs `words` and is struck, or ends with the command's exit code."""
    with struck(place, call, number):
        sys.exit(main(words))


if __name__ == "__main__":
    strike(sys.argv[1], int(sys.argv[2]), signal.Signals[sys.argv[3]], sys.argv[4:])
