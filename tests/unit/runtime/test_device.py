"""The device: its choice, its refusals and its facts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lmtrain.errors import SettingsError
from lmtrain.runtime.machine.choose_device import (
    device_name,
    pick_device,
    set_deterministic,
    set_tf32,
    set_threads,
    total_memory_bytes,
)
from lmtrain.runtime.processes.process_environment import ProcessEnv

CPU = torch.device("cpu")


def has_cudnn_attention() -> bool:
    return bool(torch.backends.cuda.cudnn_sdp_enabled())  # type: ignore[no-untyped-call]


@pytest.fixture
def _flags() -> Iterator[None]:
    deterministic, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    benchmark, cudnn = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    cudnn_attention = has_cudnn_attention()
    yield
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cuda.enable_cudnn_sdp(cudnn_attention)
    torch.set_num_threads(threads)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = benchmark, cudnn


def test_the_cpu_is_always_there() -> None:
    assert pick_device("cpu") == CPU
    assert pick_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert len(device_name(CPU)) > 2


def test_unknown_and_absent_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match=r"compute\.device=tpu is not a device\. Use auto, cpu or cuda"):
        pick_device("tpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SettingsError, match=r"sees no GPU .* Use auto or cpu"):
        pick_device("cuda")
    assert pick_device("auto") == CPU


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(SettingsError, match="local rank 2 has no GPU of its own, since the number of visible GPUs"):
        pick_device("cuda", ProcessEnv(local_rank=2))


def test_memory_of_the_host() -> None:
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    assert [total_memory_bytes(CPU)] == [int(words[1]) * 1024 for words in lines if words[0] == "MemTotal:"]


@pytest.mark.usefixtures("_flags")
def test_determinism_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    set_deterministic(True)
    assert torch.are_deterministic_algorithms_enabled()
    assert not has_cudnn_attention()
    set_deterministic(False)
    assert not torch.are_deterministic_algorithms_enabled()
    set_threads(1)
    set_threads(None)
    assert torch.get_num_threads() == 1


@pytest.mark.usefixtures("_flags")
@pytest.mark.parametrize("allowed", [True, False])
def test_without_determinism_the_kernels_of_attention_stay_as_chosen(allowed: bool) -> None:
    torch.backends.cuda.enable_cudnn_sdp(allowed)
    set_deterministic(False)
    assert has_cudnn_attention() == allowed


def test_products_are_rounded_where_it_is_asked_for() -> None:
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    try:
        for enabled in (True, False):
            set_tf32(enabled)
            assert (matmul.allow_tf32, cudnn.allow_tf32) == (enabled, enabled)
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before
