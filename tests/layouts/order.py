"""What a worker does for test_order.py: train a step and write down what was begun and waited for, in its order.

Every line is written where the real run passes: at actions, at FSDP's groups, at messages and at the tied sum. A
`wait` is what holds the device's computation up on a GPU, and the host here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from lmtrain.parallel import parallel_model as parallel_model
from lmtrain.parallel import tp_linears_and_collectives
from lmtrain.parallel.pipeline.execute_schedule import Pipeline, TrainingObserver
from lmtrain.parallel.pipeline.stage_to_stage_messages import Inbox, Mailbox, MessageKey, Outbox
from lmtrain.parallel.weights import fsdp_sharding
from lmtrain.parallel.weights.reduce_and_clip_gradients import TiedSums
from lmtrain.schedules.table import Action
from lmtrain.train.set_up_run import build_optimizer
from lmtrain.train.step import train_step
from tests.layouts.cases import Case
from tests.layouts.toy_data import loader_of
from tests.layouts.training import OPTIM, build, dp_index

Line = list[Any]  # what happened, and to what
Patch = tuple[Any, str, Any]


def order(name: str, bug: str | None = None) -> list[Line]:
    """Of the second step, when nothing is done for the first time."""
    case, lines = Case.named(name), list[Line]()
    with ExitStack() as stack:
        for owner, attribute, instead in BUGS[bug]() if bug else ():
            stack.enter_context(patch.object(owner, attribute, instead))
        model = build(case)
        optimizer, loader = build_optimizer(OPTIM, model), loader_of(case, dp_index(case))
        train_step(model, optimizer, loader.read(0), OPTIM.lr, OPTIM.clip_norm)
        stack.enter_context(written(lines))
        train_step(model, optimizer, loader.read(1), OPTIM.lr, OPTIM.clip_norm)
    return lines


@contextmanager
def written(lines: list[Line]) -> Iterator[None]:
    with ExitStack() as stack:
        for owner, attribute, instead in (*_actions(lines), *_groups(lines), *_messages(lines), *_sums(lines)):
            stack.enter_context(patch.object(owner, attribute, instead))
        yield


def _before(owner: Any, name: str, write: Callable[..., None]) -> Patch:
    right = getattr(owner, name)

    def watched(*args: Any, **named: Any) -> Any:
        write(*args, **named)
        return right(*args, **named)

    return owner, name, watched


def _actions(lines: list[Line]) -> Iterator[Patch]:
    def write(word: str) -> Callable[[TrainingObserver, Action], None]:
        return lambda _, action: lines.append([word, action.kind.value, action.stage, action.microbatch])

    yield _before(TrainingObserver, "before_action", write("begin"))
    yield _before(TrainingObserver, "after_action", write("done"))


def _groups(lines: list[Line]) -> Iterator[Patch]:
    """Of each FSDP group: "gather" and "reduce" begin something, "wait gathered" and "wait reduced" need its end."""
    reducing: list[str] = []
    gather, reduce = FSDPParamGroup.unshard, FSDPParamGroup.post_backward

    def unshard(self: Any, *args: Any, **named: Any) -> None:
        had = self._all_gather_result is not None
        gather(self, *args, **named)
        if not had and self._all_gather_result is not None:
            lines.append(["gather", self._module_fqn])

    def post_backward(self: Any, *args: Any) -> None:
        reducing[:] = [self._module_fqn]
        reduce(self, *args)

    def needed(self: Any) -> None:
        if self._all_gather_result is not None:
            lines.append(["wait gathered", self._module_fqn])

    yield FSDPParamGroup, "unshard", unshard
    yield FSDPParamGroup, "post_backward", post_backward
    yield _before(fsdp_sharding._ReduceScatter, "__call__", lambda *_, **__: lines.append(["reduce", *reducing]))
    yield _before(FSDPParamGroup, "wait_for_unshard", needed)
    yield _before(
        FSDPParamGroup, "finalize_backward", lambda self: lines.append(["wait reduced", self._module_fqn])
    )  # fmt: skip


class _Sent:
    """A send's handle that writes down when it is waited for."""

    def __init__(self, work: dist.Work, line: Line, lines: list[Line]) -> None:
        self.work, self.line, self.lines = work, line, lines

    def wait(self) -> None:
        self.lines.append(self.line)
        self.work.wait()

    def is_completed(self) -> bool:
        return bool(self.work.is_completed())


