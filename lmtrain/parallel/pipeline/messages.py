"""Messages between pipeline stages: activations forward, their gradients back, in the schedule's order.

Called by pipeline. Both sides hold every rank's row of the table, so a receiver posts its receives in the order in
which the sender sends, and messages need no names; the shape and number of messages, which the ranks cannot derive from
the table, are sent in a header before the first message. Traffic to higher and to lower ranks uses a process group
each: within a group two ranks never wait for each other in both directions.

If tp ranks hold the same activations each sends a share, and the shares are gathered on arrival (Megatron-LM 2021).
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import monotonic_ns

import torch
import torch.distributed as dist
from torch import Tensor

from lmtrain.errors import LayoutError
from lmtrain.observe.measure import phases
from lmtrain.observe.stragglers.judge import links
from lmtrain.parallel.collectives import gather_stack
from lmtrain.parallel.mesh import Axis, Mesh
from lmtrain.runtime.processes.faults import fault_point
from lmtrain.schedules.table import Action, Kind

_POSTED = 2  # posted receives per peer: the awaited message and the next one
_TERMS_TAG = 1
# of a GPU's 132; because: a receive that is posted early occupies its thread blocks until the message comes, while the
# previous stage computes. Four blocks copy about 100 GB/s over NVLink (not measured here), 50 MB in half a ms
LANE_CTAS = 4
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Lanes:
    """Two groups of the same pipeline ranks, one for each direction of traffic."""

    up: dist.ProcessGroup
    down: dist.ProcessGroup

    def between(self, sender: int, receiver: int) -> dist.ProcessGroup:
        return self.up if sender < receiver else self.down


def pairs_of(owners: Sequence[int]) -> list[tuple[int, int]]:
    """Return the (sender, receiver) pairs along pp of all messages between these stage owners, in `warm`'s order."""
    steps = [(one, other) for one, other in pairwise(owners) if one != other]
    both = {*steps, *((other, one) for one, other in steps)}
    # because: pairs that share no rank connect at the same time, so that 64 stages take no longer than 4
    return sorted(both, key=lambda pair: (pair[0] > pair[1], min(pair) % 2, pair))


def warm(lanes: Lanes, pairs: Sequence[tuple[int, int]], pp: Axis, tensor: Tensor) -> None:
    """Send a first message along each lane, in the same order on all ranks.

    because: NCCL creates a pair's communicator at its first message and blocks the host until both ranks take part; two
    ranks that each start with a different neighbour, as schedules do, would deadlock
    """
    for sender, receiver in pairs:
        if pp.index in (sender, receiver):
            send = pp.index == sender
            peer, start = pp.ranks[receiver if send else sender], dist.isend if send else dist.irecv
            work = start(tensor, peer, group=lanes.between(sender, receiver))
            assert work is not None
            _wait(work, "the first message of a lane")


@dataclass(frozen=True)
class Letter:
    """The key of a message that crosses into `stage`: hidden states, or their gradient if `backward`."""

    backward: bool
    stage: int
    microbatch: int

    @property
    def sender(self) -> int:
        """The stage that sends the message."""
        return self.stage + 1 if self.backward else self.stage - 1


def needed_by(action: Action, last_stage: int) -> Letter | None:
    """Return the message that an action waits for, or None."""
    backward = action.kind is not Kind.FORWARD
    if action.kind is Kind.WEIGHT or action.stage == (last_stage if backward else 0):
        return None
    return Letter(backward, action.stage, action.microbatch)


def letter_of(action: Action, last_stage: int) -> Letter | None:
    """Return the message that is sent after this action, or None."""
    if action.kind is Kind.FORWARD:
        return Letter(False, action.stage + 1, action.microbatch) if action.stage < last_stage else None
    if action.kind is Kind.WEIGHT or action.stage == 0:
        return None
    return Letter(True, action.stage - 1, action.microbatch)


