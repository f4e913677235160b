"""Command-line words become overrides, or are refused with what to type instead."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmtrain.config.parse_and_apply_overrides import (
    apply_override,
    hydra_quoted,
    parse_overrides,
    sweep_refusal,
)
from lmtrain.errors import SettingsError, Way, shell_quoted, split_ways

GROUPS = {"model": ["gpt_tiny"]}


def _said(*words: str) -> str:
    with pytest.raises(SettingsError) as caught:
        parse_overrides(words, GROUPS)
    return str(caught.value)


def _refused_sweep(word: str) -> tuple[str, list[Way]]:
    return split_ways(sweep_refusal(parse_overrides([word], GROUPS)[0]))


def _tree(tree: dict[str, Any], *words: str) -> dict[str, Any]:
    for override in parse_overrides(words, GROUPS):
        assert apply_override(tree, override) is None
    return tree


@settings(max_examples=40)
@given(st.text(st.characters(blacklist_categories=("Cs", "Cc")), min_size=1, max_size=20))
def test_any_text_can_be_quoted_for_grammar_and_shell(text: str) -> None:
    if "${" in text:
        return
    word = f"run.dir={hydra_quoted(text)}"
    assert shlex.split(shell_quoted(word)) == [word]
    [override] = parse_overrides([word], GROUPS)
    assert override.value() == text


@pytest.mark.parametrize("name", ["a=b", "größe", "a;b", "a#b", "a~b", "a&b<c>", "50%!", "a b"])
def test_names_that_can_mean_nothing_else_need_no_quotes(name: str) -> None:
    assert parse_overrides([f"run.dir={name}"], GROUPS)[0].value() == name


def test_keys_are_set_added_and_removed() -> None:
    tree: dict[str, Any] = {"a": {"b": 1, "c": None}, "l": [1, {"x": 2}]}
    assert _tree(tree, "a.b=2", "+a.d.e=3", "a.c={x: 1}", "a.c.y=2", "~l", "++n=null") == {
        "a": {"b": 2, "c": {"x": 1, "y": 2}, "d": {"e": 3}}, "n": None
    }  # fmt: skip
    assert _tree({"l": [1, {"x": 2}]}, "l.1.x=3", "l.0=7") == {"l": [7, {"x": 3}]}


def test_what_is_set_twice_is_refused_and_nothing_wins_in_silence() -> None:
    assert _said("a.b=1", "model=gpt_tiny", "+a.b=2", "model=x") == (
        "2 settings are wrong:\n  1. +a.b=2 sets a.b again, after a.b=1. Leave one out.\n"
        "  2. model=x sets model again, after model=gpt_tiny. Leave one out."
    )
    assert len(parse_overrides(["a=1", "a=1"], GROUPS)) == 1  # what a plan printed, behind what it was asked
    assert _tree({"a": {"b": 1}}, "~a", "a={c: 2}") == {"a": {"c": 2}}  # anew, where it would be merged


@pytest.mark.parametrize("word", ["~", "+", "~=1"])
def test_a_word_without_a_key_is_refused_after_another_too(word: str) -> None:
    assert _said("~a", word) == f"{word!r} is not an override, since it names no key. Write key=value."


def test_a_mapping_adds_to_the_one_that_is_there_however_deep() -> None:
    tree = {"hardware": {"peak_tflops": {"fp32": 67, "bf16": 989}, "power_W": 700}}
    assert _tree(tree, "hardware={peak_tflops: {bf16: 300}}") == {
        "hardware": {"peak_tflops": {"fp32": 67, "bf16": 300}, "power_W": 700}
    }


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("a.b.c=1", "sets a key of a.b, which is a single value. Write a.b=1."),
        ("~a.x", "removes a key that does not exist"), ("~x.y", "removes a key that does not exist"),
        ("l.5=1", "names entry 5 of a list of 1"), ("l.5.x=1", "sets a key of l"),
    ],
)  # fmt: skip
def test_a_change_that_cannot_be(word: str, said: str) -> None:
    problem = apply_override({"a": {"b": 1}, "l": [1]}, parse_overrides([word], GROUPS)[0])
    assert problem is not None
    assert said in split_ways(problem)[0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run.dir=a=b,c"], "type \"run.dir='a=b,c'\"."),
        (["run.dir=it's"], "has a quote that is not closed"),
        (["data.split=[1,0"], "Type \"data.split=[1,0]\""),
        (["run.dir=a]"], "closes a ] that is not open"),
        (["lr", "=", "3"], "Type lr=3."), (["lr", "=3"], "Type lr=3."), (["lr =3"], "Type lr=3."),
        (["run.dir=a", "b"], "type \"run.dir='a b'\"."),
        (["gpt_tiny"], "Did you mean model=gpt_tiny?"),
        (["lr==3"], "Write lr=3."),
        (["hydra.run.dir=x"], "Use run.dir=x."),
        (["a=" + "[" * 50], "nests too deeply"),
        (["a=" + "9" * 5000], "has 5000 digits; at most 100 are allowed"),
        (["a=[1," + "9" * 101 + "]"], "has 101 digits"), (["a='${${b}:X}'"], "may not contain another reference"),
        (["a=${oc.env:X}"], "calls a resolver"), (["a=[{b: '${'}]"], "that is not closed"),
        (["data.split=[98,", "1,", "1]", "x=2"], 'Quote it: "data.split=[98, 1, 1]".'),
        (["train={steps:", "5}"], 'Quote it: "train={steps: 5}".'),
        (["train.steps:", "5"], "Write train.steps=5."), (["train.steps:=5"], "Write train.steps=5."),
        (["model.dropout:0.1"], "Write model.dropout=0.1."), (["a='3"], "Write a=3, or"),
        (["a=(1,2)"], 'Write "a=[1,2]".'), (["micro_batch_size", "8"], "Write micro_batch_size=8."),
        (["a b"], "is not a valid key"), (["a@b=c"], "@ has no meaning here"), (["a[0]=1"], "a=[FIRST,SECOND]"),
    ],
)  # fmt: skip
def test_a_word_that_is_no_override(words: list[str], said: str) -> None:
    assert said in _said(*words)


def test_a_list_of_texts_outside_the_grammar() -> None:
    texts = parse_overrides(["a=[~/a.txt,b/*.jsonl,c é.txt]"], GROUPS)[0].value()
    assert list(map(str, texts)) == ["~/a.txt", "b/*.jsonl", "c é.txt"]


def test_several_values() -> None:
    text, ways = _refused_sweep("a=1,2")
    assert text == (
        "a=1,2 names several values. Add -m to run each of them, or --array to a Slurm job. "
        'A list is "a=[1,2]", one text "a=\'1,2\'".'
    )
    assert [way.new for way in ways] == [("-m",), ("--array",), ("a=[1,2]",), ("a='1,2'",)]
    assert _refused_sweep("data.path=a,b")[0].endswith(
        "To mix them in one run, as much of each as there is, type data=blend "
        '"data.datasets=[{path: a, epochs: 1}, {path: b, epochs: 1}]". '
        "Add -m to run each of them, or --array to a Slurm job."
    )
    assert _refused_sweep("data.valid_path=x/a,y/a")[0].endswith(
        'To validate on each of them, type "data.valid_paths={a: x/a, a-2: y/a}". '
        "Add -m to run each of them, or --array to a Slurm job."
    )
    assert _refused_sweep("data.text=a,b")[1][0].new == ("data.text=[a,b]",)
    assert _refused_sweep("a=range(3)")[0].endswith("Add -m to run each of them, or --array to a Slurm job.")


def test_several_datasets_or_texts_get_one_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line for each would set one key twice."""
    monkeypatch.chdir(tmp_path)
    for name in ("a.idx", "b.idx", "a.txt", "b.txt"):
        (tmp_path / name).touch()
    here = f"{tmp_path}/a"
    assert _said("model=gpt_tiny", "a", "b") == (
        "'a', 'b' are datasets, not settings. To mix them in one run, as much of each as there is, type "
        'data=blend "data.datasets=[{path: a, epochs: 1}, {path: b, epochs: 1}]".'
    )
    assert _said(here) == f"{here!r} is a dataset. Write data.path={here}."
    assert _said("a.txt", "b.txt") == (
        "'a.txt', 'b.txt' are no settings. To train on the texts in them, write \"data.text=[a.txt,b.txt]\"."
    )
    assert "To mix them in one run, as much of each as there is, type data=blend" in _said("data.path=a", "data.path=b")


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("train.steps=+200", "train.steps=+200 is not 200 more, since train.steps is the length of the whole run. "
         "Give 200 for so many in all; for 200 more, add the number that `lmtrain config explain train.steps"),
        ("train.tokens=+2k", "train.tokens=+2k is not 2k more"),
        ("eval.interval_steps=+5", "has +5, but nothing can be added to a value. Write eval.interval_steps=5."),
        ("train={steps: +20}", 'has +20, but nothing can be added to a value. Write "train={steps: 20}".'),
        ("data.split=[9, +1]", 'Write "data.split=[9, 1]".'),
        ("optim.lr=+1e-3,+2e-3", "Write optim.lr=1e-3,+2e-3."),
    ],
)  # fmt: skip
def test_a_number_with_a_plus_is_not_read_as_the_number(word: str, says: str) -> None:
    assert says in _said(word)


@pytest.mark.parametrize(
    "word", ["run.dir=a+20", "run.dir='+20'", "run.dir='it\\'s, +2]'", "optim.eps=1e+3", "+optim.lr=1", "a=[b+1]"]
)
def test_a_plus_elsewhere_is_not_refused(word: str) -> None:
    assert parse_overrides([word], GROUPS)
