"""Facts of a pipeline before a run: stages, bubble and activations, in short texts at any size."""

from __future__ import annotations

import pytest

from lmtrain.runtime.machine.visible_gpus_without_torch import Gpus
from lmtrain.train.layouts import dry_run_speed_and_memory
from lmtrain.train.layouts.dry_run_speed_and_memory import compile_facts, list_text, pipeline_facts, pipeline_lines
from tests.unit.train.test_layout_table import config

PIPELINE = ("parallel.pp=4", "train.global_batch=64", "train.micro_batch=4", "model.num_layers=10")


def test_stages_bubble_and_activations_are_told() -> None:
    run = config(*PIPELINE, "parallel.vp=2", "parallel.schedule=interleaved")
    assert pipeline_facts(run, run.model) == {
        "pipeline": "interleaved, 8 stages",
        "layers_per_stage": "2, 2, 1, 1, 1, 1, 1, 1",
        "bubble": "9.4% of the work, if F, I and W take equally long",  # 3 / (2 x 16)
        "activations_held": "11, 9, 7, 5 (microbatches of a stage, by pp rank)",
    }
    assert list(pipeline_lines(run, run.model))[1] == "layers per stage  2, 2, 1, 1, 1, 1, 1, 1"


def test_a_model_that_is_not_cut_has_none_of_them() -> None:
    assert not pipeline_facts(config(), config().model)


@pytest.mark.parametrize(("schedule", "held"), [("gpipe", "16 each"), ("1f1b", "4, 3, 2, 1"), ("zb_h1", "4 each")])
def test_activations_of_a_schedule(schedule: str, held: str) -> None:
    run = config(*PIPELINE, f"parallel.schedule={schedule}")
    assert pipeline_facts(run, run.model)["activations_held"] == f"{held} (microbatches of a stage, by pp rank)"


def test_many_numbers_are_few_words() -> None:
    assert list_text([1] * 96) == "1 each"
    assert list_text([2] * 13 + [1] * 83) == "2 (0-12), 1 (13-95)"
    assert list_text(range(111, 79, -2)) == "81 to 111"


@pytest.mark.parametrize(
    ("gpus", "has_compiler", "words", "said"),
    [
        (0, True, (), "nothing, since no GPU"),
        (1, False, (), "nothing, since no GPU, or no Triton with a C compiler"),
        (1, True, (), "each block, and the loss"),
        (1, True, ("compute.device=cpu",), "nothing, since no GPU"),
        (1, True, ("compute.compile=false",), "nothing"),
        (0, True, ("compute.compile=true",), "each block, and the loss"),
        (0, False, ("hardware=h100",), "each block, and the loss"),
        (1, True, ("parallel.pp=2", "parallel.schedule=zb_h1"), "nothing: parallel.schedule=zb_h1 runs a block's"),
    ],
)
def test_what_is_compiled_is_told(
    monkeypatch: pytest.MonkeyPatch, gpus: int, has_compiler: bool, words: tuple[str, ...], said: str
) -> None:
    monkeypatch.setattr(Gpus, "detect", lambda: Gpus("13.0", gpus))
    monkeypatch.setattr(dry_run_speed_and_memory, "has_kernel_compiler", lambda: has_compiler)
    run = config(*words)
    assert compile_facts(run, run.model)["compiled"].startswith(said)
