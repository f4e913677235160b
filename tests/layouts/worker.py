"""The other end of workers.py: the nursery that forks, and the loop of one worker.

Run as `python -m tests.layouts.worker FD`. The nursery imports what is slow to import and starts no thread, so that a
fork is safe; a worker then calls what it is asked to, inside a process group made for that call alone.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import signal
import socket
import sys
import traceback
from datetime import timedelta
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.tensor.debug
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from tests.layouts.training import device  # and nearly every case needs what that imports

GROUP_TIMEOUT = timedelta(seconds=180)  # because: a busy machine may take ten times as long as an idle one


def nursery(control: socket.socket) -> None:
    """Fork a worker for each pair of file descriptors that arrives: its socket and its log."""
    # because: whoever asked for workers sees their sockets close; nobody needs their exit codes
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    torch.set_num_threads(1)
    # because: a worker collects garbage after each case, and need not look through all of torch for it
    gc.collect()
    gc.freeze()
    while True:
        asked, descriptors, _, _ = socket.recv_fds(control, 1, 2)
        if not asked:
            return
        pid = os.fork()
        if pid == 0:
            control.close()
            be_worker(*descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        control.sendall(str(pid).encode())


def be_worker(end: int, log: int) -> None:
    """Never returns: a forked process must not run its parent's way out."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for descriptor in (1, 2):
            os.dup2(log, descriptor)
        with socket.socket(fileno=end) as ours:
            answer_requests(ours)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def answer_requests(ours: socket.socket) -> None:
    store: Store | None = None
    for line in ours.makefile("r", encoding="utf-8"):
        request = json.loads(line)
        if "release" in request:
            end_group()
            continue
        end_group()
        if request["world_size"] > 1 and request["rank"] == 0:
            store, port = host_store(request["world_size"])
            ours.sendall(json.dumps({"port": port}).encode() + b"\n")
        # because: a hang that outlives the group's time-out should leave the line it hangs at in the log
        faulthandler.dump_traceback_later(max(1.0, request["timeout_s"] - 5.0))
        try:
            start_group(request, store)
            answer = {"ok": True, "result": call(request["function"], request["arguments"])}
        except BaseException:
            answer = {"ok": False, "result": traceback.format_exc()}
        faulthandler.cancel_dump_traceback_later()
        if not answer["ok"]:
            end_group()  # now: peers that wait for this rank see their connections close
        ours.sendall(json.dumps(answer).encode() + b"\n")


def call(function: str, arguments: dict[str, Any]) -> Any:
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)(**arguments)


def host_store(world_size: int) -> tuple[Store, int]:
    """Listens on the loopback alone, on a port that the system chose."""
    listening = socket.create_server(("127.0.0.1", 0))
    port: int = listening.getsockname()[1]
    store = TCPStore(
        "127.0.0.1", port, world_size, is_master=True, timeout=GROUP_TIMEOUT, wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )  # fmt: skip
    return store, port


def start_group(request: dict[str, Any], store: Store | None) -> None:
    world_size, rank = request["world_size"], request["rank"]
    if world_size == 1:
        return
    if rank > 0:
        store = TCPStore("127.0.0.1", request["port"], world_size, is_master=False, timeout=GROUP_TIMEOUT)
    backend = "gloo"
    if device().type == "cuda":
        os.environ.update(one_gpu())
        torch.cuda.set_device(0)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=GROUP_TIMEOUT)


def one_gpu() -> dict[str, str]:
    """What NCCL has to be told so that it lets several ranks of one GPU talk.

    because: it refuses two ranks of one device on one host, and takes those of another host's name for another's. From
    2.30 on it allows them by a variable, which older ones do not know. The name is of the process: a worker changes its
    rank where another takes the place of one that has ended, and what NCCL has read once it may not read again
    """
    known = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_NCHANNELS": "2"}
    if torch.cuda.nccl.version() >= (2, 30):  # type: ignore[no-untyped-call]
        return known | {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    return known | {"NCCL_HOSTID": f"pid{os.getpid()}"}


def end_group() -> None:
    """Forget everything that the last call left: its tensors, its groups, its compiled code."""
    # because: DTensor remembers the meshes it has seen, and with them groups whose threads would go on polling
    torch.distributed.tensor.debug._clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    gc.collect()
    torch._dynamo.reset()
    if dist.is_initialized():
        dist.destroy_process_group()
    # because: a group that could not be made counts among those that its name is made of, and ranks must agree on it
    dist.distributed_c10d._world.group_count = 0


if __name__ == "__main__":
    nursery(socket.socket(fileno=int(sys.argv[1])))
