"""Messages between pipeline stages: activations forward, their gradients back, in the schedule's order.

Called by the executor. Both sides hold every rank's row of the table, so a receiver posts its receives in the order in
which the sender sends, and messages need no names; the shape and number of messages, which the ranks cannot derive from
the table, are sent in a header before the first message. Traffic to higher and to lower ranks uses a process group
each: within a group two ranks never wait for each other in both directions.

If tp ranks hold the same activations each sends a share, and the shares are gathered on arrival (Megatron-LM 2021).

`links` has the times of each step's first messages, which train/straggler_watch.py reads.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import monotonic_ns
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from lmtrain.errors import LayoutError
from lmtrain.parallel.mesh import Axis, Mesh
from lmtrain.parallel.tp_linears_and_collectives import gather_stack
from lmtrain.runtime.processes import current_phase
from lmtrain.runtime.processes.fault_injection import fault_point
from lmtrain.schedules.table import Action, Kind

_SHORT_WAIT_NS = 100_000  # because: a shorter wait is the cost of taking a message that has already arrived
_NUM_POSTED = 2  # posted receives per peer: the awaited message and the next one
_HEADER_TAG = 1
# of a GPU's 132; because: a receive that is posted early occupies its thread blocks until the message comes, while the
# previous stage computes. Four blocks copy about 100 GB/s over NVLink (not measured here), 50 MB in half a ms
MESSAGE_CTAS = 4
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class LinkTimes:
    """Times of the first messages of steps to and from each peer, summed over the steps of a window."""

    def __init__(self) -> None:
        self.in_step = False  # True inside a step
        self._sent: dict[int, tuple[int, int]] = {}  # by peer: sum of times in ns, and their number
        self._arrived: dict[int, tuple[int, int]] = {}

    def record_send(self, peer: int) -> None:
        """Record that the first message of the current step to rank `peer` is sent now. The times of all steps of a
        window are added up. Call it once per step and peer; outside a step it does nothing.
        """
        if self.in_step:
            total, count = self._sent.get(peer, (0, 0))
            self._sent[peer] = total + monotonic_ns(), count + 1

    def record_arrival(self, peer: int, wait_start_ns: int) -> None:
        """Record that the first message of the current step from rank `peer` has arrived now. The times of all steps of
        a window are added up. Do nothing outside a step, or if the wait that began at `wait_start_ns` took at most 0.1
        ms: the message was then there before, and its time of arrival is unknown.
        """
        arrival_ns = monotonic_ns()
        if self.in_step and arrival_ns - wait_start_ns > _SHORT_WAIT_NS:
            total, count = self._arrived.get(peer, (0, 0))
            self._arrived[peer] = total + arrival_ns, count + 1

    def pop_times(self, peer: int, steps: int) -> tuple[int, int]:
        """Remove the times of `peer`, and return the sums of its send times and of its arrival times in ns. A sum is 0
        unless it has a time from each of `steps` steps.
        """
        (sent, num_sent), (arrived, num_arrived) = self._sent.pop(peer, (0, 0)), self._arrived.pop(peer, (0, 0))
        return sent if num_sent == steps else 0, arrived if num_arrived == steps else 0

    def clear(self) -> None:
        self._sent, self._arrived = {}, {}


links = LinkTimes()


@dataclass(frozen=True)
class DirectionGroups:
    """Two process groups of the same pipeline ranks, one for each direction of messages: to higher ranks (`up`) and to
    lower.
    """

    up: dist.ProcessGroup
    down: dist.ProcessGroup

    def between(self, sender: int, receiver: int) -> dist.ProcessGroup:
        """Return the group for messages from pipeline rank `sender` to `receiver`."""
        return self.up if sender < receiver else self.down


def message_pairs(rank_of_stage: Sequence[int]) -> list[tuple[int, int]]:
    """Return the (sender, receiver) pairs of pipeline ranks that exchange messages, in the order in which
    `connect_pairs` connects them. `rank_of_stage[i]` is the pipeline rank of stage i.
    """
    hops = [(sender, receiver) for sender, receiver in pairwise(rank_of_stage) if sender != receiver]
    pairs = {*hops, *((receiver, sender) for sender, receiver in hops)}
    # because: pairs that share no rank connect at the same time, so that 64 stages take no longer than 4
    return sorted(pairs, key=lambda pair: (pair[0] > pair[1], min(pair) % 2, pair))


def connect_pairs(groups: DirectionGroups, pairs: Sequence[tuple[int, int]], pp: Axis, tensor: Tensor) -> None:
    """Send `tensor` once from sender to receiver of each of the `pairs`, indices on the pipeline axis `pp`, so that
    training finds the connections open. All ranks of the axis must call this with the same pairs in the same order.

    because: NCCL creates a pair's communicator at its first message and blocks the host until both ranks take part; two
    ranks that each start with a different neighbour, as schedules do, would deadlock
    """
    for sender, receiver in pairs:
        if pp.index in (sender, receiver):
            send = pp.index == sender
            peer, start = pp.ranks[receiver if send else sender], dist.isend if send else dist.irecv
            work = start(tensor, peer, group=groups.between(sender, receiver))
            assert work is not None
            _wait(work, "the first message of a lane")


@dataclass(frozen=True)
class MessageKey:
    """The identity of a message to `stage`: hidden states of a micro-batch, or the gradient of its output if
    `backward`.
    """

    backward: bool
    stage: int
    microbatch: int

    @property
    def sender(self) -> int:
        """The stage that sends the message."""
        return self.stage + 1 if self.backward else self.stage - 1


def message_needed_by(action: Action, last_stage: int) -> MessageKey | None:
    """Return the key of the message from another stage that must arrive before `action` can run, or None if it needs no
    message. `last_stage` is the number of the model's last stage.
    """
    backward = action.kind is not Kind.FORWARD
    if action.kind is Kind.WEIGHT or action.stage == (last_stage if backward else 0):
        return None
    return MessageKey(backward, action.stage, action.microbatch)


def message_sent_after(action: Action, last_stage: int) -> MessageKey | None:
    """Return the key of the message that goes to another stage once `action` has run, or None if it sends no message.
    `last_stage` is the number of the model's last stage.
    """
    if action.kind is Kind.FORWARD:
        return MessageKey(False, action.stage + 1, action.microbatch) if action.stage < last_stage else None
    if action.kind is Kind.WEIGHT or action.stage == 0:
        return None
    return MessageKey(True, action.stage - 1, action.microbatch)


@dataclass(frozen=True)
class Header:
    """The header that a sender and a receiver compare before the first message."""

    num_messages: int
    num_numbers: int  # elements in all messages together, before they are split over tp
    shape: tuple[int, ...]  # shape of the first message, [B, T, D]
    dtype: torch.dtype
    shapes_crc: int = 0  # CRC-32 of all messages' shapes in their order

    def to_tensor(self) -> Tensor:
        """Encode the header as a CPU tensor, so that reading it needs no device synchronization."""
        numbers = self.num_messages, self.num_numbers, self.shapes_crc, _DTYPES.index(self.dtype)
        return torch.tensor([*numbers, *self.shape])

    @classmethod
    def of(cls, tensor: Tensor) -> Header:
        """Decode a header."""
        num_messages, num_numbers, shapes_crc, dtype, *shape = tensor.tolist()
        return cls(num_messages, num_numbers, tuple(shape), _DTYPES[dtype], shapes_crc)

    def __str__(self) -> str:
        same_shape = self.num_numbers == self.num_messages * math.prod(self.shape)
        other_shapes = "" if same_shape else f" and other shapes, {self.num_numbers} numbers in all,"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.num_messages} messages of {list(self.shape)}{other_shapes} {dtype}"


class Inbox:
    """The receiver of all messages from one peer, in the order in which the peer sends them."""

    def __init__(
        self,
        keys: Sequence[MessageKey],
        sender: int,
        group: dist.ProcessGroup,
        new_buffer: Callable[[MessageKey], Tensor],
        header: Header,
    ) -> None:
        self.sender, self.group, self.new_buffer, self.header = sender, group, new_buffer, header
        self.expected = deque(keys)
        self.posted: deque[tuple[MessageKey, Tensor, dist.Work]] = deque()
        self.arrived: dict[MessageKey, Tensor] = {}
        self.is_first = True
        self.header_tensor = torch.empty_like(header.to_tensor())
        self.header_receive = dist.irecv(self.header_tensor, sender, group=group, tag=_HEADER_TAG)

    def receive(self, key: MessageKey) -> Tensor:
        """Wait until the message with this key has arrived, and return its tensor. Messages that arrive before it are
        kept for later calls.
        """
        if self.header_receive is not None:
            self._check_header(self.header_receive)
        while key not in self.arrived:
            arrived_key, tensor, work = self.posted.popleft()
            began, since_ns = current_phase.span_start(tensor), monotonic_ns()
            _wait(work)
            if self.is_first:
                self.is_first = False
                links.record_arrival(self.sender, since_ns)
            current_phase.record_message(began, "receive", self.sender, tensor, arrived_key)
            self.arrived[arrived_key] = tensor
            self._post_receives()
        return self.arrived.pop(key)

    def _check_header(self, header_receive: dist.Work) -> None:
        """Wait for the sender's header, which `header_receive` receives; raise LayoutError unless it equals the header
        that this rank expects. Then start to receive messages.
        """
        began = current_phase.span_start(self.header_tensor)
        _wait(header_receive)
        current_phase.record_message(began, "receive", self.sender, self.header_tensor)
        self.header_receive, sent_header = None, Header.of(self.header_tensor)
        if sent_header != self.header:
            others = ", but others behind the first" if str(sent_header) == str(self.header) else ""
            raise LayoutError(
                f"Ranks {self.sender} and {dist.get_rank()} do not have the same batch: rank {self.sender} sends "
                f"{sent_header}{others}, and rank {dist.get_rank()} expects {self.header}. Give every stage of a "
                "pipeline the same settings and the same data."
            )
        self._post_receives()

    def _post_receives(self) -> None:
        """Start receives of the next expected messages, until `_NUM_POSTED` are pending or no more messages are
        expected.
        """
        while self.expected and len(self.posted) < _NUM_POSTED:
            key = self.expected.popleft()
            tensor = self.new_buffer(key)
            work = dist.irecv(tensor, self.sender, group=self.group)
            assert work is not None
            self.posted.append((key, tensor, work))


class Outbox:
    """The sender of all messages to one peer, which keeps each tensor until it has arrived."""

    def __init__(self, receiver: int, group: dist.ProcessGroup, header: Header) -> None:
        self.receiver, self.group, self.header = receiver, group, header
        self.in_flight: deque[tuple[int, dist.Work, Tensor]] = deque()
        self.is_first = True
        self._send(-1, header.to_tensor(), _HEADER_TAG)

    def send(self, needed_at: int, tensor: Tensor, key: MessageKey) -> None:
        """Start to send a tensor. `needed_at` is the position of the action that waits for it in the receiver's list of
        actions; `key` identifies the message in traces.
        """
        if self.is_first:
            self.is_first = False
            links.record_send(self.receiver)
        self._send(needed_at, tensor, 0, key)
        while self.in_flight and self.in_flight[0][1].is_completed():
            self.in_flight.popleft()

    def _send(self, needed_at: int, tensor: Tensor, tag: int, key: MessageKey | None = None) -> None:
        began = current_phase.span_start(tensor)
        work = dist.isend(tensor, self.receiver, group=self.group, tag=tag)
        current_phase.record_message(began, "send", self.receiver, tensor, key)
        assert work is not None
        self.in_flight.append((needed_at, work, tensor))

    def free_sent(self, receiver_action: float = math.inf) -> None:
        """Wait for and free the sent tensors that the receiver needed for its actions before number `receiver_action`
        of its list, because these have run. By default wait for all sends.

        because: gloo reports a send as complete only to a caller that waits for it
        """
        while self.in_flight and self.in_flight[0][0] < receiver_action:
            _, work, tensor = self.in_flight.popleft()
            began = current_phase.span_start(tensor)
            _wait(work, "a message to another stage")
            current_phase.record_message(began, "taken", self.receiver, tensor)


@dataclass(frozen=True)
class MessagePlan:
    """The messages that a rank exchanges with each peer in a run of a schedule."""

    rank_of: tuple[int, ...]  # stage -> pp rank
    sent_at: Mapping[MessageKey, int]  # index of the action in the sender's row
    needed_at: Mapping[MessageKey, int]  # index of the action in the receiver's row
    from_peer: Mapping[int, list[MessageKey]]
    to_peer: Mapping[int, list[MessageKey]]

    @classmethod
    def of(cls, actions_by_rank: Sequence[Sequence[Action]], rank_of: tuple[int, ...], pp_index: int) -> MessagePlan:
        """Derive the messages of the pipeline rank `pp_index` from a schedule: each rank's actions in execution order,
        and the pipeline rank of each stage (`rank_of`).
        """
        last_stage = len(rank_of) - 1
        sent_at, needed_at = {}, {}
        from_peer, to_peer = defaultdict(list), defaultdict(list)
        for row in actions_by_rank:
            for number, action in enumerate(row):
                if needed_key := message_needed_by(action, last_stage):
                    needed_at[needed_key] = number
                if key := message_sent_after(action, last_stage):
                    sent_at[key] = number
                    sender, receiver = rank_of[action.stage], rank_of[key.stage]
                    if receiver == pp_index != sender:
                        from_peer[sender].append(key)
                    elif sender == pp_index != receiver:
                        to_peer[receiver].append(key)
        return cls(rank_of, sent_at, needed_at, dict(from_peer), dict(to_peer))


class Mailbox:
    """The inboxes and outboxes of a rank for a run of a schedule."""

    def __init__(
        self,
        message_plan: MessagePlan,
        shapes: Sequence[tuple[int, ...]],
        template: Tensor,
        mesh: Mesh,
        groups: DirectionGroups,
        *,
        split_over_tp: bool,
    ) -> None:
        """Create the in- and outboxes, which starts the exchange of headers.

        `shapes` holds each micro-batch's message shape; all messages have the dtype and device of `template`. With
        `split_over_tp` tp ranks have equal messages, and each sends a part of them.
        """
        self.message_plan, self.shapes, self.split_over_tp = message_plan, shapes, split_over_tp
        self.pp, self.tp = mesh.pp, mesh.tp
        pp_index, ranks = mesh.pp.index, mesh.pp.ranks

        def header(keys: Sequence[MessageKey]) -> Header:
            all_shapes = [shapes[key.microbatch] for key in keys]
            num_numbers, shapes_crc = sum(map(math.prod, all_shapes)), crc32(repr([*map(tuple, all_shapes)]).encode())
            return Header(len(keys), num_numbers, tuple(all_shapes[0]), template.dtype, shapes_crc)

        def new_buffer(key: MessageKey) -> Tensor:
            shape = shapes[key.microbatch]
            return template.new_empty(math.prod(shape) // self.tp.size if self._is_split(shape) else shape)

        self.outboxes = {
            peer: Outbox(ranks[peer], groups.between(pp_index, peer), header(keys))
            for peer, keys in message_plan.to_peer.items()
        }  # fmt: skip
        self.inboxes = {
            peer: Inbox(keys, ranks[peer], groups.between(peer, pp_index), new_buffer, header(keys))
            for peer, keys in message_plan.from_peer.items()
        }  # fmt: skip
        self.local_messages: dict[MessageKey, Tensor] = {}  # messages between two stages of this rank

    def send(self, key: MessageKey, tensor: Tensor) -> None:
        """Start to send a tensor to the rank of the receiving stage; raise LayoutError if its shape is not the one
        announced for the micro-batch. A message between two stages of this rank is only kept.
        """
        shape = self.shapes[key.microbatch]
        if tensor.shape != shape:
            raise LayoutError(
                f"Stage {key.sender} on rank {dist.get_rank()} computed a tensor of shape {list(tensor.shape)}, but "
                f"the next stage expects the shape {list(shape)}. Give all microbatches of a step the same size."
            )
        receiver = self.message_plan.rank_of[key.stage]
        if receiver == self.pp.index:
            self.local_messages[key] = tensor
            return
        tensor = tensor.contiguous()
        if self._is_split(shape):
            tensor = tensor.flatten().chunk(self.tp.size)[self.tp.index]
        if not fault_point("pipeline.message"):
            self.outboxes[receiver].send(self.message_plan.needed_at[key], tensor, key)

    def receive(self, key: MessageKey) -> Tensor:
        """Wait until the message with this key has arrived, and return its tensor. Then free the tensors sent to the
        same peer that have arrived there by now.
        """
        sender = self.message_plan.rank_of[key.sender]
        if sender == self.pp.index:
            return self.local_messages.pop(key)
        tensor = self.inboxes[sender].receive(key)
        if sender in self.outboxes:
            self.outboxes[sender].free_sent(self.message_plan.sent_at[key])
        shape = self.shapes[key.microbatch]
        if self._is_split(shape):
            # collective: gathers the tp ranks' shares of a message
            tensor = gather_stack(tensor, self.tp, "shares of a message")
        return tensor.view(shape)

    def _is_split(self, shape: tuple[int, ...]) -> bool:
        return self.split_over_tp and math.prod(shape) % self.tp.size == 0

    def close(self) -> None:
        """Wait for all sends."""
        for outbox in self.outboxes.values():
            outbox.free_sent()


def _wait(work: dist.Work, wait_name: str = "a message from another stage") -> None:
    with current_phase.within("collective", wait_name):
        work.wait()
