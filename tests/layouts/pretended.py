"""One rank of a run that no machine here could hold: its real modules on tensors without memory, among pretended peers.

Runs in a worker. Nothing is computed or sent; sizes are those of the tensors that the real code makes.
"""

from __future__ import annotations

import gc
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from lmtrain.batch import Batch
from lmtrain.parallel.apply import build_parallel
from lmtrain.parallel.mesh import Mesh, build_mesh
from lmtrain.train.setup import build_optimizer
from torch.autograd.graph import get_gradient_edge
from tests.layouts.bugs import _replaced
from tests.layouts.held import Living, Watch, sizes_of
from lmtrain.optim.state import apply_empty_state
from tests.unit.plan.ours import planned

CPU = torch.device("cpu")


def rank_of_gpt3(rank: int) -> dict[str, int]:
    """Bytes of weights, gradients, masters and moments, and what a microbatch's forward keeps and makes of logits."""
    run = planned_gpt3()
    dist.init_process_group("fake", rank=rank, world_size=run.parallel.layout.world_size, store=FakeStore())
    try:
        mesh = build_mesh(run.parallel.layout, CPU)
        plane = mesh.data_mesh()
        with _replaced(Mesh, "data_mesh", lambda self: plane), FakeTensorMode(allow_non_fake_inputs=True):
            model = build_parallel(
                run.model, run.precision, run.compute, CPU, seed=None, training=True,
                mesh=mesh, parallel=run.parallel, recompute=run.recompute,
            )  # fmt: skip
            (stage,) = model.stages.values()
            optimizer = build_optimizer(run.optim, model)
            apply_empty_state(optimizer)
            found = {
                "masters": sum(sizes_of(model.parameters.values()).values()),
                "moments": sum(p.nbytes for state in optimizer.state.values() for p in state.values() if p.ndim),
            }
            shape, parts = run.shape, run.sequence_parts
            tokens = torch.zeros(run.micro_batch, shape.seq_len, dtype=torch.int64)
            cut = torch.zeros(run.micro_batch, shape.seq_len // parts, shape.width, dtype=torch.bfloat16)
            living = Living()
            with living:
                hidden = stage(Batch(tokens, tokens), cut.requires_grad_())
                if run.parallel.layout.coordinate(rank).pp == run.parallel.pp - 1:
                    logits = stage.logits(hidden)
                    found["logits"] = logits.nbytes
                    loss = model.objective.cross_entropy(logits, tokens)
                    del logits
                held = get_gradient_edge(hidden)
                del hidden
                gc.collect()
                weights = sizes_of(Watch(model).weights())
                kept = {key: size for key, size in living.sizes().items() if key not in weights}
                found["weights"] = sum(weights.values())
                found["kept"] = sum(kept.values())
                print(sorted(kept.values()))
        return found
    finally:
        dist.destroy_process_group()


def planned_gpt3() -> Any:
    from lmtrain.parallel.compute_settings import ComputeSettings
    return planned(compute=ComputeSettings(device="cpu"))
