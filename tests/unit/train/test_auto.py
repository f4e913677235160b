"""`parallel=auto` without a run: settings that are kept, settings that are chosen, and layouts that are refused."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from lmtrain.config.compose_run_settings import compose
from lmtrain.config.typed_words import typed_words
from lmtrain.errors import LayoutError, SettingsError
from lmtrain.parallel.device_and_precision_settings import FullRecomputeSettings
from lmtrain.train.layouts.choose_parallel_layout import choose_layout, fixed_layout_settings, previous_layout
from lmtrain.train.run_config import RunConfig

SMALL = ("data.path=x", "model.vocab_size=400", "parallel=auto", "hardware=h100", "precision=bf16")


@cache
def config(*words: str) -> RunConfig:
    return compose(RunConfig, [*SMALL, *words])


def chosen(num_processes: int, *words: str) -> tuple[RunConfig, list[str]]:
    run = config(*words)
    return choose_layout(run, run.model, num_processes, fixed_layout_settings(run, typed_words(words)))


def test_conditions_are_what_the_command_line_sets() -> None:
    words = ("parallel.tp=2", "parallel.timeout_s=60", "train.micro_batch=4", "recompute=full", "optim.lr=1e-3")
    run = config(*words)
    assert fixed_layout_settings(run, typed_words(words)) == {"tp": 2, "micro_batch": 4, "recompute": run.recompute}
    assert fixed_layout_settings(run, []) == {}


def test_a_choice_is_of_as_many_processes_and_keeps_the_conditions() -> None:
    found, said = chosen(8, "parallel.tp=2", "parallel.timeout_s=60", "train.micro_batch=2")
    assert found.parallel.layout.world_size == 8
    assert (found.parallel.tp, found.train.micro_batch, found.parallel.timeout_s) == (2, 2, 60)
    assert not found.parallel.auto
    assert said[0].startswith("parallel=auto: ")
    assert said[1].startswith("next best: ")
    assert chosen(8, "parallel.tp=2", "parallel.timeout_s=60", "train.micro_batch=2") == (found, said)


def test_blocks_that_are_computed_again_are_said() -> None:
    found, said = chosen(2, "recompute=full", "recompute.blocks=3", "parallel.pp=1")
    assert found.recompute == FullRecomputeSettings(blocks=3)
    assert "recompute=full, recompute.blocks=3, for 2 of h100" in said[0]


def test_where_nothing_is_legal_the_keys_are_those_of_the_command_line() -> None:
    with pytest.raises(LayoutError, match=r"with parallel.tp=2 and train.micro_batch=5 that takes"):
        chosen(2, "parallel.tp=2", "train.micro_batch=5")


def test_the_rules_of_the_whole_run_are_asked_too() -> None:
    """A batch that grows by 4 needs microbatches and copies that 4 is a multiple of."""
    found, _ = chosen(4, "train.rampup={start: 4, increment: 4, samples: 100}", "train.global_batch=32")
    assert 4 % (found.train.micro_batch * found.parallel.layout.dp) == 0


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"fits in .* of hardware=h100 .*: the smallest, .* Start more processes"):
        chosen(1, "model=gpt3_175b")
    with pytest.raises(SettingsError, match="Add hardware=h100"):
        compose(RunConfig, ["data.path=x", "parallel=auto"])


def test_a_run_that_has_not_begun_has_chosen_nothing(tmp_path_factory: pytest.TempPathFactory) -> None:
    run = config(f"run.dir={tmp_path_factory.mktemp('none')}")
    assert previous_layout(run, {}) is None


@pytest.mark.wide
def test_a_layout_of_a_run_with_stages_fits_all_of_them() -> None:
    words = ("stages.long.steps=100", "stages.end.steps=50", "stages.end.train.global_batch=2")
    found, said = chosen(8, *words)
    assert said[0] == "parallel=auto plans for the stage long, which has the most tokens"
    assert found.parallel.layout.dp <= 2  # although the longest stage alone would take 8 copies
    assert chosen(8, "stages.long.steps=100")[0].parallel.layout.dp > 2
    with pytest.raises(LayoutError, match="no layout of 8 processes"):
        chosen(8, *words, "parallel.dp_shard=8")


@pytest.mark.wide
def test_the_memory_of_every_stage_counts() -> None:
    """The largest stage has few tokens, and needs more memory than a layout for the longest leaves."""
    words = (
        "model=gpt2_xl", "model.vocab_size=50257", "train.global_batch=64", "stages.a.steps=1000",
        "model.positions=rotary",
    )  # fmt: skip
    large = ("stages.b.steps=1", "stages.b.model.seq_len=32768")
    run = compose(RunConfig, ["data.path=x", "parallel=auto", "hardware=h100", "precision=bf16", *words, *large])
    found, _ = choose_layout(run, run.model, 8, {})
    alone, _ = choose_layout(replace(run, stages={"a": run.stages["a"]}), run.model, 8, {})
    assert (found.parallel, found.train.micro_batch) != (alone.parallel, alone.train.micro_batch)
