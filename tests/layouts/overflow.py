"""What a worker does for test_overflow.py: fp16 training in which one rank's gradient overflows, saved and resumed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lmtrain.checkpoint.find_and_prune import resolve_checkpoint
from lmtrain.checkpoint.save.background_writer import CheckpointWriter
from lmtrain.checkpoint.tensor_reader import CheckpointReader
from lmtrain.optim.optimizer_state import apply_num_updates, num_updates
from lmtrain.parallel.mesh import saver_thread_peers
from lmtrain.parallel.parallel_model import ParallelModel
from lmtrain.train.run_objects_and_resume import held_pieces, optimizer_pieces
from lmtrain.train.set_up_run import build_optimizer
from lmtrain.train.step import train_step
from tests.layouts.cases import Case
from tests.layouts.toy_data import loader_of
from tests.layouts.training import OPTIM, build, dp_index


def train(
    name: str, folder: str, steps: int, where: str, overflow_step: int, overflow_rank: int, save_step: int
) -> list[list[Any]]:
    """[loss, norm, skipped, scale after, whether any weight moved] of each step; saves after `save_step` of them."""
    case = Case.named(name)
    model = build(case)
    optimizer = build_optimizer(OPTIM, model)
    rows = []
    for step in range(steps):
        now = (step, dist.get_rank()) == (overflow_step, overflow_rank)
        with OVERFLOWS[where](model) if now else nullcontext():
            rows.append(_step(case, model, optimizer, step))
        if step + 1 == save_step:
            state = {"precision": model.loss_scale.state(), "num_updates": num_updates(optimizer)}
            peers = saver_thread_peers(model.mesh)
            writer = CheckpointWriter(Path(folder), keep_last=1, asynchronous=False, peers=peers)
            writer.save(save_step, model.owned_pieces(held_pieces(model, optimizer)), state, {})
            writer.wait()
    return rows


def resume(name: str, folder: str, start: int, stop: int) -> list[list[Any]]:
    case = Case.named(name)
    model = build(case)
    optimizer = build_optimizer(OPTIM, model)
    reader = CheckpointReader(resolve_checkpoint(Path(folder)))
    model.load(reader.load_into, extra_pieces=optimizer_pieces(model, optimizer))
    apply_num_updates(optimizer, reader.state["num_updates"])
    model.loss_scale.load(reader.state["precision"])
    return [_step(case, model, optimizer, step) for step in range(start, stop)]


def _step(case: Case, model: ParallelModel, optimizer: torch.optim.Optimizer, step: int) -> list[Any]:
    before = [p.detach().clone() for p in model.parameters.values()]
    done = train_step(model, optimizer, loader_of(case, dp_index(case)).read(step), OPTIM.lr, OPTIM.clip_norm)
    moved = any(not torch.equal(p, b) for p, b in zip(model.parameters.values(), before, strict=True))
    # because: JSON knows no infinity
    return [done.loss, repr(done.grad_norm), done.skipped, model.loss_scale.value, moved]


@contextmanager
def _in_activations(model: ParallelModel) -> Iterator[None]:
    """Too large for fp16 on its way back, as an unlucky batch makes it: peers meet it in sums, or stages before it."""
    up = list(model.stages[min(model.stages)].blocks.values())[-1].get_submodule("mlp.up")
    hook = up.register_full_backward_pre_hook(_enlarged)
    yield
    hook.remove()


def _enlarged(module: nn.Module, grads: Any) -> tuple[Tensor, ...]:
    return tuple(grad * 1e30 for grad in grads)


@contextmanager
def _in_one_shard(model: ParallelModel) -> Iterator[None]:
    """In numbers that this rank alone holds, after all sums: peers learn of it from the norm or not at all."""
    right = model.masters.collect_gradients

    def collect() -> None:
        right()
        name = next(name for name in reversed(model.parameters) if name.endswith(".mlp.up.weight"))
        gradient = model.parameters[name].grad
        assert gradient is not None
        gradient[0, 0] = math.inf

    model.masters.collect_gradients = collect  # type: ignore[method-assign]
    yield
    del model.masters.collect_gradients


OVERFLOWS: dict[str, Callable[[ParallelModel], AbstractContextManager[None]]] = {
    "activations": _in_activations,
    "one_shard": _in_one_shard,
}
