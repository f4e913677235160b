"""Whether NCCL lets several ranks share one GPU here: `python -m tests.gpu.day.several_ranks RECIPE NUM_RANKS`.

Each rank sums, gathers and passes a tensor round; rank 0 prints a JSON line. Neither recipe is supported by NCCL's
makers, so this says first whether the tests that use them can pass. Without a GPU the ranks talk over gloo.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

QUIETLY = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_NCHANNELS": "2"}
RECIPES: dict[str, Callable[[int], dict[str, str]]] = {
    "host_ids": lambda rank: {"NCCL_HOSTID": f"rank{rank}", **QUIETLY},  # as if each rank were a machine
    "multi_rank": lambda _: {"NCCL_MULTI_RANK_GPU_ENABLE": "1", **QUIETLY},  # NCCL 2.30 and later
}
LIMIT_S = 30


def main(name: str, count: int) -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", __spec__.name, name, str(count), "rank"],
            env={**os.environ, **shared, **RECIPES[name](rank), "RANK": str(rank)},
        )
        for rank in range(count)
    ]
    try:
        codes = [rank.wait(LIMIT_S) for rank in ranks]
    except subprocess.TimeoutExpired:
        codes = [-1]
        print(f"{name}: {count} ranks did not come to an end in {LIMIT_S} s")
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return int(any(codes))


def talk(name: str) -> None:
    """One rank."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda:0" if on_gpu else "cpu")
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(seconds=LIMIT_S / 2))
    rank, count = dist.get_rank(), dist.get_world_size()
    mine = torch.full((1 << 16,), float(rank), device=device)
    total = mine.clone()
    dist.all_reduce(total)  # collective: rank numbers, over the world
    parts = [torch.empty_like(mine) for _ in range(count)]
    dist.all_gather(parts, mine)  # collective: one row of each of the world
    came = torch.empty_like(mine)
    both = [dist.P2POp(dist.isend, mine, (rank + 1) % count), dist.P2POp(dist.irecv, came, (rank - 1) % count)]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    right = bool(
        (total == count * (count - 1) / 2).all()
        and all((part == number).all() for number, part in enumerate(parts))
        and (came == (rank - 1) % count).all()
    )
    if rank == 0:
        print(json.dumps({"recipe": name, "ranks": count, "right": right, "over": dist.get_backend()}))
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(not right)


if __name__ == "__main__":
    if sys.argv[3:] == ["rank"]:
        talk(sys.argv[1])
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
