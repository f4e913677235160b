"""Masks of blocks say what masks of all positions say, and attention by them is attention by those."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounter
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from lmtrain.batch import Batch
from lmtrain.config.settings_base import kinds
from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.models.layers import flex_attention_block_masks
from lmtrain.models.layers.attention import DotProduct, build_mask
from lmtrain.models.layers.flex_attention_block_masks import BLOCK, build_block_mask, dense_mask_rows
from lmtrain.parallel.blocks.dropout_random_numbers import DropoutSeeds
from lmtrain.parallel.blocks.recompute_and_compile import apply_recompute
from lmtrain.parallel.device_and_precision_settings import RecomputeSettings
from lmtrain.parallel.mesh import Axis
from tests.flex_on_cpu import flex_on_cpu
from tests.marks import wide
from tests.unit.models.first_weights import start

CPU = torch.device("cpu")
LENGTHS = (1, 5, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 389)
WINDOWS = (None, 1, 2, 7, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 3)
BEGINS = (None, (), (1,), (3, 4, 127), (BLOCK,), (BLOCK - 1, BLOCK + 1), (2 * BLOCK, 300), tuple(range(9, 389, 17)))


def documents_of(begins: tuple[int, ...] | None, length: int) -> Tensor | None:
    """Two rows: documents that begin at these places, and one document alone."""
    if begins is None:
        return None
    row = torch.zeros(length, dtype=torch.int32)
    for place in begins:
        row[place:] += 1
    return torch.stack([row, torch.zeros_like(row)])


def real_of(length: int) -> Tensor:
    return torch.arange(length) < torch.tensor([[length], [max(1, length // 2 - 3)]])


def wrong(length: int, **options: Any) -> list[str]:
    """Where a mask of blocks differs from one of positions, and its table from the mask."""
    right, found = (make(length, device=CPU, **options) for make in (build_mask, build_block_mask))
    if right is None or found is None:
        return [] if right is found else [f"{right} is not {found}"]
    assert isinstance(right, Tensor)
    assert isinstance(found, BlockMask)
    samples, place = found.shape[0], torch.arange(length)
    said = dense_mask_rows(found, place.expand(samples, -1)).expand(samples, 1, length, length)
    problems = [] if torch.equal(said, right.expand_as(said)) else ["positions"]
    twin = create_block_mask(found.mask_mod, samples, None, length, length, device="cpu", BLOCK_SIZE=BLOCK)
    tables = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_num_blocks", "q_indices",
              "full_q_num_blocks", "full_q_indices")  # fmt: skip
    return problems + [name for name in tables if not torch.equal(getattr(found, name), getattr(twin, name))]


@pytest.mark.parametrize("length", [BLOCK + 1, *wide(*(n for n in LENGTHS if n != BLOCK + 1))])
def test_blocks_say_what_positions_say(length: int) -> None:
    """At every position, and torch's own table of the same mask is ours."""
    for window, begins in product(WINDOWS, BEGINS):
        documents_BT = documents_of(begins, length)
        options: dict[str, Any] = {"window": window, "documents_BT": documents_BT}
        assert not wrong(length, causal=True, **options), (window, begins)
        assert not wrong(length, causal=True, not_padding_BT=real_of(length), **options), (window, begins)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("window", [None, 3, BLOCK + 1])
def test_so_they_do_where_both_sides_are_seen(length: int, window: int | None) -> None:
    for begins in (None, (), (3, 4, 127), (BLOCK - 1, BLOCK + 1)):
        options: dict[str, Any] = {"window": window, "documents_BT": documents_of(begins, length)}
        assert not wrong(length, causal=False, **options), begins
    assert not wrong(length, causal=False, window=None, documents_BT=None, not_padding_BT=real_of(length))


