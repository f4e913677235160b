"""An unknown key or value is answered with a suggestion of what was meant."""

from __future__ import annotations

import pytest

from lmtrain.config.compose_run_settings import group_choices
from lmtrain.config.foreign_names import FOREIGN_NAMES
from lmtrain.config.ideas_without_counterpart import idea_of
from lmtrain.config.name_suggestions import SettingNames, closest_value, is_near, suggest_value, types_by_key
from lmtrain.config.names_without_counterpart import sentence_about
from lmtrain.errors import split_ways
from lmtrain.train.run_config import RunConfig

NAMES = SettingNames(RunConfig, group_choices())


@pytest.mark.parametrize(
    ("key", "value", "meant"),
    [
        ("lr", "1e-3", "optim.lr=1e-3"), ("steps", "500", "train.steps=500"), ("device", "gpu", "compute.device=cuda"),
        ("train.lr", "1", "optim.lr=1"), ("optim.lrr", "1", "optim.lr=1"), ("optim.optim.lr", "1", "optim.lr=1"),
        ("optim.learning_rate", "1", "optim.lr=1"), ("micro-batch-size", "4", "train.micro_batch=4"),
        ("model.name", "gpt2_small", "model=gpt2_small"), ("optimizer", "adam", "optim=adamw"),
        ("optimm.lr", "1", "optim.lr=1"), ("mixed_precision", "float16", "precision=fp16"),
        ("parallel.tensor_parallel_size", "2", "parallel.tp=2"),
        ("train.batch_size", "8", "train.global_batch=8"), ("dropout", "10%", "model.dropout=0.1"),
        ("ema.decay", "0.9", "checkpoint.ema.decay=0.9"), ("ema_decay", "0.9", "checkpoint.ema.decay=0.9"),
        ("ema.update_every_n_steps", "5", "checkpoint.ema.every_steps=5"),
        ("optim.l", "1", "optim.lr=1"), ("max_step", "10", "train.steps=10"), ("num_layer", "2", "model.num_layers=2"),
        ("model_name_or_path", "gpt2", "model=gpt2"), ("model_name_or_path", "bert", "model=bert_base"),
        ("hardware.memory_GB", "40", "hardware.memory_GiB=40"),
    ],
)  # fmt: skip
def test_the_nearest_name_over_all_levels(key: str, value: str, meant: str) -> None:
    assert NAMES.suggest_overrides(key, value)[0] == meant


def test_no_setting_of_lmtrain_is_said_to_have_no_counterpart() -> None:
    names = {*types_by_key(RunConfig), *(key.rpartition(".")[2] for key in types_by_key(RunConfig))}
    names |= {name for names in FOREIGN_NAMES.values() for name in names.split()}
    names -= {"data.tokenizer", "tokenizer"}  # because: without data., the word is a tokenizer of another tool
    refused = {name: said for name in names if (said := sentence_about(name))}
    assert refused == {}


def test_nothing_near_gives_the_names_of_the_level() -> None:
    assert NAMES.way_out("optim.xyzzy", "1", ["lr", "eps"]) == "Known: eps, lr."


def test_a_key_of_another_kind_is_not_offered_again() -> None:
    text, ways = split_ways(NAMES.way_out("schedule.min_ratio", "0.1", []))
    assert text.startswith("Leave it out, or choose another schedule;")
    assert [way.old for way in ways] == [("schedule.min_ratio",)]


def test_names_of_other_tools_lead_to_keys_and_groups_that_there_are() -> None:
    known = types_by_key(RunConfig).keys() | set(NAMES.groups)
    assert [key for key in FOREIGN_NAMES if key not in known and key != "train.rampup"] == []
    names = [name for names in FOREIGN_NAMES.values() for name in names.split()]
    assert len(names) == len(set(names))


