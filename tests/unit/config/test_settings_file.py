"""A file of settings as an argument means what its keys would mean as words, and is refused with its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lmtrain.config.compose_run_settings import Sources, compose, compose_plain, compose_tree, expand_sweep
from lmtrain.config.parse_and_apply_overrides import MAX_CHARACTERS, parse_overrides
from lmtrain.config.settings_file import expand_settings_file, words_for_command
from lmtrain.errors import MissingInputError, SettingsError, UsageError
from lmtrain.train.run_config import RunConfig

VALUES: dict[str, Any] = {
    "a": "plain/path-1.x", "b": "true", "c": "1e3", "d": "a, 'b' [c]", "e": "", "f": None, "g": [1, 2.5, "x y"],
    "h": {"two words": 1}, "i": [{"path": "a b", "weight": 1}], "j": 1e-5, "k": True, "l": 300_000,
    "m": "${train.seed}", "n": {}, "o": "two\nlines", "p": "300B", "q": "null", "r": "back\\slash'",
}  # fmt: skip


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path("mine.yaml")


def _said(mine: Path, text: str, *words: str) -> str:
    mine.write_text(text)
    with pytest.raises(SettingsError) as caught:
        compose(RunConfig, expand_settings_file([str(mine), *words]) or [])
    return str(caught.value)


def test_choices_nested_keys_and_dotted_keys_are_those_of_the_command_line(mine: Path) -> None:
    mine.write_text(
        "# @package _global_\nmodel: llama_tiny\nmodel.width: 64\nhardware: null\ndata: {path: x}\n"
        "train:\n  steps: 50\n  rampup: {start: 8, increment: 8, samples: 1k}\n"
        "stages: {a: {tokens: 1M, schedule: wsd}}\noptim.lr: ${train.seed}\ntrain.seed: 3\n"
    )
    words = [
        "model=llama_tiny", "model.width=64", "hardware=null", "data.path=x", "train.steps=50", "train.rampup.start=8",
        "train.rampup.increment=8", "train.rampup.samples=1k", "stages.a.tokens=1M", "stages.a.schedule=wsd",
        "optim.lr=${train.seed}", "train.seed=3",
    ]  # fmt: skip
    assert compose_plain(expand_settings_file([str(mine)]) or []) == compose_plain(words)


def test_typed_words_win_wherever_they_stand(mine: Path) -> None:
    mine.write_text("optim: lamb\ntrain: {steps: 50, seed: 5}\n")
    tree = compose_plain(expand_settings_file(["train.steps=7", str(mine), "optim=muon"]) or [])
    assert (tree["train"]["steps"], tree["train"]["seed"], tree["optim"]["kind"]) == (7, 5, "muon")


def test_settings_of_a_file_are_not_defaults_that_give_way(mine: Path) -> None:
    mine.write_text("train: {tokens: 1M}\ndata.path: x\n")
    config = compose(RunConfig, expand_settings_file([str(mine)]) or [])
    assert (config.train.tokens, config.train.steps) == (1_000_000, None)


def test_another_process_gets_the_same_values_as_words(mine: Path) -> None:
    mine.write_text(json.dumps(VALUES))
    words = expand_settings_file([str(mine)]) or []
    assert {o.key_or_group: o.value() for o in parse_overrides(words, {})} == VALUES
    assert {o.key_or_group: o.value() for o in parse_overrides(words_for_command(words), {})} == VALUES
    assert not any(type(word) is not str for word in words_for_command(words))


def test_what_is_too_long_for_a_word_works_from_the_file_alone(mine: Path) -> None:
    mine.write_text(f"data.path: x\nrun.name: [{'abcdefgh, ' * (MAX_CHARACTERS // 8)}]\n")
    words = expand_settings_file([str(mine)]) or []
    assert len(parse_overrides(words, {})[1].value()) == MAX_CHARACTERS // 8
    with pytest.raises(UsageError, match=r"mine.yaml line 2: run.name has \d+ characters; at most 20000"):
        words_for_command(words)


def test_values_of_a_sweep_vary_what_the_file_says(mine: Path) -> None:
    mine.write_text("train.seed: 1\noptim: lamb\n")
    runs = expand_sweep(expand_settings_file([str(mine), "optim.lr=1,2"]) or [])
    assert runs == [["train.seed=1", "optim=lamb", f"optim.lr={lr}"] for lr in (1, 2)]


def test_the_origin_of_a_value_is_the_line_of_the_file(mine: Path) -> None:
    mine.write_text("train:\n  seed: 7\ndata.valid_paths:\n  my set: x\n")
    found = compose_tree(expand_settings_file([str(mine), "optim.lr=3"]) or [], Sources()).origins
    for key, line, text in (("train.seed", 2, "7"), ("data.valid_paths.my set", 4, "x")):
        origin = found.nearest(key)
        assert origin is not None
        assert (origin.file, origin.line, origin.text) == (mine, line, text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("optim:\n  lrr: 3\n", "mine.yaml line 2: optim.lrr=3 is not a setting. Did you mean optim.lr=3?"),
        ("train: {steps: many}\n", "mine.yaml line 1: train.steps=many is not a size"),
        ("\nmodel: gpt_tinyy\n", "mine.yaml line 2: model=gpt_tinyy is not in conf/model/. Did you mean gpt_tiny?"),
        ("optim.lr: ${optim.nothing}\n", "mine.yaml line 1: optim.lr=${optim.nothing}: The key optim.nothing does not"),
        ("optim.lr: ${oc.env:HOME}\n", "mine.yaml line 1: optim.lr="),
        ("train.seed: 1\ntrain: {seed: 2}\n", "mine.yaml line 2 gives train.seed again, after mine.yaml line 1."),
        ("~optim.lr: null\n", "mine.yaml line 1 has '~optim.lr', which is not the key of a setting. Write keys as"),
        ("optim: {_target_: x}\n", "mine.yaml line 1: optim._target_ names code"),
        ("a b: 1\n", "mine.yaml line 1 has 'a b', which is not the key of a setting"),
        ("hydra: {run: 1}\n", "mine.yaml line 1: hydra.run=1 is not a setting"),
        ("parallel: {tp: 3}\n", "mine.yaml line 1: parallel.tp=3 does not divide"),
        ("data:\n  datasets:\n  - path: 1\n    weigth: 2\n", "mine.yaml line 4: data.datasets[0].weigth=2 is not a"),
        ("# @package optim\nlr: 3\n", "mine.yaml has the line `# @package optim`, but the keys"),
        ("x: 1\ndefaults: [{override /optim: lamb}]\n", "mine.yaml line 2 has a `defaults` list, which a file of"),
        ("train:\n  steps: +200\n", "mine.yaml line 2 has +200, but nothing can be added to a value. Write 200, or"),
        ("- 1\n", "mine.yaml line 1 begins with a list."),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_file_and_line(mine: Path, text: str, says: str) -> None:
    words = ["data=blend"] if "datasets" in text else []
    assert says in _said(mine, text, *words)


def test_a_missing_file_and_several_files_are_refused(mine: Path) -> None:
    with pytest.raises(MissingInputError, match=r"mine.yaml does not exist"):
        expand_settings_file([str(mine)])
    with pytest.raises(UsageError, match=r"a.yaml and b.yml are two files of settings, but a command takes one"):
        expand_settings_file(["a.yaml", "b.yml"])