@dataclass(frozen=True)
class Terms:
    """The header that a sender and a receiver compare before the first message."""

    num_messages: int
    num_numbers: int  # elements in all messages together, before they are split over tp
    shape: tuple[int, ...]  # shape of the first message, [B, T, D]
    dtype: torch.dtype

    def to_tensor(self) -> Tensor:
        """Encode the header as a CPU tensor, so that reading it needs no device synchronization."""
        return torch.tensor([self.num_messages, self.num_numbers, _DTYPES.index(self.dtype), *self.shape])

    @classmethod
    def of(cls, tensor: Tensor) -> Terms:
        num_messages, num_numbers, dtype, *shape = tensor.tolist()
        return cls(num_messages, num_numbers, tuple(shape), _DTYPES[dtype])

    def __str__(self) -> str:
        alike = self.num_numbers == self.num_messages * math.prod(self.shape)
        others = "" if alike else f" and other shapes, {self.num_numbers} numbers in all,"
        return f"{self.num_messages} messages of {list(self.shape)}{others} {str(self.dtype).removeprefix('torch.')}"


class Inbox:
    """The receiver of a peer's messages, in the order of the peer's row."""

    def __init__(
        self,
        letters: Sequence[Letter],
        sender: int,
        group: dist.ProcessGroup,
        empty: Callable[[Letter], Tensor],
        terms: Terms,
    ) -> None:
        self.sender, self.group, self.empty, self.terms = sender, group, empty, terms
        self.coming = deque(letters)
        self.posted: deque[tuple[Letter, Tensor, dist.Work]] = deque()
        self.arrived: dict[Letter, Tensor] = {}
        self.is_first = True
        self.told = torch.empty_like(terms.to_tensor())
        self.telling = dist.irecv(self.told, sender, group=group, tag=_TERMS_TAG)

    def take(self, letter: Letter) -> Tensor:
        if self.telling is not None:
            self._agree(self.telling)
        while letter not in self.arrived:
            came, tensor, work = self.posted.popleft()
            began, since_ns = phases.now(tensor), monotonic_ns()
            _wait(work)
            if self.is_first:
                self.is_first = False
                links.came(self.sender, since_ns)
            phases.message(began, "receive", self.sender, tensor, came)
            self.arrived[came] = tensor
            self._post()
        return self.arrived.pop(letter)

    def _agree(self, telling: dist.Work) -> None:
        began = phases.now(self.told)
        _wait(telling)
        phases.message(began, "receive", self.sender, self.told)
        self.telling, told = None, Terms.of(self.told)
        if told != self.terms:
            raise LayoutError(
                f"Rank {self.sender} sends {told} to rank {dist.get_rank()}, which expects {self.terms}: they do not "
                "have the same batch. Give every stage of a pipeline the same settings and the same data."
            )
        self._post()

    def _post(self) -> None:
        while self.coming and len(self.posted) < _POSTED:
            letter = self.coming.popleft()
            tensor = self.empty(letter)
            work = dist.irecv(tensor, self.sender, group=self.group)
            assert work is not None
            self.posted.append((letter, tensor, work))


class Outbox:
    """The sender of messages to a peer, which keeps each message until it has arrived."""

    def __init__(self, receiver: int, group: dist.ProcessGroup, terms: Terms) -> None:
        self.receiver, self.group, self.terms = receiver, group, terms
        self.under_way: deque[tuple[int, dist.Work, Tensor]] = deque()
        self.is_first = True
        self._send(-1, terms.to_tensor(), _TERMS_TAG)

    def send(self, needed: int, tensor: Tensor, letter: Letter) -> None:
        """Start sending. `needed` is the index of the receiver's action that waits for the message."""
        if self.is_first:
            self.is_first = False
            links.sent(self.receiver)
        self._send(needed, tensor, 0, letter)
        while self.under_way and self.under_way[0][1].is_completed():
            self.under_way.popleft()

    def _send(self, needed: int, tensor: Tensor, tag: int, letter: Letter | None = None) -> None:
        began = phases.now(tensor)
        work = dist.isend(tensor, self.receiver, group=self.group, tag=tag)
        phases.message(began, "send", self.receiver, tensor, letter)
        assert work is not None
        self.under_way.append((needed, work, tensor))

    def let_go(self, done: float = math.inf) -> None:
        """Complete and free the sends that the receiver needed before its action `done`, which have arrived.

        because: gloo reports a send as complete only to a caller that waits for it
        """
        while self.under_way and self.under_way[0][0] < done:
            _, work, tensor = self.under_way.popleft()
            began = phases.now(tensor)
            _wait(work, "a message to another stage")
            phases.message(began, "taken", self.receiver, tensor)


