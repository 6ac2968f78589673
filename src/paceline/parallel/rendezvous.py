"""How the processes of a run find each other, make sure that they do the same, and part: never a hang, one clear line.

At torchrun's store, or one that the first rank opens, each rank posts its code and settings, or the mistake that keeps
it away, and the first one judges. torchrun's store outlives a restart of the workers, so its content may be old: a rank
signs its post with a word of its own, and has come once it has repeated the first rank's word, which also prefixes all
later keys. The first rank prints for all; another one only an error of its own that the first does not name.
"""

import contextlib
import gc
import json
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore  # where mypy finds them

from paceline.core.errors import ConfigError, PacelineError, UserError
from paceline.parallel.ranks import Ranks, ranks_from_environment
from paceline.settings.parallel import ParallelConfig

POLL_S = 0.05
RANK0_REPORT_S = 5.0  # another rank waits for the first to print, and the first for others to come, before it ends
SAME_MISTAKE_S = 30.0  # the same before ranks have met: they may start that far apart
LOST = r"gloo|pair closure|Connection (reset|closed)|Broken pipe"  # of a RuntimeError from an exchange over gloo

Facts = Mapping[str, str]  # what must be the same on every rank: its name, as a message calls it, and its value


class LostRankError(PacelineError):
    """Another rank is gone or does not answer."""


@contextlib.contextmanager
def joined(ranks: Ranks, device: torch.device, facts: Facts, config: ParallelConfig) -> Iterator[None]:
    """While the block runs, there is a process group. A rank that receives nothing for `config.timeout_s` gives up. An
    error that leaves the block has `told` set."""
    if ranks.world == 1:
        yield
        return
    store = meet(open_store(ranks, config.start_timeout_s), ranks, facts, config.start_timeout_s)
    back_ends = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=config.timeout_s)
    try:
        dist.init_process_group(back_ends, store=store, rank=ranks.rank, world_size=ranks.world, timeout=timeout)
        yield
        ranks.wait_for_all()  # the first may still be saving
    except PacelineError as error:
        settle(error, store, ranks)
        raise
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and not re.search(LOST, str(error)):
            raise
        late = f"it was silent for {config.timeout_s:g} s, --parallel.timeout-s"
        reason = late if re.search("imed out|timeout", str(error)) else _plain(error)
        lost = LostRankError(f"{ranks} lost another rank ({reason}); what was saved goes on with --resume")
        settle(lost, store, ranks)
        raise lost from error
    # A DDP wrapper left in a cycle would hold the group last and end it under Python's lock, for which a thread of the
    # group may be waiting: both then wait for ever.
    gc.collect()
    dist.destroy_process_group()  # not after an error: it could wait for a collective that never ends


def _plain(error: Exception) -> str:
    """What torch or gloo says, without its place in their sources and without advice."""
    return re.sub(r".*\[/\S*\] ", "", str(error).splitlines()[0]).split(". ")[0]


def open_store(ranks: Ranks, timeout_s: float) -> Store:
    """The store that all ranks of this launch reach, where the environment says it is."""
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdecimal():
        found = f"MASTER_ADDR={host!r}, MASTER_PORT={port!r}"
        raise ConfigError(f"{found}: not a machine and its port; start with torchrun")
    hosts_it = ranks.is_main and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    timeout = timedelta(seconds=timeout_s)
    try:
        return TCPStore(host, int(port), is_master=hosts_it, timeout=timeout, wait_for_workers=False)
    except RuntimeError as error:
        if hosts_it:
            reason = "it is in use" if "EADDRINUSE" in str(error) else _plain(error)
            line = f"port {port} of {host} cannot be opened ({reason}); choose a free one by MASTER_PORT"
            raise PacelineError(line) from error
        late = f"{ranks} did not reach {host}:{port} within {timeout_s:g} s (--parallel.start-timeout-s)"
        raise PacelineError(f"{late}; is the first rank running, and the way to it open?") from error


def meet(store: Store, ranks: Ranks, facts: Facts, timeout_s: float) -> Store:
    """The corner of the store of this launch, once all have come with equal `facts`; else all raise the same error."""
    try:
        if ranks.is_main:
            corner, said = _receive(store, ranks, timeout_s)
            verdict = _judge(said, facts, ranks, timeout_s)
            _announce(corner, verdict)
        else:
            corner = _come(store, ranks, {"facts": dict(facts)}, timeout_s)
            patience_s = timeout_s + RANK0_REPORT_S  # the first waits for the others as long as this one for it
            if (told := _awaited(corner, "verdict", patience_s)) is None:
                late = f"{ranks} got no answer of the first rank within {patience_s:g} s"
                raise PacelineError(f"{late}, so it does not begin")
            found = json.loads(told)
            verdict = None if found is None else _error(found["line"], mistake=found["mistake"])
    except RuntimeError as error:
        raise PacelineError(f"{ranks} lost the first rank before the start ({_plain(error)})") from error
    if verdict is not None:
        verdict.told = not ranks.is_main
        raise verdict
    return corner


