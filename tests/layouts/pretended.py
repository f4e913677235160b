"""One rank of a run that no machine here could hold: its real modules on tensors without memory, among pretended peers.

Runs in a worker. Nothing is computed or sent; sizes are those of the tensors that the real code makes.
"""

from __future__ import annotations

import gc

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.testing._internal.distributed.fake_pg import FakeStore

from lmtrain.batch import Batch
from lmtrain.optim.optimizer_state import apply_empty_state
from lmtrain.parallel.build_parallel_model import build_parallel
from lmtrain.parallel.mesh import Mesh, build_mesh
from lmtrain.parallel.parallel_model import ParallelModel
from lmtrain.plan.run_estimates.workload_from_settings import PlannedRun
from lmtrain.spec import LanguageModel
from lmtrain.train.set_up_run import build_optimizer
from tests.layouts.bugs import replaced
from tests.layouts.held import Ledger, sizes_of
from tests.unit.plan.planned_runs import planned_on_cpu

CPU = torch.device("cpu")


def rank_of_gpt3(rank: int) -> dict[str, int]:
    """Bytes of weights, masters and moments, and what one microbatch's forward keeps, logits apart."""
    run = planned_on_cpu()
    dist.init_process_group("fake", rank=rank, world_size=run.parallel.layout.world_size, store=FakeStore())
    try:
        mesh = build_mesh(run.parallel.layout, CPU)
        plane = mesh.data_mesh()  # because: it reads numbers, which tensors without memory do not have
        with replaced(Mesh, "data_mesh", lambda self: plane), FakeTensorMode(allow_non_fake_inputs=True):
            model = build_parallel(
                run.model, run.precision, run.compute, CPU, seed=None, training=True,
                mesh=mesh, parallel=run.parallel, recompute=run.recompute,
            )  # fmt: skip
            return _lasting(run, model) | _kept(run, model)
    finally:
        dist.destroy_process_group()


def _lasting(run: PlannedRun, model: ParallelModel) -> dict[str, int]:
    optimizer = build_optimizer(run.optim, model)
    apply_empty_state(optimizer)
    slots = (slot for state in optimizer.state.values() for slot in state.values() if slot.ndim)
    return {
        "masters": sum(sizes_of(model.parameters.values()).values()), "moments": sum(sizes_of(slots).values()),
    }  # fmt: skip


def _kept(run: PlannedRun, model: ParallelModel) -> dict[str, int]:
    ((number, stage),) = model.stages.items()
    length, width = run.shape.seq_len, run.shape.width
    tokens = torch.zeros(run.micro_batch, length, dtype=torch.int64)
    received = torch.zeros(run.micro_batch, length // run.sequence_parts, width, dtype=torch.bfloat16)
    ledger = Ledger(model)
    with ledger.living:
        came_in = None if number == 0 else received.clone().requires_grad_()
        held = _forward(model, stage, Batch(tokens, tokens), came_in, ledger, last=number == model.last_stage)
        ledger.look()
    assert held is not None
    return {name: ledger.last[name] for name in ("weights", "activations", "logits")}


def _forward(
    model: ParallelModel, stage: LanguageModel, batch: Batch, came_in: Tensor | None, ledger: Ledger, *, last: bool
) -> Tensor | GradientEdge:
    """What the pipeline holds on to."""
    hidden = stage(batch, came_in)
    if not last:
        return get_gradient_edge(hidden)
    logits = stage.logits(hidden)
    ledger.living.note_logits(logits)
    loss = model.objective.cross_entropy(logits, batch.labels_BT)
    gc.collect()
    return loss
