"""`lmtrain corpus` by its words: every step, in one task and in several, and its refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benchmarks.data_corpora import write_planted
from tests.cli.harness import lmtrain
from tests.unit.data_tools.corpus_files import read_jsonl, write_jsonl


def corpus(*words: object, code: int = 0) -> str:
    return lmtrain("corpus", *words, code=code)


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


@pytest.mark.wide
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
    (tmp_path / "wiki.test.raw").write_text(" \n = One = \n \n Words . \n")
    said = corpus("get", "wikitext103_raw", tmp_path / "wiki.test.raw", "--output", tmp_path / "out")
    assert "* 1 to test" in said
    assert [row["title"] for row in read_jsonl(tmp_path / "out" / "test.jsonl")] == ["One"]
    assert "wikitext103_raw: WikiText-103" in corpus("list")
    assert "min_words=50  at least  (gopher)" in corpus("rules")


def test_evaluation_texts_from_a_folder(tmp_path: Path, shared_data: Path) -> None:
    listed = corpus("list")
    for name, files in (
        ("wikitext103", ["wiki.test.tokens", "wiki.valid.tokens"]), ("lambada", ["lambada_test.jsonl"]),
        ("lambada_standard", ["lambada_test_plain_text.txt", "lambada_development_plain_text.txt"]),
    ):  # fmt: skip
        said = corpus("get", name, shared_data, "--output", tmp_path, "--offline")
        assert [line.split(": from ")[0] for line in said.splitlines()] == [f"{tmp_path / file}" for file in files]
        assert f"brings {' and '.join(files)} for" in listed
    said = corpus("get", "wikitext103", tmp_path / "wiki.test.tokens", "--output", tmp_path / "out")
    assert f"{tmp_path / 'out' / 'wiki.valid.tokens'}: not among what was given" in said.splitlines()


def test_evaluation_texts_that_are_not_there_are_described_line_by_line(tmp_path: Path) -> None:
    said = corpus("get", "wikitext103", "--output", tmp_path / "texts", "--offline", code=2)
    for line in (
        "error: wikitext103 was not fetched: --offline was given. Bring it by other means:",
        "  wiki.test.tokens, 1,281,077 bytes, SHA-256 56db52eb157b1ab5c89646eef70510c1eca6e12a3bfdb99f0d6b05b4eacb75b9",
        "    https://wikitext.smerity.com/wikitext-103-v1.zip",
        f"  lmtrain corpus get wikitext103 --output {tmp_path / 'texts'}",
    ):
        assert line in said.splitlines()
    (tmp_path / "lambada_test.jsonl").write_text('{"text": "cut off"}\n')
    said = corpus("get", "lambada", tmp_path, "--output", tmp_path / "texts", code=65)
    assert "is damaged or another text: it has 20 bytes" in said
    assert "  lambada_test.jsonl, 1,819,752 bytes, SHA-256 4aa8d02cd17c719165fc8a7887fddd641f43fcafa4b1c8" in said
    assert [path.name for path in tmp_path.iterdir()] == ["lambada_test.jsonl"]


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
        (["get", "wikitext1", "--output", "out"], 2, "Did you mean wikitext"),
        (["get", "lambada", "--output", "out", "--offline"], 2, "--offline was given"),
        (["clean", "absent.jsonl", "--output", "out.jsonl"], 66, "absent.jsonl does not exist"),
        (["clean", "in.jsonl", "--output", "out.jsonl", "--rule", "min_word"], 2, "Did you mean min_words"),
        (["clean", "in.jsonl", "--output", "out.jsonl", "--part", "4/4"], 2, "--part=4/4 is not a part"),
        (["clean", "in.jsonl", "--output", "out.jsonl", "--on-error", "go"], 2, "--on-error go"),
        (["dedupe", "in.jsonl", "--output", "out.jsonl", "--threshold", "2"], 2, "dedupe.threshold=2.0"),
        (["split", "in.jsonl", "--output", "out", "--ratios", "a,b"], 2, "--ratios=a,b is not a list of numbers"),
        (["shuffle", "in.jsonl", "--output", "o.jsonl", "--memory", "much"], 2, "--memory cannot be used: much is not"),
        (["drop", "in.jsonl", "--output", "out.jsonl", "--work", "w"], 66, "corpus sign"),
        (["sign", "in.jsonl", "--work", "w", "--workers", "0"], 2, "--workers=0 must be at least 1"),
        (["merge", "nothing.jsonl"], 66, "has no part files"),
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


@pytest.mark.parametrize("words", [("dedupe", "--output"), ("sign", "--work"), ("sample", "--count", 1, "--output")])
def test_a_step_that_reads_twice_does_not_offer_standard_input(tmp_path: Path, words: tuple[object, ...]) -> None:
    said = lmtrain("corpus", words[0], "-", *words[1:], tmp_path / "out.jsonl", code=2)
    assert "Standard input can be read only once, but this step reads its input twice. Give files." in said
    text = " ".join(lmtrain("corpus", words[0], "--help").split())
    assert "not standard input" in text or "not from standard input" in text
    assert ("- for standard input" in text) == (words[0] == "sample"), "with --fraction it reads once"
