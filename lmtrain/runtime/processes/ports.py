"""The socket at which the processes of a run first meet. Torch-free; called by process_group, and to try a port."""

from __future__ import annotations

import errno
import socket

from lmtrain.errors import UsageError


def listen(host: str, port: int) -> int:
    """A descriptor that listens there; without a host on every interface."""
    family = socket.AF_INET if host or not socket.has_dualstack_ipv6() else socket.AF_INET6
    try:
        return socket.create_server(
            (host, port), family=family, backlog=1024, dualstack_ipv6=family == socket.AF_INET6
        ).detach()
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        what = "is in use by another program" if taken else f"cannot be opened: {error.strerror}"
        raise UsageError(f"Port {port} {what}. Set MASTER_PORT to a free one.") from error
