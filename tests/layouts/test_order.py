"""What a step begins before what, and where it waits, so that a GPU has work while others talk.

Read from the real run of a few processes (order.py); each rule finds the bug that is planted against it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.layouts.cases import Case
from tests.layouts.order import BUGS, Line
from tests.layouts.workers import Pool
from tests.marks import wide

SHARDED = [
    "untied-dp2-zero3-fp32-micro4",
    *wide(
        "untied-dp2-zero2-fp32-micro4",
        "tied-dp2-zero3-bf16-micro4",
        "deepuntied-pp2-vp2-interleaved-tp1-dp2-zero3-fp32-micro4",
        "deep-pp2-zb_h1-tp1-dp2-zero2-fp32-micro5",
        "deepbert-pp2-vp2-zb_v-tp1-dp2-zero2-fp32-micro4",
    ),
]
APART = ["untied-dp2-zero3-fp32-micro4", *wide("gqa-dp2-zero3-full-bf16-micro4")]
TIED = [
    "deep-pp2-zb_h1-tp1-dp1-fp32-micro4",
    *wide(
        "deep-pp2-vp2-interleaved-tp1-dp1-bf16-micro4",
        "deep-pp2-zb_h1-tp1-dp2-zero2-fp32-micro5",
        "deep-pp2-tp1-dp2-zero3-fp32-micro4",
        "deepbert-pp3-tp1-dp1-fp32-micro3",
    ),
]
SENDS = [
    "deep-pp2-zb_h1-tp1-dp1-fp32-micro4",
    *wide("deepgqa-pp2-tp1-dp1-fp32-micro4"),
    *wide(*(f"deepgqa-{p}-tp1-dp1-fp32-micro8" for p in ("pp4", "pp4-gpipe", "pp4-zb_h1", "pp2-vp2-interleaved"))),
]


_known: dict[str, list[list[Line]]] = {}


def orders(pool: Pool, name: str, bug: str | None = None) -> list[list[Line]]:
    """Return the lines of each rank; a case that several rules look at is run once."""
    if bug is None and name in _known:
        return _known[name]
    assert not Case.named(name).problems()
    found = pool.run("tests.layouts.order:order", Case.named(name).num_processes, {"name": name, "bug": bug})
    return found if bug else _known.setdefault(name, found)


def waits_on_the_way(lines: list[Line]) -> list[str]:
    """Of reductions, before the last action of the step is done."""
    last = max(at for at, line in enumerate(lines) if line[0] == "done")
    return [f"line {at}: {line[1]}" for at, line in enumerate(lines[:last]) if line[0] == "wait reduced"]


@pytest.mark.parametrize("name", SHARDED)
def test_a_step_waits_for_its_reductions_once(name: str, pool: Pool) -> None:
    case = Case.named(name)
    for lines in orders(pool, name):
        assert not waits_on_the_way(lines)
        begun = [line[1] for line in lines if line[0] == "reduce"]
        assert {begun.count(group) for group in begun if group.startswith("blocks")} == {case.microbatches}
        waited = [line[1] for line in lines if line[0] == "wait reduced"]
        assert set(begun) <= set(waited), "what is begun is waited for"


def of_a_backward(lines: list[Line], microbatch: int) -> list[Line]:
    begun, done = (lines.index([word, "B", 0, microbatch]) for word in ("begin", "done"))
    return [line for line in lines[begun:done] if line[0] in ("gather", "reduce")]


def of_a_forward(lines: list[Line], microbatch: int) -> list[str]:
    begun, done = (lines.index(["begin", kind, 0, microbatch]) for kind in "FB")
    return [line[1] for line in lines[begun:done] if line[0] == "gather"]


FORWARD = ["", "embedding.token", "blocks.0", "blocks.1", "head"]
BACKWARD = [
    ["gather", "blocks.1"], ["reduce", "head"], ["gather", "blocks.0"], ["reduce", "blocks.1"], ["reduce", "blocks.0"],
]  # fmt: skip


def tables_with_the_root(lines: list[Line], count: int) -> list[str]:
    wrong = []
    for number in range(count):
        wrong += [f"gathered {found}"] if (found := of_a_forward(lines, number)) != FORWARD else []
        *early, one, other = of_a_backward(lines, number)
        wrong += [f"backward: {early}"] if early != BACKWARD else []
        wrong += [f"last: {one}, {other}"] if sorted((one[1], other[1])) != FORWARD[:2] else []
    return wrong


@pytest.mark.parametrize("name", APART)
def test_embedding_and_head_are_gathered_and_reduced_when_their_turn_comes(name: str, pool: Pool) -> None:
    """At zero 3 in every microbatch; and a block's weights are gathered while the one behind it computes."""
    for lines in orders(pool, name):
        assert not tables_with_the_root(lines, Case.named(name).microbatches)


