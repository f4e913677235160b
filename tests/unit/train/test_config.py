"""The rules across settings, and the length of a run given in tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmtrain.config.build_typed_settings import build_settings
from lmtrain.config.compose_run_settings import compose, group_choices
from lmtrain.data.batch_size_per_step import BatchPlan
from lmtrain.errors import SettingsError
from lmtrain.placement.batch_rampup_settings import RampUpSettings
from lmtrain.train.run_config import RunConfig
from lmtrain.train.train_settings import TrainSettings, count_steps
from tests.marks import wide


def problems(*overrides: str) -> tuple[str, ...]:
    with pytest.raises(SettingsError) as caught:
        compose(RunConfig, ["data.path=x", *overrides])
    return caught.value.problems


@pytest.mark.parametrize(
    ("group", "choice"),
    [one for g, choices in group_choices().items() if g != "data"
     for one in [(g, choices[0]), *wide(*((g, c) for c in choices[1:]))]],
)  # fmt: skip
def test_every_choice_of_every_group_composes(group: str, choice: str) -> None:
    chosen = ["data.path=x", f"stages.last={choice}" if group == "stage" else f"{group}={choice}"]
    if choice == "long_context":
        chosen += ["model.positions=rotary", "train.micro_batch=1"]
    if group == "model" and choice.startswith("bert_"):
        chosen.append("data=masked")
    if choice == "auto":
        chosen.append("hardware=cpu")
    if choice == "stages_demo":
        chosen.remove("data.path=x")  # because: it has data of its own, a blend
    compose(RunConfig, chosen)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model=bert_tiny", "data=dataset"], "makes samples that a bert model cannot learn from. Use data=masked"),
        (["data=masked"], "data.kind=masked makes samples that a gpt model cannot learn from. Use model=bert_base, or"),
        (["model=bert_tiny", "data=masked", "data.pairs=none"], "model.pair_head=true needs sentence pairs"),
        (["model=bert_tiny", "data=masked", "model.pair_head=false"], "model.pair_head=false does not use"),
    ],
)
def test_a_model_learns_what_its_samples_have_labels_for(overrides: list[str], words: str) -> None:
    (problem,) = problems(*overrides)
    assert words in problem


def test_rules_across_settings_are_told_beside_rules_within() -> None:
    found = problems("train.global_batch=10", "train.micro_batch=4", "optim.lr=0", "model.num_heads=7")
    assert len(found) == 3
    assert any("train.micro_batch=4 x 1 data-parallel copies does not divide" in p for p in found)


@pytest.mark.parametrize(
    ("rampup", "words"),
    [("{start: 3, increment: 4, samples: 10}", "train.rampup.start=3 is not a multiple"),
     ("{start: 4, increment: 2, samples: 10}", "train.rampup.increment=2 is not a multiple"),
     ("{start: 64, increment: 4, samples: 10}", "does not reach"),
     ("{start: 4, increment: 8, samples: 10}", "does not reach")],
)  # fmt: skip
def test_ramp_ups_that_never_arrive(rampup: str, words: str) -> None:
    assert any(words in p for p in problems("train.micro_batch=4", f"train.rampup={rampup}"))


@given(
    tokens=st.integers(1, 10**6),
    batch=st.integers(1, 16),
    seq_len=st.integers(1, 64),
    steps=st.integers(0, 4),
    samples=st.integers(1, 500),
)
def test_a_token_budget_ends_at_the_first_step_that_reaches_it(
    tokens: int, batch: int, seq_len: int, steps: int, samples: int
) -> None:
    full = batch * (steps + 1)
    rampup = RampUpSettings(start=batch, increment=batch, samples=samples) if steps else None
    train = TrainSettings(tokens=tokens, global_batch=full, micro_batch=1, rampup=rampup)
    found, plan = count_steps(train, seq_len), BatchPlan(train.global_batch, train.rampup)
    assert plan.range_of(found)[0] * seq_len >= tokens
    assert found == 1 or plan.range_of(found - 1)[0] * seq_len < tokens


def test_settings_survive_their_own_dictionary() -> None:
    overrides = ["data.path=x", "model=llama_tiny", "precision=fp16", "train.tokens=1M", "train.steps=null"]
    config = compose(RunConfig, overrides)
    assert build_settings(RunConfig, config.to_dict()) == config


@pytest.mark.parametrize(
    ("typed", "said", "section", "values"),
    [
        (["train.steps=20"], ["schedule.warmup_steps=2 instead of 100, to fit train.steps=20."], "schedule",
         {"warmup_steps": 2}),
        (["train.tokens=100k", "schedule.warmup_steps=0"],
         ["train.steps=null instead of 1000, to fit train.tokens=100k."], "train", {"steps": None, "tokens": 100_000}),
        (["experiment=demo", "train={global_batch: 12}", "parallel.dp_shard=2"],
         ["train.micro_batch=6 instead of 8, to fit train.global_batch=12 on 2 copies of the model."], "train",
         {"micro_batch": 6, "global_batch": 12}),
        (["train.rampup={start: 4, increment: 4, samples: 20}"],
         ["train.micro_batch=4 instead of 8, to fit train.global_batch=32."], "train", {"micro_batch": 4}),
        (["model=bert_tiny", "data.mask_share=0.2"], ["data=masked instead of dataset, to fit model=bert_tiny."],
         "data", {"kind": "masked", "mask_share": 0.2, "path": "x"}),
        (["schedule=wsd", "train.steps=110"], ["schedule.warmup_steps=11 instead of 100, to fit train.steps=110."],
         "schedule", {"warmup_steps": 11}),
        (["train.steps=101"], [], "schedule", {"warmup_steps": 100}),
        (["train.steps=null", "train.tokens=100k", "train.rampup={start: 8, increment: 8, samples: 48}"],
         ["schedule.warmup_steps=2 instead of 100, to fit train.tokens=100000, 27 steps."], "schedule",
         {"warmup_steps": 2}),
    ],
)  # fmt: skip
def test_what_is_not_typed_gives_way_to_what_is(
    typed: list[str], said: list[str], section: str, values: dict[str, int]
) -> None:
    heard = list[str]()
    config = compose(RunConfig, ["data.path=x", *typed], report=heard.append)
    assert heard == said
    assert config.to_dict()[section].items() >= values.items()


def test_a_seed_that_megatrons_generator_lacks_is_refused() -> None:
    words = ("data.order=megatron", "data.megatron_samples=9")
    assert problems(*words, "train.seed=4294967301") == (
        "train.seed=4294967301 must be at most 4294967295 with data.order=megatron. Use 5, or data.order=own.",
    )
    assert compose(RunConfig, ["data.path=x", *words, "train.seed=4294967295"]).train.seed == 2**32 - 1


def test_what_is_typed_gives_way_to_nothing() -> None:
    unreachable = "train.rampup={start: 8, increment: 7, samples: 48}"
    assert "does not reach" in problems("train.steps=null", "train.tokens=100k", unreachable, "data.path=x")[-1]
    assert "must be less than the run's 20 steps" in problems("train.steps=20", "schedule.warmup_steps=100")[0]
    assert "exactly one of them must be set" in problems("train.steps=20", "train.tokens=1k")[0]


def test_a_refused_word_does_not_hide_what_else_is_wrong() -> None:
    """And what depends on it is not judged by what stands in its place."""
    found = problems("optim.lr==3", "precision=fp8", "optim.lrr=1", "model=gpt", "model.num_heads=7")
    assert [one.split()[0] for one in found] == ["'optim.lr==3'", "precision=fp8", "model=gpt", "optim.lrr=1"]
