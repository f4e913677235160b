"""A step waits for the device once, and spans make it wait no more.

Counted on any device are the operators that bring a number to the host; on a GPU torch's own look at what waits, too.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lmtrain.observe.spans.span_file import Header, SpanFile, read_spans
from lmtrain.observe.spans.trace_span_recorder import DeviceClock, Recorder
from lmtrain.parallel.build_parallel_model import build_parallel
from lmtrain.parallel.parallel_model import ParallelModel
from lmtrain.runtime.processes import current_phase
from lmtrain.train.set_up_run import build_optimizer
from lmtrain.train.step import train_step
from tests.layouts.cases import Case
from tests.layouts.toy_data import loader_of
from tests.layouts.training import OPTIM, SEED

CASE = Case.named("gqa-bf16-micro4")
# because: each of them reads a number that is on a device
_aten = torch.ops.aten
ASKING = {_aten._local_scalar_dense.default, _aten.nonzero.default, _aten.equal.default, _aten.is_nonzero.default}


class Asked(TorchDispatchMode):
    """How often the host asks a device for a number; its own numbers, as an optimizer's count of steps, are at hand."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self.count = device, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # because: what leaves a device for the host is waited for
        leaves = func is _aten._to_copy.default and args[0].is_cuda and not result.is_cuda
        self.count += (func in ASKING and args[0].device.type == self.device.type) or leaves
        return result


class AskingRecorder(Recorder):
    """The planted bug: a span looks at what it is about."""

    def enter(self, *rest: Any) -> None:
        torch.ones((), device="cpu" if self.device is None else "cuda").item()
        super().enter(*rest)


def recorder(device: torch.device, folder: Path, kind: type[Recorder]) -> Recorder:
    header = Header(
        rank=0, world_size=1, coordinate=(0, 0, 0, 0), sizes=(1, 1, 1, 1, 1), host="here", pid=1, start=0, wall_ns=0,
        monotonic_ns=0, capacity=1 << 12, schedule="1f1b", num_microbatches=CASE.microbatches,
    )  # fmt: skip
    file = SpanFile(folder / f"{kind.__name__}.spans", header)
    return kind(file, DeviceClock(torch.cuda) if device.type == "cuda" else None)


@contextmanager
def counted(device: torch.device) -> Iterator[list[int]]:
    """[numbers asked for, waits that torch has seen]."""
    found = [0, 0]
    with warnings.catch_warnings(record=True) as seen, Asked(device) as asked:
        warnings.simplefilter("always")
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    found[:] = [asked.count, sum("synchronizing CUDA operation" in str(one.message) for one in seen)]


def waits(device: torch.device, folder: Path, kind: type[Recorder] | None) -> list[int]:
    """Of a second step, as the first makes buffers."""
    model: ParallelModel = build_parallel(
        CASE.model_settings, CASE.precision_settings, CASE.compute, device, seed=SEED, training=True
    )
    optimizer, loader = build_optimizer(OPTIM, model), loader_of(CASE, 0)
    train_step(model, optimizer, loader.read(0), OPTIM.lr, OPTIM.clip_norm)
    batches = loader.read(1)
    spans = recorder(device, folder, kind) if kind else None
    if spans is not None:
        spans.begin_step(1)
        current_phase.set_recorder(spans)
    try:
        with counted(device) as found:
            train_step(model, optimizer, batches, OPTIM.lr, OPTIM.clip_norm)
    finally:
        current_phase.set_recorder(None)
    if spans is not None:
        spans.close()
        assert len(read_spans(spans.file.path).spans) > 2 * CASE.microbatches  # it did record
    return found


def planned(device: torch.device) -> list[int]:
    """One copy to the host has all losses of a step and its norm, as train/step.py says; on a CPU they are there."""
    return [1, 1] if device.type == "cuda" else [0, 0]


def test_spans_wait_for_nothing(device: torch.device, tmp_path: Path) -> None:
    assert waits(device, tmp_path, None) == planned(device)
    assert waits(device, tmp_path, Recorder) == planned(device)
    assert waits(device, tmp_path, AskingRecorder) != planned(device)


def test_a_step_that_looks_once_more_is_noticed(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = ParallelModel.finish_gradients

    def looks(self: ParallelModel, clip_norm: float | None) -> torch.Tensor:
        norm = right(self, clip_norm)
        assert norm.item() > 0
        return norm

    monkeypatch.setattr(ParallelModel, "finish_gradients", looks)
    found = waits(device, tmp_path, None)
    assert found[0] > planned(device)[0]
    assert found[1] > planned(device)[1] or device.type == "cpu"
