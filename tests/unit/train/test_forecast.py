"""The planner's forecast of a run in words, and its comparison with measured steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lmtrain.config.compose_run_settings import conf_dir
from lmtrain.runtime.machine.visible_gpus_without_torch import Gpus
from lmtrain.train.layouts.dry_run_speed_and_memory import StepForecast, forecast_facts, planned_run, predict_step
from tests.unit.plan.machines import hardware_named
from tests.unit.train.test_layout_table import BIG, config

H100 = hardware_named("h100", conf_dir() / "hardware")
LAYOUT = ("parallel.tp=8", "parallel.pp=16", "parallel.dp_shard=8", "recompute=full")


def facts(*words: str) -> dict[str, Any]:
    run = config(*BIG, *words)
    return forecast_facts(run, run.model)


def test_memory_is_known_without_a_machine_and_time_is_not() -> None:
    found = facts(*LAYOUT)
    assert "GiB predicted on rank 0, which needs most; mainly " in found["memory"]
    assert found["step_time"] == "not predicted: give hardware=NAME, as in hardware=h100"
    assert "as in hardware=cpu, a guess about one CPU core" in facts("compute.device=cpu")["step_time"]
    assert "energy" not in found


@pytest.mark.parametrize(("num_gpus", "words", "is_cpu"), [(0, (), True), (1, (), False), (0, LAYOUT, False)])
def test_a_run_of_one_process_where_no_gpu_is_holds_what_a_cpu_does(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int, words: tuple[str, ...], is_cpu: bool
) -> None:
    monkeypatch.setattr(Gpus, "detect", lambda: Gpus("13.0", num_gpus))
    said = facts(*words)["memory"]
    assert (said == facts(*words, "compute.device=cpu")["memory"]) == is_cpu
    assert ("without Python and torch themselves" in said) == is_cpu


def test_a_machine_tells_time_and_room() -> None:
    found = facts(*LAYOUT, "hardware=h100")
    assert "of 79.1 GiB predicted on rank 0" in found["memory"]
    assert found["step_time"].endswith("), predicted")
    assert "unverified" in found["energy"]
    assert found["hardware"] == "h100"
    assert "and does not fit" in facts("parallel.tp=8", "hardware=h100")["memory"]
    assert "no measured run has confirmed" in facts(*LAYOUT, "hardware=l40s")["hardware"]


def test_a_batch_that_grows_takes_the_mean_of_its_steps() -> None:
    run = planned_run(config(*BIG, *LAYOUT), config(*BIG).model)
    small, large = (predict_step(replace(run, global_batch=size), H100).likely_s for size in (768, 1536))
    assert predict_step(run, H100).likely_s == large
    assert predict_step(run, H100, [768, 1536, 1536, 1536]).likely_s == pytest.approx((small + 3 * large) / 4)


def test_how_far_off_it_was() -> None:
    expected = StepForecast(1.0, 0.25)
    assert (expected.low_s, expected.high_s) == (0.8, 1.25)
    assert expected.comparison_text(1.1) == (
        "a step takes 1.10 s, 10% more than the 1.00 s predicted, within its interval (800.0 ms to 1.25 s)"
    )
    assert "25% less than the 1.00 s predicted, outside of its interval" in expected.comparison_text(0.75)


def test_communicators_are_named_with_whom_they_talk_to() -> None:
    said = facts(*LAYOUT)["communicators"]
    assert said == (
        "2.3 GiB of that, with CUDA itself, as in published runs: tp of 8, dp_shard of 8, pp of 16, lanes between "
        "stages, the world of 1,024"
    )
    assert "communicators" not in facts()
    assert "communicators" not in facts(*LAYOUT, "compute.device=cpu")
    assert "communicators" not in facts(*LAYOUT, "hardware=cpu")


@pytest.mark.parametrize(
    ("words", "compiles"),
    [((), True), (("compute.compile=false",), False), (("compute.device=cpu",), False), (("hardware=cpu",), False),
     (("parallel.schedule=zb_h1",), False)],
)  # fmt: skip
def test_a_run_is_planned_as_it_will_be_compiled(words: tuple[str, ...], compiles: bool) -> None:
    run = config(*BIG, *LAYOUT[:3], *words)
    assert planned_run(run, run.model).compiles is compiles
