"""The plan of a run in stages: steps, batches and learning rates by their formulas, and refusals with a way out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from lmtrain.config.compose_run_settings import Sources, compose
from lmtrain.errors import LmtrainError
from lmtrain.train.run_config import RunConfig, StageConfig

BASE = (
    "model.positions=rotary", "model.seq_len=16", "train.global_batch=8", "train.micro_batch=1", "data.path=x",
    "run.dir=x", "optim.lr=1e-2", "schedule=cosine", "schedule.warmup_steps=0",
)  # fmt: skip
TRUNK = "stages.trunk.steps=50"


@cache
def composed(*words: str, config_dir: Path | None = None) -> RunConfig:
    keys = [word.partition("=")[0] for word in words]
    base = [word for word in BASE if word.partition("=")[0] not in keys]
    return compose(RunConfig, [*base, *words], Sources(config_dir))


def rates(*words: str) -> list[float]:
    """The factor of each step."""
    config = composed(*words)
    steps = range(config.total_steps)
    return [config.stage_at(s).learning_rate(s) / config.stage_at(s).optim.lr for s in steps]


def ends(*words: str) -> list[int]:
    return [stage.end_step for stage in composed(*words).stage_configs]


def test_lengths_are_rounded_up_to_whole_steps() -> None:
    assert ends("stages.a.steps=5", "stages.b.samples=17", "stages.c.tokens=257", "stages.d.tokens=1") == [5, 8, 11, 12]
    assert ends("stages.a.samples=1", "stages.b.tokens=513", "stages.b.model.seq_len=64") == [1, 3]
    assert composed("stages.a.steps=5", "stages.b.samples=17").train.steps == 8


def test_a_ramp_up_goes_on_over_a_border_until_a_stage_has_a_batch_or_ramp_up_of_its_own() -> None:
    def sizes(*words: str) -> list[int]:
        config = composed("train.rampup={start: 2, increment: 2, samples: 24}", "stages.a.steps=3", *words)
        return [config.batch_plan.range_of(step)[1] for step in range(config.total_steps)]

    unbroken = [2, 2, 2, 2, 4, 4, 6, 6, 8, 8]
    assert sizes("stages.b.steps=7") == unbroken
    assert sizes("stages.b.samples=30") == unbroken[:9]
    assert sizes("stages.b.steps=3", "stages.b.train.global_batch=4", "stages.c.steps=2") == [2, 2, 2, 4, 4, 4, 8, 8]
    assert sizes("stages.b.steps=4", "stages.b.train.rampup={start: 4, increment: 4, samples: 6}") == [
        2, 2, 2, 4, 4, 8, 8,
    ]  # fmt: skip
    assert sizes("stages.b.steps=2", "stages.b.train.rampup=null") == [2, 2, 2, 8, 8]


def test_stages_without_a_schedule_share_the_runs() -> None:
    whole = rates("train.steps=20", "schedule.warmup_steps=4")
    assert rates("stages.a.steps=3", "stages.b.steps=9", "stages.c.steps=8", "schedule.warmup_steps=4") == whole
    cut = rates(
        "stages.a.steps=3", "stages.x.steps=5", "stages.x.schedule=linear", "stages.b.steps=17",
        "schedule.warmup_steps=4",
    )  # fmt: skip
    assert cut[:3] + cut[8:] == whole
    assert cut[3:8] == [1.0, 0.8, 0.6, pytest.approx(0.4), pytest.approx(0.2)]


@pytest.mark.parametrize("larger", [("train.global_batch=32",), ("model.seq_len=32", "train.global_batch=16")])
def test_where_tokens_differ_the_shared_schedule_is_measured_in_them(larger: Sequence[str]) -> None:
    found = rates(
        "stages.a.steps=6", "stages.b.steps=4", *(f"stages.b.{word}" for word in larger), "schedule.warmup_steps=2",
        "schedule.min_ratio=0",
    )  # fmt: skip
    tokens = [128 * s for s in range(7)] + [128 * 6 + 512 * s for s in range(1, 5)]
    progress = [(t - tokens[2]) / (tokens[10] - tokens[2]) for t in tokens[:10]]
    expected = [0.5, 1.0] + [0.5 * (1 + math.cos(math.pi * x)) for x in progress[2:]]
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("warmup_steps", [0, 1])
def test_inverse_sqrt_without_a_warm_up_counts_steps_where_tokens_differ(warmup_steps: int) -> None:
    words = ("schedule=inverse_sqrt", f"schedule.warmup_steps={warmup_steps}", "stages.a.steps=4", "stages.b.steps=2")
    # a step of b has four times the tokens of one of a: b's second step comes after what would be 8 steps of a
    assert rates(*words, "stages.b.train.global_batch=32") == pytest.approx(
        [n**-0.5 for n in (1, 1, 2, 3, 4, 8)], rel=1e-12
    )


def test_a_stage_of_its_own_rate_and_schedule() -> None:
    words = (TRUNK, "stages.b.steps=4", "stages.b.optim.lr=1e-3", "stages.b.schedule=linear")
    assert [composed(*words).stage_at(50).learning_rate(50 + s) for s in range(4)] == pytest.approx(
        [1e-3, 0.75e-3, 0.5e-3, 0.25e-3]
    )


def test_settings_of_a_stage_are_in_place_of_the_runs_and_not_of_the_stage_before() -> None:
    config = composed(TRUNK, "stages.trunk.model.dropout=0.1", "stages.b.steps=3", "stages.b.data.packing=document")
    first, second = config.stage_configs
    assert [stage.model.to_dict()["dropout"] for stage in (first, second)] == [0.1, 0.0]
    assert (first.data.packing, second.data.packing) == ("concatenate", "document")
    assert isinstance(second, StageConfig)
    assert second.to_dict() == config.to_dict()


def test_a_stage_takes_files_of_the_groups(tmp_path: Path) -> None:
    """A stage takes from the run what a file of data leaves at the defaults of its kind."""
    for name, text in {
        "data/mix.yaml": "defaults: [blend, _self_]\ndatasets: [{path: a, weight: 1}]\n",
        "stage/last.yaml": "samples: 5\ndata: mix\nschedule: linear\n", "stage/list.yaml": "- 1\n",
        "data/lost.yaml": "defaults: [nothing]\n",
    }.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    config = composed(TRUNK, "stages.b=last", "data.packing=document", config_dir=tmp_path)
    assert config.to_dict()["stages"]["b"] == {
        "samples": 5, "data": {"kind": "blend", "datasets": [{"path": "a", "weight": 1}]},
        "schedule": {"kind": "linear", "min_ratio": 0.0},
    }  # fmt: skip
    assert config.stage_configs[1].data.packing == "document"
    for word, said in {
        "stages.b=list": r"list\.yaml", "stages.b.data=lost": "builds upon nothing, which is not in conf/data/",
        "stages.b=lst": "is not in conf/stage/", "stage=decay": r"Write stages\.NAME=decay",
    }.items():  # fmt: skip
        with pytest.raises(LmtrainError, match=said):
            composed(TRUNK, word, config_dir=tmp_path)


B = "stages.b.steps=5"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([B, "stages.b.tokens=3"], r"stages\.b\.steps=5 and tokens: .*exactly one of.*Leave tokens out"),
        (["stages.b.steps=0"], r"stages\.b\.steps=0 must be at least 1"),
        (["stages.b.stop_after=true"], r"stages\.b\.steps=null and no other length.*Give one"),
        (["stages.b.tokens=9999999T"], r"stages\.b\.tokens=.* must be at most 1e18"),
        ([B, "train.steps=100"], r"train\.steps=100 is the length of the run.*Leave it out, or change a stage's"),
        ([B, "train.tokens=2B"], r"train\.tokens=2B is the length of the run.*Leave it out"),
        ([B, "stages.b.model.width=64"], r"model\.width=64 cannot differ.*a stage may set model\.seq_len, "),
        ([B, "stages.b.model.rotary_share=0.5"], r"model\.rotary_share=0\.5 cannot differ"),
        ([B, "stages.b.model.window=8"], r"model\.window=8 cannot differ"),
        ([B, "stages.b.model.rotary_factor=4"], r"stages\.b\.model\.rotary_factor=4\.0 has an effect only with"),
        ([B, "stages.b.train.seed=1"], r"train\.seed=1 cannot differ.*Set train\.seed=1 for the whole run"),
        ([B, "stages.b.optim.kind=lamb"], r"optim\.kind=lamb cannot differ.*a stage may set optim\.lr"),
        ([B, "stages.b.data.tokenizer=t"], r"data\.tokenizer=t belongs to the run.*Set data\.tokenizer=t for the"),
        ([B, "stages.b.data.text=t"], r"data\.text=t belongs to the run.*lmtrain preprocess"),
        ([B, "stages.b.schedule.warmup_steps=2"], r"schedule\.kind=null is missing.*Add its kind"),
        ([B, "stages.b.schedule=linear", "stages.b.schedule.warmup_steps=5"],
         r"stages\.b\.schedule\.warmup_steps=5 must be less than.*Use 0"),
        ([B, "schedule.warmup_steps=60"], r"schedule\.warmup_steps=60 must be less than the run's 55 steps"),
        ([B, "stages.b.model.seq_len=32", "model.positions=learned"],
         r"stages\.b\.model\.seq_len=32 is longer than .*Use model\.num_positions=32, .* or 16 or less"),
        ([B, "stages.b.train.micro_batch=3"], r"stages\.b\.train\.micro_batch=3 .* does not divide.*Use 1, 2"),
        ([B, "stages.b.train.rampup={start: 3, increment: 2, samples: 9}"],
         r"stages\.b\.train\.rampup\.start=3 does not reach"),
        ([B, "data.order=megatron"], r"In the stage b, data\.order=megatron depends on.*Use data\.order=own"),
        ([B, "checkpoint.interval_steps=null"], r"interval_steps=null saves no checkpoint.*Use checkpoint\.interval"),
        ([B, "stages.trunk.data.restart=true"], r"data\.restart=true has no effect where a run begins.*later stage"),
        (["data.restart=true"], r"data\.restart=true has no effect where a run begins"),
        ([B, "stages.b.data={kind: blend, datasets: [{path: a, weight: 0}]}"],
         r"stages\.b\.data\.datasets\[0\]\.weight=0\.0 is not a valid share.*Give a number above 0"),
        ([B, "stages.b.data={kind: blend}"], r"data\.datasets=\[\] names no dataset.*Give a list"),
        ([B, "stages.b.recompute=some"], r"stages\.b\.recompute=some is not in conf/recompute/"),
        ([B, "stages.b.eval.interval_steps=3"], r"stages\.b\.eval\.interval_steps=3 has no effect without eval\.tasks"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_a_way_out(words: Sequence[str], said: str) -> None:
    with pytest.raises(LmtrainError, match=f"(?s){said}"):
        composed(TRUNK, *words)


def test_a_name_is_one_that_can_be_typed_in_a_key() -> None:
    from lmtrain.train.run_stage_settings import StageSettings, name_problems

    names = ["a-b_2", "A", "2b", "a.b", "", "ä", "a b"]
    found = [problem.value for problem in name_problems({name: StageSettings(steps=1) for name in names})]
    assert found == names[2:]


@pytest.mark.wide
def test_three_hundred_stages_are_planned() -> None:
    assert composed(*(f"stages.s{i}.steps=1" for i in range(300))).total_steps == 300
