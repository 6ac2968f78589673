"""A rank begins only once the first one has said that all agree."""

import threading
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import TCPStore

from paceline.core.errors import PacelineError
from paceline.parallel import rendezvous
from paceline.parallel.ranks import Ranks

FACTS = {"--seed": "0"}


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> TCPStore:
    monkeypatch.setattr(rendezvous, "RANK0_REPORT_S", 0.2)
    return TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=10), wait_for_workers=False)


def test_a_rank_that_gets_no_verdict_does_not_begin(store: TCPStore) -> None:
    """The first rank has welcomed it and hangs then."""
    first = threading.Thread(target=rendezvous._receive, args=(store, Ranks(0, 2, 0), 5.0))
    first.start()
    with pytest.raises(PacelineError, match=r"rank 1 of 2 got no answer of the first rank within 0\.5 s"):
        rendezvous.meet(store, Ranks(1, 2, 1), FACTS, 0.3)
    first.join()
