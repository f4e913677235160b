"""Detect the GPUs a run would see without importing torch, so that a wrong device is refused before anything starts.

Called by preflight; choose_device.py applies the same rules to the GPUs that torch itself reports.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from lmtrain.errors import LmtrainError, SettingsError, own
from lmtrain.runtime.processes.process_environment import ProcessEnv


@dataclass(frozen=True)
class Gpus:
    """The CUDA version that torch was built for and the number of GPUs that this process sees; None if unknown."""

    built_for: str | None  # a CUDA version; None also for a torch without CUDA
    count: int | None
    torch: str = ""  # its version

    @classmethod
    def detect(cls) -> Gpus:
        """Return torch's CUDA version from its version file and the number of GPUs from the CUDA driver, without
        importing torch. Both are None if torch is built for ROCm or is not installed.
        """
        version, cuda, hip = _torch_build()
        if hip is not None or version is None:
            return cls(None, None, version or "")
        return cls(cuda, _driver_count() if cuda else 0, version)


def gpu_index(process: ProcessEnv, count: int | None) -> int:
    """Return which of the `count` visible GPUs a process uses: the first if its launcher shows it only GPUs of its own,
    else the GPU with the number of its local rank.
    """
    return 0 if count == process.num_own_gpus else process.local_rank


def device_problem(name: str, gpus: Gpus, process: ProcessEnv) -> LmtrainError | None:
    """Return the error to raise if this process, or another rank of its node, cannot use the device `name` (cpu, cuda
    or auto); None if all can. `gpus` are the GPUs that this process sees.
    """
    if name == "cpu" or gpus.count is None or (name == "auto" and gpus.count == 0):
        return None
    if gpus.count == 0:
        built = f"is built for CUDA {gpus.built_for}" if gpus.built_for else "is built without CUDA"
        return SettingsError([
            f"compute.device=cuda needs a GPU, but torch {gpus.torch} sees no GPU (it {built}). "
            f"Use {own('auto')} or {own('cpu')}."
        ])  # fmt: skip
    last = max(process.local_world_size - 1, process.local_rank)
    if last >= gpus.count != process.num_own_gpus:
        return SettingsError([
            f"local rank {last} has no GPU of its own, since the number of visible GPUs is {gpus.count}. Start at most "
            f"{gpus.count} processes per node."
        ])  # fmt: skip
    return None


def has_kernel_compiler() -> bool:
    """Return whether torch.compile can make GPU kernels here, which takes Triton and a C compiler."""
    return importlib.util.find_spec("triton") is not None and any(map(shutil.which, ("cc", "gcc", "clang")))


def _torch_build() -> tuple[str | None, str | None, str | None]:
    """Return torch's version and the CUDA and HIP versions that it was built for, read from its version file without
    importing torch. Each is None if torch is not installed; CUDA or HIP is None if torch is built without it.
    """
    spec = importlib.util.find_spec("torch")
    file = Path(spec.origin).parent / "version.py" if spec and spec.origin else None
    if file is None or not file.is_file():
        return None, None, None
    version_fields = dict(re.findall(
        r"^(__version__|cuda|hip)(?:\s*:[^=]*)?\s*=\s*['\"]([^'\"]*)['\"]",
        file.read_text(encoding="utf-8", errors="replace"), re.MULTILINE,
    ))  # fmt: skip
    return version_fields.get("__version__", "?"), version_fields.get("cuda"), version_fields.get("hip")


def _driver_count() -> int | None:
    """Return the number of GPUs that the CUDA driver sees, within CUDA_VISIBLE_DEVICES; 0 if there is no driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    is_counted = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    return count.value if is_counted else 0
