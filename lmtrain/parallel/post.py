"""Messages between pipeline stages: activations go forward, their gradients back, in the order the schedule says.

Called by pipeline. Both sides know every rank's row of the table, so a receiver posts its receives in the order in
which the sender sends, and no message carries a name. Traffic to higher and to lower ranks has a process group each:
within one group two ranks never wait for each other in both directions.

Where tp ranks hold the same activations each sends a share, and the shares are gathered on arrival (Megatron-LM 2021).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lmtrain.parallel.collectives import gather_stack
from lmtrain.parallel.mesh import Mesh
from lmtrain.schedules.table import Action, Kind

_POSTED = 2  # receives under way from one peer: one that is waited for, one that arrives meanwhile


@dataclass(frozen=True)
class Lanes:
    """Two groups of the same pipeline ranks, one for each direction of traffic."""

    up: dist.ProcessGroup
    down: dist.ProcessGroup

    def between(self, sender: int, receiver: int) -> dist.ProcessGroup:
        return self.up if sender < receiver else self.down


@dataclass(frozen=True)
class Letter:
    """What an action waits for: the hidden states, or their gradient, that cross into `stage`."""

    backward: bool
    stage: int
    microbatch: int


def letter_of(action: Action, last_stage: int) -> Letter | None:
    """What others wait for once this action is done."""
    if action.kind is Kind.FORWARD:
        return Letter(False, action.stage + 1, action.microbatch) if action.stage < last_stage else None
    if action.kind is Kind.WEIGHT or action.stage == 0:
        return None
    return Letter(True, action.stage - 1, action.microbatch)


class Inbox:
    """Letters from one peer, received in the order of its row."""

    def __init__(self, letters: Sequence[Letter], sender: int, group: dist.ProcessGroup, like: Tensor) -> None:
        self.sender, self.group, self.like = sender, group, like
        self.coming = deque(letters)
        self.posted: deque[tuple[Letter, Tensor, dist.Work]] = deque()
        self.arrived: dict[Letter, Tensor] = {}
        self._post()

    def take(self, letter: Letter) -> Tensor:
        while letter not in self.arrived:
            came, tensor, work = self.posted.popleft()
            work.wait()
            self.arrived[came] = tensor
            self._post()
        return self.arrived.pop(letter)

    def _post(self) -> None:
        while self.coming and len(self.posted) < _POSTED:
            tensor = torch.empty_like(self.like)
            work = dist.irecv(tensor, self.sender, group=self.group)
            assert work is not None
            self.posted.append((self.coming.popleft(), tensor, work))


class Post:
    """One rank's mail for one run of a schedule."""

    def __init__(
        self,
        rows: Sequence[Sequence[Action]],
        rank_of: Sequence[int],
        like: Tensor,
        mesh: Mesh,
        lanes: Lanes,
        *,
        shares: bool,
    ) -> None:
        """`like` has the shape and dtype of one message; `shares` says that tp ranks have the same ones."""
        self.rank_of, self.pp, self.tp, self.lanes, self.shape = rank_of, mesh.pp, mesh.tp, lanes, like.shape
        self.shares = shares and like.numel() % self.tp.size == 0
        message = like.flatten()[: like.numel() // self.tp.size] if self.shares else like
        last_stage, pp = len(rank_of) - 1, self.pp
        letters: dict[int, list[Letter]] = {}
        for peer, row in enumerate(rows):
            if peer != pp.index:
                found = [letter for action in row if (letter := letter_of(action, last_stage)) is not None]
                letters[peer] = [letter for letter in found if rank_of[letter.stage] == pp.index]
        self.inboxes = {
            peer: Inbox(found, pp.ranks[peer], lanes.between(peer, pp.index), message)
            for peer, found in letters.items() if found
        }  # fmt: skip
        self.own: dict[Letter, Tensor] = {}  # between two stages of this rank
        self.sent: deque[tuple[dist.Work, Tensor]] = deque()

    def send(self, letter: Letter, tensor: Tensor) -> None:
        to = self.rank_of[letter.stage]
        if to == self.pp.index:
            self.own[letter] = tensor
            return
        tensor = tensor.contiguous()
        if self.shares:
            tensor = tensor.flatten().chunk(self.tp.size)[self.tp.index]
        work = dist.isend(tensor, self.pp.ranks[to], group=self.lanes.between(self.pp.index, to))
        assert work is not None
        self.sent.append((work, tensor))
        while self.sent and self.sent[0][0].is_completed():
            self.sent.popleft()  # and with it the memory of what was sent

    def receive(self, letter: Letter, sender_stage: int) -> Tensor:
        sender = self.rank_of[sender_stage]
        if sender == self.pp.index:
            return self.own.pop(letter)
        tensor = self.inboxes[sender].take(letter)
        if self.shares:
            # collective: nothing is summed; tp ranks' shares of one message
            tensor = gather_stack(tensor, self.tp)
        return tensor.view(self.shape)

    def close(self) -> None:
        while self.sent:
            self.sent.popleft()[0].wait()
