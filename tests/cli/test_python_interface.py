"""The Python interface beside the commands: the same results from a run, from its resharded copy, from its export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import lmtrain
from lmtrain.errors import UsageError
from tests.cli.harness import Toy
from tests.cli.harness import lmtrain as command
from tests.marks import wide

TEXT = "The quick brown fox"
TWO_STEPS = {"train__steps": 2, "schedule__warmup_steps": 0, "checkpoint__interval_steps": 0}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, toy: Toy) -> Path:
    folder = tmp_path_factory.mktemp("interface") / "run"
    command("pretrain", *toy.settings(folder, **TWO_STEPS))
    return folder


def without_origin_and_times(document: dict[str, Any]) -> dict[str, Any]:
    results = [{**result, "seconds": 0, "tokens_per_s": 0} for result in document["results"]]
    return {key: value for key, value in document.items() if key not in ("command", "made_from")} | {"results": results}


def test_an_evaluation_is_the_commands(run: Path, toy: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--baseline", toy.data, "--stride", 16, "--batch-size", 3, "--seq-len", 24, "--device", "cpu"]
    words = ["--task", "perplexity", "--data", toy.text, "--limit", 2, *options, "--json"]
    said = json.loads(command("eval", run, *words))
    found = lmtrain.evaluate(
        run, "perplexity", toy.text, baseline=toy.data, limit=2, stride=16, batch_size=3, seq_len=24, device="cpu"
    )
    assert without_origin_and_times(found) == without_origin_and_times(said)
    assert capsys.readouterr() == ("", ""), "a notebook's cell shows what its last line gives, and nothing else"


def test_what_the_command_refuses_is_refused(run: Path, toy: Toy) -> None:
    for wrong, message in (
        ({"task": "perplexit"}, "Did you mean perplexity"),
        ({"task": "masked-lm"}, "masked"),
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"dtype": "fp8"}, "dtype=fp8 is not a type"),
        ({"device": "tpu"}, "device=tpu is not a device"),
        ({"data": "-"}, "data=- is standard input"),
        ({"seq_len": 99}, "99"),
    ):
        with pytest.raises(UsageError, match=message):
            lmtrain.evaluate(**{"path": run, "task": "perplexity", "data": toy.text, "device": "cpu"} | wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("words", [["reshard", "tp=2,pp=2"], *wide(["export", "hf"])], ids=lambda words: words[0])
def test_a_copy_in_another_form_is_the_same_model(run: Path, tmp_path: Path, words: list[str]) -> None:
    verb, to = words
    command(verb, run, "--to", to, "--output", tmp_path / "copy")
    model, tokenizer = lmtrain.load(run, device="cpu")
    copy, its_tokenizer = lmtrain.load(tmp_path / "copy", device="cpu")
    ids = tokenizer.encode(TEXT)
    assert its_tokenizer.encode(TEXT) == ids
    assert copy.logits(ids).equal(model.logits(ids))
    assert copy.generate(TEXT, max_tokens=5) == model.generate(TEXT, max_tokens=5)


def test_a_text_is_the_commands(run: Path) -> None:
    asked = ["--max-new-tokens", 8, "--top-k", 30, "--seed", 3, "--device", "cpu", "--json"]
    said = json.loads(command("generate", run, "--prompt", TEXT, *asked))
    model, _ = lmtrain.load(run, device="cpu")
    assert model.generate(TEXT, max_tokens=8, top_k=30, seed=3) == said["samples"][0]["text"]


def test_the_runs_of_a_folder_are_the_commands(run: Path) -> None:
    runs = lmtrain.runs(run.parent)
    assert runs == json.loads(command("runs", "list", run.parent, "--json"))
    assert [(row["name"], row["state"], row["step"]) for row in runs] == [("run", "finished", 2)]


@pytest.mark.wide
def test_a_checkpoint_that_four_ranks_saved_is_the_evaluators_model(toy: Toy, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command("pretrain", *toy.settings(run, **TWO_STEPS, parallel__tp=2, parallel__pp=2), "--nproc", 4)
    model, tokenizer = lmtrain.load(run, device="cpu")
    assert (tmp_path / "text.txt").write_text(TEXT)
    said = json.loads(command("eval", run, "--task", "perplexity", "--data", tmp_path / "text.txt", "--json"))
    ids = [tokenizer.special["eod"], *tokenizer.encode(TEXT)]
    assert model.loss(ids) == said["results"][0]["measures"]["nll_per_token_nats"]

    import torch

    from lmtrain.batch import Batch
    from lmtrain.eval.load_model import load_for_eval

    tokens_BT = torch.tensor([ids])
    evaluator = load_for_eval(run, torch.device("cpu"), "fp32").subject.model
    assert torch.equal(model.logits([ids]), evaluator.logits(Batch(tokens_BT, tokens_BT)))


@pytest.mark.wide
def test_hidden_states_are_those_that_transformers_has(run: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    command("export", run, "--to", "hf", "--output", tmp_path / "exported")
    model, tokenizer = lmtrain.load(run, device="cpu")
    ids = tokenizer.encode(TEXT)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "exported").eval()
    with torch.no_grad():
        states = theirs(torch.tensor([ids]), output_hidden_states=True).hidden_states
    hidden = model.hidden_states([ids])
    # transformers leaves out the last block's output before the final norm
    assert list(hidden) == ["embedding", "blocks.0", "blocks.1", "norm"]
    for ours, other in zip(("embedding", "blocks.0", "norm"), states, strict=True):
        torch.testing.assert_close(hidden[ours], other, atol=1e-5, rtol=1e-4)
