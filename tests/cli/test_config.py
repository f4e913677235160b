"""`lmtrain config`: what there is to choose, what a choice sets, where a value of a run comes from."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from lmtrain.config.compose_run_settings import conf_dir, group_choices
from lmtrain.config.settings_base import kinds
from lmtrain.optim.optim_settings import OptimSettings
from lmtrain.start.explain.describe_all_settings import all_keys
from tests.cli.harness import lmtrain
from tests.marks import wide


def test_groups_and_their_choices() -> None:
    rows = {row["group"]: row for row in json.loads(lmtrain("config", "list", "--json"))}
    assert {name: row["choices"] for name, row in rows.items()} == group_choices()
    assert rows["model"]["default"] == "gpt_tiny"
    assert rows["experiment"]["default"] is None


@pytest.mark.wide
def test_sizes_of_models() -> None:
    rows = {row["choice"]: row for row in json.loads(lmtrain("config", "list", "model", "--json"))}
    assert rows["gpt2_small"] | {"about": "", "file": ""} == {
        "choice": "gpt2_small", "default": False, "about": "", "file": "", "kind": "gpt", "parameters": 124_439_808,
        "vocab_size": 50257, "num_layers": 12, "width": 768, "num_heads": 12, "seq_len": 1024,
    }  # fmt: skip
    assert rows["gpt_tiny"]["default"]
    assert rows["gpt_tiny"]["vocab_size"] is None
    table = lmtrain("config", "list", "model", env={"COLUMNS": "80"})
    assert re.search(r"model=gpt3_175b +175B +96 +12288 +96 +2048  Brown 2020", table)
    for row in rows.values():  # every model but the toys says where its numbers are from
        assert re.search(r"\(\S+( \d{4})?\)\.?$", row["about"]) or row["choice"].endswith("_tiny"), row["about"]
    assert max(map(len, table.splitlines())) <= 80


@pytest.mark.wide
def test_what_each_choice_is() -> None:
    table = lmtrain("config", "list", "optim")
    assert "optim=adamw *" in table
    assert "LAMB: AdamW whose steps" in table
    for group in group_choices().keys() - {"model"}:
        assert all(row["about"] for row in json.loads(lmtrain("config", "list", group, "--json"))), group


@pytest.mark.wide
def test_show_prints_yaml_and_where_it_lies(tmp_path: Path) -> None:
    text = lmtrain("config", "show", "schedule", "wsd")
    file = conf_dir() / "schedule/wsd.yaml"
    assert text == f"# {file}\n{file.read_text(encoding='utf-8')}"
    assert yaml.safe_load(lmtrain("config", "show", "optim"))["kind"] == "adamw"
    part = lmtrain("config", "show", "checkpoint")
    assert yaml.safe_load(part)["checkpoint"]["keep_last"] == 2
    assert "observe" not in yaml.safe_load(part)
    (tmp_path / "optim").mkdir()
    (tmp_path / "optim/mine.yaml").write_text("# Mine.\nkind: adamw\nlr: 1.0\n")
    assert "lr: 1.0" in lmtrain("config", "show", "optim", "mine", "--config-dir", tmp_path)
    assert "optim=mine" in lmtrain("config", "list", "optim", "--config-dir", tmp_path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("list", "optimizer"), "optimizer is not a group of settings. Did you mean optim?"),
        (("show", "optim", "adam"), "optim has no choice adam. Did you mean adamw?"),
        (("show", "experiment"), "The group experiment has no choice by default. Known: demo, "),
        (("explain", "nothing"), "nothing is not a setting. `lmtrain config explain all` lists the settings."),
        (("explain", "lr"), "lr is not a setting. Did you mean optim.lr?"),
        *wide(
            (("explain", "optim.learning_rate"), "optim.learning_rate is not a setting."),
            (("explain", "optim.lr", "optim.lrr=3"), "optim.lrr=3 is not a setting."),
        ),
    ],
)
def test_refused_with_a_way_out(words: tuple[str, ...], said: str) -> None:
    assert said in lmtrain("config", *words, code=2)


def test_explain_a_key() -> None:
    facts = json.loads(lmtrain("config", "explain", "optim.lr", "model=gpt2_small", "experiment=demo", "--json"))
    assert facts["type"] == "number"
    assert facts["meaning"].startswith("the peak learning rate")
    assert facts["kinds"] == list(kinds(OptimSettings))
    assert facts["default"] == {"value": 3e-4, "from": "conf/optim/adamw.yaml, line 3"}
    assert facts["run"]["value"] == 4e-3
    assert facts["run"]["from"].startswith("conf/experiment/demo.yaml, line ")
    assert {"choice": "optim=lamb", "value": "0.01"} in facts["set_by"]
    assert {"choice": "experiment=demo", "value": "0.004"} in facts["set_by"]


@pytest.mark.wide
def test_explain_a_key_of_another_kind_and_one_that_is_missing() -> None:
    assert "optim.kind=adamw has no such key" in lmtrain("config", "explain", "optim.momentum")
    assert "0.95, from conf/optim/muon.yaml" in lmtrain("config", "explain", "optim.momentum", "optim=muon")
    assert "has to be given" in lmtrain("config", "explain", "data.path")
    assert "hardware is null" in lmtrain("config", "explain", "hardware.memory_GiB", "optim.lr=1e-3")
    text = lmtrain("config", "explain", "optim.lr", "optim.lr=1e-3")
    assert "0.001, from the command line: optim.lr=1e-3" in text
    assert re.search(r"^presets +0\.004: experiment=demo, experiment=stages_demo *$", text, re.MULTILINE)


def test_explain_a_section() -> None:
    text = lmtrain("config", "explain", "optim", "optim.eps=1e-7", env={"COLUMNS": "80"})
    assert re.search(r"^optim.lr  0.0003, from conf/optim/adamw.yaml, line 3\n    the peak learning rate", text, re.M)
    assert "optim.eps  1e-07, from the command line: optim.eps=1e-7\n" in text
    assert "choices  optim=adamw *, optim=lamb, optim=muon; * the choice of a run that names no other" in (
        " ".join(text.split("\n")[-3:])
    )
    assert max(map(len, text.splitlines())) <= 80
    rows = {row["key"]: row for row in json.loads(lmtrain("config", "explain", "checkpoint", "--json"))}
    assert rows["checkpoint.keep_last"] == {
        "key": "checkpoint.keep_last", "value": 2, "from": "conf/pretrain.yaml, line 40",
        "meaning": "how many of the newest checkpoints stay, or all; older ones go after the next is whole",
    }  # fmt: skip


def test_explain_what_is_null_and_a_group_that_is_no_section_name_the_choices() -> None:
    text = lmtrain("config", "explain", "hardware")
    assert text.startswith("hardware  null\nchoices  hardware=a100_40gb, ")
    assert "stages.NAME=decay, stages.NAME=long_context" in lmtrain("config", "explain", "stages")
    assert lmtrain("config", "explain", "experiment") == lmtrain("config", "list", "experiment")
    words = ("stages.a.steps=5", "stages.a.optim.lr=1", "data.path=x")
    stage = json.loads(lmtrain("config", "explain", "stages", *words, "--json"))
    assert stage[-1]["meaning"].startswith("the peak learning rate")


@pytest.mark.wide
def test_explain_all_of_a_run() -> None:
    given = ["model=llama_tiny", "train.rampup={start: 8, increment: 8, samples: 1k}", "data.path=x"]
    rows = {row["key"]: row for row in json.loads(lmtrain("config", "explain", "all", *given, "--json"))}
    assert rows.keys() <= all_keys().keys()
    assert rows["train.rampup.start"]["value"] == 8
    assert rows["data.path"]["from"] == "the command line: data.path=x"
    assert rows["model.positions"]["from"].startswith("conf/model/llama_tiny.yaml")
    assert not [row for row in rows.values() if row["from"] is None]
    bare = lmtrain("config", "explain", "train", env={"COLUMNS": "80"})
    assert "train.rampup" in bare
    assert "train.rampup.start" not in bare
    assert max(map(len, bare.splitlines())) <= 80
