"""Worker processes leave Ctrl-C to their parent from their first instruction on."""

from __future__ import annotations

import os
import signal

import pytest

from data_tools.read.cut_files_into_chunks import MemoryBudget, Portion
from data_tools.read.process_portions_in_workers import process_portions
from lmtrain.errors import OutOfMemoryError


class SaysWhetherBlocked:
    def run(self, portion: Portion) -> bool:
        return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())


class IsKilled:
    def run(self, portion: Portion) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_worker_is_said_to_lack_memory() -> None:
    with (
        pytest.raises(OutOfMemoryError, match=r"A worker process was killed, .* Give fewer --workers"),
        process_portions(iter([Portion([])]), IsKilled, 1, MemoryBudget(10), use_processes=True) as results,
    ):
        list(results)


def test_a_worker_is_started_with_ctrl_c_blocked() -> None:
    """Before that, Ctrl-C while a worker was importing ended it, and its parent waited forever."""
    portions = iter([Portion([]), Portion([])])
    with process_portions(portions, SaysWhetherBlocked, 1, MemoryBudget(10), use_processes=True) as results:
        assert [blocked for _, blocked in results] == [True, True]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
