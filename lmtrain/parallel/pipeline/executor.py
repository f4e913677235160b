"""The executor of a rank's row of a schedule: forwards and backwards of its stages, with messages in between.

Called by ParallelModel if a model is cut into stages. Depends on tables and messages; the caller supplies what a stage
computes and the loss of a micro-batch. A stage's output is freed as soon as it has been sent: backward needs only its
edge in the autograd graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lmtrain.observe.measure import phases
from lmtrain.parallel.mesh import Mesh
from lmtrain.parallel.pipeline.messages import LANE_CTAS, Lanes, Letter, Post, Routes, pairs_of, warm
from lmtrain.parallel.products import DeferredProduct, defer_products
from lmtrain.parallel.weights.grads import Weights
from lmtrain.runtime.processes.faults import fault_point
from lmtrain.runtime.processes.process_group import new_group
from lmtrain.schedules.pipeline_schedule import PipelineSchedule
from lmtrain.schedules.table import Action, Kind

_HALVES = {Kind.INPUT: "input", Kind.WEIGHT: "weight"}
Compute = Callable[[int, int, Tensor | None], Tensor]  # (stage, micro-batch, input) -> hidden states, or loss terms
Row = list[Action]
Shape = tuple[int, ...]  # shape of the hidden states between two stages


class Begun:
    """The observer of training actions: sets the trace phase and notifies the weights, which reduce gradients."""

    def __init__(self, weights: Weights, count: int) -> None:
        self.weights, self.last = weights, count - 1

    def begin(self, action: Action) -> None:
        phase = "forward" if action.kind is Kind.FORWARD else "backward"
        phases.enter(phase, microbatch=action.microbatch, stage=action.stage, half=_HALVES.get(action.kind, ""))
        fault_point(phase)
        self.weights.begin(action, action.microbatch == self.last)

    def done(self, action: Action) -> None:
        self.weights.done(action, action.microbatch == self.last)
        phases.leave()


class Watch(Protocol):
    """An observer that is notified before and after every action of this rank."""

    def begin(self, action: Action) -> None: ...
    def done(self, action: Action) -> None: ...


@dataclass
class Held:
    """The tensors that a micro-batch keeps in a stage between its forward and the end of its backward."""

    hidden: Tensor | None  # the stage's input
    out: GradientEdge | Tensor | None  # None after the input half of backward
    later: list[DeferredProduct] = field(default_factory=list)

    def finish(self) -> None:
        """Run the weight half of the backward; each product frees its inputs."""
        for _ in range(len(self.later)):
            self.later.pop(0)()


class OneStage:
    """The executor of a model without a pipeline: forward and backward of a micro-batch after the other."""

    at_once = 1  # number of batches that `forward` processes together
    ends = (0, 0)  # pp ranks of the first and the last stage

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

    def forward(self, compute: Compute, shapes: Sequence[Shape]) -> dict[int, Tensor]:
        return {index: compute(0, index, None) for index in range(len(shapes))}

    def settle(self) -> None:
        """Wait for outstanding sends. A single stage has none."""


class Pipeline:
    """The executor of a rank's stages in a pipeline."""

    def __init__(
        self, schedule: PipelineSchedule, mesh: Mesh, dtype: torch.dtype, device: torch.device, *, shares: bool
    ) -> None:
        """Create the lanes. `shares` means that tp ranks hold the same activations, so each sends a part of them.

        Collective: every rank of the pipeline takes part.
        """
        self.schedule, self.mesh, self.dtype, self.device, self.shares = schedule, mesh, dtype, device, shares
        self.at_once = 4 * mesh.pp.size
        owners = schedule.ranks_of_stages(mesh.layout.pp, mesh.layout.vp)
        self.ends = owners[0], owners[-1]
        up, ranks = mesh.pp.group, mesh.pp.ranks
        assert up is not None
        if device.type == "cuda":  # because: sums along pp may use the whole device, lanes only few blocks
            up = new_group(ranks, mesh.timeout_s, LANE_CTAS)
        self.lanes = Lanes(up, new_group(ranks, mesh.timeout_s, LANE_CTAS))
        if device.type == "cuda":
            warm(self.lanes, pairs_of(owners), mesh.pp, torch.zeros(1, device=device))
        self.sent: list[Post] = []  # runs whose last messages may be in flight

    def train(self, count: int, compute: Compute, shape: Shape, scale: float, watch: Watch) -> dict[int, Tensor]:
        """Run the schedule; return [terms] of each micro-batch on the rank of the last stage, else an empty dict."""
        row, routes = self._turns(count, forward_only=False)
        post, last = self._post(routes, [shape] * count), len(routes.rank_of) - 1
        held: dict[tuple[int, int], Held] = {}
        shares = {}
        for action in row:
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
                del hidden, out  # because: the backward frees the tensors in `held`; these names would keep them alive
            elif action.kind is Kind.WEIGHT:
                held.pop(key).finish()
            else:
                self._backward(post, action, held, last)
            watch.done(action)
        self.sent.append(post)
        return shares

    @torch.no_grad()
    def forward(self, compute: Compute, shapes: Sequence[Shape]) -> dict[int, Tensor]:
        """Run only a schedule's forwards; return each batch's output of the last stage, on its rank."""
        row, routes = self._turns(len(shapes), forward_only=True)
        post, results = self._post(routes, shapes), {}
        for action in row:
            out = compute(action.stage, action.microbatch, self._arrive(post, action))
            if action.stage == len(routes.rank_of) - 1:
                results[action.microbatch] = out
            else:
                post.send(Letter(False, action.stage + 1, action.microbatch), out)
        self.sent.append(post)
        return results

    def settle(self) -> None:
        """Wait for outstanding sends.

        The caller runs a collective over pp first, which no rank enters before it has received all its messages.
        """
        while self.sent:
            self.sent.pop().close()

    def _turns(self, count: int, *, forward_only: bool) -> tuple[Row, Routes]:
        layout = self.mesh.layout
        return _turns_once(self.schedule, layout.pp, layout.vp, count, self.mesh.pp.index, forward_only)

    def _post(self, routes: Routes, shapes: Sequence[Shape]) -> Post:
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        return Post(routes, shapes, like, self.mesh, self.lanes, shares=self.shares)

    def _arrive(self, post: Post, action: Action) -> Tensor | None:
        if action.stage == 0:
            return None
        hidden = post.receive(Letter(False, action.stage, action.microbatch))
        return hidden.detach().requires_grad_(torch.is_grad_enabled())

    def _backward(self, post: Post, action: Action, held: dict[tuple[int, int], Held], last: int) -> None:
        """Run a whole backward or its input half, and send the gradient of the stage's input."""
        key = (action.stage, action.microbatch)
        it, grad = held[key], None
        assert it.out is not None
        if action.stage < last:
            grad = post.receive(Letter(True, action.stage, action.microbatch))
        if action.kind is Kind.INPUT:
            with defer_products(it.later):
                torch.autograd.backward(it.out, grad)
            held[key] = Held(None, None, it.later)
        else:
            torch.autograd.backward(it.out, grad)
            del held[key]
        if it.hidden is not None:
            assert it.hidden.grad is not None
            post.send(Letter(True, action.stage - 1, action.microbatch), it.hidden.grad)


@cache  # because: a run uses only a few different numbers of micro-batches
def _turns_once(
    schedule: PipelineSchedule, pp: int, vp: int, count: int, rank: int, forward_only: bool
) -> tuple[Row, Routes]:
    table = schedule.table(pp, vp, count)
    rows = [[a for a in row if a.kind is Kind.FORWARD or not forward_only] for row in table.actions]
    return rows[rank], Routes.of(rows, table.rank_of, rank)


def _scaled(terms: Tensor, scale: float) -> Tensor:
    loss = terms.sum()
    return loss if scale == 1.0 else loss * scale
