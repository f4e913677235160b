"""The device a run computes on: choose it, name it, look up its memory, and set torch's numerical modes."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from lmtrain.errors import OutOfMemoryError, SettingsError, own
from lmtrain.runtime.machine.visible_gpus_without_torch import Gpus, device_problem, gpu_index
from lmtrain.runtime.processes.process_environment import ProcessEnv, set_env_default
from lmtrain.units import format_bytes


def pick_device(name: str, process: ProcessEnv = ProcessEnv()) -> torch.device:
    """Return the device that the setting `name` selects: `cpu`, `cuda`, or with `auto` this process's GPU if torch sees
    one, else the CPU. A GPU also becomes torch's current device. Raise SettingsError if the device cannot be used.
    """
    if name not in ("auto", "cpu", "cuda"):
        way_out = f"Use {own('auto')}, {own('cpu')} or {own('cuda')}."
        raise SettingsError([f"compute.device={name} is not a device. {way_out}"])
    gpus = Gpus(torch.version.cuda, torch.cuda.device_count() if torch.cuda.is_available() else 0, torch.__version__)
    if problem := device_problem(name, gpus, process):
        raise problem
    if name == "cpu" or gpus.count == 0:
        return torch.device("cpu")
    device = torch.device("cuda", gpu_index(process, gpus.count))
    torch.cuda.set_device(device)
    return device


def device_name(device: torch.device) -> str:
    """Return a device's name, such as "NVIDIA H200" or the CPU's model."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(errors="replace").splitlines() if cpuinfo.is_file() else []
    model_name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)
    return model_name if model_name is not None else platform.processor() or platform.machine()


def total_memory_bytes(device: torch.device) -> int:
    """Return the bytes of memory of a GPU, or of the host for the CPU."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def device_report() -> dict[str, str | int | None]:
    """Return facts for a bug report by name: the device that `auto` chooses, its memory, torch's CUDA and threads."""
    device = pick_device("auto")
    return {
        "device": device_name(device), "device_memory": format_bytes(total_memory_bytes(device)),
        "cuda": torch.version.cuda, "threads": torch.get_num_threads(),
    }  # fmt: skip


@contextmanager
def memory_errors(way_out: str) -> Iterator[None]:
    """Turn torch's out-of-memory errors of the `with` block, on host or GPU, into OutOfMemoryError. `way_out` ends the
    message: what the user can change.
    """
    try:
        yield
    except RuntimeError as error:
        torch_message = str(error)
        on_host = "DefaultCPUAllocator" in torch_message
        if not (on_host or isinstance(error, torch.OutOfMemoryError)):
            raise
        raise OutOfMemoryError(
            f"The {'host' if on_host else 'device'} ran out of memory: {torch_message.splitlines()[0][:200]} {way_out}"
        ) from error


def set_deterministic(enabled: bool) -> None:
    """Make torch use only kernels that give the same result in each run, or, if not `enabled`, allow all kernels again.
    Call it before the device is first used.
    """
    if enabled:
        # because: cuBLAS is deterministic only with a fixed workspace, and reads this when its first handle is made
        set_env_default("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        # because: torch may choose cuDNN's attention by itself, whose backward sums in any order and raises nothing
        torch.backends.cuda.enable_cudnn_sdp(False)
    else:
        # because: `use_deterministic_algorithms(False)` does the same but also imports torch's compiler, which is slow
        torch.set_deterministic_debug_mode("default")
    torch.backends.cudnn.deterministic = enabled
    torch.backends.cudnn.benchmark = False


def set_tf32(enabled: bool) -> None:
    """Allow or forbid that a GPU rounds the factors of fp32 products to TF32."""
    torch.backends.cuda.matmul.allow_tf32 = enabled
    torch.backends.cudnn.allow_tf32 = enabled


def set_threads(count: int | None) -> None:
    """Set how many CPU threads a torch operation uses; None keeps torch's choice."""
    if count is not None:
        torch.set_num_threads(count)
