"""A small hub on the loopback interface, spoken to by the real hub client."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """Serve one repository, `owner/tiny`; `owner/gated` is gated and any other unknown."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        #: Paths of the files that were downloaded.
        self.downloads: list[str] = []
        #: Seconds that each file's second half keeps the client waiting.
        self.pause_s = 0.0
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self)

            def do_HEAD(self) -> None:
                hub.answer(self)

            def log_message(self, *args: Any) -> None:
                """Keep the test's output clean."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    @property
    def url(self) -> str:
        """Return the address that stands for the hub."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def stop(self) -> None:
        """Take no more connections; a second call does nothing."""
        if not self._thread.is_alive():
            return
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Answer one request as the hub does."""
        path = request.path.split("?")[0].strip("/")
        if "owner/gated" in path:
            self._send(request, 403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif "owner/tiny" not in path:
            self._send(request, 404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif path.startswith("api/models/owner/tiny/tree/"):
            self._send(request, 200, json.dumps(self._tree()).encode(), {})
        elif path.startswith("api/models/owner/tiny"):
            siblings = [{"rfilename": name} for name in self.files]
            info = {"id": "owner/tiny", "modelId": "owner/tiny", "sha": COMMIT}
            self._send(request, 200, json.dumps({**info, "siblings": siblings}).encode(), {})
        else:
            self._send_file(request, path.split("/", 4)[4])

    def _tree(self) -> list[dict[str, Any]]:
        return [
            {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for name, data in self.files.items()
        ]

    def _send_file(self, request: BaseHTTPRequestHandler, name: str) -> None:
        data = self.files[name]
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
        if request.command == "GET":
            self.downloads.append(name)
        self._send(request, 200, data, headers, self.pause_s)

    @staticmethod
    def _send(
        request: BaseHTTPRequestHandler,
        status: int,
        body: bytes,
        headers: dict[str, str],
        pause_s: float = 0.0,
    ) -> None:
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        if request.command == "GET":
            request.wfile.write(body[: len(body) // 2])
            request.wfile.flush()
            time.sleep(pause_s)
            request.wfile.write(body[len(body) // 2 :])


@pytest.fixture
def fake_hub() -> Iterator[FakeHub]:
    """Run a hub whose repository has no files yet."""
    hub = FakeHub()
    hub.start()
    yield hub
    hub.stop()
