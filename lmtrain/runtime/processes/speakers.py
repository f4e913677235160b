"""What the processes of our own launcher say: the lines of all but rank 0, each under its rank. Called by launch."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Iterable
from typing import IO

_NUM_LINES = 50  # that are remembered of each
_LAST_S = 1.0  # because: a helper of a dead child may hold its output open


class Speakers:
    def __init__(self, ranks: Iterable[int]) -> None:
        self._last_lines: dict[int, deque[str]] = {rank: deque(maxlen=_NUM_LINES) for rank in ranks}
        self._threads: list[threading.Thread] = []

    def add(self, rank: int, output: IO[str]) -> None:
        self._threads.append(threading.Thread(target=self._speak, args=(rank, output), daemon=True))
        self._threads[-1].start()

    def finish(self) -> None:
        """Once the processes have ended."""
        for thread in self._threads:
            thread.join(timeout=_LAST_S)

    def has_spoken(self, rank: int) -> bool:
        """Whether a rank other than 0 has printed anything."""
        return any(line.strip() for line in self._last_lines[rank])

    def last_words(self, rank: int) -> str:
        """Its error, or the end of its traceback."""
        lines = [line for line in self._last_lines[rank] if line.strip()]
        errors = [line.partition("error: ")[2] for line in lines if "error: " in line]
        return (errors or lines or ["it said nothing"])[-1]

    def _speak(self, rank: int, output: IO[str]) -> None:
        with output:
            for line in output:
                self._last_lines[rank].append(line.rstrip("\n"))
                sys.stderr.write(f"[rank {rank}] {line}")
                sys.stderr.flush()
