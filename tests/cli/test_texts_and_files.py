"""Options that take a text refuse the name of a file; many prompts and many files are each as one alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.harness import Toy, lmtrain


@pytest.fixture
def note(tmp_path: Path) -> Path:
    path = tmp_path / "my note.txt"
    path.write_bytes(b"\xef\xbb\xbfThe old house\n\nby the river \n\n")
    return path


def test_the_name_of_a_file_is_no_text(toy: Toy, note: Path) -> None:
    said = lmtrain("generate", "no_run", "--prompt", note, code=2)
    assert f"--prompt takes a text, but {note} is the name of a file" in said
    assert f'Type --prompt-file "{note}"' in said
    said = lmtrain("tokenizer", "show", toy.tokenizer, note, code=2)
    assert f'Type --data "{note}"' in said


def test_two_prompts_and_two_texts_are_refused(toy: Toy, note: Path) -> None:
    said = lmtrain("generate", "no_run", "--prompt", "x", "--prompt-file", note, code=2)
    assert f"--prompt and --prompt-file {note} both give the text" in said
    assert "takes one text, and there are 2" in lmtrain("tokenizer", "show", toy.tokenizer, "a", "text", code=2)


def test_a_wrong_seed_is_refused_before_the_model_is_looked_for() -> None:
    said = lmtrain("generate", "no_run", "--prompt", "x", "--seed", 2**32 - 1, "--num-samples", 2, code=2)
    assert "seed=4294967296 is not a whole number from 0 to 4294967295" in said


def test_tokens_of_files_are_counted_by_file_and_together(toy: Toy, note: Path, tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"body": "one"}\n{"body": "two two"}\n')
    words = ("tokenizer", "show", toy.tokenizer, "--data", lines, note, "--key", "body")  # as the shell writes out *
    said = lmtrain(*words, "--json")
    found = json.loads(said[said.index("{") :])["data"]
    assert [(row["file"], row["documents"], row["bytes"]) for row in found["files"]] == [
        (str(lines), 2, 10), (str(note), 1, 30)
    ]  # fmt: skip
    assert found["total"]["tokens"] == sum(row["tokens"] for row in found["files"])
    total = next(line.split() for line in lmtrain(*words).splitlines() if line.split()[:1] == ["total"])
    assert total[1:4] == ["3", "40", "40"]
    said = lmtrain("tokenizer", "show", toy.tokenizer, "note", "--split", "line", code=2)
    assert "--split has no effect with a tokenizer without --data" in said


@pytest.mark.wide
def test_many_prompts_are_continued_as_each_alone(toy: Toy, tmp_path: Path) -> None:
    run, prompts, output = tmp_path / "run", tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    lmtrain("pretrain", *toy.settings(run, train__steps=3))
    prompts.write_text("The house\nA river\nThe house\n")
    words = "generate", run, "--max-new-tokens", 5, "--num-samples", 2, "--device", "cpu"
    alone = json.loads(lmtrain(*words, "--prompt", "A river", "--json"))
    together = json.loads(lmtrain(*words, "--prompts", prompts, "--json"))
    assert [each["prompt"] for each in together["prompts"]] == ["The house", "A river", "The house"]
    assert together["prompts"][1]["samples"] == alone["samples"]
    said = lmtrain(*words, "--prompts", prompts)
    assert said.startswith("--- prompt 1 of 3, sample 1 of 2, seed 0\nThe house")
    assert "\n\n--- prompt 2 of 3, sample 2 of 2, seed 1\nA river" in said
    assert f"6 continuations, 30 tokens -> {output}\n" in lmtrain(*words, "--prompts", prompts, "--output", output)
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert rows[2:4] == [{"prompt": "A river"} | sample for sample in alone["samples"]]
    assert "are continued as one prompt" in lmtrain(*words, "--prompt-file", prompts)
    assert "--output=" in lmtrain(*words, "--prompts", prompts, "--output", prompts / "out.jsonl", code=73)
    refused = lmtrain(*words, "--prompts", prompts, "--prompt", "x", code=2)
    assert f"--prompt and --prompts {prompts} both give the text to continue" in refused
