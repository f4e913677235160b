"""The executor of a rank's row of a schedule: forwards and backwards of its stages, with messages in between.

Called by ParallelModel if a model is cut into stages. Depends on tables and messages; the caller supplies what a stage
computes and the loss of a micro-batch. A stage's output is freed as soon as it has been sent: backward needs only its
edge in the autograd graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lmtrain.parallel.linear_forward_backward_products import DeferredProduct, defer_products
from lmtrain.parallel.mesh import Mesh
from lmtrain.parallel.pipeline.stage_to_stage_messages import (
    MESSAGE_CTAS,
    DirectionGroups,
    Mailbox,
    MessageKey,
    MessagePlan,
    connect_pairs,
    message_pairs,
)
from lmtrain.parallel.weights.reduce_and_clip_gradients import Weights
from lmtrain.runtime.processes import current_phase
from lmtrain.runtime.processes.fault_injection import fault_point
from lmtrain.runtime.processes.process_group import new_group
from lmtrain.schedules.pipeline_schedule import PipelineSchedule
from lmtrain.schedules.table import Action, Kind

_HALVES = {Kind.INPUT: "input", Kind.WEIGHT: "weight"}
# (stage, micro-batch, hidden states of the previous stage) -> hidden states, or loss terms from the last stage
StageForward = Callable[[int, int, Tensor | None], Tensor]
Shape = tuple[int, ...]  # shape of the hidden states between two stages


class TrainingObserver:
    """An observer of a rank's actions: sets the trace phase and notifies the weights, which reduce gradients."""

    def __init__(self, weights: Weights, num_microbatches: int) -> None:
        self.weights, self.last_microbatch = weights, num_microbatches - 1

    def before_action(self, action: Action) -> None:
        phase = "forward" if action.kind is Kind.FORWARD else "backward"
        current_phase.enter(phase, microbatch=action.microbatch, stage=action.stage, half=_HALVES.get(action.kind, ""))
        fault_point(phase)
        self.weights.before_action(action, action.microbatch == self.last_microbatch)

    def after_action(self, action: Action) -> None:
        self.weights.after_action(action, action.microbatch == self.last_microbatch)
        current_phase.leave()


@dataclass
class StageTensors:
    """The tensors that a micro-batch keeps in a stage between its forward and the end of its backward."""

    hidden: Tensor | None  # the stage's input
    out: GradientEdge | Tensor | None  # None after the input half of backward
    deferred: list[DeferredProduct] = field(default_factory=list)

    def run_deferred(self) -> None:
        """Run the weight half of the backward; each product frees its inputs."""
        for _ in range(len(self.deferred)):
            self.deferred.pop(0)()


class SingleStage:
    """The executor of a model without a pipeline: forward and backward of a micro-batch after the other."""

    batches_at_once = 1  # number of batches that `forward` processes together
    end_ranks = (0, 0)  # pp ranks of the first and the last stage

    def train(
        self,
        num_microbatches: int,
        stage_forward: StageForward,
        hidden_shape: Shape,
        loss_scale: float,
        observer: TrainingObserver,
    ) -> dict[int, Tensor]:
        """Run forward and backward of each micro-batch in turn; return micro-batch number -> its loss terms.
        `stage_forward(stage, micro-batch, input)` runs a forward, `observer` is notified of each action, and
        `loss_scale` multiplies the loss. `hidden_shape` is unused.
        """
        losses = {}
        for index in range(num_microbatches):
            forward, backward = Action(Kind.FORWARD, 0, index), Action(Kind.BACKWARD, 0, index)
            observer.before_action(forward)
            terms = stage_forward(0, index, None)
            observer.before_action(backward)
            torch.autograd.backward(_scaled_loss(terms, loss_scale))
            observer.after_action(backward)
            losses[index] = terms.detach()
        return losses

    def forward(self, stage_forward: StageForward, hidden_shapes: Sequence[Shape]) -> dict[int, Tensor]:
        """Return the output of each batch by its index; there are as many batches as shapes."""
        return {index: stage_forward(0, index, None) for index in range(len(hidden_shapes))}

    def wait_for_sends(self) -> None:
        """Wait for outstanding sends. A single stage has none."""