@pytest.mark.parametrize("length", [BLOCK + 1, 3 * BLOCK, 389])
@pytest.mark.parametrize(
    "options",
    [
        {"causal": False, "window": 3, "documents_BT": None},
        {"causal": True, "window": None, "documents_BT": "scattered"},
    ],
)
def test_blocks_may_be_asked_in_vain_and_are_answered_alike(length: int, options: dict[str, Any]) -> None:
    """A block in which some pair is near and some key is real need have none that is both."""
    if options["documents_BT"] is not None:
        options |= {"documents_BT": (torch.arange(length) * 7 % 5).expand(2, -1).to(torch.int32)}
    options |= {"not_padding_BT": real_of(length), "device": CPU}
    right, found = (make(length, **options) for make in (build_mask, build_block_mask))
    assert isinstance(found, BlockMask)
    assert isinstance(right, Tensor)
    assert torch.equal(dense_mask_rows(found, torch.arange(length).expand(2, -1)), right)
    asked = found.to_dense().repeat_interleave(BLOCK, -1).repeat_interleave(BLOCK, -2).bool()
    assert not (right & ~asked[..., :length, :length]).any()


def _wide_window(min_distance: int, max_distance: int, *rest: Any) -> Any:
    return _pair_rule(min_distance, max_distance + 1, *rest)


def _deaf(min_distance: int, max_distance: int, documents_BT: Any, not_padding_BT: Any) -> Any:
    return _pair_rule(min_distance, max_distance, None, not_padding_BT)


def _short_table(first_N: Tensor, length: int, min_distance: int, max_distance: int) -> Any:
    return _blocks_by_distance(first_N, length, min_distance, max_distance - 1)


def _eager_table(table: Tensor) -> Any:
    return _block_lists(torch.ones_like(table))


