"""The training loop, read downward: a step, its row of metrics, now and then a measurement and a checkpoint.

Called by the command line with a Run, on every process of it. Everything that happens during training happens in
`train`; numbers in rows are global, and only rank 0 has somewhere to write them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from lmtrain.runtime.faults import fault_point
from lmtrain.runtime.signals import StopRequest
from lmtrain.train.evaluate import Evaluation, evaluate
from lmtrain.train.peers import StopVote
from lmtrain.train.records import record, report_save, report_step
from lmtrain.train.save import save
from lmtrain.train.setup import Run
from lmtrain.train.step import train_step
from lmtrain.train.validate import validate


@dataclass(frozen=True)
class Summary:
    step: int
    loss: float | None  # of the last step of this attempt
    valid_loss: float | None
    seconds: float
    tokens: int
    stopped_by: str | None  # the signal that ended the run early


def train(run: Run, evaluation: Evaluation | None = None) -> Summary:
    config, progress, view = run.config, run.progress, run.view
    total, began = config.total_steps, time.monotonic()
    last_saved = progress.step if run.inputs.resume_from is not None else None
    keep = config.checkpoint.interval_steps is not None
    loss = valid_loss = None
    resumed, weights = run.inputs.resume_from, run.inputs.weights_from
    began_at = {"resumed_from": resumed and str(resumed), "weights_from": weights and str(weights)}
    record(run, "start", began_at | ({"passed_over": list(run.passed_over)} if run.passed_over else {}))
    for warning in run.inputs.warnings:
        view.note(f"warning: {warning}")
    if resumed is not None and progress.step == total:
        view.note(f"nothing is left to do: {resumed} is step {total} of {total}")
    elif resumed is not None:
        view.note(f"continuing from {resumed} at step {progress.step}")
    elif weights is not None:
        view.note(f"a new run with the weights of {weights}")

    stopped_by = None
    vote = StopVote(run.mesh)
    with StopRequest(heard=lambda name: view.stopping(f"{name}: stopping after this step")) as stop:
        run.throughput.start(progress.step, time.monotonic())
        for batches in run.loader.steps(progress.step, total):
            fault_point("step", batches.step)
            vote.ask(stop)
            lr = config.optim.lr * config.schedule.factor(batches.step, total)
            result = train_step(run.model, run.optimizer, batches, lr, config.optim.clip_norm, run.folder)
            loss = result.loss
            progress.step += 1
            progress.samples += batches.num_samples
            progress.tokens += batches.num_tokens
            progress.skipped += result.skipped
            now = time.monotonic()
            run.throughput.step_done(progress.step, now, batches.num_tokens)

            stopped_by = vote.answer(stop)
            report_save(run)
            done = progress.step == total or stopped_by is not None
            if progress.step % config.observe.log_interval_steps == 0 or done:
                report_step(run, batches, result, lr, now - began)
            due = _due(progress.step, config.train.valid_interval_steps)
            if due or (progress.step == total and run.inputs.data.valid):
                valid_loss = validate(run)
                run.throughput.start(progress.step, time.monotonic())
            due = stopped_by is None and _due(progress.step, config.eval.interval_steps)
            if evaluation is not None and (due or progress.step == total):
                stopped_by = evaluate(run, evaluation, vote, stop) or stopped_by
                done = progress.step == total or stopped_by is not None
                run.throughput.start(progress.step, time.monotonic())
            if keep and (_due(progress.step, config.checkpoint.interval_steps) or done):
                last_saved = save(run)
            if done:
                break

        if keep and last_saved != progress.step:
            save(run)
        view.doing("writing the last checkpoint to disk")
        run.writer.wait()  # a failure of the last checkpoint is the run's failure
        report_save(run)
    stopped_by = stopped_by if progress.step < total else None
    record(run, "stop", {"stopped_by": stopped_by, "elapsed_s": time.monotonic() - began})
    return Summary(progress.step, loss, valid_loss, time.monotonic() - began, progress.tokens, stopped_by)


def _due(step: int, interval: int | None) -> bool:
    return interval is not None and interval > 0 and step % interval == 0
