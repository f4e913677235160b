"""What this process does in a step and how long it waits, from the marks: of a few steps, as a row of numbers.

Called by the loop around each step; the row goes to rank 0 with the vote on a stop. Wall time on the host: a block that
sleeps works. On a GPU that is the time of launching, by which nobody is judged.
"""

from __future__ import annotations

from lmtrain.observe.measure.phases import MESSAGES, PHASES, main
from lmtrain.observe.stragglers.judge import links

OWN = ("data", "forward", "backward", "optimizer")  # what only this process's slowness makes longer
WAITS = ("messages", "collectives")
NUM_ENDS = 2  # of links: to the next rank along pp and to the one before
COLUMNS = (*OWN, *WAITS, *(("sent", "came") * NUM_ENDS))
STEPS = 4  # in a window
_WARM = 2  # because: the first steps of a process compile, fill caches and make memory
_KINDS = (*map(PHASES.index, OWN), MESSAGES, PHASES.index("collective"))


class Work:
    def __init__(self) -> None:
        self.neighbours: tuple[int, ...] = ()  # along pp, whose messages are timed
        self._seen_ns: list[list[int]] = []  # of each step of the window, by _KINDS
        self._before = [0] * len(_KINDS)
        self._warm = _WARM  # steps that are yet to be left out

    def begin_step(self) -> None:
        main.count_time(main.kind)
        spent = main.spent_ns
        self._before = [spent[kind] for kind in _KINDS]
        links.open = bool(self.neighbours)

    def end_step(self, waited_s: float) -> None:
        """`waited_s` for its data, before it began."""
        main.count_time(main.kind)
        links.open = False
        if self._warm:
            self._warm -= 1
            links.clear()
            return
        spent = main.spent_ns
        seen = [spent[kind] - was for kind, was in zip(_KINDS, self._before, strict=True)]
        seen[0] += int(waited_s * 1e9)
        self._seen_ns.append(seen)

    @property
    def is_due(self) -> bool:
        """After the same step on all processes."""
        return len(self._seen_ns) >= STEPS

    def take(self) -> list[int]:
        """By COLUMNS: nanoseconds of a step of the quicker half, and links' times summed over STEPS steps.

        because: a busy machine holds a step up and never hurries one
        """
        ends = [number for peer in self.neighbours for number in links.take(peer, STEPS)]
        half = STEPS // 2
        quick = [sum(sorted(values)[:half]) // half for values in zip(*self._seen_ns, strict=True)]
        self._seen_ns = []
        return [*quick, *ends, *([0] * (2 * NUM_ENDS - len(ends)))]
