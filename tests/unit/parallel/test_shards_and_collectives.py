"""What sharding promises: bytes by the closed form, collectives by the level, and computing with what was loaded."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from lmtrain.batch import Batch
from lmtrain.layout import Piece
from lmtrain.parallel.parallel_model import ParallelModel
from lmtrain.placement.weight_and_activation_bytes import count_elements, rank_bytes
from lmtrain.schedules.table import Action, Kind
from tests.layouts.memory import on_their_way, storages
from tests.layouts.workers import Pool
from tests.marks import wide
from tests.unit.models.first_weights import whole
from tests.unit.parallel.spread import build, step_of
from tests.unit.parallel.test_layouts import num_processes, words

LAYOUTS: list[dict[str, Any]] = [
    {"dp_replicate": 2, "zero": 0},
    {"dp_shard": 4, "zero": 1},
    {"dp_shard": 4, "zero": 2},
    {"dp_shard": 4, "zero": 3},
    {"dp_replicate": 2, "dp_shard": 2, "zero": 2},
    {"tp": 2, "dp_shard": 2, "zero": 3},
]


# of a model of three groups: what the first and the last microbatch send
SENT: dict[str, list[dict[str, int]]] = {
    "dp_replicate2-zero0": [{}, {"allreduce": 3}],
    "dp_shard4-zero1": [{"allgather_base": 3}, {"reduce_scatter_base": 3}],
    "dp_shard4-zero2": [{"allgather_base": 3, "reduce_scatter_base": 3}, {"reduce_scatter_base": 3}],
    "dp_shard4-zero3": [{"allgather_base": 5, "reduce_scatter_base": 3}] * 2,  # the root's weights stay for backward
    "dp_replicate2-dp_shard2-zero2": [
        {"allgather_base": 3, "reduce_scatter_base": 3}, {"reduce_scatter_base": 3, "allreduce": 3},
    ],
}  # fmt: skip


def live_tensors() -> dict[int, Tensor]:
    """Floating-point memory that tensors of this process keep, one tensor for each piece of it."""
    gc.collect()
    # because: a compiler of an earlier test may keep fakes, which have no memory
    tensors = [t for t in gc.get_objects() if issubclass(type(t), Tensor) and not issubclass(type(t), FakeTensor)]
    found: dict[int, Tensor] = {}
    for tensor in [*tensors, *(t.grad for t in tensors if t.is_leaf and t.grad is not None)]:
        plain = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if plain.is_floating_point() and plain.device.type == "cpu":
            found[plain.untyped_storage().data_ptr()] = plain
    return found


def microbatch(built: ParallelModel, *, last: bool) -> dict[str, int]:
    """One forward and backward; returns how many collectives of each kind it took."""
    batch = step_of(0, built.mesh.layout, 2, built.mesh.dp.index).microbatches[int(last)]
    with CommDebugMode() as mode:  # type: ignore[no-untyped-call]
        loss = built.objective.loss_sums(built.model, built.model(batch), batch).sum()
        built.masters.before_action(Action(Kind.BACKWARD, 0, 0), last)
        torch.autograd.backward(loss)
    return {str(op).rpartition(".")[2].strip("_"): count for op, count in mode.get_comm_counts().items()}


def measure(parallel: dict[str, Any], precision: str) -> dict[str, Any]:
    """Weights and gradients between two microbatches, in bytes, and what both microbatches sent."""
    before = live_tensors()  # kept, so that no address is used again
    built = build(parallel, precision)
    layout, work_bytes = built.mesh.layout, {"fp32": 4, "bf16": 2}[precision]
    counts = count_elements(built.placements.values(), layout)
    held = rank_bytes(counts, layout, zero=parallel["zero"], work_bytes=work_bytes)
    sent = [microbatch(built, last=False)]
    known = before.keys() | storages(on_their_way(built)).keys()
    for _ in range(20):  # because: a thread of gloo's drops a tensor it has sent some time after the wait for it
        between = sum(t.untyped_storage().nbytes() for address, t in live_tensors().items() if address not in known)
        if between == held.masters + held.work + held.gradients:
            break
    sent.append(microbatch(built, last=True))
    return {
        "sent": sent,
        "bytes": [between, sum(p.untyped_storage().nbytes() for p in built.parameters.values()),
                  8 * sum(p.numel() for p in built.parameters.values())],
        "closed": [held.masters + held.work + held.gradients, held.masters, held.optimizer],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("parallel", "precision"),
    [
        (LAYOUTS[5], "fp32"),
        (LAYOUTS[1], "bf16"),
        *wide(*((parallel, "fp32") for parallel in LAYOUTS if parallel != LAYOUTS[5]), (LAYOUTS[2], "bf16")),
    ],
    ids=lambda value: words(value) if isinstance(value, dict) else value,
)
def test_bytes_equal_the_closed_form_and_nothing_more_is_sent(
    pool: Pool, parallel: dict[str, Any], precision: str
) -> None:
    arguments = {"parallel": parallel, "precision": precision}
    for rank in pool.run(f"{__name__}:measure", num_processes(parallel), arguments):
        assert rank["bytes"] == rank["closed"]
        if "tp" not in parallel:
            assert rank["sent"] == SENT[words(parallel)]


def load_and_look(parallel: dict[str, Any]) -> dict[str, Any]:
    """Logits before and after weights are loaded into their blocks; a batch whose length divides by nothing."""
    built = build(parallel, seed=None)
    tokens = torch.arange(14).view(2, 7) % 13
    keep = torch.zeros(2, 7, dtype=torch.bool)
    keep[0, 6] = keep[1, 2] = True
    empty = built.logits(Batch(tokens, tokens))
    starts = built.model.starts()

    def draw_initial_values(pieces: list[Piece]) -> None:
        for piece in pieces:
            name = piece.name.removeprefix("model.")
            weight = whole(name, piece.global_shape, starts[name], 5)
            at = zip(piece.offset, piece.block.shape, strict=True)
            piece.block.copy_(weight[tuple(slice(o, o + n) for o, n in at)])

    built.load(draw_initial_values)
    logits = built.logits(Batch(tokens, tokens))
    # because: a product of fewer rows may sum in another order, on some processors
    torch.testing.assert_close(built.logits(Batch(tokens, tokens), keep), logits[keep], rtol=1e-6, atol=1e-6)
    return {"empty": empty.abs().max().item(), "logits": logits.tolist(), "count": built.settings.num_parameters}


@pytest.mark.parametrize(
    "parallel", [LAYOUTS[0], LAYOUTS[5], *wide(*LAYOUTS[3:5], {"tp": 2, "sequence_parallel": False})], ids=words
)
def test_what_is_loaded_computes_the_logits_of_one_process(pool: Pool, parallel: dict[str, Any]) -> None:
    (one,) = pool.run(f"{__name__}:load_and_look", 1, {"parallel": {}})
    for rank in pool.run(f"{__name__}:load_and_look", num_processes(parallel), {"parallel": parallel}):
        assert (rank["empty"], rank["count"]) == (0, one["count"])
        torch.testing.assert_close(torch.tensor(rank["logits"]), torch.tensor(one["logits"]), rtol=1e-5, atol=1e-6)
