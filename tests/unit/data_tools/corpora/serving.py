"""A local server that can break off, redirect and send wrong bytes. Called by conftest.py."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Behaviour:
    """How the server answers, and what it was asked."""

    content: bytes = b""
    others: dict[str, bytes] = field(default_factory=dict)  # what lies at certain addresses instead
    break_after: int | None = None  # bytes of an answer, once
    ranges: bool = True
    redirect_to: str | None = None
    status: int = 200
    asked: list[str | None] = field(default_factory=list)


@contextmanager
def serving(behaviour: Behaviour) -> Iterator[str]:
    """The address of a file there."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = self.headers.get("Range")
            behaviour.asked.append(wanted)
            if behaviour.redirect_to is not None and self.path not in behaviour.others:
                self.send_response(302)
                self.send_header("Location", behaviour.redirect_to)
                self.end_headers()
                return
            if behaviour.status != 200:
                self.send_error(behaviour.status)
                return
            content = behaviour.others.get(self.path, behaviour.content)
            start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and behaviour.ranges else 0
            if start >= len(content):
                self.send_error(416)
                return
            body = content[start:]
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if behaviour.break_after is not None:
                body, behaviour.break_after = body[: behaviour.break_after], None
            with suppress(ConnectionError):  # the other side may have heard enough
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listening.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.server_port}/file"
    finally:
        listening.shutdown()
        thread.join()
        listening.server_close()