@dataclass(frozen=True)
class Routes:
    """The messages that a rank exchanges with each peer in a run of a schedule."""

    rank_of: tuple[int, ...]  # stage -> pp rank
    sent_at: Mapping[Letter, int]  # index of the action in the sender's row
    needed_at: Mapping[Letter, int]  # index of the action in the receiver's row
    from_peer: Mapping[int, list[Letter]]
    to_peer: Mapping[int, list[Letter]]

    @classmethod
    def of(cls, rows: Sequence[Sequence[Action]], rank_of: tuple[int, ...], me: int) -> Routes:
        last_stage = len(rank_of) - 1
        sent_at, needed_at = {}, {}
        from_peer, to_peer = defaultdict(list), defaultdict(list)
        for row in rows:
            for number, action in enumerate(row):
                if needed := needed_by(action, last_stage):
                    needed_at[needed] = number
                if letter := letter_of(action, last_stage):
                    sent_at[letter] = number
                    sender, receiver = rank_of[action.stage], rank_of[letter.stage]
                    if receiver == me != sender:
                        from_peer[sender].append(letter)
                    elif sender == me != receiver:
                        to_peer[receiver].append(letter)
        return cls(rank_of, sent_at, needed_at, dict(from_peer), dict(to_peer))


class Post:
    """The inboxes and outboxes of a rank for a run of a schedule."""

    def __init__(
        self, routes: Routes, shapes: Sequence[tuple[int, ...]], like: Tensor, mesh: Mesh, lanes: Lanes, *, shares: bool
    ) -> None:
        """Create the in- and outboxes, which starts the exchange of headers.

        `shapes` holds each micro-batch's message shape; all messages have the dtype and device of `like`. `shares`
        means that tp ranks send equal messages, which are then split over tp.
        """
        self.routes, self.shapes, self.pp, self.tp, self.shares = routes, shapes, mesh.pp, mesh.tp, shares
        me, ranks = mesh.pp.index, mesh.pp.ranks

        def terms(letters: Sequence[Letter]) -> Terms:
            all_shapes = [shapes[letter.microbatch] for letter in letters]
            return Terms(len(letters), sum(map(math.prod, all_shapes)), tuple(all_shapes[0]), like.dtype)

        def empty(letter: Letter) -> Tensor:
            shape = shapes[letter.microbatch]
            return like.new_empty(math.prod(shape) // self.tp.size if self._is_shared(shape) else shape)

        self.outboxes = {
            peer: Outbox(ranks[peer], lanes.between(me, peer), terms(letters))
            for peer, letters in routes.to_peer.items()
        }  # fmt: skip
        self.inboxes = {
            peer: Inbox(letters, ranks[peer], lanes.between(peer, me), empty, terms(letters))
            for peer, letters in routes.from_peer.items()
        }  # fmt: skip
        self.own: dict[Letter, Tensor] = {}  # messages between two stages of this rank

    def send(self, letter: Letter, tensor: Tensor) -> None:
        shape = self.shapes[letter.microbatch]
        if tensor.shape != shape:
            raise LayoutError(
                f"Stage {letter.sender} on rank {dist.get_rank()} made {list(tensor.shape)}, and {list(shape)} "
                "was announced. Give all microbatches of a step the same size."
            )
        to = self.routes.rank_of[letter.stage]
        if to == self.pp.index:
            self.own[letter] = tensor
            return
        tensor = tensor.contiguous()
        if self._is_shared(shape):
            tensor = tensor.flatten().chunk(self.tp.size)[self.tp.index]
        if not fault_point("pipeline.message"):
            self.outboxes[to].send(self.routes.needed_at[letter], tensor, letter)

    def receive(self, letter: Letter) -> Tensor:
        sender = self.routes.rank_of[letter.sender]
        if sender == self.pp.index:
            return self.own.pop(letter)
        tensor = self.inboxes[sender].take(letter)
        if sender in self.outboxes:
            self.outboxes[sender].let_go(self.routes.sent_at[letter])
        shape = self.shapes[letter.microbatch]
        if self._is_shared(shape):
            # collective: gathers the tp ranks' shares of a message
            tensor = gather_stack(tensor, self.tp, "shares of a message")
        return tensor.view(shape)

    def _is_shared(self, shape: tuple[int, ...]) -> bool:
        return self.shares and math.prod(shape) % self.tp.size == 0

    def close(self) -> None:
        for outbox in self.outboxes.values():
            outbox.let_go()


def _wait(work: dist.Work, what: str = "a message from another stage") -> None:
    with phases.within("collective", what):
        work.wait()
