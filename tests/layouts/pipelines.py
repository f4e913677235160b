"""What workers do for test_pipelines.py: train with copies of tied weights, count what is in flight, disagree."""

from __future__ import annotations

import hashlib
import weakref
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lmtrain.errors import LayoutError
from lmtrain.parallel.pipeline.execute_schedule import StageForward
from lmtrain.train.set_up_run import build_optimizer
from lmtrain.train.step import train_step
from tests.layouts.cases import Case
from tests.layouts.toy_data import loader_of
from tests.layouts.training import OPTIM, build, dp_index


def tied(name: str, steps: int) -> dict[str, Any]:
    """Losses, and of each tied name that this rank holds: where its shard lies and a digest of its bits."""
    case = Case.named(name)
    model = build(case)
    optimizer = build_optimizer(OPTIM, model)
    loader = loader_of(case, dp_index(case))
    done = [train_step(model, optimizer, loader.read(step), OPTIM.lr, OPTIM.clip_norm) for step in range(steps)]
    at = model.mesh.coordinate
    names = {key for tie in model.settings.ties() for key in (tie.first, tie.second)}
    held = {key: weight for key, weight in model.parameters.items() if key in names}
    return {
        "losses": [result.loss for result in done],
        "copies": [
            [key, f"{at.dp_replicate}.{at.dp_shard}.{at.tp}", digest(weight)] for key, weight in held.items()
        ],
    }  # fmt: skip


def digest(weight: Tensor) -> str:
    return hashlib.sha256(weight.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


class Alive:
    """How many storages of each kind live, and the most there ever were."""

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.most: Counter[str] = Counter()

    def born(self, kind: str, tensor: Tensor) -> None:
        self.now[kind] += 1
        self.most[kind] = max(self.most[kind], self.now[kind])
        weakref.finalize(tensor.untyped_storage(), self.gone, kind)

    def gone(self, kind: str) -> None:
        self.now[kind] -= 1


def in_flight(name: str) -> dict[str, dict[str, int]]:
    """The most stage-microbatches whose activations, and whose outputs, lived at once in a second step; what is left.

    Of each stage its first block's widest activation is watched, which backward needs whichever way it is taken apart.
    """
    case = Case.named(name)
    model = build(case)
    optimizer = build_optimizer(OPTIM, model)
    loader = loader_of(case, dp_index(case))
    train_step(model, optimizer, loader.read(0), OPTIM.lr, OPTIM.clip_norm)
    alive = Alive()

    def watch(module: nn.Module, args: Any) -> None:
        alive.born("activations", args[0])

    for stage in model.stages.values():
        next(iter(stage.blocks.values())).get_submodule("mlp.down").register_forward_pre_hook(watch)
    right = model.runner.train

    def train(count: int, compute: StageForward, *rest: Any) -> dict[int, Tensor]:
        def watched(stage: int, index: int, hidden: Tensor | None) -> Tensor:
            out = compute(stage, index, hidden)
            if stage < model.last_stage:
                alive.born("outputs", out)
            return out

        return right(count, watched, *rest)

    model.runner.train = train  # type: ignore[assignment, method-assign]
    train_step(model, optimizer, loader.read(1), OPTIM.lr, OPTIM.clip_norm)
    return {"most": dict(alive.most), "left": dict(alive.now)}


def disagree(name: str) -> str:
    """The first stage has batches of half as many samples; gives what each rank is told."""
    case = Case.named(name)
    model = build(case)
    batches = loader_of(case, dp_index(case)).read(0)
    if model.mesh.pp.index == 0:
        batches.microbatches[:] = [b.map(lambda array: array[: len(array) // 2]) for b in batches.microbatches]
    try:
        model.forward_backward(batches)
    except LayoutError as error:
        dist.destroy_process_group()  # because: a run ends here, and its closed sockets are what frees the other stage
        return str(error)
    except RuntimeError as error:
        return f"lost: {error}"
    return "nothing"


def vary(name: str) -> dict[str, Any]:
    """Steps of 4, 2 and 3 microbatches, then losses of a validation and logits."""
    case = Case.named(name)
    model = build(case)
    optimizer = build_optimizer(OPTIM, model)
    loader = loader_of(case, dp_index(case))
    losses = []
    for step, count in enumerate((4, 2, 3)):
        batches = loader.read(step)
        some = replace(batches, microbatches=batches.microbatches[:count])
        losses.append(train_step(model, optimizer, some, OPTIM.lr, OPTIM.clip_norm).loss)
    last = loader.read(3).microbatches
    sums = [sums.tolist() for sums in model.validation_sums(last)]
    return {"losses": losses, "valid": sums, "logits": model.logits(last[0])[:2, :5].tolist()}
