"""When the first message of a step goes to a neighbour, and when one comes: from both ends' sums, how slow a link is.

Called by the pipeline's messages. Each process reads its own clock; a link's time there and back is free of how the two
differ. A message that had come before it was asked for tells no time, and its window none of this link.
"""

from __future__ import annotations

from time import monotonic_ns

_WAITED_NS = 100_000  # because: less is what taking a message that is there costs


class Links:
    def __init__(self) -> None:
        self.open = False  # in a step
        self._sent: dict[int, tuple[int, int]] = {}  # by peer: summed times, and how many
        self._came: dict[int, tuple[int, int]] = {}

    def sent(self, peer: int) -> None:
        """The first message of this step to that rank goes out."""
        if self.open:
            total, count = self._sent.get(peer, (0, 0))
            self._sent[peer] = total + monotonic_ns(), count + 1

    def came(self, peer: int, since_ns: int) -> None:
        """The first message from it was waited for since then, and is here."""
        now = monotonic_ns()
        if self.open and now - since_ns > _WAITED_NS:
            total, count = self._came.get(peer, (0, 0))
            self._came[peer] = total + now, count + 1

    def take(self, peer: int, steps: int) -> tuple[int, int]:
        """(sent, came) of this peer, summed over so many steps; 0 for what was not seen in each."""
        (sent, num_sent), (came, num_came) = self._sent.pop(peer, (0, 0)), self._came.pop(peer, (0, 0))
        return sent if num_sent == steps else 0, came if num_came == steps else 0

    def clear(self) -> None:
        self._sent, self._came = {}, {}


links = Links()
