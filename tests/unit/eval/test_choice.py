"""Multiple choice: what an answer is compared by, shots, cuts, and the mistakes that would change a figure."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lmtrain.batch import Batch
from lmtrain.errors import DataError, UsageError
from lmtrain.eval.run_task import Outcome, run
from lmtrain.eval.score_targets import Subject
from lmtrain.eval.task import TaskOptions, find_task
from lmtrain.eval.tasks import choice
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer
from tests.unit.eval.conftest import LONGROPE

SEQ_LEN = 64
_Request = choice.ChoiceRequest
ROWS: list[dict[str, Any]] = [
    {"goal": "the old mill", "sol1": "stood still", "sol2": "sold flour , and nobody in the house spoke", "label": 0},
    {"goal": "nobody spoke in", "sol1": "winter", "sol2": "the river 's house", "label": 1},
    {"goal": "the lights ", "sol1": "went", "sol2": "went out and in", "label": 1},
    {"goal": "who dared to speak", "sol1": "the boy", "sol2": "a well known miller and the boy", "label": 0},
    {"goal": "flour", "sol1": "bran", "sol2": "200 sacks", "label": 1},
    {"goal": "cold 3 °C", "sol1": "°°°°", "sol2": "in winter", "label": 0},
]
ANSWERS = ["Nobody", "°C", "qzx", "the old mill", "wheel stood still"]
ROWS += [{"goal": one, "sol1": one, "sol2": other, "label": 0} for one in ANSWERS for other in ANSWERS if one != other]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer, build_gpt: Callable[..., Any]) -> Any:
    model = build_gpt(tokenizer.vocab_size, SEQ_LEN, std=0.4)
    model.model.double()
    return model


def measured(model: Any, tokenizer: Tokenizer, source: Path, task: str = "choice/piqa", batch_size: int = 8) -> Outcome:
    size = tokenizer.vocab_size
    subject = Subject(model=model, tokenizer=tokenizer, seq_len=SEQ_LEN, vocab_size=size, dtype="fp64")
    return run(find_task(task), subject, source, batch_size=batch_size)


@torch.no_grad()
def twin_nll(model: Any, tokenizer: Tokenizer, question: str, answer: str) -> float:
    """One answer by itself, as lm-evaluation-harness asks for it."""
    spaces = len(question) - len(question.rstrip())
    context, continuation = question[: len(question) - spaces], question[len(question) - spaces :] + " " + answer
    whole, before = tokenizer.encode(context + continuation), tokenizer.encode(context)
    fed = torch.tensor([whole[:-1]])
    scores = model.model.logits(model.model(Batch(tokens_BT=fed, labels_BT=fed)))[0, :, : tokenizer.vocab_size]
    rows = scores.double().log_softmax(-1).numpy()
    return -sum(float(rows[at - 1, whole[at]]) for at in range(len(before), len(whole)))


def agree(model: Any, tokenizer: Tokenizer, source: Path, batch_size: int = 8) -> Outcome:
    """The task says of PIQA's rows what scoring each answer by itself says."""
    outcome = measured(model, tokenizer, source, batch_size=batch_size)
    right, by_length, total = 0, 0, 0.0
    for row in ROWS:
        answers = [row["sol1"], row["sol2"]]
        nll = np.array([twin_nll(model, tokenizer, f"Question: {row['goal']}\nAnswer:", one) for one in answers])
        right += nll.argmin() == row["label"]
        by_length += (nll / [len(one) for one in answers]).argmin() == row["label"]
        total += nll.sum()
    assert outcome.result.nll_sum_nats == pytest.approx(total, rel=1e-10)
    found = {"accuracy": right / len(ROWS), "per_character_accuracy": by_length / len(ROWS), "chance_accuracy": 0.5}
    assert outcome.result.measures == pytest.approx(found)
    return outcome


def test_answers_are_scored_as_alone_if_angles_depend_on_their_length(
    tokenizer: Tokenizer, build_gpt: Callable[..., Any], tmp_path: Path
) -> None:
    model = build_gpt(tokenizer.vocab_size, SEQ_LEN, std=0.4, **LONGROPE | {"rotary_original_len": 24})
    model.model.double()
    agree(model, tokenizer, write(tmp_path / "a.jsonl", ROWS), 7)


@pytest.mark.parametrize("batch_size", [1, 7])
def test_answers_are_compared_as_one_by_one(model: Any, tokenizer: Tokenizer, tmp_path: Path, batch_size: int) -> None:
    outcome = agree(model, tokenizer, write(tmp_path / "a.jsonl", ROWS), batch_size)
    assert outcome.columns["chosen"].tolist() != outcome.columns["answer"].tolist()
    assert outcome.columns["items"].tolist() == [1] * len(ROWS)
    assert outcome.result.num_documents == len(ROWS)


def _tokens(tokens: Any, num_scored: int, item: int, *, length: float) -> choice.ChoiceRequest:
    return _Request(tokens, num_scored, item, length=num_scored)


def _apart(tokenizer: Tokenizer, context: str, target: str) -> tuple[list[int], list[int]]:
    return tokenizer.encode(context), [*tokenizer.encode(target[:1]), *tokenizer.encode(target[1:])]


