"""Memory figures come from /proc and are plausible for this very process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lmtrain.observe.measure.process_and_gpu_memory import Memory, device_peak_bytes, host_memory_bytes


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc here")
def test_this_process_holds_more_than_its_own_ballast() -> None:
    before = host_memory_bytes()
    ballast = bytearray(b"\x01" * (64 << 20))
    after = host_memory_bytes()
    assert before is not None
    assert after is not None
    assert after > max(before, 64 << 20)
    assert len(ballast) == 64 << 20


def test_figures_are_read_in_kib(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmHWM:\t    2048 kB\nVmRSS:\t    1024 kB\n")
    assert host_memory_bytes(status) == 1 << 20


def test_where_there_is_no_proc_nothing_is_known(tmp_path: Path) -> None:
    assert host_memory_bytes(tmp_path / "absent") is None


def test_only_a_cuda_device_has_a_peak() -> None:
    assert device_peak_bytes("cpu") is None
    if sys.platform == "linux":
        assert Memory("cpu", 0).measure()[0] > 1 << 20


def test_all_ranks_are_shown_when_one_has_grown_by_a_twentieth() -> None:
    memory = Memory("cpu", 0)
    assert memory.grown_peaks() is None
    memory.update_peaks([1000, 2000])
    assert memory.grown_peaks() == [1000, 2000]
    assert memory.grown_peaks() is None
    memory.update_peaks([1050, 100])  # peaks stay
    assert memory.grown_peaks() is None
    memory.update_peaks([1051, 0])
    assert memory.grown_peaks() == [1051, 2000]
    memory.update_peaks([1000, 2101])
    assert memory.grown_peaks() == [1051, 2101]


def test_a_row_of_all_ranks_is_rare_whatever_memory_does() -> None:
    memory, told = Memory("cpu", 0), 0
    for now in range(10_000):
        memory.update_peaks([1 << 30, (1 << 30) + (now << 20)])
        told += memory.grown_peaks() is not None
    assert 10 < told < 60
