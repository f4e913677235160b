"""The device a run computes on: choose it, name it, measure its memory, and set torch's numerical modes."""

from __future__ import annotations

import platform
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from lmtrain.errors import OutOfMemoryError, SettingsError
from lmtrain.runtime.machine.gpus import Gpus, device_problem, gpu_index
from lmtrain.runtime.processes.process_environment import ProcessEnv, set_env_default


@dataclass(frozen=True)
class MemoryStats:
    """Memory of a device: on a GPU what torch's allocator holds, on a CPU the resident memory of the process."""

    used_bytes: int
    peak_bytes: int
    total_bytes: int


def pick_device(name: str, process: ProcessEnv = ProcessEnv()) -> torch.device:
    """Return the device that the setting `name` selects: `cpu`, `cuda`, or with `auto` this process's GPU if torch sees
    one, else the CPU. A GPU also becomes torch's current device. Raise SettingsError if the device cannot be used.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise SettingsError([f"compute.device={name} is not a device. Use auto, cpu or cuda."])
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


def memory_stats(device: torch.device) -> MemoryStats:
    """Return the bytes of memory in use, their peak since the start, and the total: for a GPU those of torch's
    allocator and of the GPU, for the CPU those of this process and of the host.
    """
    if device.type == "cuda":
        return MemoryStats(
            torch.cuda.memory_allocated(device),
            torch.cuda.max_memory_allocated(device),
            torch.cuda.get_device_properties(device).total_memory,
        )
    # because: Linux counts in KiB, macOS in bytes
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    page, used, total = resource.getpagesize(), peak, 0
    if sys.platform == "linux":
        used = int(Path("/proc/self/statm").read_text().split()[1]) * page
        lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
        total = next((int(words[1]) * 1024 for words in lines if words[0] == "MemTotal:"), 0)
    return MemoryStats(used, max(used, peak), total)


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


def set_threads(count: int | None) -> int:
    """Set how many CPU threads a torch operation uses; None keeps torch's choice. Return the number in use."""
    if count is not None:
        torch.set_num_threads(count)
    return torch.get_num_threads()
