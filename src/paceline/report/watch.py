"""The live page: the same sections, exchanged in the browser as the runs' files change.

A server of the standard library on loopback with two answers, the page and its state as JSON. The page asks again
0.7 s after each answer, so that a new step is seen within 2 s; while nothing changes the answer is empty, and a run
that has not changed is neither read nor smoothed again. No path of a request ever names a file.

The runs are seen from their files alone. Between two looks anything may happen: a run is started, killed, resumed or
deleted, a file is half-written, the folder appears or goes. Nothing outside it is read, whatever links lie in it.
"""

import contextlib
import itertools
import json
import os
import secrets
import socket
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

from paceline.analysis.ablation import ABLATION_FILE, read_ablations
from paceline.analysis.facts import some
from paceline.checkpoint.manifest import CONFIG
from paceline.core.errors import RunError, UserError
from paceline.core.loopback import HOSTS, LOOPBACK, headers, host_of
from paceline.core.units import human_seconds
from paceline.metrics.card import CARD_FILE
from paceline.metrics.metrics_file import METRICS_FILE
from paceline.report.charts import as_script, chart_data
from paceline.report.curves import Curves, MetricsFile
from paceline.report.markup import Markup, element, join
from paceline.report.page import LIVE_ORDER, POLICY, asset, render, sections_of
from paceline.report.sections.about import about, warnings
from paceline.report.subject import Run, Subject, load_run

LIVE_POLICY = f"{POLICY}; connect-src 'self'; base-uri 'none'; form-action 'none'"
HEADERS = headers(LIVE_POLICY)
EMPTY = dict.fromkeys(LIVE_ORDER, Markup(""))
FILES = (CARD_FILE, CONFIG, METRICS_FILE)
QUIET_S, QUIET_STEPS = 60.0, 20  # a run is quiet after a minute without a record, and so many of its own steps
HEADERS_S = 10.0  # a client has so long to send a request; a connection without one for so long is closed
MOST_CONNECTIONS = 512  # beyond it the oldest without a whole request is closed

Signature = tuple[tuple[int, int] | None, ...]  # of each of FILES when it was written and its size; None: not there


# ---- what there is


@dataclass
class _Watched:
    """One run, and what its files looked like when they were read."""

    metrics: MetricsFile
    signature: Signature = ()
    run: Run | None = None
    trouble: str | None = None


