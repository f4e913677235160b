"""What this machine is, as a JSON line: versions, device, NCCL's environment, and what NCCL says when it starts.

`python -m tests.gpu.day.machine`. A world of one makes NCCL read its environment and write about itself to the log.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from importlib.metadata import distributions
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist

TOLD = ("NCCL", "TORCH", "CUDA", "NVIDIA", "OMP", "PYTORCH", "LMTRAIN", "SLURM", "TRITON")


def main() -> None:
    print(json.dumps(machine() | (gpu() if torch.cuda.is_available() else {})))


def machine() -> dict[str, Any]:
    return {
        "python": platform.python_version(), "system": platform.platform(), "cpus": os.cpu_count(),
        "torch": torch.__version__, "cuda": torch.version.cuda, "has_gpu": torch.cuda.is_available(),
        "triton": find_spec("triton") is not None, "compilers": [c for c in ("cc", "gcc", "clang") if shutil.which(c)],
        "environment": {key: value for key, value in sorted(os.environ.items()) if key.startswith(TOLD)},
        "packages": sorted({f"{one.name}=={one.version}" for one in distributions()}),
    }  # fmt: skip


def gpu() -> dict[str, Any]:
    public: Any = torch  # because: some of its public names have no types
    dist.init_process_group("nccl", store=public.distributed.HashStore(), rank=0, world_size=1)
    tensor = torch.ones(1, device="cuda")
    dist.all_reduce(tensor)  # collective: of one rank, so that NCCL starts
    torch.cuda.synchronize()
    dist.destroy_process_group()
    device = torch.cuda.get_device_properties(0)
    return {
        "device": device.name, "memory_bytes": device.total_memory, "multiprocessors": device.multi_processor_count,
        "nccl": ".".join(map(str, public.cuda.nccl.version())), "cudnn": public.backends.cudnn.version(),
        "nvidia_smi": _smi("-q", "-d", "CLOCK,POWER,PERFORMANCE"), "topology": _smi("topo", "-m"),
    }  # fmt: skip


def _smi(*words: str) -> str:
    if shutil.which("nvidia-smi") is None:
        return ""
    return subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, check=False).stdout


if __name__ == "__main__":
    main()
