"""Tasks are found by themselves, say what they need, and never name a measure just "perplexity"."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from lmtrain.errors import UsageError
from lmtrain.eval import tasks as room
from lmtrain.eval.task import all_tasks, bits_per_byte, choose_window, find_task, perplexity


def test_every_file_of_the_folder_offers_tasks() -> None:
    files = {path.stem for path in Path(room.__path__[0]).glob("*.py")} - {"__init__"}
    assert {type(task).__module__.rpartition(".")[2] for task in all_tasks().values()} == files
    assert {
        "perplexity", "wikitext103/megatron-o32", "wikitext103/lmeval-2.0", "wikitext2/lmeval-2.0",
        "wikitext/hf-stride512", "lambada/megatron-strict", "lambada/megatron-token", "lambada/lmeval-openai-1.0",
        "lambada/lmeval-standard-1.0",
    } <= set(all_tasks())  # fmt: skip


@pytest.mark.parametrize(
    ("name", "found", "seq_len"),
    [
        ("wikitext103/megatron-o32", "wikitext103/megatron-o32", None),
        ("wikitext103/megatron-o64", "wikitext103/megatron-o64", None),
        ("wikitext103/megatron-o64-s2048", "wikitext103/megatron-o64", 2048),
        ("wikitext/hf-stride256", "wikitext/hf-stride256", None),
        ("lambada/lmeval-openai-1.0-s128", "lambada/lmeval-openai-1.0", 128),
    ],
)
def test_an_id_names_a_stride_and_a_window(name: str, found: str, seq_len: int | None) -> None:
    task = find_task(name)
    assert (task.id, task.seq_len) == (found, seq_len)
    assert all(task.seq_len is None for task in all_tasks().values())


@pytest.mark.parametrize(
    ("name", "asked", "window"),
    [
        ("perplexity", None, 16), ("perplexity", 4, 4), ("perplexity", 16, 16), ("perplexity-s4", None, 4),
        ("perplexity-s4", 4, 4), ("perplexity-s4", 8, "--seq-len=8 contradicts the window in --task=perplexity-s4"),
        ("perplexity", 17, "A window of 17 tokens is longer than the 16 positions"),
        ("perplexity-s20", 20, "A window of 20 tokens is longer than the 16 positions"),
    ],
)  # fmt: skip
def test_a_window_is_that_of_the_id_or_the_option_or_the_model(name: str, asked: int | None, window: int | str) -> None:
    if isinstance(window, int):
        assert choose_window(find_task(name), 16, asked) == window
    else:
        with pytest.raises(UsageError, match=window):
            choose_window(find_task(name), 16, asked)


@pytest.mark.parametrize(
    "name", ["wikitext103/megatron-o0", "wikitext103/megatron-o032", "perplexity-s0", "perplexity-s8-s16"]
)
def test_what_names_no_task_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"--task={name} is not an evaluation task"):
        find_task(name)


def test_a_misspelt_task_is_told_the_nearest() -> None:
    with pytest.raises(UsageError, match="Did you mean perplexity"):
        find_task("perplexty")


def test_ratios_at_their_edges() -> None:
    assert perplexity(math.log(7) * 3, 3) == pytest.approx(7)
    assert perplexity(1e9, 1) == math.inf
    assert math.isnan(perplexity(1.0, 0))
    assert bits_per_byte(8 * math.log(2), 4) == pytest.approx(2)
    assert math.isnan(bits_per_byte(1.0, 0))
