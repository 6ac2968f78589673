"""The live page: the same sections, exchanged in the browser as the runs' files change.

A server of the standard library on loopback with two answers, the page and its state as JSON. The page asks again
0.7 s after each answer, so that a new step is seen within 2 s; while nothing changes the answer is empty, and a run
that has not changed is neither read nor smoothed again. No path of a request ever names a file.
"""

import contextlib
import itertools
import json
import secrets
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from paceline.core.errors import UserError
from paceline.core.loopback import HOSTS, LOOPBACK, headers, host_of
from paceline.report.charts import as_script, chart_data
from paceline.report.live import RunsFolder
from paceline.report.markup import Markup, element, join
from paceline.report.page import PARTS, POLICY, asset, render, sections_of
from paceline.report.sections.about import about
from paceline.report.subject import Subject
from paceline.report.words import Statistics

LIVE_POLICY = f"{POLICY}; connect-src 'self'; base-uri 'none'; form-action 'none'"
HEADERS = headers(LIVE_POLICY)


class LivePage:
    """The page about a folder, and its state at any time. Requests come from many threads; one at a time looks."""

    def __init__(self, folder: RunsFolder, statistics: Statistics | None) -> None:
        self._folder = folder
        self._statistics = statistics
        self._lock = threading.Lock()
        self._launch, self._numbers = secrets.token_hex(4), itertools.count()
        self._seen: object = None
        self._state: tuple[str, bytes] = ("", b"")
        self.title = f"Runs in {folder.root}"
        self.page = self._empty_page()

    def _empty_page(self) -> bytes:
        """Its sections are filled by the first state."""
        nothing = dict.fromkeys(PARTS, Markup(""))
        data = as_script(chart_data(Subject(runs=[])))
        return render(self.title, nothing, data, policy=LIVE_POLICY, scripts=asset("watch.js")).encode()

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
            return sections_of(subject, self._statistics, self.title)
        waiting = element("p", "No run yet. One that is started will appear here.", class_="quiet")
        return dict.fromkeys(PARTS, Markup("")) | {"about": join([*about(subject, self.title), waiting])}


def make_server(root: Path, *, port: int, newest: int, statistics: Statistics | None) -> ThreadingHTTPServer:
    """A server that listens already; `serve_forever` answers. Port 0: any that is free."""
    live = LivePage(RunsFolder(root, newest), statistics)
    try:
        server = ThreadingHTTPServer((LOOPBACK, port), _handler(live))
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--port {port}: cannot be listened on ({reason}); choose another") from None
    server.daemon_threads = True  # a browser that keeps a connection open must not keep us from ending
    return server


def _handler(live: LivePage) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 60  # of an idle connection

        def do_GET(self) -> None:
            path, _, query = self.path.partition("?")
            if host_of(self.headers.get("Host")) not in HOSTS:
                self._answer(403, b"paceline watch answers to localhost only\n", "text/plain")
            elif path == "/":
                self._answer(200, live.page, "text/html; charset=utf-8")
            elif path == "/state":
                self._state(query)
            else:
                self._answer(404, b"there is only / here\n", "text/plain")

        def _state(self, query: str) -> None:
            name, state = live.state()
            if query == f"seen={name}":
                self._answer(204, None, "application/json")
            else:
                self._answer(200, state, "application/json")

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
