"""`lmtrain corpus` by its words: every step, in one task and in several, and its refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benchmarks.data_corpora import write_planted
from tests.cli.harness import lmtrain
from tests.unit.data_tools.corpus_files import read_jsonl, write_jsonl


def corpus(*words: object) -> str:
    return lmtrain("corpus", *words)


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    write_planted(tmp_path / "in.jsonl", 250, seed=4)
    return tmp_path / "in.jsonl"


def test_a_chain_of_steps_says_what_each_did(tmp_path: Path, planted: Path) -> None:
    clean, unique, honest = (tmp_path / f"{name}.jsonl" for name in ("clean", "unique", "honest"))
    (tmp_path / "eval.txt").write_text(" ".join(read_jsonl(planted)[0]["text"].split()[5:25]))
    said = corpus("clean", planted, "--output", clean, "--rule", "min_words=10", "--workers", 1)
    assert "clean: 250 documents" in said
    said = corpus("dedupe", clean, "--output", unique, "--workers", 1)
    assert "near copy" in said
    assert "exact copy" in said
    against = ["--against", tmp_path / "eval.txt", "--action", "drop"]
    assert "- 1 contaminated" in corpus("decontaminate", unique, "--output", honest, *against, "--workers", 1)
    corpus("shuffle", honest, "--output", tmp_path / "mixed.jsonl", "--seed", 5, "--memory", "1MiB")
    assert "to train" in corpus("split", tmp_path / "mixed.jsonl", "--output", tmp_path / "s", "--workers", 1)
    corpus("sample", honest, "--output", tmp_path / "few.jsonl", "--count", 9, "--workers", 1)
    assert len(read_jsonl(tmp_path / "few.jsonl")) == 9
    total = sum(len(read_jsonl(path)) for path in (tmp_path / "s").glob("*.jsonl"))
    assert total == len(read_jsonl(honest)) == len(read_jsonl(unique)) - 1


def test_tasks_of_an_array_come_to_the_same(tmp_path: Path, planted: Path) -> None:
    work, many = tmp_path / "work", tmp_path / "many.jsonl"
    corpus("dedupe", planted, "--output", tmp_path / "one.jsonl", "--workers", 1)
    parts = [f"{i}/3" for i in range(3)]
    for part in parts:
        corpus("sign", planted, "--work", work, "--part", part, "--workers", 1)
    corpus("match", "--exact", "--work", work)
    for part in parts:
        corpus("match", "--work", work, "--part", part)
    assert "near copies" in corpus("join", "--work", work, "--parts", 3)
    for part in parts:
        corpus("drop", planted, "--work", work, "--output", many, "--part", part, "--workers", 1)
    assert "joined 3 parts" in corpus("merge", many)
    assert many.read_bytes() == (tmp_path / "one.jsonl").read_bytes()


def test_a_known_corpus_from_a_local_file(tmp_path: Path) -> None:
    (tmp_path / "lambada_test.txt").write_text("one passage\nanother passage\n")
    assert "* 2 to test" in corpus("get", "lambada", tmp_path / "lambada_test.txt", "--output", tmp_path / "out")
    assert [row["text"] for row in read_jsonl(tmp_path / "out" / "test.jsonl")] == ["one passage", "another passage"]
    assert "wikitext103: WikiText-103" in corpus("list")
    assert "min_words=50  at least  (gopher)" in corpus("rules")


def test_a_recipe_runs_whole(tmp_path: Path, planted: Path) -> None:
    recipe = {"inputs": [str(planted)], "output": str(tmp_path / "out"), "dedupe": {}, "split": {}}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    said = corpus("build", tmp_path / "recipe.yaml", "--workers", 1)
    steps = [line.split(":")[0] for line in said.splitlines() if " documents (" in line]
    assert steps == ["dedupe", "shuffle", "split"]
    assert (tmp_path / "out" / "train.jsonl").exists()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["get", "wikitext", "--output", "out"], 2, "Did you mean wikitext103"),
        (["get", "lambada", "--output", "out", "--offline"], 2, "--offline was given"),
        (["clean", "absent.jsonl", "--output", "out.jsonl"], 66, "absent.jsonl does not exist"),
        (["clean", "in.jsonl", "--output", "out.jsonl", "--rule", "min_word"], 2, "Did you mean min_words"),
        (["clean", "in.jsonl", "--output", "out.jsonl", "--part", "4/4"], 2, "--part=4/4 is not a part"),
        (["clean", "in.jsonl", "--output", "out.jsonl", "--on-error", "go"], 2, "--on-error=go"),
        (["dedupe", "in.jsonl", "--output", "out.jsonl", "--threshold", "2"], 2, "dedupe.threshold=2.0"),
        (["split", "in.jsonl", "--output", "out", "--ratios", "a,b"], 2, "--ratios=a,b are not numbers"),
        (["shuffle", "in.jsonl", "--output", "o.jsonl", "--memory", "much"], 2, "--memory much is not a size"),
        (["drop", "in.jsonl", "--output", "out.jsonl", "--work", "w"], 66, "corpus sign"),
        (["merge", "nothing.jsonl"], 66, "has no parts"),
        (["fetch", "http://example.org/x", "--sha256", "0" * 64, "--output", "x"], 2, "not an https address"),
    ],
)
def test_a_refusal_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], code: int, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "in.jsonl", [{"text": "some text"}])
    assert said in " ".join(lmtrain("corpus", *words, code=code).split())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl"]
