"""The layout table: every rank and what it holds, in few columns and rows."""

from __future__ import annotations

from functools import cache

import pytest

from lmtrain.config.compose_run_settings import compose
from lmtrain.train.layouts.ranks_and_memory_table import layout_lines, merge_rows, rank_rows
from lmtrain.train.run_config import RunConfig

BIG = ("model=gpt3_175b", "precision=bf16", "train.global_batch=1536", "train.micro_batch=1")


@cache
def config(*overrides: str) -> RunConfig:
    return compose(RunConfig, ["data.path=x", "model.vocab_size=50257", *overrides])


def test_a_rank_sits_and_holds() -> None:
    run = config("model=gpt2_small", "parallel.tp=2", "parallel.dp_replicate=2", "parallel.dp_shard=2")
    rows = rank_rows(run, run.model, [f"n{rank // 4}" for rank in range(8)])
    assert [(r["host"], r["dp_replicate"], r["dp_shard"], r["tp"]) for r in rows[3:6]] == [
        ("n0", 0, 1, 1), ("n1", 1, 0, 0), ("n1", 1, 0, 1),
    ]  # fmt: skip
    row = rows[0]
    assert row["layers"] == "0-11"
    assert run.model.num_parameters / 2 < row["parameters"] < 0.55 * run.model.num_parameters
    assert row["weights_bytes"] == row["gradients_bytes"] == 4 * row["parameters"]  # ZeRO-1
    assert row["masters_bytes"] == 2 * row["parameters"]  # a half of them in fp32
    assert row["optimizer_bytes"] == 4 * row["parameters"]


@pytest.mark.parametrize(("precision", "kinds"), [("fp32", (4, 0, 4, 8)), ("bf16", (2, 4, 4, 8))])
def test_one_process_holds_it_all(precision: str, kinds: tuple[int, ...]) -> None:
    run = config("model=gpt2_small", f"precision={precision}", "model.vocab_multiple=1")
    [row] = rank_rows(run, run.model)
    sizes = [row[f"{kind}_bytes"] for kind in ("weights", "masters", "gradients", "optimizer")]
    assert sizes == [each * run.model.num_parameters for each in kinds]


def test_an_average_of_the_weights_is_sharded_as_the_optimizer_is() -> None:
    words = ("model=gpt2_small", "parallel.dp_shard=2", "model.vocab_multiple=1")
    kept, none = config(*words, "checkpoint.ema.decay=0.999"), config(*words)
    more = [ours["optimizer_bytes"] - theirs["optimizer_bytes"] for ours, theirs in zip(
        rank_rows(kept, kept.model), rank_rows(none, none.model), strict=True
    )]  # fmt: skip
    assert sum(more) == 4 * kept.model.num_parameters
    assert max(more) < 0.51 * sum(more)


def test_muon_keeps_one_number_for_a_hidden_one() -> None:
    run, adam = config("optim=muon", "model=gpt2_small"), config("model=gpt2_small")
    [ours], [theirs] = rank_rows(run, run.model), rank_rows(adam, adam.model)
    hidden = run.model.shape.num_layers * run.model.shape.block_matrix_params
    assert theirs["optimizer_bytes"] - ours["optimizer_bytes"] == 4 * hidden


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_thousands_of_ranks_are_a_few_lines_of_80_columns(zero: int) -> None:
    run = config(*BIG, "parallel.tp=8", "parallel.dp_shard=256", "parallel.dp_replicate=2", f"parallel.zero={zero}")
    rows = rank_rows(run, run.model, [f"node-{rank // 8:04d}.cluster" for rank in range(4096)])
    lines = list(layout_lines(merge_rows(rows)))
    assert max(map(len, lines)) <= 80
    assert 2 <= len(lines) <= 6
    assert "hosts" in lines[1]
    single = list(layout_lines(rows))
    assert len(single) == 4097
    assert max(map(len, single)) <= 80


def test_ranks_that_hold_the_same_become_one_row() -> None:
    run = config("parallel.tp=2", "parallel.dp_shard=3", "train.global_batch=24", "model.width=128")
    rows = rank_rows(run, run.model)
    found = merge_rows(rows)
    assert [(row["rank"], row["dp_shard"], row["tp"]) for row in found] == [("0-3", "0-1", "0-1"), ("4-5", "2", "0-1")]
    assert found[1]["optimizer_bytes"] < found[0]["optimizer_bytes"]  # 128 rows in three are 43, 43 and 42
    assert next(iter(layout_lines(found))).split()[:5] == ["rank", "shard", "tp", "layers", "params"]


def test_the_layout_in_words() -> None:
    assert config().parallel.layout_text == "one process"
    assert config("parallel.tp=2").parallel.layout_text == "tp 2"
    run = config("parallel.dp_shard=2", "parallel.tp=2", "parallel.zero=3")
    assert run.parallel.layout_text == "dp_shard 2 x tp 2, zero 3"
