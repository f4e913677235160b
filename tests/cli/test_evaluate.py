"""`lmtrain eval` and `lmtrain generate` on a run that the command line has made."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from data_tools.read.find_input_files import find_sources
from lmtrain.cli.main import app
from lmtrain.errors import LmtrainError
from lmtrain.start.evaluation.tasks_and_texts import read_texts
from tests.cli.harness import Toy, lmtrain

PROMPT = "def read(path):\n\n    "  # what it goes on from ends with spaces


@pytest.fixture(scope="module")
def run(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluated") / "run"
    lmtrain("pretrain", *toy.settings(folder, train__steps=30, checkpoint__interval_steps=30))
    return folder


@pytest.fixture(scope="module")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "held.jsonl"
    path.write_text('{"text": "def read(path):"}\n{"text": "the number of it"}\n')
    return path


def call(*arguments: object, typed: str = "") -> str:
    """The verb in this process, which is quick; its errors are raised as they are."""
    torch.set_num_threads(1)
    result = CliRunner().invoke(app, [str(a) for a in arguments], input=typed)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def evaluation(*arguments: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(call("eval", *arguments, "--device", "cpu", "--json"))
    return found


def test_a_text_with_baselines_as_a_user_types_it(toy: Toy, run: Path, held_out: Path, tmp_path: Path) -> None:
    output, samples = tmp_path / "e.json", tmp_path / "s.jsonl"
    asked = ("--task", "perplexity", "--data", held_out, "--baseline", toy.data)
    shown = lmtrain("eval", run, *asked, "--output", output, "--samples", samples)
    document = json.loads(output.read_text())
    (result,) = document["results"]
    assert document["model"]["step"] == 30
    assert document["complete"] is True
    assert [row["name"] for row in result["baselines"]] == ["unigram", "bigram (Witten-Bell)"]
    assert f"{result['measures']['token_perplexity']:,.2f}" in shown
    assert result["text_sha256"][:12] in shown
    assert result["num_bytes"] == 15 + 16
    expected = math.exp(result["nll_sum_nats"] / result["num_targets"])
    assert result["measures"]["token_perplexity"] == pytest.approx(expected)
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    assert [row["text"].partition(">")[2] for row in rows] == [
        "def read(path):",
        "the number of it",
    ]
    assert sum(row["nll"] for row in rows) == pytest.approx(result["nll_sum_nats"])
    compared = lmtrain("eval", "--compare", output, output)
    assert "bits_per_byte" in compared
    assert sorted(path.name for path in tmp_path.iterdir()) == ["e.json", "s.jsonl"]  # no journal is left


def test_a_text_and_the_dataset_made_from_it_give_the_same_number(toy: Toy, run: Path, tmp_path: Path) -> None:
    text = toy.text / "page_000.txt"
    lmtrain("preprocess", text, "--tokenizer", toy.tokenizer, "--output", tmp_path / "set")
    sources = (text, tmp_path / "set")
    ours, theirs = (
        evaluation(run, "--task", "perplexity", "--data", source, "--stride", 32)["results"][0] for source in sources
    )
    for key in ("nll_sum_nats", "num_targets", "num_bytes", "num_documents", "stride"):
        assert ours[key] == theirs[key]
    assert ours["measures"]["token_perplexity"] < 0.8 * 400  # better than a uniform guess


def test_several_tasks_each_with_its_file(run: Path, held_out: Path, tmp_path: Path) -> None:
    (tmp_path / "wiki.test.tokens").write_text(" = Mill = \n \n The mill 's wheel was old . \n ")
    names = ["wikitext103/megatron-o32", "lambada/megatron-strict"]
    pairs = zip(names, [tmp_path / "wiki.test.tokens", held_out], strict=True)
    document = evaluation(run, *(word for name, path in pairs for word in ("--task", name, "--data", path)))
    wiki, lambada = document["results"]
    assert wiki["protocol"] == f"{names[0]}-s{wiki['seq_len']}"  # no model of 1,024 tokens, as the published ones were
    assert lambada["protocol"] == names[1]
    assert wiki["num_words"] == len(["=", "Mill", "=", "\n", "\n", "The", "mill", "'s", "wheel", "was", "old", "."])
    assert lambada["num_documents"] == 2
    assert wiki["notes"]["text_is_not_the_published"] == "wiki.test.tokens"
    assert lambada["notes"]["text_is_not_the_published"] == "lambada_test.jsonl"
    assert "NOT OF lambada_test.jsonl AS PUBLISHED" in lmtrain("eval", run, "--task", names[1], "--data", held_out)


def test_a_window_is_chosen_by_an_option_or_by_an_id(run: Path, held_out: Path) -> None:
    chosen, named, whole = (
        evaluation(run, "--task", task, "--data", held_out, *more)["results"][0]
        for task, more in (("perplexity", ("--seq-len", 4)), ("perplexity-s4", ()), ("perplexity", ()))
    )
    assert chosen["nll_sum_nats"] == named["nll_sum_nats"] != whole["nll_sum_nats"]
    assert chosen["protocol"] == named["protocol"] == "perplexity-s4"
    assert (chosen["seq_len"], whole["protocol"]) == (4, "perplexity")


def asked(*texts: Path) -> list[object]:
    return [word for text in texts for word in ("--task", "perplexity", "--data", text)]


def test_answers_of_a_call_that_failed_are_not_taken_over_in_another_precision(
    run: Path, held_out: Path, tmp_path: Path
) -> None:
    output, later = tmp_path / "r.json", tmp_path / "later.jsonl"
    later.write_text('{"no": "text"}\n')
    with pytest.raises(LmtrainError, match="later"):
        evaluation(run, *asked(held_out, later), "--output", output)
    in_fp32 = json.loads(output.read_text())["results"][0]
    later.write_text(held_out.read_text())
    written = ("--output", output, "--overwrite")
    in_bf16 = evaluation(run, *asked(held_out, later), *written, "--precision", "bf16")["results"]
    alone = evaluation(run, *asked(held_out), "--precision", "bf16")["results"][0]
    assert {one["nll_sum_nats"] for one in in_bf16} == {alone["nll_sum_nats"]}
    assert in_fp32["nll_sum_nats"] != alone["nll_sum_nats"]


def test_results_of_several_texts_are_compared_text_by_text(run: Path, held_out: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text('{"text": "def write(path: Path) -> None:"}\n')
    files = tmp_path / "a.json", tmp_path / "b.json"
    for file, texts in zip(files, ((held_out, other), (other, held_out)), strict=True):
        evaluation(run, *asked(*texts), "--output", file, "--samples", file.with_suffix(".jsonl"))
    found = json.loads(call("eval", "--compare", *files, "--json"))["comparisons"]
    assert [one["data"] for one in found] == [str(held_out), str(other)]
    assert {one["differences"]["token_perplexity"]["difference"] for one in found} == {0.0}


def test_texts_of_several_files_are_known_by_their_documents(tmp_path: Path) -> None:
    found = []
    for number, documents in enumerate((["ab", "c"], ["a", "bc"])):
        (tmp_path / str(number)).mkdir()
        for name, document in zip("xy", documents, strict=True):
            (tmp_path / str(number) / f"{name}.txt").write_text(document)
        found.append(read_texts(find_sources([str(tmp_path / str(number))]), "text", lambda done: None).sha256)
    assert found == [hashlib.sha256(whole).hexdigest() for whole in (b"ab\0c\0", b"a\0bc\0")]


def test_batch_size_does_not_change_the_number(run: Path, held_out: Path) -> None:
    arguments = (run, "--task", "perplexity", "--data", held_out, "--stride", 3)
    sums = [evaluation(*arguments, "--batch-size", size)["results"][0]["nll_sum_nats"] for size in (1, 16)]
    assert sums[0] == pytest.approx(sums[1], rel=1e-6)


def test_the_list_names_every_task_with_its_file() -> None:
    tasks = json.loads(call("eval", "--list", "--json"))
    assert {"perplexity", "wikitext103/megatron-o32", "lambada/megatron-strict"} <= {task["id"] for task in tasks}
    assert all(task["data"] and task["recipe"] for task in tasks)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--task", "perplexty", "--data", "a.txt"], 2, "Did you mean perplexity?"),
        (["--task", "wikitext103"], 2, "Choose one of them: wikitext103/lmeval-2.0, wikitext103/megatron-o32."),
        (["--task", "perplexity"], 2, "Each --task needs its own --data, but 1 task and 0 --data options were given."),
        ([], 2, "No --task was given. Use --task perplexity for the loss on any text"),
        (["--task", "perplexity", "--data", "absent.txt"], 66, "--data=absent.txt does not exist"),
        (["--task", "perplexity", "--data", f"{__file__},{__file__}"], 2, "is several paths in one word"),
        (["--task", "lambada/megatron-strict", "--data", "absent", "--baseline", "b"], 2,
         "--baseline=b needs a task that scores whole documents"),
        (["--steps", "all", "--samples", "s"], 2, "--samples has no effect with --steps"),
        (["--compare", "a", "b"], 2, "CHECKPOINT has no effect with --compare of two checkpoints"),
        (["--output", "."], 73, "--output=. is a folder"),
        (["--output", "a/r.json", "--samples", "a/r.json"], 2, "Give two different files"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_loading(arguments: list[str], code: int, words: str) -> None:
    with pytest.raises(LmtrainError) as caught:
        call("eval", "no-such-checkpoint", *arguments)
    assert words in str(caught.value)
    assert caught.value.exit_code == code


def test_a_missing_checkpoint_is_an_error_and_no_traceback(held_out: Path) -> None:
    output = lmtrain("eval", "no-such-run", "--task", "perplexity", "--data", held_out, code=66)
    assert "no-such-run" in output
    assert "Traceback" not in output


def test_generate_writes_on_from_a_prompt_and_repeats_itself(run: Path) -> None:
    arguments = ("generate", run, "--max-new-tokens", 12, "--seed", 3, "--device", "cpu")
    first = call(*arguments, "--prompt", PROMPT)
    assert first.startswith(PROMPT)
    assert len(first) > len(f"{PROMPT}\n")
    assert call(*arguments, typed=f"{PROMPT}\n") == first  # the same prompt through a pipe
    assert call(*arguments[:4], "--seed", 4, "--device", "cpu", "--prompt", PROMPT) != first


def test_generate_gives_every_sample_its_own_seed(run: Path) -> None:
    arguments = ("generate", run, "--max-new-tokens", 40, "--device", "cpu", "--prompt", "x", "--json")
    samples = json.loads(call(*arguments, "--num-samples", 3, "--seed", 5))["samples"]
    assert [sample["seed"] for sample in samples] == [5, 6, 7]
    assert len({sample["text"] for sample in samples}) == 3
    alone = json.loads(call(*arguments, "--seed", 6))["samples"]
    assert alone == samples[1:2]
    assert all(sample["num_tokens"] <= 40 for sample in samples)  # longer than the model sees: the context is cropped


@pytest.mark.wide  # because: transformers is imported to compare the export
def test_generate_takes_a_hugging_face_folder(run: Path, tmp_path: Path) -> None:
    call("export", run, "--to", "hf", "--output", tmp_path / "hf")
    arguments = ("--max-new-tokens", 12, "--seed", 3, "--device", "cpu", "--prompt", PROMPT)
    assert call("generate", tmp_path / "hf", *arguments) == call("generate", run, *arguments)


def test_evaluating_leaves_a_run_as_it_was(run: Path, held_out: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    evaluation(run, "--task", "perplexity", "--data", held_out)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_a_dataset_of_another_tokenizer_is_refused(toy: Toy, run: Path, tmp_path: Path) -> None:
    text = toy.text / "page_000.txt"
    lmtrain("tokenizer", "train", text, "--output", tmp_path / "other", "--vocab-size", 300)
    lmtrain("preprocess", text, "--tokenizer", tmp_path / "other", "--output", tmp_path / "set")
    with pytest.raises(LmtrainError, match="was made with the tokenizer"):
        call("eval", run, "--task", "perplexity", "--data", tmp_path / "set", "--device", "cpu")
    assert np.fromfile(tmp_path / "set.bin", np.uint16).max() < 300  # every id would have been a known one


def test_a_window_and_its_stride_are_shortened_together(toy: Toy, tmp_path: Path) -> None:
    run = tmp_path / "run"
    lmtrain("pretrain", *toy.settings(run, train__steps=1, schedule__warmup_steps=0))
    words = ["eval", run, "--task", "perplexity", "--data", toy.data]
    said = lmtrain(*words, "--max_length", 2048, "--stride", 512, code=2)
    assert "A window of 2048 tokens is longer than the 32 positions" in said
    assert said.replace("\\\n", "").split()[-4:] == ["--seq-len", "32", "--stride", "8"]