def _receive(store: Store, ranks: Ranks, timeout_s: float) -> tuple[Store, dict[int, Any]]:
    """What each rank says that comes in time, and the corner of the store that all of them know by then."""
    word, said, signed = uuid.uuid4().hex, dict[int, Any](), dict[int, str]()
    corner = PrefixStore(word, store)

    def all_came() -> bool:
        for rank in set(range(1, ranks.world)) - set(said):
            if not store.check([f"hello/{rank}"]):
                continue
            hello = json.loads(store.get(f"hello/{rank}"))
            if signed.get(rank) != hello["word"]:  # new, or what it said before a restart is replaced
                signed[rank] = hello["word"]
                store.set(f"welcome/{hello['word']}", word)
            if corner.check([f"came/{hello['word']}"]):
                said[rank] = hello["says"]
        return len(said) == ranks.world - 1

    _wait_until(all_came, timeout_s)
    return corner, said


def _come(store: Store, ranks: Ranks, says: dict[str, Any], timeout_s: float) -> Store:
    """The other side of `_receive`."""
    word = uuid.uuid4().hex
    store.set(f"hello/{ranks.rank}", json.dumps({"word": word, "says": says}))
    if (first_word := _awaited(store, f"welcome/{word}", timeout_s)) is None:
        late = f"within {timeout_s:g} s (--parallel.start-timeout-s)"
        raise PacelineError(f"{ranks} got no reply from the first rank {late}")
    corner = PrefixStore(first_word, store)
    corner.set(f"came/{word}", "")
    return corner


def _judge(said: Mapping[int, Any], facts: Facts, ranks: Ranks, timeout_s: float) -> PacelineError | None:
    """None: all have come and are as the first."""
    for rank, says in sorted(said.items()):
        if "error" in says:
            return _error(f"rank {rank}: {says['error']}", mistake=says["mistake"])
        for name in {**facts, **says["facts"]}:
            there, here = says["facts"].get(name), facts.get(name)
            if there != here:
                differs = f"rank {rank} differs from rank 0: {name} is {there} there and {here} here"
                return UserError(f"{differs}; all ranks need the same code and flags")
    missing = ", ".join(str(rank) for rank in range(1, ranks.world) if rank not in said)
    late = f"rank {missing} of {ranks.world} did not come within {timeout_s:g} s (--parallel.start-timeout-s)"
    return PacelineError(late) if missing else None


def _error(line: str, *, mistake: bool) -> PacelineError:
    """Another rank's, as it came through the store."""
    return UserError(line) if mistake else PacelineError(line)


def report_before_rendezvous(error: PacelineError) -> None:
    """Of a rank that fails before `meet`: the first one tells those that come, another one tells the first."""
    ranks = ranks_from_environment()
    if ranks.world == 1:
        return
    with contextlib.suppress(PacelineError, RuntimeError):
        store = open_store(ranks, SAME_MISTAKE_S)
        if ranks.is_main:
            corner, _ = _receive(store, ranks, RANK0_REPORT_S)
            _announce(corner, error)
        else:
            _come(store, ranks, {"error": str(error), "mistake": isinstance(error, UserError)}, SAME_MISTAKE_S)
            error.told = True


def _announce(corner: Store, verdict: PacelineError | None) -> None:
    said = None if verdict is None else {"line": str(verdict), "mistake": isinstance(verdict, UserError)}
    corner.set("verdict", json.dumps(said))
    if said is not None:
        time.sleep(4 * POLL_S)  # until others have read it: the store may end with this process


def settle(error: PacelineError, corner: Store, ranks: Ranks) -> None:
    """Who prints: the first rank, with the reason of one that it lost; another, if the first does not say the same."""
    if error.told is not None:
        return
    error.told = False
    asking = threading.Thread(target=_settle, args=(error, corner, ranks), daemon=True)
    asking.start()  # a thread, since a store behind a cut cable does not even fail
    asking.join(2 * RANK0_REPORT_S)
    if not error.told and not ranks.is_main and not isinstance(error, LostRankError):
        error.args = (f"rank {ranks.rank}: {error}",)


def _settle(error: PacelineError, corner: Store, ranks: Ranks) -> None:
    lost = isinstance(error, LostRankError)
    with contextlib.suppress(RuntimeError):  # with the store gone, each prints its own
        if ranks.is_main:
            if lost:
                error.args = (f"{error}{_posted_reason(corner, ranks)}",)
            corner.set("said", str(error))
            return
        if not lost:
            corner.set(f"reason/{ranks.rank}", str(error))
        said = _awaited(corner, "said", RANK0_REPORT_S)
        error.told = said is not None and (lost or said == str(error))


def _posted_reason(corner: Store, ranks: Ranks) -> str:
    def posted() -> list[int]:
        return [rank for rank in range(1, ranks.world) if corner.check([f"reason/{rank}"])]

    _wait_until(lambda: bool(posted()), 1.0)
    return "".join(f"; rank {rank}: {corner.get(f'reason/{rank}').decode()}" for rank in posted()[:1])


def _awaited(store: Store, key: str, timeout_s: float) -> str | None:
    return store.get(key).decode() if _wait_until(lambda: store.check([key]), timeout_s) else None


def _wait_until(true: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True
