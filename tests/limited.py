"""Limits of this process, lowered for a moment: the real refusals of the system, with no disk to fill."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def limited(which: int, most: int) -> Iterator[None]:
    """As in `limited(resource.RLIMIT_FSIZE, 4096)`: no file grows beyond 4 KiB inside."""
    soft, hard = resource.getrlimit(which)
    resource.setrlimit(which, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(which, (soft, hard))
