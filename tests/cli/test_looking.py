"""What a person sees after a run and of its data: inspect, data show, a text that is one document, inputs by name."""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import json
import os
import pty
import re
import signal
import socket
import struct
import subprocess
import sys
import termios
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmtrain.data.store.indexed_dataset import IndexedDataset
from lmtrain.observe.metrics import read_metrics
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer
from lmtrain.units import format_bytes
from tests.cli.harness import Toy, lmtrain, on_terminal


@pytest.fixture(scope="module")
def run(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("looked") / "run"
    lmtrain("pretrain", *toy.settings(folder, train__valid_interval_steps=4, train__valid_samples=5))
    return folder


def test_a_run_in_sixteen_lines(run: Path) -> None:
    title, *lines = lmtrain("inspect", run).splitlines()
    assert title == f"run {run}"
    facts = {line[:15].rstrip(): line[16:] for line in lines}
    assert max(len(line) for line in lines if not line.startswith("data")) <= 80
    assert len(lines) <= 16
    assert re.fullmatch(r"finished [\d.msh]+ ago", facts["state"])
    assert facts["step"] == "12 of 12 (100%)"
    assert re.fullmatch("[▁-█]{12}", facts["curve"])
    assert re.match(r"\d\.\d{4} at step (4|8|12), perplexity [\d.]+ a token, accuracy ", facts["best validation"])
    assert facts["saved"].startswith("step_00000012 and 1 older: ")
    assert facts["model"].startswith("gpt, ")
    assert re.fullmatch(r"torch \S+ on \S+ at \d{4}-\d\d-\d\dT\d\d:\d\d; environment.json", facts["environment"])
    assert "seq_len" not in "".join(lines)
    everything = lmtrain("inspect", run, "--all")
    sizes = json.loads(lmtrain("inspect", run, "--json"))["checkpoint_bytes"]
    assert all(re.search(rf"{name} +{format_bytes(size)}", everything) for name, size in sizes.items())
    assert "step_00000008" in everything
    assert "warmup_steps: 2" in everything


def test_the_facts_of_a_run_for_a_program(run: Path) -> None:
    facts = json.loads(lmtrain("inspect", run, "--json"))
    valid = [row for row in read_metrics(run / "metrics.jsonl") if row["event"] == "valid"]
    assert facts["best_validation"] == min(valid, key=lambda row: row["loss"])
    assert (facts["state"], facts["steps"], facts["last_save"]["saved_step"]) == ("finished", 12, 12)
    assert facts["parameters"] > 10_000
    assert "losses" not in facts


def test_two_starts_from_nothing_are_two(toy: Toy, tmp_path: Path) -> None:
    short = {"train__steps": 2, "schedule__warmup_steps": 0, "checkpoint__interval_steps": "null"}
    for _ in range(2):
        lmtrain("pretrain", *toy.settings(tmp_path / "run", **short))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["attempt"]) for row in rows if row["event"] == "step"] == [(1, 1), (2, 1), (1, 2), (2, 2)]
    facts = json.loads(lmtrain("inspect", tmp_path / "run", "--json"))
    last = [row["elapsed_s"] for row in rows if row["event"] == "step" and row["step"] == 2]
    assert (facts["starts"], facts["elapsed_s"]) == (2, pytest.approx(sum(last)))


def test_a_run_of_an_older_version_is_read(run: Path, tmp_path: Path) -> None:
    """Rows without a time, settings that nobody knows any more, no stop.json and no lock."""
    old = tmp_path / "old"
    old.mkdir()
    settings = json.loads((run / "config.json").read_text()) | {"gone": 1}
    (old / "config.json").write_text(json.dumps(settings))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [json.dumps({key: value for key, value in row.items() if key != "time"}) for row in rows]
    (old / "metrics.jsonl").write_text("\n".join(kept) + "\n")
    text = lmtrain("inspect", old)
    assert re.search(r"killed .* ago \(it left no stop.json\)", text)
    assert "12 of 12" in text
    assert "no checkpoint" in text


