"""The environment never reaches a setting, a file of a run or the screen, however a config asks for it."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from tests.cli.harness import Toy, lmtrain, outcome
from tests.marks import wide

SECRETS = {"WANDB_API_KEY": "canary-7731", "HF_TOKEN": "canary-7731", "SECRET": "canary-7731"}
SHOW = ("pretrain", "--print-config", "data.path=x")


@pytest.mark.parametrize(
    "words",
    [
        ("run.dir=oc.env", "data.index_dir='${${run.dir}:SECRET}'"),
        ("run.dir=oc.env:SECRET", "data.index_dir='${${run.dir}}'"),
        ("run.dir=${oc.env:SECRET}",), ("run.dir='${oc.decode:${oc.env:SECRET}}'",), ("+x='${oc.select:SECRET}'",),
        ("run.dir=${hydra:runtime.cwd}",), ("model='${oc.env:SECRET}'",), ("+${oc.env:SECRET}=1",),
        ("-m", "run.dir='${oc.env:SECRET}','${env:SECRET}'"),
    ],
    ids=str,
)  # fmt: skip
def test_a_word_that_asks_for_it_is_refused(words: tuple[str, ...]) -> None:
    assert "canary" not in lmtrain(*SHOW, *words, code=2, env=SECRETS)


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (("run.dir='{oc.env:SECRET}'", "data.index_dir='$${run.dir}'"), "${oc.env:SECRET}"),
        (("run.dir='\\${oc.env:SECRET}'", "data.index_dir=${run.dir}"), "${oc.env:SECRET}"),
        (("run.dir=$SECRET",), "$SECRET"),
    ],
    ids=str,
)
def test_signs_that_are_no_reference_stay_as_they_are(words: tuple[str, ...], shown: str) -> None:
    config = json.loads(lmtrain(*SHOW, "--json", *words, env=SECRETS))
    assert shown in (config["run"]["dir"], config["data"]["index_dir"])


@pytest.mark.wide
@pytest.mark.parametrize(
    "text",
    [
        "run: {dir: '${oc.env:SECRET}'}", "run: {dir: oc.env}\ndata: {index_dir: '${${run.dir}:SECRET}'}",
        "data: {index_dir: ['${oc.env:SECRET}']}", "'${oc.env:SECRET}': 1",
        "defaults:\n  - override /model: ${oc.env:SECRET}", "defaults:\n  - ${oc.env:SECRET}",
        "run: &a {dir: '${oc.env:SECRET}'}\nx: *a",
    ],
)  # fmt: skip
def test_a_file_that_asks_for_it_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "e.yaml").write_text(f"# @package _global_\n{text}\n")
    words = ("--config-dir", tmp_path, "experiment=e")
    assert "canary" not in lmtrain(*SHOW, *words, code=2, env=SECRETS)
    assert "canary" not in outcome("config", "explain", "run.dir", *words, env=SECRETS)[1]


@cache
def honest() -> str:
    return lmtrain(*SHOW, "--json")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"run": {"dir": "${oc.env:SECRET}"}}, None),  # a run can be in a folder of this name
        ({"data": {"index_dir": "\\${oc.env:SECRET}"}}, None),
        ({"run": {"dir": "oc.env"}, "data": {"index_dir": "${${run.dir}:SECRET}"}}, None),
        ({"defaults": [{"model": "gpt_tiny"}]}, "has the key defaults, which no run writes"),
        ({"optim": {"hydra": {"run": 1}}}, "has the key hydra"),
        ({"optim": {"_target_": "os.system"}}, "names code"),
        ({"data": {"path": "\ud800"}}, "holds half a character (U+D800)"),
        ({"optim": {"lr": "x" * 300_000}}, "is larger than the 256.0 KiB"),
        *wide(({"optim": {"lr": [[1]] * 9000}}, "config.json is damaged: it holds more than 10000 values")),
    ],
    ids=lambda given: f"{given!a:.60}",
)
def test_the_settings_of_a_strangers_run(tmp_path: Path, change: dict[str, object], said: str | None) -> None:
    config = json.loads(honest())
    for key, value in change.items():
        config[key] = config[key] | value if isinstance(value, dict) else value
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ("pretrain", "--from-run", tmp_path, "--print-config", "--json")
    code, output = outcome(*words, env=SECRETS)
    assert "canary" not in output
    assert "as_in_that_run" not in output
    if said is None:
        assert json.loads(output)["data"]["index_dir"] == config["data"]["index_dir"]
    else:
        assert code in (2, 65)
        assert said in output


@pytest.mark.wide
def test_a_run_stores_nothing_of_the_environment(toy: Toy, tmp_path: Path) -> None:
    said = lmtrain("pretrain", *toy.settings(tmp_path / "run", train__steps=4), env=SECRETS)
    said += "".join(lmtrain(*words, env=SECRETS) for words in (("env",), ("inspect", "--all", tmp_path / "run")))
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert {"config.json", "environment.json", "log.txt", "metrics.jsonl"} <= {file.name for file in files}
    assert [file for file in files if b"canary" in file.read_bytes()] == []
    assert "canary" not in said
