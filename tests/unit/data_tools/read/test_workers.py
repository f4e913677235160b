"""Worker processes leave Ctrl-C to their parent from their first instruction on."""

from __future__ import annotations

import signal

from data_tools.read.cut_files_into_chunks import MemoryBudget, Portion
from data_tools.read.process_portions_in_workers import process_portions


class SaysWhetherBlocked:
    def run(self, portion: Portion) -> bool:
        return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_worker_is_started_with_ctrl_c_blocked() -> None:
    """Before that, Ctrl-C while a worker was importing ended it, and its parent waited forever."""
    portions = iter([Portion([]), Portion([])])
    with process_portions(portions, SaysWhetherBlocked, 1, MemoryBudget(10), use_processes=True) as results:
        assert [blocked for _, blocked in results] == [True, True]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