@pytest.mark.parametrize(("holder", "state"), [("n1", "killed"), ("gpu-n1", "out of sight"), ("n12", "out of sight")])
def test_of_a_run_on_another_machine_it_is_not_said_that_it_was_killed(
    holder: str, state: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "n1")
    for name in ("metrics.jsonl", "config.json"):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    (tmp_path / ".lock").write_text(f"process 123 on {holder}\n")
    facts = json.loads(lmtrain("inspect", tmp_path, "--json"))
    assert (facts["state"], facts["process"]) == (state, f"process 123 on {holder}")


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("stop.json", '"done"', "[]"), ("stop.json", "{", "[{"), ("metrics.jsonl", '"step":', '"steps":'),
        ("metrics.jsonl", '"loss": ', '"loss": "x", "was": '), ("config.json", '"model": {', '"model": 3, "was": {'),
    ],
)  # fmt: skip
def test_records_that_no_run_writes(run: Path, tmp_path: Path, file: str, old: str, new: str) -> None:
    for name in ("stop.json", "metrics.jsonl", "config.json"):
        text = (run / name).read_text()
        (tmp_path / name).write_text(text.replace(old, new, 1) + "]" * (new == "[{") if name == file else text)
    said = lmtrain("inspect", tmp_path, code=65) if new != "[]" else lmtrain("inspect", tmp_path)
    assert "Traceback" not in said
    assert "failed with exit code 0" in said if new == "[]" else str(tmp_path) in said


def test_a_run_that_has_nothing_left_to_do_draws_no_panel(toy: Toy, run: Path) -> None:
    settings = toy.settings(run, train__valid_interval_steps=4, train__valid_samples=5)
    shown = on_terminal("pretrain", *settings)
    assert re.search(r"nothing is left to do: \S+ is step 12 of 12", " ".join(shown.split()))
    assert "done: 12 steps" in shown
    assert "╭" not in shown
    assert max(map(len, shown.replace(str(run), "").splitlines())) <= 80


def test_a_checkpoint_in_the_words_of_its_run(run: Path) -> None:
    facts, of_run = (
        {line[:15].rstrip(): line[16:] for line in lmtrain("inspect", path).splitlines()}
        for path in (run / "checkpoints/step_00000012", run)
    )
    assert facts["model"] == re.sub(r" [^ ]+ parameters,|;.*", "", of_run["model"])
    assert re.fullmatch(r"[\d,]+ pieces, end token \d+, fingerprint [0-9a-f]{12}", facts["tokenizer"])
    assert facts["tokens"] == f"{12 * 4 * 32:,}"
    assert re.fullmatch(r"[\d.]+ KiB in 3 files, \d+ tensors with the optimizer's", facts["on disk"])


def test_settings_are_shown_as_one_types_them(run: Path) -> None:
    everything = lmtrain("inspect", run, "--all")
    assert "tied: true" in everything
    assert "window: null" in everything


def test_rows_carry_the_time_of_day(run: Path) -> None:
    times = [datetime.fromisoformat(row["time"]) for row in read_metrics(run / "metrics.jsonl")]
    assert times == sorted(times)
    assert times[0].tzinfo is not None
    assert abs((datetime.now(UTC) - times[-1]).total_seconds()) < 3600


def test_saves_are_told_before_the_next_one(run: Path) -> None:
    rows = [row for row in read_metrics(run / "metrics.jsonl") if row["event"] == "save"]
    assert [row["saved_step"] for row in rows] == [4, 8, 12]
    assert all(row["step"] - row["saved_step"] <= 4 for row in rows)  # at the latest as the next one begins


