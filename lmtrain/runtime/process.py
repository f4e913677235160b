"""Who this process is among its peers, and what is reported about its surroundings. Torch-free.

The only reader of environment variables (with native.py). Called by set-up, faults and the bug report; it reads named
facts only, so that no secret of the environment can reach a log or a checkpoint.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmtrain.errors import UsageError

# because: Slurm numbers the steps that srun did not start (batch script, interactive shell) from the top of 32 bits
_FIRST_SPECIAL_STEP = 0xFFFF_FFF0
_PACKAGES = ("lmtrain", "torch", "numpy", "tokenizers", "safetensors", "hydra-core", "typer", "rich")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class ProcessEnv:
    """One process of a run, as its launcher started it."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    launcher: str = "single"  # torchrun, slurm or single
    host: str = ""
    job_id: str | None = None
    num_restarts: int = 0  # how often the launcher has started this job again

    @classmethod
    def detect(cls, environ: Mapping[str, str] | None = None) -> ProcessEnv:
        env = os.environ if environ is None else environ
        if "RANK" in env or "WORLD_SIZE" in env:
            names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT")
            launcher = "torchrun"
        elif _is_srun_task(env):
            # because: inside an allocation SLURM_NTASKS may be the job's; SLURM_STEP_NUM_TASKS is always the step's
            tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
            names = ("SLURM_PROCID", tasks, "SLURM_LOCALID", "SLURM_RESTART_COUNT")
            launcher = "slurm"
        else:
            return cls(host=socket.gethostname(), job_id=env.get("SLURM_JOB_ID"))
        rank, world_size = _number(env, names[0]), _number(env, names[1])
        local_rank, num_restarts = _number(env, names[2], 0), _number(env, names[3], 0)
        if not (rank < world_size and local_rank < world_size):
            raise UsageError(
                f"{names[0]}={rank} and {names[2]}={local_rank} do not fit {names[1]}={world_size}. "
                "Start processes with torchrun or srun, or unset these variables for a single process."
            )
        job_id = env.get("SLURM_JOB_ID") or env.get("TORCHELASTIC_RUN_ID")
        return cls(rank, world_size, local_rank, launcher, socket.gethostname(), job_id, num_restarts)


def _is_srun_task(env: Mapping[str, str]) -> bool:
    """Whether srun started this process; a batch script or an allocation's shell has some of its variables too."""
    step = env.get("SLURM_STEP_ID", "")
    return "SLURM_PROCID" in env and step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None and default is not None:
        return default
    if text is None or not re.fullmatch(r"[0-9]{1,9}", text):
        found = "is not set" if text is None else f"is {text}, which is no whole number"
        raise UsageError(f"{name} {found}, and this process looks like one of several. Start it with torchrun or srun.")
    return int(text)


def fault_request(environ: Mapping[str, str] | None = None) -> tuple[str | None, bool]:
    """What LMTRAIN_FAULT asks for, and whether faults are allowed."""
    env = os.environ if environ is None else environ
    return env.get("LMTRAIN_FAULT") or None, env.get("LMTRAIN_ALLOW_FAULTS") == "1"


def set_env_default(name: str, value: str) -> None:
    """Set a library's variable unless the user has."""
    os.environ.setdefault(name, value)


def num_usable_cpus() -> int:
    """The CPUs that this process may use, which on a shared node is fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def environment_report() -> dict[str, Any]:
    """What a bug report needs: versions and the machine. Environment variables are never part of it."""
    process = ProcessEnv.detect()
    return {
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "num_cpus": os.cpu_count() or 1,
        "num_usable_cpus": num_usable_cpus(),
        "host": process.host,
        "launcher": process.launcher,
        "world_size": process.world_size,
        "commit": git_commit(Path(__file__).resolve().parents[2]),
        "packages": {name: _version(name) for name in _PACKAGES},
        "prefix": sys.prefix,
    }


def _version(package: str) -> str | None:
    # because: importing torch only to ask its version takes seconds
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def git_commit(root: Path) -> str | None:
    """The commit of the checkout with this root, read from its files; None where there is no checkout."""
    git = root / ".git"
    try:
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head if _COMMIT.fullmatch(head) else None
        ref = head.removeprefix("ref: ")
        if (git / ref).is_file():
            lines = [f"{(git / ref).read_text().strip()} {ref}"]
        else:
            lines = (git / "packed-refs").read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    found = [line.split()[0] for line in lines if line.endswith(f" {ref}")]
    return found[0] if found and _COMMIT.fullmatch(found[0]) else None