class Pipeline:
    """The executor of a rank's stages in a pipeline."""

    def __init__(
        self, schedule: PipelineSchedule, mesh: Mesh, dtype: torch.dtype, device: torch.device, *, split_over_tp: bool
    ) -> None:
        """Create the process groups of messages. Collective: every rank of the pipeline takes part.

        `split_over_tp`: tp ranks hold the same activations, so each sends a part of them.
        """
        self.schedule, self.mesh, self.dtype, self.device = schedule, mesh, dtype, device
        self.split_over_tp = split_over_tp
        self.batches_at_once = 4 * mesh.pp.size
        rank_of_stage = schedule.ranks_of_stages(mesh.layout.pp, mesh.layout.vp)
        self.end_ranks = rank_of_stage[0], rank_of_stage[-1]
        up, ranks = mesh.pp.group, mesh.pp.ranks
        assert up is not None
        if device.type == "cuda":  # because: sums along pp may use the whole device, messages only few blocks
            up = new_group(ranks, mesh.timeout_s, MESSAGE_CTAS)
        self.direction_groups = DirectionGroups(up, new_group(ranks, mesh.timeout_s, MESSAGE_CTAS))
        if device.type == "cuda":
            connect_pairs(self.direction_groups, message_pairs(rank_of_stage), mesh.pp, torch.zeros(1, device=device))
        self.sent: list[Mailbox] = []  # runs whose last messages may be in flight

    def train(
        self,
        num_microbatches: int,
        stage_forward: StageForward,
        hidden_shape: Shape,
        loss_scale: float,
        observer: TrainingObserver,
    ) -> dict[int, Tensor]:
        """Run this rank's actions of the pipeline schedule in a training step. Return micro-batch number -> its loss
        terms on the rank of the last stage, {} on others. `stage_forward(stage, micro-batch, hidden states)` runs a
        forward, and `observer` is notified of each action.

        `hidden_shape` is the shape of the tensors between stages. The loss is multiplied by `loss_scale` for backward.
        """
        row, message_plan = self._actions_and_messages(num_microbatches, forward_only=False)
        mailbox = self._open_mailbox(message_plan, [hidden_shape] * num_microbatches)
        last_stage = len(message_plan.rank_of) - 1
        in_flight: dict[tuple[int, int], StageTensors] = {}
        losses = {}
        for action in row:
            key = (action.stage, action.microbatch)
            observer.before_action(action)
            if action.kind is Kind.FORWARD:
                hidden = self._receive_input(mailbox, action)
                out = stage_forward(*key, hidden)
                if action.stage == last_stage:
                    losses[action.microbatch] = out.detach()
                    in_flight[key] = StageTensors(hidden, _scaled_loss(out, loss_scale))
                else:
                    in_flight[key] = StageTensors(hidden, get_gradient_edge(out))
                    mailbox.send(MessageKey(False, action.stage + 1, action.microbatch), out.detach())
                del hidden, out  # because: backward frees the tensors in `in_flight`; these names would keep them alive
            elif action.kind is Kind.WEIGHT:
                in_flight.pop(key).run_deferred()
            else:
                self._backward(mailbox, action, in_flight, last_stage)
            observer.after_action(action)
        self.sent.append(mailbox)
        return losses

    @torch.no_grad()
    def forward(self, stage_forward: StageForward, hidden_shapes: Sequence[Shape]) -> dict[int, Tensor]:
        """Run only the forwards of this rank's stages. Return batch index -> its output on the rank of the last stage,
        {} on others. `stage_forward(stage, batch index, hidden states)` runs a forward.

        There are as many batches as `hidden_shapes`, the shape of the tensors between stages for each.
        """
        row, message_plan = self._actions_and_messages(len(hidden_shapes), forward_only=True)
        mailbox, results = self._open_mailbox(message_plan, hidden_shapes), {}
        for action in row:
            out = stage_forward(action.stage, action.microbatch, self._receive_input(mailbox, action))
            if action.stage == len(message_plan.rank_of) - 1:
                results[action.microbatch] = out
            else:
                mailbox.send(MessageKey(False, action.stage + 1, action.microbatch), out)
        self.sent.append(mailbox)
        return results

    def wait_for_sends(self) -> None:
        """Wait for outstanding sends.

        The caller runs a collective over pp first, which no rank enters before it has received all its messages.
        """
        while self.sent:
            self.sent.pop().close()

    def _actions_and_messages(self, num_microbatches: int, *, forward_only: bool) -> tuple[list[Action], MessagePlan]:
        """Return this rank's actions in execution order, and the messages that it exchanges with other ranks."""
        layout, rank = self.mesh.layout, self.mesh.pp.index
        return _cached_actions_and_messages(self.schedule, layout.pp, layout.vp, num_microbatches, rank, forward_only)

    def _open_mailbox(self, message_plan: MessagePlan, hidden_shapes: Sequence[Shape]) -> Mailbox:
        """Create the mailbox that sends and receives this rank's messages, listed in `message_plan`, in a run of the
        schedule. `hidden_shapes` has the shape of a message for each micro-batch.
        """
        template = torch.empty(0, dtype=self.dtype, device=self.device)
        return Mailbox(
            message_plan, hidden_shapes, template, self.mesh, self.direction_groups, split_over_tp=self.split_over_tp
        )

    def _receive_input(self, mailbox: Mailbox, action: Action) -> Tensor | None:
        """Return the hidden states that the previous stage sent for the forward `action`, as a leaf for autograd; None
        for the model's first stage.
        """
        if action.stage == 0:
            return None
        hidden = mailbox.receive(MessageKey(False, action.stage, action.microbatch))
        return hidden.detach().requires_grad_(torch.is_grad_enabled())

    def _backward(
        self, mailbox: Mailbox, action: Action, in_flight: dict[tuple[int, int], StageTensors], last_stage: int
    ) -> None:
        """Run `action`, a whole backward or only the half that computes gradients of activations, and send the gradient
        of the stage's input to the previous stage. `in_flight` holds the tensors of each (stage, micro-batch) since its
        forward.
        """
        key = (action.stage, action.microbatch)
        tensors, grad = in_flight[key], None
        assert tensors.out is not None
        if action.stage < last_stage:
            grad = mailbox.receive(MessageKey(True, action.stage, action.microbatch))
        if action.kind is Kind.INPUT:
            with defer_products(tensors.deferred):
                torch.autograd.backward(tensors.out, grad)
            in_flight[key] = StageTensors(None, None, tensors.deferred)
        else:
            torch.autograd.backward(tensors.out, grad)
            del in_flight[key]
        if tensors.hidden is not None:
            assert tensors.hidden.grad is not None
            mailbox.send(MessageKey(True, action.stage - 1, action.microbatch), tensors.hidden.grad)


@cache  # because: a run uses only a few different numbers of micro-batches
def _cached_actions_and_messages(
    schedule: PipelineSchedule, pp: int, vp: int, num_microbatches: int, rank: int, forward_only: bool
) -> tuple[list[Action], MessagePlan]:
    """Return the actions of the pipeline rank `rank` in execution order, and the messages that it exchanges with other
    ranks. `pp` is the number of ranks, `vp` the number of stages per rank; `forward_only` leaves out all backwards.
    """
    table = schedule.table(pp, vp, num_microbatches)
    rows = [[a for a in row if a.kind is Kind.FORWARD or not forward_only] for row in table.actions]
    return rows[rank], MessagePlan.of(rows, table.rank_of, rank)


def _scaled_loss(terms: Tensor, loss_scale: float) -> Tensor:
    """Return the sum of the loss terms, times the loss scale."""
    loss = terms.sum()
    return loss if loss_scale == 1.0 else loss * loss_scale
