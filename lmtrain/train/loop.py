"""The training loop, read downward: a step, its row of metrics, from time to time a measurement and a checkpoint.

Called by the command line with a Run, on every process of the run. Everything that happens during training happens in
`train`; numbers in rows are global, and only rank 0 writes rows.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from lmtrain.runtime.processes.fault_injection import fault_point
from lmtrain.runtime.processes.stop_signals import StopRequest
from lmtrain.train.in_loop.save_and_stop_requests import SAVE, open_requests
from lmtrain.train.in_loop.validate_and_evaluate import Evaluation, due_measurements, is_due, measure, measure_pending
from lmtrain.train.record.metrics_writer import record, record_start, report_occasional, report_save, report_step, save
from lmtrain.train.record.trace_and_profile_steps import open_tracer, profile_steps
from lmtrain.train.run_objects_and_resume import Run
from lmtrain.train.step import train_step


def train(run: Run, stop: StopRequest, evaluation: Evaluation | None = None, before: Summary | None = None) -> Summary:
    """Train until the last step, or until a stop is requested, with validations, evaluations and checkpoints in
    between. `stop` receives signals, `evaluation` runs the configured tasks. `before` is the summary of the stages that
    this start has trained already. All ranks take part.
    """
    config, progress, view = run.config, run.progress, run.view
    total, end, began = config.total_steps, config.end_step, time.monotonic() - (before.seconds if before else 0.0)
    last_saved = progress.step if run.inputs.resume_from is not None else None
    keep = config.checkpoint.interval_steps is not None
    # because: with several ranks, the vote on a stop has its result one step later
    last = "this step" if config.parallel.layout.world_size == 1 else "the next step"
    loss = valid_loss = None
    record_start(run)
    with open_tracer(run) as tracer, open_requests(run, stop, tracer.request_steps) as requests:
        if progress.pending:
            valid_loss = measure_pending(run, requests, evaluation)
            last_saved = last_saved if progress.pending else None  # because: the checkpoint lists it as pending
        run.throughput.start(progress.step, time.monotonic())
        for batches in profile_steps(run, run.loader.steps(progress.step, end)):
            if requests.stopped_by:
                break
            fault_point("step", batches.step)
            requests.start_vote()
            run.durations.begin_step()
            lr = config.learning_rate(batches.step)
            result = train_step(run.model, run.optimizer, batches, lr, config.optim.clip_norm, run.folder)
            loss = result.loss
            progress.count(batches, result, run.inputs.data.parts)
            run.average.update(progress.step)
            now = time.monotonic()
            run.throughput.step_done(progress.step, now, batches.num_tokens)
            run.durations.end_step(run.loader.data_wait_s)
            report_occasional(run)

            requests.finish_vote()
            stop.defer_to_step_end(lambda name: view.show_stop(f"{name}: stopping after {last}"))
            report_save(run)
            names = due_measurements(run, evaluation)
            done = progress.step == end or requests.stopped_by is not None
            if progress.step % config.observe.log_interval_steps == 0 or done:
                report_step(run, batches, result, lr, now - began)
            if names:
                valid_loss = measure(run, requests, evaluation, names) or valid_loss
                run.throughput.start(progress.step, time.monotonic())
            done = progress.step == end or requests.stopped_by is not None
            if requests.save_requested or (keep and (is_due(progress.step, config.checkpoint.interval_steps) or done)):
                last_saved = save(run)
                requests.report_done(SAVE)
            if done:
                break
        if keep and last_saved != progress.step:
            save(run)
        view.show_activity("writing the last checkpoint to disk")
        run.writer.wait()  # a failure of the last checkpoint is the run's failure
        report_save(run)
    stopped_by = requests.stopped_by or config.stop_at_end if progress.step < total or progress.pending else None
    if progress.step == total or stopped_by:
        record(run, "stop", {"stopped_by": stopped_by, "elapsed_s": time.monotonic() - began})
    epochs = (progress.samples - run.inputs.data.first_position) / run.inputs.data.train.num_samples
    seconds, went_on = time.monotonic() - began, run.inputs.resume_from is not None
    return Summary(
        progress.step, loss, valid_loss, seconds, progress.tokens, stopped_by, epochs, went_on
    ).joined_to(before)


@dataclass(frozen=True)
class Summary:
    """The result of `train`, for the summary that the command line shows."""
    step: int
    loss: float | None  # loss of the last step of this attempt
    valid_loss: float | None
    seconds: float  # duration of this attempt, all its stages together
    tokens: int
    stopped_by: str | None  # the cause if the run ended early
    epochs: float  # passes over the training data
    was_resumed: bool  # True if earlier attempts did some of the steps

    def joined_to(self, before: Summary | None) -> Summary:
        """Return this stage's summary with the epochs of `before`, that of earlier stages, added; unchanged if None."""
        if before is None:
            return self
        return replace(self, epochs=before.epochs + self.epochs, was_resumed=before.was_resumed)
