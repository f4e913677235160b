"""A port that is free is listened at; one that is not is named."""

from __future__ import annotations

import os
import socket

import pytest

from lmtrain.errors import UsageError
from lmtrain.runtime.processes.process_environment import listen


@pytest.mark.parametrize("host", ["127.0.0.1", ""])
def test_a_free_port_is_listened_at(host: str) -> None:
    with socket.socket(fileno=listen(host, 0)) as server:
        port = server.getsockname()[1]
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
        with pytest.raises(UsageError, match=f"Port {port} cannot be opened: it is in use by another program."):
            listen(host, port)
    os.close(listen(host, port))