# words of other programs, which no setting of lmtrain is called or misspelled like
OTHER_WORDS = """
callbacks callback hooks plugins logger trainer strategy devices_list engine backend_name profiler dataset_class
checkpoint_callback sampler collate_fn tokenizer_class model_class loss_fn criterion metric names tags notes verbose
experiment_tags workers pool queue cache memory retry host port world group machine cluster job script entry module
package version license author banana kitchen letter color shape size type format style method level phase round loop
student teacher reward policy critic actor agent buffer replay rollout image pixel scaler barebones grad_hook
num_sanity_val_steps fast_dev_run overfit_batches lr_monitor progress_bar swa_lrs neck state stats status first last
gradient loss_weights class_weights pad truncation stride region zone trainer.hooks train.callbacks model.hooks
optim.hooks checkpoint.callbacks data.collator observe.plugins
"""


@pytest.mark.parametrize("word", OTHER_WORDS.split())
def test_a_word_that_is_no_name_becomes_no_setting(word: str) -> None:
    assert NAMES.suggest_overrides(word, "1") == []
    assert "Did you mean" not in NAMES.way_out(word, "1", ["train", "model", "schedule", "checkpoint", "stages"])


@pytest.mark.parametrize(("name", "known", "near"), [
    ("stpes", "steps", True), ("step", "steps", True), ("mdoel", "model", True), ("layers_num", "num_layers", True),
    ("interval_stpe", "interval_steps", True), ("state", "start", False), ("callbacks", "fallback", False),
    ("author", "auto", False), ("p", "pp", False), ("dropuot", "dropout", True), ("weight_decya", "weight_decay", True),
    ("", "pp", False), ("lr", "tp", False),
])  # fmt: skip
def test_a_name_is_near_by_an_edit_or_two(name: str, known: str, near: bool) -> None:
    assert is_near(name, known) is near


def test_an_environment_variable_is_said_to_be_one() -> None:
    said = NAMES.refusal("NCCL_DEBUG", "WARN", [])
    assert said.endswith("It is an environment variable, which stands before the command: NCCL_DEBUG=WARN lmtrain ...")
    assert NAMES.suggest_overrides("MAX_STEPS", "10") == ["train.steps=10"]
    assert "environment" not in NAMES.refusal("MAX_STEPS", "10", [])


def test_values() -> None:
    assert closest_value("gpu", ["cpu", "cuda"]) == "cuda"
    assert closest_value("fp16_mixed", ["bf16", "fp16", "fp32"]) == "fp16"
    assert closest_value("tpu", ["auto"]) is None
    assert closest_value("meta-llama/Llama-3.2-1B", ["qwen3_0.6b", "llama3.2_1b"]) == "llama3.2_1b"
    assert closest_value("False", ["full", "none"]) == "none"
    assert closest_value("true", ["full", "none"]) == "full"
    assert suggest_value("gpu", ["cpu", "cuda"]) == "Did you mean cuda?"
    assert suggest_value("x", ["b", "a"]) == "Known: a, b."


def test_a_key_that_one_other_kind_has_leads_to_that_kind() -> None:
    text, ways = split_ways(NAMES.way_out("data.datasets", "[]", []))
    assert text == "It is one of data=blend; add that, or leave it out."
    assert ways[0].new == ("data=blend",)
    typed = SettingNames(RunConfig, group_choices(), {"data": "masked"})
    assert typed.way_out("data.datasets", "[]", []) != NAMES.way_out("data.datasets", "[]", [])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("unfreeze_last_layers", "Nothing is frozen here"), ("layerwise_lr_decay", "One learning rate"),
        ("eval_at_start", "not before the first"), ("pure-bf16", "Weights are never kept in 16 bits"),
        ("save_to_s3", "this machine's disks"), ("slack_webhook", "Nothing is sent"), ("nonsense", None),
        ("optim.embedding_lr", "One learning rate"), ("trainer.callbacks.early_stop.min_delta", "no early stopping"),
    ],
)  # fmt: skip
def test_the_words_of_a_name_tell_its_idea(name: str, said: str | None) -> None:
    sentence = idea_of(name)
    assert (sentence is None) if said is None else (sentence is not None and said in sentence)