def test_a_sample_as_the_model_saw_it(toy: Toy, run: Path) -> None:
    [row] = json.loads(lmtrain("data", "show", "--run", run, "--sample", 7, "--json"))
    dataset = IndexedDataset.open(toy.data)
    ids = dataset.tokens[7 * 32 : 8 * 32].tolist()
    assert row["ids"] == ids
    assert row["labels"] == dataset.tokens[7 * 32 + 1 : 8 * 32 + 1].tolist()
    assert row["text"] == Tokenizer.load(toy.tokenizer).decode(ids)
    named = lmtrain("data", "show", toy.data, "--sample", 7, *toy.settings(run)[1:])
    assert " ".join(map(str, ids)) in named
    assert f"sample 7 of {toy.data}: 32 tokens, 32 with a label" in named
    assert row["text"].splitlines()[-1] in named
    several = json.loads(lmtrain("data", "show", "--run", run, "--sample", "6-7", "--sample", 0, "--json"))
    assert [each["sample"] for each in several] == [6, 7, 0]
    assert several[1] == row


def test_documents_are_shown_by_the_same_verb(toy: Toy) -> None:
    shown = lmtrain("data", "show", toy.data, "--document", 1, "--most", 5, "--ids")
    assert shown == lmtrain("data", "decode", toy.data, 1, "--most", 5, "--ids")
    assert shown.splitlines()[1] == " ".join(map(str, IndexedDataset.open(toy.data).document(1)[:5].tolist()))
    drawn = lmtrain("data", "show", toy.data, "--random", 2, "--seed", 3, "--most", 9)
    assert drawn == lmtrain("data", "sample", toy.data, "-n", 2, "--seed", 3, "--most", 9)
    assert lmtrain("data", "sample", toy.data, "-n", 1, "--ids").count("\n") == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--sample", 10**9, "--run", "RUN"], "is not one of the"),
        (["--sample", f"0-{10**9}", "--run", "RUN"], "is not one of the"),
        (["--sample", "-1", "--run", "RUN"], "is not a number or a range of numbers. Give one such as 7 or 0-19."),
        (["DATA", "--sample", 1, "--document", 1], "Give only one of them"),
        (["DATA", "--run", "RUN"], "--run has an effect only with --sample NUMBER"),
        (["DATA", "--sample", 1, "--run", "RUN"], "Give --run alone"),
        (["DATA", "--document", 1, "--seed", 2], "--seed has an effect only with --random NUMBER"),
        (["--sample", 1], "PREFIX is missing"),
        (["DATA", "DATA"], "shows one dataset, but"),
        (["DATA", 3], "give its number: --document 3."),
    ],
)
def test_what_cannot_be_shown(toy: Toy, run: Path, words: list[object], said: str) -> None:
    given = [{"RUN": run, "DATA": toy.data}.get(str(word), word) for word in words]
    assert said in lmtrain("data", "show", *given, code=2)


