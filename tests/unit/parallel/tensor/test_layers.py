"""A model cut over 2, 3 or 4 processes is the uncut model: hidden states, loss, logits and every gradient."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lmtrain.batch import IGNORED
from lmtrain.errors import LayoutError
from lmtrain.models import gpt
from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.parallel.mesh import Axis
from lmtrain.parallel.tensor_parallel import (
    ColumnLinear,
    apply_tensor_parallel,
    cross_entropy_sum,
    heads_take_whole_sequences,
)
from lmtrain.parallel.tp_linears_and_collectives import gather_columns, gather_sequence
from lmtrain.placement.parallel_settings import ParallelSettings, check_layout
from tests.layouts.workers import Pool
from tests.marks import wide
from tests.unit.parallel.cut_models import (
    GPT2,
    LLAMA,
    Record,
    batch_of,
    cut,
    distance,
    loss_of,
    part,
    sum_partial_gradients,
    uncut,
    world_axis,
)

MODELS: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "gpt2_untied": GPT2 | {"tied": False},
    "gpt2_documents": GPT2 | {"window": 5},
    "gpt2_padded": GPT2 | {"vocab_multiple": 64},  # a rank of nothing but padding
    "llama": LLAMA,
    "llama_documents": LLAMA | {"window": 5},
    "parallel_block": GPT2 | {"parallel_block": "one_norm"},
    "llama_parallel_block": LLAMA | {"parallel_block": "one_norm", "tied": True},
}


def compare_with_uncut(settings: dict[str, Any], sequence: bool, documents: bool) -> dict[str, float]:
    """On each rank: how far everything is from the uncut model's."""
    axis, batch = world_axis(), batch_of(settings, documents=documents)
    whole = uncut(settings)
    model = cut(settings, whole, axis, sequence=sequence)
    hidden = whole(batch)
    expected = F.cross_entropy(
        whole.logits(hidden).flatten(0, 1), batch.labels_BT.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    torch.autograd.backward(expected)
    loss = loss_of(model, batch, axis)
    torch.autograd.backward(loss)
    sum_partial_gradients(model, axis, sequence=sequence)
    gradients = {name: parameter.grad for name, parameter in whole.named_parameters()}
    found = {
        name: distance(parameter.grad, part(gradients[name], whole.cuts()[name], axis))
        for name, parameter in model.named_parameters()
    }
    assert found.keys() == gradients.keys()
    found["loss"] = distance(loss, expected)
    with torch.no_grad():
        here = gather_sequence(model(batch), axis) if sequence else model(batch)
        found["hidden"] = distance(here, hidden)
        kept = batch.labels_BT != IGNORED
        vocab_size = settings["vocab_size"]
        for name, keep in (("logits", None), ("kept logits", kept)):
            logits = whole.logits(hidden if keep is None else hidden[keep])[..., :vocab_size]
            with heads_take_whole_sequences(model):
                columns = gather_columns(model.logits(here if keep is None else here[keep]), axis)
            found[name] = distance(columns[..., :vocab_size], logits)
    return found


# because: every model over two; over more, those whose sizes are awkward there
AWKWARD = [("gpt2", 3), ("llama_documents", 3), ("gpt2_padded", 4), ("llama_parallel_block", 4)]
FEW = ("gpt2_untied", "gpt2_documents", "llama_documents", "llama_parallel_block")  # each word of a model once
WHOLE = [(name, 2, False) for name in MODELS if name != "gpt2"] + [(*one, False) for one in AWKWARD]


@pytest.mark.parametrize(
    ("name", "num_ranks", "sequence"),
    [
        ("gpt2", 2, False),
        *((name, 2, True) for name in FEW),
        *((*one, True) for one in AWKWARD[1:3]),
        *wide(
            *((name, 2, True) for name in MODELS if name not in FEW), *((*one, True) for one in AWKWARD[::3]), *WHOLE
        ),
    ],
)
def test_equals_the_uncut_model(pool: Pool, name: str, num_ranks: int, sequence: bool) -> None:
    arguments = {"settings": MODELS[name], "sequence": sequence, "documents": name.endswith("documents")}
    # because: everything is fp64 but rotary angles, which the model turns in fp32
    limit = 1e-6 if name.startswith("llama") else 1e-12
    for rank, found in enumerate(pool.run(f"{__name__}:compare_with_uncut", num_ranks, arguments)):
        worst = max(found, key=lambda key: found[key])
        assert found[worst] < limit, (rank, worst, found[worst])


def compiled_gradients(settings: dict[str, Any], sequence: bool) -> float:
    """The greatest distance between eager and compiled gradients. `fullgraph` raises at a graph break."""
    axis, batch = world_axis(), batch_of(settings)
    whole = uncut(settings, torch.float32)
    eager, compiled = (cut(settings, whole, axis, sequence=sequence) for _ in range(2))
    torch.autograd.backward(loss_of(eager, batch, axis))
    for block in compiled.blocks.values():
        block.compile(fullgraph=True, dynamic=False, backend="aot_eager")
    loss = torch.compile(partial(cross_entropy_sum, axis=axis), fullgraph=True, dynamic=False, backend="aot_eager")
    torch.autograd.backward(loss(compiled.logits(compiled(batch)), batch.labels_BT))
    gradients = {name: parameter.grad for name, parameter in eager.named_parameters()}
    return max(distance(parameter.grad, gradients[name]) for name, parameter in compiled.named_parameters())


# because: sums that a bias is added to and sums that stand as they are go different ways
@pytest.mark.wide
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("settings", [GPT2, LLAMA], ids=["biased", "unbiased"])
def test_compiles_in_one_piece(pool: Pool, settings: dict[str, Any], sequence: bool) -> None:
    arguments = {"settings": settings | {"num_layers": 1}, "sequence": sequence}
    assert max(pool.run(f"{__name__}:compiled_gradients", 2, arguments)) < 1e-5


def saved_numbers(settings: dict[str, Any], sequence: bool) -> list[int]:
    """How many numbers a block keeps for backward beside its weights: of the uncut one, and of a rank's."""
    axis, whole = world_axis(), uncut(settings)
    model = cut(settings, whole, axis, sequence=sequence)
    length = settings["seq_len"] // axis.size if sequence else settings["seq_len"]
    return [
        saved_by(whole, torch.randn(2, settings["seq_len"], settings["width"], dtype=torch.float64)),
        saved_by(model, torch.randn(2, length, settings["width"], dtype=torch.float64)),
    ]


def saved_by(model: Any, x_BTD: Tensor) -> int:
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    seen: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            seen[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    around = model.block_contexts(batch_of(GPT2))["0"]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept_alive = model.blocks["0"](x_BTD.requires_grad_(), around)
    del kept_alive
    return sum(tensor.untyped_storage().nbytes() // tensor.element_size() for tensor in seen.values())


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_cut_sequence_keeps_its_share_of_every_activation(pool: Pool, num_ranks: int) -> None:
    """Exactly 1/tp of the uncut block's: gathered inputs are not among them."""
    for whole, here in pool.run(f"{__name__}:saved_numbers", num_ranks, {"settings": GPT2, "sequence": True}):
        assert here * num_ranks == whole


def order_of_backward(settings: dict[str, Any], sequence: bool) -> list[str]:
    """Products and collectives of one block's backward, in the order in which they were started."""
    axis = world_axis()
    model = cut(settings, uncut(settings), axis, sequence=sequence)
    layer = model.blocks["0"].attention.qkv
    assert isinstance(layer, ColumnLinear)
    length = settings["seq_len"] // axis.size if sequence else settings["seq_len"]
    y = layer(torch.randn(2, length, settings["width"], dtype=torch.float64, requires_grad=True))
    with Record() as record:
        torch.autograd.backward(y, torch.ones_like(y))
    calls = [name for _, name, _ in record.calls]
    return [call for call in calls if call in {"mm", "allreduce_", "_reduce_scatter_base_", "_allgather_base_"}]


@pytest.mark.parametrize(
    ("sequence", "order"),
    [
        (False, ["mm", "allreduce_", "mm"]),
        (True, ["_allgather_base_", "mm", "_reduce_scatter_base_", "mm"]),
    ],
)
def test_collectives_hide_behind_products(pool: Pool, sequence: bool, order: list[str]) -> None:
    """The sum of the input's gradient is under way while the weight's gradient is computed."""
    results = pool.run(f"{__name__}:order_of_backward", 2, {"settings": GPT2, "sequence": sequence})
    assert results == [order, order]


def on_meta(settings: dict[str, Any]) -> Any:
    with torch.device("meta"):
        return gpt.build(GPTSettings(**settings))


def test_names_stay_and_weights_shrink() -> None:
    """Names, cuts and ties are those of the uncut model; no weight is larger than its share, padding aside."""
    whole, model = on_meta(LLAMA | {"tied": True}), on_meta(LLAMA | {"tied": True})
    apply_tensor_parallel(model, Axis(3, 1, None), sequence_parallel=True)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in whole.named_parameters()]
    assert model.head.weight is model.embedding.token.weight
    assert model.cuts() == whole.cuts()
    assert tuple(model.head.weight.shape) == (5, 24)  # 13 rows, padded to 15
    assert tuple(model.blocks["0"].attention.qkv.weight.shape) == ((24 + 2 * 12) * 4 // 3, 24)
    assert tuple(model.blocks["1"].mlp.down.weight.shape) == (24, 36 // 3)


def test_one_rank_changes_nothing() -> None:
    model = on_meta(GPT2)
    before = list(model.modules())
    apply_tensor_parallel(model, Axis(1, 0, None), sequence_parallel=True)
    assert list(model.modules()) == before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (GPT2 | {"num_heads": 6}, r"tp=4 does not divide model\.num_heads=6\. Use 1, 2, 3 or 6"),
        (LLAMA | {"ffn_width": 30}, r"tp=4 does not divide model\.ffn_width=30\. Use 1, 2, 3 or 6"),
    ],
)
def test_heads_and_columns_are_never_cut_in_two(settings: dict[str, Any], message: str) -> None:
    """Before a model is built: `apply_tensor_parallel` relies on it."""
    with pytest.raises(LayoutError, match=message):
        check_layout(GPTSettings(**settings), ParallelSettings(tp=4))
