"""What a run has read of its sources: streams that go on, restart and join, and its form in a checkpoint."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from lmtrain.data.resume_position_by_source import NOTHING_READ, DataHistory, HeldOut, MixtureOrder
from lmtrain.data.sample_dataset_interface import ShuffledOrder

A, B, C = (f"{letter * 16} 8 concatenate documents 0-{n}" for letter, n in zip("abc", (5, 7, 9), strict=True))
SIZES = {A: 50, B: 30, C: 20}


def begin(history: DataHistory, position: int, shares: dict[str, int], *restarts: str) -> DataHistory:
    seeds = [10 + d for d in range(len(shares))]
    return history.begin(
        position, list(shares), list(shares.values()), seeds, [key in restarts for key in shares], run_seed=3
    )


def ids(history: DataHistory, first: int, count: int) -> list[int]:
    orders = [ShuffledOrder(SIZES[key], history.states[key].seed) for key in history.streams]
    found: list[int] = MixtureOrder(history, orders, [SIZES[key] for key in history.streams]).ids(first, count).tolist()
    return found


def test_a_stream_goes_on_where_the_run_left_it_and_others_join_with_seeds_of_their_own() -> None:
    first = begin(NOTHING_READ, 0, {A: 2, B: 1})
    second = begin(first, 30, {C: 1, A: 1})
    assert [second.states[key].samples for key in (A, B, C)] == [20, 10, 0]
    assert second.states[A].seed == 10
    assert second.states[C].seed not in (10, 11)
    third = begin(second, 50, {A: 1})
    read = [i for i in ids(first, 0, 30) if i < 50] + [i - 20 for i in ids(second, 30, 20) if i >= 20]
    assert len({*read, *ids(third, 50, 20)}) == 50  # one epoch of A over three stages


def test_the_same_mixture_goes_on_as_if_there_were_no_border() -> None:
    first = begin(NOTHING_READ, 0, {A: 2, B: 1})
    assert begin(first, 17, {A: 2, B: 1}) is first
    assert begin(first, 17, {B: 1, A: 2}) != first


def test_a_restart_begins_a_stream_anew_at_the_border_alone() -> None:
    first = begin(NOTHING_READ, 0, {A: 1})
    again = begin(first, 20, {A: 1}, A)
    assert ids(again, 20, 5) == ids(first, 0, 5)
    resumed = begin(again, 20, {A: 1}, A)  # from a checkpoint in the middle of the stage
    assert ids(resumed, 25, 5) == ids(first, 5, 5)


def test_its_form_in_a_checkpoint_is_read_back() -> None:
    kept = HeldOut({"a": 4}, {"b": 9}, frozenset("v"))
    history = begin(replace(begin(NOTHING_READ, 0, {A: 2, B: 1}), held_out=kept), 30, {C: 1})
    history = replace(history, held_out=kept.joined(HeldOut({"a": 5, "c": 1}, {}, frozenset("w"))))
    assert history.held_out == HeldOut({"a": 4, "c": 1}, {"b": 9}, frozenset("vw"))
    assert [history.held_out_before_stage(position) for position in (30, 31)] == [kept, history.held_out]
    data = json.loads(json.dumps(history.to_dict()))
    assert DataHistory.from_dict(data) == history
    older = DataHistory.from_dict({key: value for key, value in data.items() if key != "held_out_before"})
    assert older.held_out_before_stage(30) == history.held_out
    assert (history.end_of_trained_documents("b" * 16), history.end_of_trained_documents("d" * 16)) == (7, 0)


@pytest.mark.parametrize("change", [
    {"origin": -1}, {"origin": True}, {"shares": [1, 2]}, {"shares": [0]}, {"streams": ["x"]}, {"states": {C: [1]}},
])  # fmt: skip
def test_a_damaged_form_is_refused(change: dict[str, object]) -> None:
    data = begin(NOTHING_READ, 0, {C: 1}).to_dict() | change
    with pytest.raises((ValueError, TypeError, KeyError)):
        DataHistory.from_dict(data)