def _messages(lines: list[Line]) -> Iterator[Patch]:
    """["send", to, number of the action that needs it there], "wait sent" alike; ["came", from, number there]."""
    send, take, new = Outbox._send, Inbox.receive, Mailbox.__init__
    sent_at: dict[MessageKey, int] = {}

    def begin(self: Mailbox, *args: Any, **named: Any) -> None:
        new(self, *args, **named)
        sent_at.update(self.message_plan.sent_at)

    def sends(self: Outbox, needed: int, *rest: Any) -> None:
        send(self, needed, *rest)
        lines.append(["send", self.receiver, needed])
        _, work, tensor = self.in_flight.pop()
        self.in_flight.append((needed, _Sent(work, ["wait sent", self.receiver, needed], lines), tensor))  # type: ignore[arg-type]

    def takes(self: Inbox, letter: MessageKey) -> Tensor:
        tensor = take(self, letter)
        lines.append(["came", self.sender, sent_at[letter]])
        return tensor

    yield Mailbox, "__init__", begin
    yield Outbox, "_send", sends
    yield Inbox, "receive", takes


def _sums(lines: list[Line]) -> Iterator[Patch]:
    def losses(*_: Any, wait_name: str = "", **__: Any) -> None:
        if wait_name == "losses of the last stage":
            lines.append(["losses"])

    def waits(self: TiedSums) -> None:
        lines.extend(["wait tied"] for _ in self.in_flight)

    yield _before(dist, "all_reduce", lambda *_, async_op=False, **__: lines.append(["tied"]) if async_op else None)
    yield _before(TiedSums, "wait", waits)
    right = tp_linears_and_collectives.all_reduce

    def all_reduce(*args: Any, **named: Any) -> Tensor:
        result = right(*args, **named)
        losses(*args, **named)
        return result

    yield parallel_model, "all_reduce", all_reduce


# ---- planted: what each of the tests must notice


def _waits_at_every_microbatch() -> Iterator[Patch]:
    """FSDP as it comes: it is never told that a backward is not the last."""
    right = FSDPModule.set_is_last_backward
    yield FSDPModule, "set_is_last_backward", lambda self, _: right(self, True)


def _tables_in_the_root() -> Iterator[Patch]:
    yield fsdp_sharding, "_vocabulary_tables", lambda _: []


def _gathers_what_came_before() -> Iterator[Patch]:
    """FSDP as it comes: it gathers what any forward had before."""
    yield fsdp_sharding, "_set_backward_prefetch", lambda _: None


def _tied_at_the_end() -> Iterator[Patch]:
    begin, wait = TiedSums.start, TiedSums.wait
    late: list[tuple[str, Tensor]] = []

    def at_last(self: TiedSums) -> None:
        while late:
            begin(self, *late.pop(0))
        wait(self)

    yield TiedSums, "start", lambda self, *whole: late.append(whole)
    yield TiedSums, "wait", at_last


def _sends_block() -> Iterator[Patch]:
    right = Outbox.send

    def send(self: Outbox, *args: Any) -> None:
        right(self, *args)
        self.free_sent()

    yield Outbox, "send", send


def _last_sends_block() -> Iterator[Patch]:
    right = Pipeline.train

    def train(self: Pipeline, *args: Any) -> dict[int, Tensor]:
        shares = right(self, *args)
        self.wait_for_sends()
        return shares

    yield Pipeline, "train", train


BUGS: dict[str, Callable[[], Iterator[Patch]]] = {
    name: globals()[f"_{name}"]
    for name in (
        "waits_at_every_microbatch", "tables_in_the_root", "gathers_what_came_before", "tied_at_the_end",
        "sends_block", "last_sends_block",
    )
}  # fmt: skip
