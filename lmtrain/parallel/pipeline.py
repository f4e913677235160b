"""Runs this rank's row of a schedule: forwards and backwards of its stages, with messages in between.

Called by ParallelModel where a model is cut into stages. Knows tables and messages; what a stage computes, and what a
microbatch's loss is, comes from outside. A stage's output is dropped as soon as it has been sent: what backward needs
of it is its place in autograd's graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lmtrain.parallel.deferred import Later, put_off
from lmtrain.parallel.mesh import Mesh
from lmtrain.parallel.post import Lanes, Letter, Post
from lmtrain.runtime.process_group import new_group
from lmtrain.schedules.choose import Name, build, ranks_of_stages
from lmtrain.schedules.table import Action, Kind, Table

Compute = Callable[[int, int, Tensor | None], Tensor]  # (stage, microbatch, hidden states) -> hidden states, or terms
Shape = tuple[int, ...]  # of the hidden states between two stages


class Watch(Protocol):
    """Is told of every action of this rank."""

    def begin(self, action: Action) -> None: ...
    def done(self, action: Action) -> None: ...


@dataclass
class Held:
    """What a microbatch leaves in a stage between its forward and the end of its backward."""

    hidden: Tensor | None  # what came in
    out: GradientEdge | Tensor | None  # None: its first half is done
    later: list[Later] = field(default_factory=list)


class OneStage:
    """A model that is not cut: forward and backward of one microbatch after the other."""

    at_once = 1  # batches that `forward` is given together
    ends = (0, 0)  # ranks along pp of the first and the last stage

    def train(self, count: int, compute: Compute, shape: Shape, scale: float, watch: Watch) -> dict[int, Tensor]:
        shares = {}
        for index in range(count):
            forward, backward = Action(Kind.FORWARD, 0, index), Action(Kind.BACKWARD, 0, index)
            watch.begin(forward)
            terms = compute(0, index, None)
            watch.begin(backward)
            torch.autograd.backward(_scaled(terms, scale))
            watch.done(backward)
            shares[index] = terms.detach()
        return shares

    def forward(self, count: int, compute: Compute, shape: Shape) -> dict[int, Tensor]:
        return {index: compute(0, index, None) for index in range(count)}


class Pipeline:
    def __init__(self, schedule: Name, mesh: Mesh, dtype: torch.dtype, device: torch.device, *, shares: bool) -> None:
        """`shares`: tp ranks hold the same activations, so each sends a part of them."""
        self.schedule, self.mesh, self.dtype, self.device, self.shares = schedule, mesh, dtype, device, shares
        self.at_once = 4 * mesh.pp.size
        owners = ranks_of_stages(schedule, mesh.layout.pp, mesh.layout.vp)
        self.ends = owners[0], owners[-1]
        group = mesh.pp.group
        assert group is not None
        self.lanes = Lanes(group, new_group(mesh.pp.ranks, mesh.timeout_s))

    def train(self, count: int, compute: Compute, shape: Shape, scale: float, watch: Watch) -> dict[int, Tensor]:
        """[terms] of each microbatch, on the rank of the last stage."""
        table = self._table(count)
        post, last = self._post(table.actions, table.rank_of, shape), table.num_stages - 1
        held: dict[tuple[int, int], Held] = {}
        shares = {}
        for action in table.actions[self.mesh.pp.index]:
            key = (action.stage, action.microbatch)
            watch.begin(action)
            if action.kind is Kind.FORWARD:
                hidden = self._arrive(post, action)
                out = compute(*key, hidden)
                if action.stage == last:
                    shares[action.microbatch] = out.detach()
                    held[key] = Held(hidden, _scaled(out, scale))
                else:
                    held[key] = Held(hidden, get_gradient_edge(out))
                    post.send(Letter(False, action.stage + 1, action.microbatch), out.detach())
                del out
            elif action.kind is Kind.WEIGHT:
                for work in held.pop(key).later:
                    work()
            else:
                self._backward(post, action, held, last)
            watch.done(action)
        post.close()
        return shares

    @torch.no_grad()
    def forward(self, count: int, compute: Compute, shape: Shape) -> dict[int, Tensor]:
        """What the last stage gives for each batch, on its rank: a schedule's forwards alone."""
        table = self._table(count)
        rows = [[action for action in row if action.kind is Kind.FORWARD] for row in table.actions]
        post, results = self._post(rows, table.rank_of, shape), {}
        for action in rows[self.mesh.pp.index]:
            out = compute(action.stage, action.microbatch, self._arrive(post, action))
            if action.stage == table.num_stages - 1:
                results[action.microbatch] = out
            else:
                post.send(Letter(False, action.stage + 1, action.microbatch), out)
        post.close()
        return results

    def _table(self, count: int) -> Table:
        return _build_once(self.schedule, self.mesh.layout.pp, self.mesh.layout.vp, count)

    def _post(self, rows: Sequence[Sequence[Action]], rank_of: Sequence[int], shape: Shape) -> Post:
        like = torch.empty(shape, dtype=self.dtype, device=self.device)
        return Post(rows, rank_of, like, self.mesh, self.lanes, shares=self.shares)

    def _arrive(self, post: Post, action: Action) -> Tensor | None:
        if action.stage == 0:
            return None
        hidden = post.receive(Letter(False, action.stage, action.microbatch), action.stage - 1)
        return hidden.detach().requires_grad_(torch.is_grad_enabled())

    def _backward(self, post: Post, action: Action, held: dict[tuple[int, int], Held], last: int) -> None:
        """A whole backward, or its first half."""
        key = (action.stage, action.microbatch)
        it, grad = held[key], None
        assert it.out is not None
        if action.stage < last:
            grad = post.receive(Letter(True, action.stage, action.microbatch), action.stage + 1)
        if action.kind is Kind.INPUT:
            with put_off(it.later):
                torch.autograd.backward(it.out, grad)
            held[key] = Held(None, None, it.later)
        else:
            torch.autograd.backward(it.out, grad)
            del held[key]
        if it.hidden is not None:
            assert it.hidden.grad is not None
            post.send(Letter(True, action.stage - 1, action.microbatch), it.hidden.grad)


_build_once = cache(build)  # because: a run has a few numbers of microbatches


def _scaled(terms: Tensor, scale: float) -> Tensor:
    loss = terms.sum()
    return loss if scale == 1.0 else loss * scale


def reduce_now(stage: Any) -> None:
    """FSDP's reduction of the gradients a stage holds, as at the end of a backward.

    because: second halves accumulate gradients after the last hook of a backward has run, and FSDP has no public call
    """
    stage._get_fsdp_state()._root_post_backward_final_callback()
