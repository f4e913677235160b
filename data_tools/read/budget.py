"""How much of the corpus may be in memory at once. Called by ahead.py and by who cuts."""

from __future__ import annotations

from threading import Condition


class StoppedError(Exception):
    """The run is over; the reader need not go on."""


class Budget:
    """Bytes lent to one reader. A reader with nothing lent out but its own may go over: a long document must pass."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._taken = self._in_flight = 0  # by the reader in all; what it has handed on and is not yet given back
        self._stopped = False
        self._changed = Condition()

    def take(self, num_bytes: int) -> None:
        """Wait until so many bytes are free, or nothing is in flight any more."""
        with self._changed:
            while not self._stopped and self._in_flight and self._taken + num_bytes > self._num_bytes:
                self._changed.wait()
            if self._stopped:
                raise StoppedError
            self._taken += num_bytes

    def give(self, num_bytes: int) -> None:
        """Bytes that were taken and not handed on."""
        with self._changed:
            self._taken -= num_bytes
            self._changed.notify()

    def hand_on(self, num_bytes: int) -> None:
        """The reader's bytes are someone else's now, who will return them."""
        with self._changed:
            self._in_flight += num_bytes

    def give_back(self, num_bytes: int) -> None:
        with self._changed:
            self._in_flight -= num_bytes
            self._taken -= num_bytes
            self._changed.notify()

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify()
