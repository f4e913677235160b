"""Answers on disk: an evaluation that ends anywhere goes on to the same digits, and what is damaged is not believed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmtrain.errors import OutputError
from lmtrain.eval.resume_journal import _HEAD_BYTES, Journal, model_identity, open_journal
from lmtrain.eval.score_targets import Scorer, TargetScores
from lmtrain.eval.windows import Request, WindowedRequests
from lmtrain.runtime.processes.fault_injection import Fault, arm

BATCH, VOCAB = 3, 37


@pytest.fixture(autouse=True)
def no_fault() -> Iterator[None]:
    arm()
    yield
    arm()


@pytest.fixture
def requests() -> list[Request]:
    random = np.random.default_rng(5)
    sequences = [random.integers(0, VOCAB, length) for length in random.integers(2, 40, 40)]
    return list(WindowedRequests(sequences, 16, 5))


class Work:
    """An evaluation that can be begun again and again; counts what goes through the model."""

    def __init__(self, model: Any, requests: list[Request], output: Path) -> None:
        self.model, self.requests, self.output = model, requests, output
        self.said: list[str] = []

    def __call__(self, identity: str = "weights") -> list[TargetScores]:
        with open_journal(self.output, self.said.append) as journal:
            journal.set_identity(identity)
            return list(Scorer(self.model, batch_size=BATCH, cache=journal).score(self.requests))

    @property
    def num_scored(self) -> int:
        return sum(self.model.rows_through_head)

    @property
    def journal(self) -> Path:
        return self.output.with_name("r.json.journal")


@pytest.fixture
def work(build_gpt: Callable[..., Any], requests: list[Request], tmp_path: Path) -> Work:
    return Work(build_gpt(), requests, tmp_path / "r.json")


def digits(answers: list[TargetScores]) -> list[bytes]:
    return [one.nll.tobytes() + one.greedy.tobytes() for one in answers]


@pytest.fixture
def expected(work: Work) -> list[bytes]:
    answers = digits(list(Scorer(work.model, batch_size=BATCH).score(work.requests)))
    work.model.rows_through_head.clear()
    return answers


def test_ended_at_five_instants_it_goes_on_and_scores_nothing_twice(work: Work, expected: list[bytes]) -> None:
    instants = sorted(np.random.default_rng(7).choice(np.arange(2, 7), 5, replace=True).tolist())
    for count in instants:
        arm(Fault("exc", "eval.batch", count))
        with pytest.raises(RuntimeError, match="fault at"):
            work()
    assert 0 < work.num_scored < sum(request.num_scored for request in work.requests)
    assert digits(work()) == expected
    assert work.num_scored == sum(request.num_scored for request in work.requests)
    assert len(work.said) == 5  # each time it went on
    assert not work.journal.exists()


def test_a_record_that_is_torn_is_scored_again_and_nothing_else(work: Work, expected: list[bytes]) -> None:
    arm(Fault("exc", "eval.journal", 4))
    with pytest.raises(RuntimeError):
        work()
    scored_once = work.model.rows_through_head[:3]
    work.model.rows_through_head.clear()
    assert digits(work()) == expected
    assert "is damaged after 3 batches" in work.said[0]
    assert work.num_scored == sum(request.num_scored for request in work.requests) - sum(scored_once)


def test_damage_anywhere_changes_no_digit(work: Work, expected: list[bytes]) -> None:
    arm(Fault("exc", "eval.batch", 9))
    with pytest.raises(RuntimeError):
        work()
    whole = work.journal.read_bytes()
    for at in np.random.default_rng(2).integers(_HEAD_BYTES, len(whole), 3).tolist():
        work.journal.write_bytes(whole[:at] + bytes([whole[at] ^ 64]) + whole[at + 1 :])
        work.said.clear()
        assert digits(work()) == expected
        assert "is damaged after" in work.said[0]


@pytest.mark.parametrize("other", ["weights", "text"])
def test_a_journal_of_another_evaluation_is_begun_again_aloud(work: Work, expected: list[bytes], other: str) -> None:
    arm(Fault("exc", "eval.batch", 5))
    with pytest.raises(RuntimeError):
        work()
    work.model.rows_through_head.clear()
    if other == "text":
        work.requests = [Request(np.roll(one.tokens, 1), one.num_scored, one.item) for one in work.requests]
        work()
    else:
        assert digits(work("other weights")) == expected
    assert "is of another evaluation" in work.said[0]
    assert work.num_scored == sum(request.num_scored for request in work.requests)


def test_other_tasks_behind_those_that_were_done_keep_them(work: Work, tmp_path: Path) -> None:
    arm(Fault("exc", "eval.batch", 5))
    with pytest.raises(RuntimeError):
        work()
    done = len(work.model.rows_through_head)
    journal = Journal(work.journal)
    journal.set_identity("weights")
    kept = list(Scorer(work.model, batch_size=BATCH, cache=journal).score(work.requests))
    journal.close(done=False)
    assert len(work.model.rows_through_head) > done
    again = Journal(work.journal)
    again.set_identity("weights")
    work.model.rows_through_head.clear()
    more = [*work.requests, *work.requests[:5]]
    scored = [*Scorer(work.model, batch_size=BATCH, cache=again).score(work.requests)]
    scored += Scorer(work.model, batch_size=BATCH, cache=again).score(work.requests[:5])
    again.close(done=True)
    assert digits(scored[: len(kept)]) == digits(kept)
    assert len(scored) == len(more)
    assert work.num_scored == sum(request.num_scored for request in work.requests[:5])


def test_every_rank_has_the_first_ones_answers_and_only_the_first_writes(work: Work, expected: list[bytes]) -> None:
    arm(Fault("exc", "eval.batch", 5))
    with pytest.raises(RuntimeError):
        work()
    told: list[bytes] = []

    def first(data: bytes) -> bytes:
        told.append(data)
        return data

    counts = []
    for rank, identity in enumerate(("weights", "a copy of the weights on another device")):
        journal = Journal(None, share=lambda data: told.pop(0)) if rank else Journal(work.journal, share=first)
        journal.set_identity(identity)
        work.model.rows_through_head.clear()
        assert digits(list(Scorer(work.model, batch_size=BATCH, cache=journal).score(work.requests))) == expected
        counts.append(work.num_scored)
        journal.close(done=True)
    assert counts[0] == counts[1] < sum(request.num_scored for request in work.requests)


def test_a_file_that_is_no_journal_is_left_alone_and_one_in_use_is_refused(work: Work) -> None:
    work.journal.write_text("notes of mine")
    with pytest.raises(OutputError, match="but is no journal"):
        work()
    assert work.journal.read_text() == "notes of mine"
    work.journal.unlink()
    with (
        open_journal(work.output),
        pytest.raises(OutputError, match="in use by another evaluation"),
        open_journal(work.output),
    ):
        pass
    work.journal.symlink_to(work.output)
    with pytest.raises(OutputError, match="symbolic link"):
        work()


def test_a_checkpoint_is_known_by_its_manifest_and_another_folder_by_its_files(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"12")
    first = model_identity(tmp_path, "fp32")
    assert model_identity(tmp_path, "fp32") == first != model_identity(tmp_path, "bf16")
    (tmp_path / "model.safetensors").write_bytes(b"123")
    assert model_identity(tmp_path, "fp32") != first
    (tmp_path / "manifest.json").write_text("{}")
    second = model_identity(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"1234")
    assert model_identity(tmp_path) == second
