"""A process that is given folders from others: `python -m train.foreign_victim`, in the folder of a world.

Reads a line of JSON for each folder, the commands by name, and writes one: of each command the exit code or None, both
outputs, a traceback, the memory that it took at most beyond what the process held, the seconds, and what it did that no
command may do to a folder. More memory than `LIMIT_BYTES` is not to be had, and after `LIMIT_S` the process ends with a
traceback on its standard error."""

import contextlib
import faulthandler
import json
import os
import re
import resource
import sys
import time
import traceback
from pathlib import Path
from typing import IO, Any

import numpy  # noqa: F401 - before the limit, and what takes seconds once
import scipy.special  # noqa: F401
import torch

from paceline.cli import main
from train.foreign import FOREIGN

LIMIT_BYTES = 3 << 30
LIMIT_S = 240
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = (
    "os.remove",
    "os.rename",
    "os.mkdir",
    "os.rmdir",
    "os.truncate",
    "os.chmod",
    "os.chown",
    "os.link",
    "os.symlink",
)
WORLD = os.path.realpath(".")
HARMLESS = ("/dev/null", "/dev/tty", "/proc/self/")
crimes: list[str] = []


def watch(event: str, given: tuple[Any, ...]) -> None:
    """An audit hook."""
    if event == "open" and given[2] & WRITES and isinstance(given[0], str | bytes | os.PathLike):
        _note_outside(event, given[0])
    elif event in CHANGES:
        for path in given[:2]:
            if isinstance(path, str | bytes | os.PathLike):
                _note_outside(event, path)
    elif event == "exec" and str(FOREIGN) in getattr(given[0], "co_filename", ""):
        crimes.append(f"runs {given[0].co_filename}")
    elif event in ("import", "ctypes.dlopen") and str(FOREIGN) in str(given[:2]):
        crimes.append(f"{event} {given[:2]}")
    elif event in ("pickle.find_class", "socket.connect", "socket.getaddrinfo", "os.exec", "os.system"):
        crimes.append(f"{event} {given[:3]}")


def _note_outside(event: str, path: Any) -> None:
    place = os.path.realpath(os.path.dirname(os.path.abspath(os.fsdecode(path))))
    if not f"{place}/".startswith(f"{WORLD}/") and not os.fsdecode(path).startswith(HARMLESS):
        crimes.append(f"{event} {os.fsdecode(path)!r}")


def status_bytes(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def answer(words: list[str], out: IO[str], err: IO[str]) -> dict[str, Any]:
    for stream in (out, err):
        stream.seek(0)
        stream.truncate()
    crimes.clear()
    code, trace, began = None, None, time.monotonic()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before = status_bytes("VmRSS")
    os.dup2(out.fileno(), 1)
    os.dup2(err.fileno(), 2)
    with open(1, "w", closefd=False) as sys.stdout, open(2, "w", closefd=False) as sys.stderr:
        try:
            code = main(words)
        except SystemExit as error:
            code = error.code
        except BaseException:  # what a command may not raise
            trace = traceback.format_exc()
        with contextlib.suppress(OSError):
            sys.stdout.flush()
    return {
        "code": code,
        "out": Path(out.name).read_bytes().decode(errors="replace"),
        "err": Path(err.name).read_bytes().decode(errors="replace"),
        "trace": trace,
        "bytes": status_bytes("VmHWM") - before,
        "seconds": time.monotonic() - began,
        "crimes": list(dict.fromkeys(crimes)),
    }


def serve() -> None:
    sys.modules["tiktoken"] = None  # type: ignore[assignment]  # else gpt2 is fetched, which is no place of theirs
    torch.set_num_threads(1)
    questions, answers, trouble = (os.fdopen(os.dup(n), mode) for n, mode in ((0, "r"), (1, "w"), (2, "w")))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for module in ("commands.train", "commands.trained", "commands.evaluate", "commands.results", "train.run"):
        __import__(f"paceline.{module}")
    with open("home/out", "w+") as out, open("home/err", "w+") as err:
        limit = status_bytes("VmSize") + LIMIT_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        sys.addaudithook(watch)
        faulthandler.enable(trouble)
        for line in questions:
            faulthandler.dump_traceback_later(LIMIT_S, exit=True, file=trouble)
            found = {name: answer(words, out, err) for name, words in json.loads(line).items()}
            faulthandler.cancel_dump_traceback_later()
            answers.write(json.dumps(found) + "\n")
            answers.flush()


if __name__ == "__main__":
    serve()
