"""Without torch the same is known of GPUs as with it."""

from __future__ import annotations

import importlib.util
import shutil

import pytest

from lmtrain.runtime.machine.visible_gpus_without_torch import Gpus, device_problem, gpu_index, has_kernel_compiler
from lmtrain.runtime.processes.process_environment import ProcessEnv


def test_what_is_found_is_what_torch_finds() -> None:
    torch = pytest.importorskip("torch")
    found = Gpus.detect()
    assert (found.built_for, found.torch) == (torch.version.cuda, torch.__version__)
    assert found.count == (torch.cuda.device_count() if torch.cuda.is_available() else 0)


@pytest.mark.parametrize(
    ("name", "gpus", "last", "said"),
    [
        ("cpu", Gpus(None, 0), 9, None), ("auto", Gpus(None, 0), 9, None), ("auto", Gpus("13.0", 2), 1, None),
        ("cuda", Gpus(None, None), 0, None), ("cuda", Gpus("13.0", 1), 0, None),
        ("cuda", Gpus(None, 0, "2.13"), 0, "torch 2.13 sees no GPU (it is built without CUDA). Use auto or cpu"),
        ("cuda", Gpus("13.0", 0, "2.13"), 0, "sees no GPU (it is built for CUDA 13.0)"),
        ("auto", Gpus("13.0", 2), 2, "local rank 2 has no GPU of its own, since the number of visible GPUs is 2."),
    ],
)  # fmt: skip
def test_a_device_that_a_process_cannot_have(name: str, gpus: Gpus, last: int, said: str | None) -> None:
    """Whichever process of the node asks."""
    for process in (ProcessEnv(local_rank=last), ProcessEnv(local_world_size=last + 1)):
        problem = device_problem(name, gpus, process)
        assert (problem is None) == (said is None)
        assert said is None or said in str(problem)


@pytest.mark.parametrize(
    ("shown", "count", "index"),
    [
        ({}, 4, 3),
        ({"SLURM_GPUS_PER_TASK": "1"}, 1, 0),
        ({"SLURM_GPUS_PER_TASK": "a100:2"}, 2, 0),
        ({"SLURM_TRES_PER_TASK": "cpu=4,gres/gpu:h100=1"}, 1, 0),
        ({"SLURM_TRES_PER_TASK": "cpu=1"}, 4, 3),
        ({"SLURM_STEP_GPUS": "3", "SLURM_GPUS_ON_NODE": "4"}, 1, 0),  # srun --gpus-per-task=1, --gpu-bind=single:1
        ({"SLURM_STEP_GPUS": "0,1,2,3", "SLURM_GPUS_ON_NODE": "4"}, 4, 3),
        ({"SLURM_GPUS_PER_TASK": "1"}, 4, 3),  # asked for, and --gpu-bind=none shows those of the node
    ],
)
def test_a_task_takes_the_first_of_its_own_gpus_and_its_share_of_the_nodes(
    shown: dict[str, str], count: int, index: int
) -> None:
    srun = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "3"}
    process = ProcessEnv.detect(srun | {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "4"} | shown)
    assert gpu_index(process, count) == index
    assert device_problem("cuda", Gpus("13.0", count), process) is None


def test_four_tasks_that_are_shown_the_same_gpu_are_refused() -> None:
    process = ProcessEnv(rank=3, world_size=4, local_rank=3, local_world_size=4, launcher="slurm")
    assert "local rank 3 has no GPU of its own" in str(device_problem("cuda", Gpus("13.0", 1), process))


@pytest.mark.parametrize("triton", [False, True])
@pytest.mark.parametrize("compiler", [None, "gcc"])
def test_kernels_need_triton_and_a_compiler(
    monkeypatch: pytest.MonkeyPatch, triton: bool, compiler: str | None
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "triton" and triton else None)
    monkeypatch.setattr(shutil, "which", lambda name: name if name == compiler else None)
    assert has_kernel_compiler() is (triton and compiler is not None)
