"""One of two ranks of a run that does nothing but sum: `python -m tests.gpu.lost RANK FOLDER DEVICE`. For test_nccl.py.

It says when it is in, and a word after a hundred sums; what happens when the other is gone is the run's own way out.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from lmtrain.errors import LmtrainError
from lmtrain.observe.hang_watch.start_companion_and_raise_verdict import watch_run
from lmtrain.runtime.processes.process_environment import ProcessEnv
from lmtrain.runtime.processes.process_group import RunGroup, peer_errors
from tests.layouts.worker import one_gpu


def main(rank: int, folder: Path, device: torch.device) -> None:
    store = FileStore(str(folder / "store"), 2)
    on_device = device.type == "cuda"
    if on_device:
        # because: what meets as a run does sets it; this one has no launcher
        os.environ |= {**one_gpu(), "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_device else "gloo", store=store, rank=rank, world_size=2)
    env, met = ProcessEnv(rank, 2, host="here"), RunGroup(("here", "here"), store)
    with peer_errors(env, 60.0), watch_run(
        env, met, folder, 60.0, on_end=say, on_device=on_device
    ):
        total, count = torch.ones(1 << 16, device=device), 0
        while True:
            dist.all_reduce(total)
            total /= 2
            count += 1
            if count % 100 == 0:
                assert total[0].item() == 1.0
                print(count, flush=True)


def say(error: LmtrainError) -> None:
    print(f"error: {error}", flush=True)


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), Path(sys.argv[2]), torch.device(sys.argv[3]))
    except LmtrainError as error:
        say(error)
        sys.exit(error.exit_code)
