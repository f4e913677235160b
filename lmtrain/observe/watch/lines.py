"""Messages between a rank, its companion and the hub: a JSON object a line, over sockets that never block.

Called by companion, hub and guard. A line that is too long or no object ends the connection.
"""

from __future__ import annotations

import json
import socket

TYPE_CHECKING = False
if TYPE_CHECKING:  # because: importing typing takes a third of a companion's start
    from typing import Any

MAX_BYTES = 1 << 16


class Lines:
    """One connection. `ended` once the other side is gone."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        connection.setblocking(False)
        self.ended = False
        self.rank: int | None = None  # who is at the other end, once it has said so with the run's token
        self._in, self._out = b"", b""

    def fileno(self) -> int:
        return self.connection.fileno()

    def read(self) -> list[dict[str, Any]]:
        """What has come, without waiting."""
        while not self.ended:
            try:
                data = self.connection.recv(MAX_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self._in += data
            if not data or len(self._in) > 8 * MAX_BYTES:
                self.ended = True
        *whole, self._in = self._in.split(b"\n")
        if len(self._in) > MAX_BYTES:
            self.ended = True
        return [found for line in whole if isinstance(found := _parsed(line), dict)]

    def send(self, message: dict[str, Any]) -> None:
        """What cannot be sent now goes with the next; who does not read for long is given up."""
        self._out += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        while self._out and not self.ended:
            try:
                self._out = self._out[self.connection.send(self._out) :]
            except BlockingIOError:
                break
            except OSError:
                self.ended = True
        if len(self._out) > 8 * MAX_BYTES:
            self.ended = True

    @property
    def idle(self) -> bool:
        """Whether all has been sent that can be."""
        return self.ended or not self._out

    def close(self) -> None:
        self.ended = True
        self.connection.close()


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
