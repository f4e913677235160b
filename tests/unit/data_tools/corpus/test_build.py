"""All steps from one file: reports of each, a second run repeats only changed steps, wrong recipes are refused."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path

import pytest

from data_tools.corpus.build_from_yaml import (
    BuildSettings,
    CleanSettings,
    DedupeSettings,
    SplitSettings,
    build_corpus,
    read_recipe,
)
from lmtrain.errors import DataError, MissingInputError, OutputError, SettingsError
from tests.benchmarks.data_corpora import write_planted
from tests.unit.data_tools.corpus_files import read_jsonl, texts, write_jsonl

PASSAGE = "one upon two upon three upon four upon five upon six upon seven upon eight upon nine upon ten"


def recipe_of(folder: Path, **changes: object) -> BuildSettings:
    facts: dict[str, object] = {
        "inputs": [str(folder / "in")], "output": str(folder / "out"), "seed": 3,
        "clean": {"rules": ["min_words=20"]}, "dedupe": {"threshold": 0.75},
        "decontaminate": {"against": [str(folder / "eval.txt")], "action": "drop"},
        "split": {"ratios": [0.8, 0.1, 0.1]},
    }  # fmt: skip
    (folder / "recipe.yaml").write_text(json.dumps(facts | changes))  # JSON is YAML
    return read_recipe(folder / "recipe.yaml")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    write_planted(tmp_path / "in" / "a.jsonl", 150, seed=2)
    documents = read_jsonl(tmp_path / "in" / "a.jsonl")
    documents += [{"id": 1000, "kind": "short", "text": "far too short"}]
    documents += [{"id": 1001, "kind": "spoilt", "text": f"{documents[0]['text'][:300]} {PASSAGE}"}]
    write_jsonl(tmp_path / "in" / "a.jsonl", documents)
    (tmp_path / "eval.txt").write_text(PASSAGE)
    return tmp_path


def test_every_step_runs_and_reports(folder: Path) -> None:
    reports = build_corpus(recipe_of(folder))
    assert [report.step for report in reports] == ["clean", "dedupe", "decontaminate", "shuffle", "split"]
    assert reports[0].tally.dropped == {"min_words": 1}
    assert reports[1].tally.dropped.keys() == {"exact copy", "near copy"}
    assert reports[2].tally.dropped == {"contaminated": 1}
    for earlier, later in pairwise(reports):
        assert later.tally.num_in == earlier.tally.num_out
    found = {name: read_jsonl(folder / "out" / f"{name}.jsonl") for name in ("train", "valid", "test")}
    kinds = [row["kind"] for rows in found.values() for row in rows]
    assert len(kinds) == reports[-1].tally.num_out
    assert set(kinds) == {"original", "relative"}
    assert len(found["train"]) > len(found["valid"]) > 0
    assert [row["id"] for row in found["train"]] != sorted(row["id"] for row in found["train"])
    assert json.loads((folder / "out" / "report.json").read_text()) == [report.to_dict() for report in reports]


@pytest.mark.wide
def test_workers_change_nothing(folder: Path) -> None:
    build_corpus(recipe_of(folder))
    build_corpus(recipe_of(folder, output=str(folder / "two")), workers=2)
    for name in ("train.jsonl", "valid.jsonl", "test.jsonl", "report.json"):
        assert (folder / "out" / name).read_bytes() == (folder / "two" / name).read_bytes()


def test_a_second_run_repeats_only_changed_steps(folder: Path) -> None:
    first = build_corpus(recipe_of(folder))
    work = folder / "out" / "work"
    times = {path.name: path.stat().st_mtime_ns for path in work.glob("*.jsonl")}
    assert build_corpus(recipe_of(folder)) == []
    assert {path.name: path.stat().st_mtime_ns for path in work.glob("*.jsonl")} == times
    (work / "3-decontaminate.done.json").unlink()  # as after a kill in the middle of it
    assert build_corpus(recipe_of(folder), overwrite=True) == first
    changed = {name for name, at in times.items() if (work / name).stat().st_mtime_ns != at}
    assert changed == {"3-decontaminate.jsonl", "4-shuffle.jsonl"}
    (folder / "eval.txt").write_text("other words " * 20)
    with pytest.raises(OutputError, match="is there already"):
        build_corpus(recipe_of(folder))
    assert not build_corpus(recipe_of(folder), overwrite=True)[2].tally.dropped
    os.utime(folder / "in" / "a.jsonl", ns=(0, 0))
    build_corpus(recipe_of(folder), overwrite=True)
    assert (work / "1-clean.jsonl").stat().st_mtime_ns != times["1-clean.jsonl"]


def test_another_seed_is_another_order(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", [{"text": f"text {i}"} for i in range(20)])
    first, second = (BuildSettings(inputs=(str(path),), output=str(tmp_path / "out"), seed=seed) for seed in (1, 2))
    build_corpus(first)
    before = texts(tmp_path / "out" / "documents.jsonl")
    build_corpus(second, overwrite=True)
    after = texts(tmp_path / "out" / "documents.jsonl")
    assert before != after
    assert sorted(before) == sorted(after)


def test_a_share_of_scripts_is_the_recipes(tmp_path: Path) -> None:
    words, others = "some plain words of a longer text " * 10, "слова другого письма " * 10
    path = write_jsonl(tmp_path / "in.jsonl", [{"text": words}, {"text": words + others}])
    kept = []
    for share in (0.3, 0.99):
        clean = CleanSettings(rules=("min_words=5",), scripts=("latin",), min_script_share=share)
        build_corpus(BuildSettings(inputs=(str(path),), output=str(tmp_path / f"{share}"), clean=clean, shuffle=False))
        kept.append(len(texts(tmp_path / f"{share}" / "documents.jsonl")))
    assert kept == [2, 1]


def test_steps_without_settings_do_not_run(folder: Path) -> None:
    recipe = BuildSettings(inputs=(str(folder / "in"),), output=str(folder / "out"), shuffle=False)
    (report,) = build_corpus(recipe)
    assert report.step == "collect"
    before, after = read_jsonl(folder / "in" / "a.jsonl"), read_jsonl(folder / "out" / "documents.jsonl")
    assert after == before


WRONG = {
    "inputs is not set": "output: x",
    "not a setting. Did you mean dedupe": "{inputs: [a], output: x, dedup: {}}",
    "clean.min_script_share=2.0": "{inputs: [a], output: x, clean: {min_script_share: 2}}",
    "split.ratios": "{inputs: [a], output: x, split: {ratios: [0.5, 0.6]}}",
    "dedupe.threshold=0.0": "{inputs: [a], output: x, dedupe: {threshold: 0}}",
    "decontaminate.against is not set": "{inputs: [a], output: x, decontaminate: {}}",
    "on_error=ignore": "{inputs: [a], output: x, on_error: ignore}",
    "begins with a list": "- a",
    "inputs=[] names no file": "{inputs: [], output: x}",
}


@pytest.mark.parametrize(("said", "text"), WRONG.items(), ids=WRONG.keys())
def test_a_wrong_recipe_is_refused(tmp_path: Path, said: str, text: str) -> None:
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(SettingsError) as caught:
        read_recipe(tmp_path / "r.yaml")
    assert said in str(caught.value)


def test_a_recipe_is_data(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    for text in ("a: [", "!!python/object/apply:os.system ['true']", "\xff"):
        path.write_bytes(text.encode("latin-1"))
        with pytest.raises((DataError, SettingsError)):
            read_recipe(path)
    path.write_text("{inputs: [a], output: '${oc.env:HOME}'}")
    assert read_recipe(path).output == "${oc.env:HOME}"
    with pytest.raises(MissingInputError):
        read_recipe(tmp_path / "absent.yaml")


def test_wrong_settings_say_so() -> None:
    with pytest.raises(SettingsError, match=r"threshold=1\.5"):
        DedupeSettings(threshold=1.5)
    with pytest.raises(SettingsError, match="ratios"):
        SplitSettings(ratios=(1.0,))
