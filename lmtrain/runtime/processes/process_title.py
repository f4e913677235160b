"""What `ps` and /proc say of a forked process: its command line, its short name and its environment. Torch-free.

A forked process shows the words and the variables with which its parent was started, since Linux reads both from where
they lay in memory at that time. This file writes there. Called by fork_server; on other systems it does nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from lmtrain.runtime.processes.process import drop_variable

# a variable with which a process is started whose forks are to show variables of their own; see `show_environment`
ROOM = "LMTRAIN_ROOM"
ROOM_BYTES = 512
_room: int | None = None  # where it lies in memory, once nothing else is there
_shown: dict[str, str] = {}  # what stands there
_ARGUMENTS, _ENVIRONMENT = (45, 46), (47, 48)  # fields of /proc/self/stat behind the name: start and end


def show_title(title: str, name: str) -> None:
    """Make `title` this process' command line and `name` its short name, of which Linux keeps 15 bytes."""
    with suppress(OSError):
        Path("/proc/self/comm").write_bytes(name.encode()[:15])
    start, end = _area(_ARGUMENTS)
    if end > start:
        text = title.encode(errors="surrogateescape")[: end - start - 1]
        _write(start, text.ljust(end - start, b"\0"))


def show_environment(variables: Mapping[str, str]) -> None:
    """Let /proc/PID/environ show these variables, where this process has inherited room for them.

    What the process itself reads is os.environ, which this leaves alone but for removing ROOM. A fork of a fork shows
    what its parent was given, too.
    """
    global _room
    if drop_variable(ROOM):  # from here on nothing reads the memory in which it was
        start, end = _area(_ENVIRONMENT)
        held = _read(start, end - start).find(f"\0{ROOM}=".encode()) if end > start else -1
        _room = start + held + 1 if held >= 0 else None
    _shown.update(variables)
    size = len(ROOM) + 1 + ROOM_BYTES
    text = b"\0".join(f"{name}={value}".encode(errors="surrogateescape") for name, value in _shown.items())
    if _room is not None and len(text) <= size:
        _write(_room, text.ljust(size, b"\0"))


def _area(fields: tuple[int, int]) -> tuple[int, int]:
    """Return where such an area begins and ends in this process' memory; (0, 0) where the system does not say."""
    try:
        words = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        return int(words[fields[0]]), int(words[fields[1]])
    except (OSError, ValueError, IndexError):
        return 0, 0


def _read(start: int, count: int) -> bytes:
    import ctypes  # because: only a forked process needs it, and this file is imported by each launcher

    return ctypes.string_at(start, count)


def _write(start: int, data: bytes) -> None:
    import ctypes  # because: as above

    ctypes.memmove(start, data, len(data))
