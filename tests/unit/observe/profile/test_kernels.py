"""A table from traces whose times are known: each class's seconds, on a CPU and on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lmtrain.observe.profile.kernel_times import (
    TABLE_SUFFIX,
    Kernel,
    KernelTable,
    build_table,
    read_tables,
    write_table,
)


def span(name: str, at: float, micros: float, cat: str = "cpu_op", thread: int = 1, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": at, "dur": micros, "tid": thread, "args": more}


ON_CPU = [
    {"ph": "M", "name": "process_name"},
    span("aten::linear", 0, 100), span("aten::t", 1, 10), span("aten::addmm", 20, 70),
    span("aten::gelu", 100, 30),
    span("Optimizer.step#AdamW.step", 200, 100, "user_annotation"), span("aten::mul_", 210, 40),
    span("aten::copy_", 0, 25, thread=2), span("aten::embedding", 50, 5, thread=2),
]  # fmt: skip


def test_on_a_cpu_operators_count_without_what_they_call() -> None:
    table = build_table(ON_CPU, (3, 4), 0, 0.5)
    assert (table.first_step, table.last_step, table.device, table.window_s) == (3, 4, "cpu", 0.5)
    used = {kind: round(seconds * 1e6) for kind, seconds in table.classes.items() if seconds}
    assert used == {"products": 100, "elementwise": 30, "optimizer": 40, "copies": 25, "other": 5}
    first = table.kernels[0]
    assert first == Kernel("aten::addmm", "products", first.seconds, 1)
    assert first.seconds == pytest.approx(70e-6)


def test_on_a_gpu_kernels_count_and_belong_to_who_launched_them() -> None:
    events = [
        *ON_CPU,
        span("cudaLaunchKernel", 215, 1, "cuda_runtime", correlation=7),
        span("cudaLaunchKernel", 110, 1, "cuda_runtime", correlation=8),
        span("cudaLaunchKernel", 900, 1, "cuda_runtime", correlation=9),
        span("cudaLaunchKernel", 30, 1, "cuda_runtime", correlation=10),
        span("vectorized_elementwise_kernel", 1000, 400, "kernel", 99, correlation=7),
        span("vectorized_elementwise_kernel", 1500, 300, "kernel", 99, correlation=8),
        span("ncclDevKernel_AllReduce", 2000, 200, "kernel", 98, correlation=9),
        span("ncclDevKernel_AllGather", 2500, 50, "kernel", 98, correlation=10),
        span("Memcpy HtoD", 3000, 100, "gpu_memcpy", 99),
    ]
    table = build_table(events, (1, 1), 2, 1.0)
    used = {kind: round(seconds * 1e6) for kind, seconds in table.classes.items() if seconds}
    assert table.device == "cuda"
    assert used == {"optimizer": 400, "elementwise": 300, "collectives": 250, "copies": 100}
    assert table.lines()[0].startswith("profile of steps 1 to 1, rank 2: kernels on the GPU took ")
    assert table.lines()[1].split()[:2] == ["optimizer", "38.1%"]


def test_a_table_is_read_back(tmp_path: Path) -> None:
    tables = [build_table(ON_CPU, (3, 4), rank, 0.5) for rank in (0, 1)]
    for table in tables:
        write_table(tmp_path / f"steps.rank-{table.rank}{TABLE_SUFFIX}", table)
    assert read_tables(tmp_path) == tables
    assert read_tables(tmp_path / "none") == []


def test_a_trace_without_work_is_a_table_of_nothing() -> None:
    table = build_table([], (1, 1), 0, 1.0)
    assert isinstance(table, KernelTable)
    assert sum(table.classes.values()) == 0
    assert len(table.lines()) == 1