@dataclass
class RunsFolder:
    root: Path
    newest: int  # runs that are shown: the ones written to last
    clock: Callable[[], float] = time.time
    _watched: dict[Path, _Watched] = field(default_factory=dict)

    def look(self) -> tuple[Subject, object]:
        """What there is now, and a value that stays equal until something changes."""
        found = dict(_run_folders(self.root))
        self._watched = {folder: one for folder, one in self._watched.items() if folder in found}
        latest = sorted(found, key=lambda folder: _written(found[folder]))[-self.newest :]
        for folder in sorted(latest):
            self._read(folder, found[folder])
        shown = [self._watched[folder] for folder in sorted(latest)]
        folders = (self.root, *sorted(_folders(self.root, self.root)))
        there = (one for one in folders if _look_at(one / ABLATION_FILE, self.root) is not None)
        ablated, damaged = read_ablations(there)  # small files, read anew at every look
        ablations = list(ablated.values())
        read = [one.run for one in shown if one.run is not None]
        names = Counter(run.label for run in read)  # of several with one name, each gets that of its folder in front
        own = [f"{run.folder.parent.name}/{run.label}" if names[run.label] > 1 else run.label for run in read]
        runs = [replace(run, label=label) if label != run.label else run for run, label in zip(read, own, strict=True)]
        going = [run for run in runs if not run.card.finished and run.card.ended is None]  # Ctrl-C is an end, too
        quiet = [run for run in going if self._is_quiet(run)]
        subject = Subject(
            runs=runs,
            running=[run for run in going if run not in quiet],
            left_out=[*damaged, *(one.trouble for one in shown if one.trouble is not None)],
            ablations=ablations,
            folder=self.root,
            notes=self._notes(len(shown), len(found), quiet),
        )
        return subject, ([(folder, found[folder]) for folder in sorted(latest)], ablations, damaged, subject.notes)

    def _read(self, folder: Path, signature: Signature) -> None:
        watched = self._watched.setdefault(folder, _Watched(MetricsFile(folder)))
        if watched.signature == signature:
            return
        there = dict(zip(FILES, signature, strict=True))
        try:
            if there[CONFIG] is None:
                raise RunError(f"{folder / CONFIG}: is not there, or leads out of the folder that is watched")
            read_curves = Curves.none if there[METRICS_FILE] is None else watched.metrics.read
            watched.run, watched.trouble = load_run(folder, read_curves), None
        except RunError as error:
            watched.run, watched.trouble, watched.metrics = None, str(error), MetricsFile(folder)
        watched.signature = signature

    def _notes(self, num_shown: int, num_found: int, quiet: list[Run]) -> list[str]:
        notes = [f"The {num_shown} newest of {num_found} runs in the folder."] if num_found > num_shown else []
        # by the minute, or the page would change every second
        silent = {run.label: human_seconds(60.0 * (self._silent_s(run) // 60)) for run in quiet}
        said = some([f"{label} (nothing new for {time})" for label, time in silent.items()])
        return [*notes, f"Killed, or hanging: {said}."] if quiet else notes

    def _is_quiet(self, run: Run) -> bool:
        steps_s = np.diff(run.curves.steps["wall_s"][-QUIET_STEPS:])
        return self._silent_s(run) >= max(QUIET_S, QUIET_STEPS * float(steps_s.mean()) if len(steps_s) else 0.0)

    def _silent_s(self, run: Run) -> float:
        return self.clock() - _written(self._watched[run.folder].signature)


def _run_folders(root: Path) -> Iterator[tuple[Path, Signature]]:
    """The folder itself, its folders and theirs (an ablation's runs), where there is a card and nothing leads out."""
    outer = _folders(root, root)
    for folder in (root, *outer, *(inner for one in outer for inner in _folders(one, root))):
        signature = tuple(_look_at(folder / name, root) for name in FILES)
        if signature[0] is not None:
            yield folder, signature


def _folders(folder: Path, root: Path) -> list[Path]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        folders = [entry for entry in entries if os.path.isdir(entry.path)]
        return [Path(entry.path) for entry in folders if not entry.is_symlink() or _is_inside(entry.path, root)]
    return []


def _is_inside(path: str | Path, root: Path) -> bool:
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root))


def _look_at(path: Path, root: Path) -> tuple[int, int] | None:
    """A pipe or a device under the name of a file could be waited for for ever, so only files count."""
    with contextlib.suppress(OSError):
        found = path.lstat()
        if stat.S_ISLNK(found.st_mode) and _is_inside(path, root):
            found = path.stat()
        if stat.S_ISREG(found.st_mode):
            return found.st_mtime_ns, found.st_size
    return None


def _written(signature: Signature) -> float:
    """When a run last wrote something, in seconds."""
    return max(when for when, _ in filter(None, signature)) / 1e9


# ---- how it is shown


class LivePage:
    """The page about a folder, and its state at any time. Requests come from many threads; one at a time looks."""

    def __init__(self, folder: RunsFolder) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._launch, self._numbers = secrets.token_hex(4), itertools.count()
        self._seen: object = None
        self._state: tuple[str, bytes] = ("", b"")
        nothing = Subject(runs=[], folder=folder.root)  # the first state fills the sections
        data, script = as_script(chart_data(nothing)), asset("watch.js")
        self.page = render(nothing.title, EMPTY, data, policy=LIVE_POLICY, scripts=script).encode()

    def state(self) -> tuple[str, bytes]:
        """A name for the state, and the state: sections by name and the charts' data."""
        with self._lock:
            subject, seen = self._folder.look()
            if seen != self._seen:
                name = f"{self._launch}-{next(self._numbers)}"
                state = {"name": name, "sections": self._sections(subject), "data": chart_data(subject)}
                self._seen, self._state = seen, (name, json.dumps(state).encode())
            return self._state

    def _sections(self, subject: Subject) -> dict[str, Markup]:
        if subject.runs:
            return sections_of(subject)
        waiting = element("p", "No run yet. One that is started will appear here.", class_="quiet")
        return EMPTY | {"about": join([*about(subject), *warnings(subject), waiting])}


class _Server(ThreadingHTTPServer):
    """A thread for each connection, which has time limits."""

    request_queue_size = 1024
    daemon_threads = True  # a browser that keeps a connection open must not keep us from ending

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.due_s: dict[socket.socket, float] = {}  # when each without a whole request is closed, oldest first
        super().__init__(address, handler)

    def service_actions(self) -> None:
        """Called for every new connection, and twice a second."""
        surplus = len(self.due_s) - MOST_CONNECTIONS
        for number, (connection, due_s) in enumerate(self.due_s.copy().items()):
            if number < surplus or due_s < time.monotonic():
                with contextlib.suppress(OSError):  # it may have ended by now
                    connection.shutdown(socket.SHUT_RDWR)  # its thread reads an end and closes it


def make_server(root: Path, *, port: int, newest: int) -> ThreadingHTTPServer:
    """A server that listens already; `serve_forever` answers. Port 0: any that is free."""
    live = LivePage(RunsFolder(root, newest))
    try:
        return _Server((LOOPBACK, port), _handler(live))
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--port {port}: cannot be listened on ({reason}); choose another") from None


def _handler(live: LivePage) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 60  # of a client that does not read its answer
        server: _Server

        def handle_one_request(self) -> None:
            self.server.due_s[self.connection] = time.monotonic() + HEADERS_S
            try:
                super().handle_one_request()
            except ConnectionError:  # the client has left
                self.close_connection = True
            finally:
                self.server.due_s.pop(self.connection, None)

        def parse_request(self) -> bool:
            is_whole = super().parse_request()
            self.server.due_s.pop(self.connection, None)
            return is_whole

        def do_GET(self) -> None:
            path, _, query = self.path.partition("?")
            if host_of(self.headers.get("Host")) not in HOSTS:
                self._answer(403, b"paceline watch answers to localhost only\n", "text/plain")
            elif path == "/":
                self._answer(200, live.page, "text/html; charset=utf-8")
            elif path == "/state":
                name, state = live.state()
                seen = query == f"seen={name}"
                self._answer(204 if seen else 200, None if seen else state, "application/json")
            else:
                self._answer(404, b"there is only / here\n", "text/plain")

        def _answer(self, code: int, body: bytes | None, kind: str) -> None:
            self.send_response(code)
            length = {} if body is None else {"Content-Length": str(len(body))}
            for header, value in {**HEADERS, "Content-Type": kind, **length}.items():
                self.send_header(header, value)
            with contextlib.suppress(ConnectionError):  # the browser may be gone by now
                self.end_headers()
                self.wfile.write(body or b"")

        def log_message(self, *_: Any) -> None:
            """A request a second is no news."""

    return Handler
