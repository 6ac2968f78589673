"""A server on this machine that has as much of the Hugging Face hub's protocol as fetching a dataset needs."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

REVISION = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """What is served, what goes wrong, and what was asked for."""

    repo: str
    files: dict[str, bytes]
    listed_hash: dict[str, str] = field(default_factory=dict)
    """Of files whose listing lies."""
    break_after: dict[str, int] = field(default_factory=dict)
    """Bytes of a file after which its connection breaks, once."""
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    """File and Range header of every GET of a file."""
    endpoint: str = ""

    def sha256(self, name: str) -> str:
        return self.listed_hash.get(name) or hashlib.sha256(self.files[name]).hexdigest()

    def listing(self) -> bytes:
        siblings = [
            {
                "rfilename": name,
                "size": len(content),
                "blobId": hashlib.sha1(content).hexdigest(),
                "lfs": {"sha256": self.sha256(name), "size": len(content), "pointerSize": 134},
            }
            for name, content in self.files.items()
        ]
        return json.dumps({"id": self.repo, "sha": REVISION, "siblings": siblings}).encode()


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """`hub.endpoint` answers while the block runs."""
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        yield hub
        server.shutdown()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: object) -> None:
        """Nothing: the tests look at `asked`."""

    def do_HEAD(self) -> None:
        name = self._file()
        if name is None:
            self._send(404, b"")
        else:
            self._send(200, self.hub.files[name], name=name, body=False)

    def do_GET(self) -> None:
        if urlsplit(self.path).path == f"/api/datasets/{self.hub.repo}":
            self._send(200, self.hub.listing())
        elif (name := self._file()) is None:
            self._send(404, b"{}")
        else:
            self._send_file(name)

    def _file(self) -> str | None:
        prefix = f"/datasets/{self.hub.repo}/resolve/{REVISION}/"
        name = urlsplit(self.path).path.removeprefix(prefix)
        return name if name in self.hub.files else None

    def _send_file(self, name: str) -> None:
        wanted = self.headers.get("Range")
        self.hub.asked.append((name, wanted))
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted else 0
        content = self.hub.files[name]
        breaks = self.hub.break_after.pop(name, None)
        self._send(206 if start else 200, content[start:], name=name, start=start, breaks=breaks)

    def _send(
        self,
        status: int,
        content: bytes,
        *,
        name: str | None = None,
        body: bool = True,
        start: int = 0,
        breaks: int | None = None,
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        if name is not None:
            self.send_header("X-Repo-Commit", REVISION)
            self.send_header("ETag", f'"{self.hub.sha256(name)}"')
        if status == 206:
            total = start + len(content)
            self.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
        self.end_headers()
        if body:
            self.wfile.write(content[:breaks])
        if breaks is not None:
            self.close_connection = True