@pytest.fixture(scope="module")
def one(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of one plain text."""
    folder = tmp_path_factory.mktemp("one")
    (folder / "book.txt").write_text("\n".join(path.read_text() for path in sorted(toy.text.iterdir())[:8]))
    lmtrain("preprocess", folder / "book.txt", "--tokenizer", toy.tokenizer, "--output", folder / "book")
    return folder / "book"


@pytest.mark.wide
def test_one_document_is_validated_on_its_tail(toy: Toy, one: Path, tmp_path: Path) -> None:
    settings = toy.settings(
        tmp_path / "run", data__path=one, train__valid_interval_steps=4, train__valid_samples=9, train__steps=8
    )
    plan = json.loads(lmtrain("pretrain", *settings, "--dry-run", "--json"))
    tokens = IndexedDataset.open(one).num_tokens
    tail = round(tokens * 0.02)
    assert f"the last {tail:,} of {tokens:,} tokens" in plan["validation"]
    assert plan["training_samples"] == (tokens - tail - 1) // 32
    output = lmtrain("pretrain", *settings)
    assert f"validation reads the last {tail:,} of" in output
    rows = read_metrics(tmp_path / "run/metrics.jsonl")
    assert [row["step"] for row in rows if row["event"] == "valid"] == [4, 8]
    assert "at step 8" in lmtrain("pretrain", *settings, "train.steps=9")
    refused = lmtrain("pretrain", *settings, "train.steps=10", "train.valid_interval_steps=0", code=65)
    assert f"data: held_out_tokens is 0, and was {tail}" in refused


def test_documents_drawn_by_a_seed(toy: Toy, tmp_path: Path) -> None:
    dataset = IndexedDataset.open(toy.data)

    def parts(seed: int) -> list[list[tuple[int, ...]]]:
        outputs = [tmp_path / f"{name}{seed}" for name in ("train", "heldout")]
        lmtrain("data", "split", toy.data, "--shares", "8,2", "--seed", seed, "--overwrite",
                *(word for output in outputs for word in ("--output", output)))  # fmt: skip
        made = [IndexedDataset.open(output) for output in outputs]
        return [[tuple(one.document(i).tolist()) for i in range(one.num_documents)] for one in made]

    whole = [tuple(dataset.document(i).tolist()) for i in range(dataset.num_documents)]
    train, heldout = parts(1)
    assert sorted(train + heldout) == sorted(whole)
    assert len(heldout) == pytest.approx(0.2 * len(whole), abs=1)
    places = [whole.index(document) for document in heldout]
    assert places == sorted(places)
    assert np.ptp(places) > len(whole) / 2  # not the tail
    assert parts(1) == [train, heldout] != parts(2)


def test_a_model_of_another_program_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    for path, is_file in ((tmp_path, ""), (tmp_path / "model.safetensors", "a file of ")):
        said = " ".join(lmtrain("inspect", path, "--all", code=66).split())
        assert f"is {is_file}a Hugging Face folder with a model of the type gpt2 (1 tensor, " in said
        assert f"`lmtrain import {tmp_path} --output DIR`" in said


def test_a_second_tokenizer_is_not_counted_as_a_text(toy: Toy, tmp_path: Path) -> None:
    (tmp_path / "bert-vocab.txt").write_text("[PAD]\n[UNK]\nthe\n")
    (tmp_path / "notes.txt").write_text("the end")
    words = ("tokenizer", "show", toy.tokenizer, tmp_path / "bert-vocab.txt", "--data", tmp_path / "notes.txt")
    assert "is a tokenizer, which would be counted as a text" in lmtrain(*words, code=2)


def test_what_a_folder_holds_besides_is_named_by_every_verb(toy: Toy, tmp_path: Path) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.txt.gz").write_bytes(gzip.compress(b"some words to learn from, some words to read\n" * 40))
    (folder / "notes.md").write_text("and more of them\n" * 40)
    said = "1 file left out (.md). Add --suffix .md to read it as text."
    made = ["--output", tmp_path / "out"]
    few = lmtrain("tokenizer", "train", folder, "--vocab-size", "4k", "--output", tmp_path / "tokenizer")
    assert said in few
    assert "pieces; the text has no more of the 4,000 that were asked for, fingerprint" in few
    assert said in lmtrain("preprocess", folder, "--tokenizer", toy.tokenizer, *made)
    assert said in lmtrain("corpus", "split", folder, "--output", tmp_path / "split", "--workers", 1)
    lmtrain("preprocess", folder / "notes.md", "--format", "txt", "--tokenizer", toy.tokenizer, *made, "--overwrite")
    assert IndexedDataset.open(tmp_path / "out").num_documents == 1
    refused = lmtrain("preprocess", folder / "notes.md", "--tokenizer", toy.tokenizer, *made, code=2)
    assert "If it is text, add --format txt; if it has lines of JSON, --format jsonl." in refused
    refused = lmtrain("corpus", "clean", folder, "--output", tmp_path / "c.jsonl", "--format", "txt", code=2)
    assert f"the inputs have neither. Leave it out. {said}" in refused
    lmtrain("preprocess", folder, "--suffix", ".md", "--tokenizer", toy.tokenizer, *made, "--overwrite")
    assert IndexedDataset.open(tmp_path / "out").num_documents == 2
    refused = lmtrain("preprocess", folder, "--key", "a", "--tokenizer", toy.tokenizer, *made, "--overwrite", code=2)
    assert "--key=a has no effect: all inputs are plain text" in refused
    refused = lmtrain("preprocess", folder, "--tokenizer", toy.tokenizer, "--output", tmp_path / "out.bin", code=2)
    assert f"Give the prefix {tmp_path / 'out'}." in refused


def test_any_input_is_evaluated(run: Path, tmp_path: Path) -> None:
    text = "def read(path: Path) -> str:\n"
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed/a.jsonl.gz").write_bytes(gzip.compress(json.dumps({"code": text}).encode()))
    words = ["eval", run, "--task", "perplexity", "--device", "cpu", "--json", "--data"]
    one = first_result(lmtrain(*words, tmp_path / "a.txt"))
    same = first_result(lmtrain(*words, tmp_path / "packed", "--key", "code"))
    assert one["nll_sum_nats"] == same["nll_sum_nats"]
    assert (one["num_bytes"], one["num_documents"]) == (same["num_bytes"], same["num_documents"]) == (len(text), 1)


@pytest.mark.wide
def test_a_run_on_a_terminal_gives_it_back_after_a_stop(toy: Toy, tmp_path: Path) -> None:
    host, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
    settings = toy.settings(tmp_path / "run", train__steps=100_000, checkpoint__interval_steps=20)
    process = subprocess.Popen(
        [sys.executable, "-m", "lmtrain.cli.main", "pretrain", *settings],
        stdout=terminal, stderr=terminal, env={**os.environ, "TERM": "xterm-256color", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    os.close(terminal)
    seen, asked = b"", False
    awaited = (b"last save", b"saved step 20", b"Ctrl-C stops after a step")
    with contextlib.suppress(OSError):  # Linux says EIO at the end
        while chunk := os.read(host, 1 << 16):
            seen += chunk
            if not asked and all(words in seen for words in awaited):
                process.send_signal(signal.SIGINT)
                asked = True
    os.close(host)
    assert process.wait(60) == 75
    shown = seen.decode(errors="replace")
    assert asked
    assert shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l") >= 0  # the cursor is shown again
    *_, panel = shown.split("╭─")
    assert panel.count("╰─") == 1  # the last one is whole, and what is said comes behind it
    plain = re.sub(r"\s+", "", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", panel.split("╰─")[1]))
    assert "Runthesamecommandagaintogoon." in plain
    assert "Ctrl-C" not in plain


def first_result(output: str) -> dict[str, Any]:
    """Lines of progress, where the machine is slow, stand before the JSON."""
    result: dict[str, Any] = json.loads(output[output.index("{") :])["results"][0]
    return result


def test_a_tokenizer_splits_text_as_the_model_that_is_named(toy: Toy, tmp_path: Path) -> None:
    made, sizes = tmp_path / "tokenizer", ["--vocab-size", 300]
    lmtrain("tokenizer", "train", toy.text, "--output", made, *sizes, "--pattern", "qwen2")
    tokenizer = Tokenizer.load(made)
    assert [tokenizer.piece(token) for token in tokenizer.encode("2024")] == ["2", "0", "2", "4"]
    text, data = tmp_path / "a.txt", tmp_path / "data"
    text.write_text("The cafe\u0301 of 2024")
    lmtrain("preprocess", text, "--tokenizer", made, "--output", data)
    ids = tokenizer.encode("The caf\u00e9 of 2024")
    assert IndexedDataset.open(data).document(0).tolist() == [*ids, tokenizer.eod_id]
    refused = lmtrain(
        "tokenizer", "train", toy.text, "--output", made, *sizes, "--pattern", "qwen2", "--kind", "wordpiece", code=2
    )
    assert "--pattern works only with --kind bpe: WordPiece splits text as BERT does. Leave it out." in refused