MISTAKES: dict[str, tuple[Any, str, Any]] = {
    "answers divided by their tokens": (choice, "ChoiceRequest", _tokens),
    "answers tokenized apart": (choice, "encode_pair", _apart),
    "the last of the likeliest": (choice, "likeliest_choice", lambda item, nll: np.zeros(len(set(item)))),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_noticed(
    mistake: str, model: Any, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "a.jsonl", ROWS)
    agree(model, tokenizer, source)
    monkeypatch.setattr(*MISTAKES[mistake])
    with pytest.raises(AssertionError):
        agree(model, tokenizer, source)


def test_of_answers_that_are_alike_the_first_is_chosen() -> None:
    item, nll = np.array([0, 0, 1, 1, 1]), np.array([2.0, 2.0, 3.0, 1.0, 1.0])
    assert choice.likeliest_choice(item, nll).tolist() == [0, 1]


def test_shots_stand_before_a_question_and_never_the_question_itself(tmp_path: Path, tokenizer: Tokenizer) -> None:
    write(tmp_path / "shots.jsonl", ROWS[:3])
    (tmp_path / "mine.yaml").write_text("like: choice/piqa\nshots: 2\nshots_file: shots.jsonl\n")
    task = find_task(str(tmp_path / "mine.yaml"))
    asked = TaskOptions(tokenizer=tokenizer, seq_len=512)
    prepared = task.prepare(write(tmp_path / "a.jsonl", [ROWS[4], ROWS[1]]), asked)
    first, _, second, _ = prepared.requests
    mill = "Question: the old mill\nAnswer: stood still\n\n"
    river = "Question: nobody spoke in\nAnswer: the river 's house\n\n"
    assert tokenizer.decode(first.tokens.tolist()) == mill + river + "Question: flour\nAnswer: bran"
    lights = "Question: the lights \nAnswer: went out and in\n\n"
    assert tokenizer.decode(second.tokens.tolist()) == mill + lights + "Question: nobody spoke in\nAnswer: winter"
    assert prepared.facts.protocol == "choice/mine-2shot"
    assert str(prepared.facts.notes["shots"]).startswith("2, the first of shots.jsonl")
    (tmp_path / "mine.yaml").write_text("like: choice/piqa\nshots: 3\nshots_file: shots.jsonl\n")
    with pytest.raises(DataError, match="has 2 questions besides the one that is asked"):
        find_task(str(tmp_path / "mine.yaml")).prepare(tmp_path / "a.jsonl", asked)
    (tmp_path / "mine.yaml").write_text("like: choice/piqa\nshots: 2\nshots_file: shots.jsonl\nshots_seed: 2\n")
    drawn = find_task(str(tmp_path / "mine.yaml")).prepare(tmp_path / "a.jsonl", asked)
    assert [len(one.tokens) for one in drawn.requests] != [len(one.tokens) for one in prepared.requests]
    assert sorted(choice.drawn_order(5, 1)) == [0, 1, 2, 3, 4]
    assert choice.drawn_order(5, 1) != choice.drawn_order(5, 2)


def test_long_rows_are_cut_on_the_left_and_an_empty_question_has_a_prefix(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "plain.yaml").write_text('question: "{q}"\nchoices: a\nanswer: label\nnormalisation: bytes\n')
    task = find_task(str(tmp_path / "plain.yaml"))
    rows = [{"q": "", "a": ["°C", "C"], "label": 0}, {"q": "the old mill " * 9, "a": ["was", "is"], "label": 1}]
    prepared = task.prepare(write(tmp_path / "a.jsonl", rows), TaskOptions(tokenizer=tokenizer, seq_len=12))
    requests: list[Any] = list(prepared.requests)
    assert requests[0].tokens.tolist() == [tokenizer.eod_id, *tokenizer.encode(" °C")]
    assert [one.length for one in requests[:2]] == [3, 1]
    assert len(requests[2].tokens) == 13
    assert prepared.facts.notes["rows_cut_on_the_left"] == 2
    with pytest.raises(DataError, match="the window takes 1 to 1"):
        task.prepare(tmp_path / "a.jsonl", TaskOptions(tokenizer=tokenizer, seq_len=1))
    with pytest.raises(UsageError, match="has no overlapping windows"):
        task.prepare(tmp_path / "a.jsonl", TaskOptions(tokenizer=tokenizer, seq_len=12, stride=3))
    (tmp_path / "bad.jsonl").write_text("{}\nno\n")
    with pytest.raises(DataError, match="line 1 has no q"):
        task.prepare(tmp_path / "bad.jsonl", TaskOptions(tokenizer=tokenizer, seq_len=12))
    (tmp_path / "bad.jsonl").write_text("\nno\n")
    with pytest.raises(DataError, match="line 2 is not JSON"):
        task.prepare(tmp_path / "bad.jsonl", TaskOptions(tokenizer=tokenizer, seq_len=12))


def test_a_copy_model_is_always_right(tmp_path: Path, tokenizer: Tokenizer, build_table: Callable[..., Any]) -> None:
    rows = [{"goal": "x", "sol1": "the" + " the" * n, "sol2": "mill cold the", "label": 0} for n in range(1, 4)]
    table = np.zeros((tokenizer.vocab_size, tokenizer.vocab_size))
    the = tokenizer.encode(" the")
    table[:, the] = 1000.0
    outcome = measured(build_table(table), tokenizer, write(tmp_path / "a.jsonl", rows))
    assert outcome.result.measures["accuracy"] == outcome.result.measures["per_character_accuracy"] == 1.0