_pair_rule, _block_lists = flex_attention_block_masks._pair_rule, flex_attention_block_masks._block_lists
_blocks_by_distance = flex_attention_block_masks._blocks_by_distance
BUGS: dict[str, tuple[str, Callable[..., Any]]] = {
    "a window one too wide": ("_pair_rule", _wide_window),
    "documents forgotten": ("_pair_rule", _deaf),
    "a table for a window one too narrow": ("_blocks_by_distance", _short_table),
    "every block is asked and every block is whole": ("_block_lists", _eager_table),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_noticed(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"causal": True, "window": BLOCK + 2, "documents_BT": documents_of((300,), 389)}
    assert not wrong(389, **options)
    monkeypatch.setattr(flex_attention_block_masks, *BUGS[bug])
    assert wrong(389, **options)


@pytest.mark.parametrize(
    ("kv_heads", "window", "begins", "scores"),
    [
        (4, 7, None, {}),
        (2, 7, (3, 20), {}),
        *wide(
            (2, None, None, {"cap": 2.0}), (4, 7, (3, 20), {"scale": 0.7, "cap": 1.5}),
            (2, 7, None, {}), (4, 7, (3, 20), {}), (2, None, (3, 20), {}), (4, None, (3, 20), {}),
            (2, 7, None, {"scale": 0.7}), (4, None, None, {"scale": 0.7, "cap": 1.5}),
        ),
    ],
)  # fmt: skip
def test_attention_by_blocks_is_attention_by_positions(
    kv_heads: int, window: int | None, begins: tuple[int, ...] | None, scores: dict[str, float]
) -> None:
    """Outputs and gradients, unfused: what a GPU's kernel makes of the same mask is tests/gpu's."""
    torch._dynamo.reset()  # because: after another number of heads torch traces the unfused form for any number
    generator, length, core = torch.Generator().manual_seed(3), 33, DotProduct(0.0, causal=True, **scores)
    q = torch.randn(2, 4, length, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    k, v = (
        torch.randn(2, kv_heads, length, 8, generator=generator, dtype=torch.float64, requires_grad=True)
        for _ in range(2)
    )
    grad = torch.randn(q.shape, generator=generator, dtype=torch.float64)
    found = []
    for make in (build_mask, build_block_mask):
        options: dict[str, Any] = {"window": window, "documents_BT": documents_of(begins, length)}
        mask = make(length, causal=True, device=CPU, always="cap" in scores, **options)
        assert (make is build_mask) == (mask is None or isinstance(mask, Tensor))
        with flex_on_cpu():
            y = core(q, k, v, mask)
            found.append([y, *torch.autograd.grad(y, (q, k, v), grad)])
    for right, other in zip(*found, strict=True):
        torch.testing.assert_close(other, right, rtol=1e-10, atol=1e-12)


SIZE: dict[str, Any] = {"num_layers": 3, "width": 32, "num_heads": 4, "vocab_size": 61, "seq_len": 24}
ROTARY: dict[str, Any] = {
    "positions": "rotary", "norm": "rmsnorm", "activation": "silu", "gated": True, "num_kv_heads": 2,
}  # fmt: skip


def model_of(**words: Any) -> Any:
    model: Any = GPTSettings(**SIZE, **words).build()
    start(model, 1)
    return model


def batch_of(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    begins = torch.rand(2, 24, generator=generator) < 0.2
    tokens_BT, documents_BT = torch.randint(0, 61, (2, 24), generator=generator), begins.cumsum(1).to(torch.int32)
    return Batch(tokens_BT, tokens_BT, documents_BT=documents_BT)


@torch.no_grad()
@pytest.mark.parametrize("words", [ROTARY | {"window": 5}, *wide({"window": 5}, ROTARY)])
def test_asked_positions_look_along_their_rows(words: dict[str, Any]) -> None:
    model, batch = model_of(**words).eval(), batch_of(0)
    is_query_BT = torch.zeros(2, 24, dtype=torch.bool)
    is_query_BT[1, [0, 3, 4, 9, 15]] = True
    right = model(batch)
    model.build_mask = build_block_mask
    with flex_on_cpu():
        found = model(replace(batch, is_query_BT=is_query_BT))
    torch.testing.assert_close(found[is_query_BT], right[is_query_BT], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("words", [{"window": 5}, *wide({"window": 5, "attention_cap": 2.0, "attention_scale": 0.3})])
def test_every_block_and_microbatch_shares_one_graph(words: dict[str, Any]) -> None:
    """The mask is made once a microbatch, outside of what is compiled, and other documents need no other code."""
    counter, model, made = CompileCounter(), model_of(**words), []

    def build(*args: Any, **options: Any) -> Any:
        made.append(build_block_mask(*args, **options))
        return made[-1]

    model.build_mask = build
    torch._dynamo.reset()
    for block in model.blocks.values():
        block.forward = torch.compile(block.forward, backend=counter, dynamic=False, fullgraph=True)
    with flex_on_cpu():
        for seed in range(3):
            model(batch_of(seed)).sum().backward()
    assert len(made) == 3
    assert counter.frame_count == 1


@pytest.mark.wide
@pytest.mark.parametrize(("kind", "times"), [("none", 0), ("attention", 1), ("operators", 0)])
def test_compiled_recompute_knows_attention_by_blocks(kind: str, times: int) -> None:
    """Whole blocks are one graph each; `operators` keeps what attention has made, and `attention` makes it again."""
    model, noise = model_of(window=5), DropoutSeeds(0, Axis(), Axis(), sequence_parallel=False, uses_dropout=False)
    if kind != "none":
        settings: Any = kinds(RecomputeSettings)[kind]()
        apply_recompute(model, settings, noise, compiled=True)
    model.build_mask = build_block_mask
    forwards: list[Any] = []
    backwards: list[Any] = []

    def noted(graphs: list[Any]) -> Any:
        def compiler(module: Any, given: Any) -> Any:
            graphs.append(module.graph)
            return make_boxed_func(module.forward)

        return compiler

    backend = aot_autograd(
        fw_compiler=noted(forwards), bw_compiler=noted(backwards), partition_fn=min_cut_rematerialization_partition
    )
    torch._dynamo.reset()
    for block in model.blocks.values():
        block.forward = torch.compile(block.forward, backend=backend, dynamic=False, fullgraph=True)
    with flex_on_cpu():
        model(batch_of(0)).sum().backward()
    counts = [[str(node.target) for node in graph.nodes].count("flex_attention") for graph in (*forwards, *backwards)]
    assert counts == [1, times]