def late_sums(lines: list[Line], case: Case) -> list[str]:
    """Of tied gradients: not begun before anything else that follows the last gradient of this rank's name."""
    begun = [at for at, line in enumerate(lines) if line[0] == "tied"]
    if not begun:
        return ["never begun"]
    stages = {line[2] for line in lines if line[0] == "done"}
    last_stage, last = case.pp * case.vp - 1, case.microbatches - 1
    whole = [["done", kind, 0, last] for kind in "BI"] if 0 in stages else []
    whole += [["done", kind, last_stage, last] for kind in "BW"] if last_stage in stages else []
    (done,) = (at for at, line in enumerate(lines) if line in whole)
    after = next((at for at in range(done + 1, len(lines)) if lines[at][0] in ("begin", "losses")), len(lines))
    wrong = [f"begun at line {at}, whole at {done}, after line {after}" for at in begun if at > after]
    end = lines.index(["losses"])
    return wrong + [f"waited for at line {at}" for at in range(end) if lines[at][0] == "wait tied"]


@pytest.mark.parametrize("name", TIED)
def test_the_tied_sum_begins_with_the_gradient(name: str, pool: Pool) -> None:
    case = Case.named(name)
    first, *_, last = (rank for rank in orders(pool, name) if any(line[0] in ("tied", "wait tied") for line in rank))
    assert not late_sums(first, case)
    assert not late_sums(last, case)


def blocking_sends(lines: list[Line]) -> list[str]:
    """Waits for a send that nothing shows to have been taken: no later answer of its receiver, and no sum of all."""
    wrong, come = list[str](), dict[int, int]()
    for word, *about in lines:
        if word == "losses":
            return wrong
        if word == "came":
            sender, number = about
            come[sender] = max(number, come.get(sender, -1))
        elif word == "wait sent":
            receiver, needed = about
            if come.get(receiver, -1) <= needed:
                wrong.append(f"to rank {receiver}, for its action {needed}")
    return [*wrong, "no sum of losses"]


@pytest.mark.parametrize("name", SENDS)
def test_no_stage_waits_for_a_send(name: str, pool: Pool) -> None:
    for lines in orders(pool, name):
        assert any(line[0] == "send" for line in lines)
        assert not blocking_sends(lines)


@pytest.mark.parametrize("bug", ["sends_block", *wide(*(bug for bug in BUGS if bug != "sends_block"))])
def test_a_planted_bug_is_noticed(bug: str, pool: Pool) -> None:
    name = {
        "waits_at_every_microbatch": "untied-dp2-zero2-fp32-micro4",
        "tables_in_the_root": APART[0],
        "gathers_what_came_before": APART[0],
        "tied_at_the_end": TIED[0],
    }.get(bug, SENDS[0])
    assert isinstance(name, str)
    case = Case.named(name)
    ranks = orders(pool, name, bug)
    rules: dict[str, Callable[[list[Line]], list[str]]] = {
        "waits_at_every_microbatch": waits_on_the_way,
        "tables_in_the_root": lambda lines: tables_with_the_root(lines, case.microbatches),
        "gathers_what_came_before": lambda lines: tables_with_the_root(lines, case.microbatches),
        "tied_at_the_end": lambda lines: late_sums(lines, case),
    }
    rule = rules.get(bug, blocking_sends)
    assert any(rule(lines) for lines in ranks), f"{bug} went unnoticed"
