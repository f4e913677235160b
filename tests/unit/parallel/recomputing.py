"""Two microbatches of a small GPT with a recompute of choice, on one process or a layout: gradients, bytes, counts."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lmtrain.batch import Batch, StepBatches
from lmtrain.config.build_typed_settings import build_settings
from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.parallel.build_parallel_model import build_parallel
from lmtrain.parallel.device_and_precision_settings import ComputeSettings, Fp32Settings, RecomputeSettings
from lmtrain.parallel.mesh import build_mesh
from lmtrain.parallel.parallel_model import ParallelModel
from lmtrain.placement.parallel_settings import ParallelSettings

CPU = torch.device("cpu")
SETTINGS = GPTSettings(
    num_layers=3, width=32, num_heads=4, num_kv_heads=2, vocab_size=61, vocab_multiple=1, seq_len=32, dropout=0.2,
    activation="silu", gated=True, norm="rmsnorm", positions="rotary", ffn_width=96, init_std=0.1,
)  # fmt: skip


def build(
    recompute: dict[str, Any], parallel: dict[str, Any] | None = None, *, compile: bool = False, **model: Any
) -> ParallelModel:
    spread = ParallelSettings(**(parallel or {}))
    return build_parallel(
        replace(SETTINGS, **model), Fp32Settings(), ComputeSettings(compile=compile), CPU, seed=1, training=True,
        mesh=build_mesh(spread.layout, CPU, 60.0), parallel=spread,
        recompute=build_settings(RecomputeSettings, recompute, "recompute"),
    )  # fmt: skip


def step_of(built: ParallelModel) -> StepBatches:
    tokens = torch.randint(61, (2, 2, 32), generator=torch.Generator().manual_seed(built.mesh.dp.index))
    batches = [Batch(tokens_BT, tokens_BT.roll(-1, dims=1)) for tokens_BT in tokens]
    num_tokens = 128 * built.mesh.dp.size
    return StepBatches(0, batches, 4 * built.mesh.dp.size, (num_tokens,), np.arange(4), num_tokens)


def gradients(built: ParallelModel) -> dict[str, Tensor]:
    built.forward_backward(step_of(built))
    built.finish_gradients(None)
    return {name: p.grad for name, p in built.parameters.items() if p.grad is not None}


def different(recomputes: list[dict[str, Any]], parallel: dict[str, Any], model: dict[str, Any]) -> list[str]:
    """Runs on every rank: which gradients of which recompute are not bit for bit those of none."""
    none = build({"kind": "none"}, parallel, **model)
    expected = gradients(none)
    assert list(expected) == list(none.parameters)
    found = []
    for recompute in recomputes:
        again = gradients(build(recompute, parallel, **model))
        found += [f"{recompute} {name}" for name, g in expected.items() if not torch.equal(again[name], g)]
    return found


class Live(TorchDispatchMode):
    """Bytes of the storages made inside that somebody still holds."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and (storage := x.untyped_storage())._cdata not in given:
                self.made[storage._cdata] = weakref.ref(storage), int(storage.nbytes())
        return result

    @property
    def num_bytes(self) -> int:
        return sum(size for storage, size in self.made.values() if storage() is not None)


def saved_bytes(recompute: dict[str, Any], **model: Any) -> int:
    """What one microbatch's forward leaves for its backward."""
    built = build(recompute, **model)
    batch = step_of(built).microbatches[0]
    live = Live()
    with live:
        loss = built.objective.loss_sums(built.model, built.model(batch), batch).sum()
    kept = live.num_bytes
    torch.autograd.backward(loss)
    return kept


def compiled(parallel: dict[str, Any], recomputes: list[dict[str, Any]]) -> dict[str, Any]:
    """Runs on every rank: graph breaks, graphs, and the largest difference from the same without a compiler."""
    expected = gradients(build({"kind": "none"}, parallel, dropout=0.0))
    worst, broken, graphs = 0.0, 0, []
    for recompute in recomputes:
        torch._dynamo.reset()
        counters.clear()
        found = gradients(build(recompute, parallel, compile=True, dropout=0.0))
        worst = max([worst, *(float((found[n] - g).norm() / (g.norm() + 1e-9)) for n, g in expected.items())])
        broken += sum(counters["graph_break"].values())
        graphs.append(counters["stats"]["unique_graphs"])
    return {"worst": worst, "broken": broken, "graphs": graphs}
