"""Measurements of a run between its steps, if due and if time is left: validation, then evaluations.

Called by the loop, on every process. A measurement that a stop interrupts is pending: the checkpoint lists it, and the
next start makes it before its first step, so that no row is missing in the end. If too little time is left, the run
stops.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from lmtrain.batch import Batch
from lmtrain.data.sample_dataset_interface import Dataset, labels_per_term
from lmtrain.data.samples.blend import counts_by_source
from lmtrain.data.training_data_by_source import shown_sources
from lmtrain.parallel.parallel_model import ParallelModel
from lmtrain.runfolder.tensorboard_metric_names import AVERAGE_KEY, term_measure_names
from lmtrain.runtime.processes import current_phase
from lmtrain.runtime.processes.fault_injection import fault_point
from lmtrain.train.in_loop.save_and_stop_requests import MeasurementCutOff, Requests
from lmtrain.train.record.metrics_writer import record, report_measures
from lmtrain.train.run_objects_and_resume import Run
from lmtrain.train.step_and_save_durations import EVALUATION, VALIDATION

_MAX_NATS = 700.0  # because: a double cannot hold the exponential of more
Sums = list[list[float]]  # row 0: loss sum of each term; row 1: number of correct predictions of each term
Part = tuple[Sums, Sequence[int], int]  # sums, number of labels per term, number of samples


class Evaluation(Protocol):
    """The evaluation tasks of a run, as a function that scores a model."""

    def __call__(
        self, model: ParallelModel, before_each: Callable[[], None], show_activity: Callable[[str], None]
    ) -> Iterator[dict[str, Any]]:
        """Yield a row per task: its `name`, its `measures`, the `headline` measure's name, and the facts of its data.

        `before_each` is called before every call of the model, on all processes alike; an exception from it ends the
        evaluation.
        """


def evaluate(run: Run, evaluation: Evaluation, requests: Requests) -> bool:
    """Run all evaluation tasks on the model and write a metrics row for each. Return False if a request to stop the run
    interrupted them; all ranks return the same.
    """
    # because: blocks compiled for a step's shape would be recompiled for every text length
    uncompiled = torch.compiler.set_stance("force_eager") if run.model.compiled else nullcontext()
    try:
        with current_phase.within("evaluation"), uncompiled:
            for result in _evaluation_results(run, evaluation, requests):
                report_measures(run, record(run, "eval", result))
    except MeasurementCutOff:
        return False
    return True


def _evaluation_results(run: Run, evaluation: Evaluation, requests: Requests) -> Iterator[dict[str, Any]]:
    """Run all evaluation tasks and yield the metrics row of each. If the run keeps an average of its weights, run all
    tasks a second time with the average, and yield the rows, which then also have its measures, after that. Raise
    MeasurementCutOff if the run must stop.
    """
    results = evaluation(run.model, requests.vote_now, run.view.show_activity)
    if not run.average.has_begun:
        yield from results
        return
    of_weights = list(results)
    with run.average.in_place_of_weights():
        of_average = list(evaluation(
            run.model, requests.vote_now, lambda text: run.view.show_activity(f"{text} of the average")
        ))  # fmt: skip
    for row, averaged in zip(of_weights, of_average, strict=True):
        yield row | {"seconds": row["seconds"] + averaged["seconds"], AVERAGE_KEY: averaged["measures"]}


def validate(run: Run, requests: Requests) -> float | None:
    """Return the mean loss over the first train.valid_samples validation samples and write a metrics row, which also
    has the measures of the weights' average if the run keeps one. Return None if a request to stop the run interrupted
    the validation.

    The samples are always the same. With data.valid_paths, this many samples of each are read, and the loss is the mean
    over all their tokens together. Of a blend, each dataset also has a loss of its own. All ranks take part.
    """
    began = time.monotonic()
    try:
        with current_phase.within("validation"):
            values = _measure_validation(run, requests)
            if run.average.has_begun:
                with run.average.in_place_of_weights():
                    of_average = _measure_validation(run, requests, " with the average")
                values[AVERAGE_KEY] = {key: of_average[key] for key in of_average if key not in ("samples", "tokens")}
    except MeasurementCutOff:
        return None
    row = record(run, "valid", values | {"seconds": time.monotonic() - began})
    report_measures(run, row)
    return float(row["loss"])


def _measure_validation(run: Run, requests: Requests, activity_suffix: str = "") -> dict[str, Any]:
    """Validate the model with the weights that it has now, and return the values of the metrics row: loss, ppl,
    accuracy, samples, tokens and, for several datasets, `domains` with those of each. `activity_suffix` is appended to
    the text that the screen shows meanwhile. All ranks must call this.
    """
    terms, datasets = run.model.terms, run.inputs.data.valid
    results = {
        name: _sum_losses(run, name, dataset, requests, activity_suffix) for name, dataset in datasets.items()
    }
    parts = {name: part for name, (part, _) in results.items()}
    sums = np.sum([sums for sums, _, _ in parts.values()], axis=0).tolist()
    counts = np.sum([counts for _, counts, _ in parts.values()], axis=0).tolist()
    values = _row_values(terms, sums, counts, sum(samples for _, _, samples in parts.values()))
    if run.config.data.valid_paths:
        values["domains"] = {name: _row_values(terms, *part) for name, part in parts.items()}
    elif by_source := _sums_by_source(run, *results[""]):
        values["domains"] = {name: _row_values(terms, *part) for name, part in by_source.items()}
    return values


def _sum_losses(
    run: Run, domain: str, dataset: Dataset, requests: Requests, activity_suffix: str
) -> tuple[Part, Sums]:
    """Score the first train.valid_samples samples of `dataset`, and return (sums over all of them, sums of each
    sample). The second, for a blend alone, has each sample's summed loss in row 0 and its correct predictions in row 1.
    `domain` is the dataset's name on the screen, "" if there is only one; `activity_suffix` is appended to that text.
    """
    dp, num_terms, micro_batch = run.mesh.dp, len(run.model.terms), run.config.train.micro_batch
    ids = np.arange(min(run.config.train.valid_samples, dataset.num_samples))
    of_domain = f" of {domain}" if domain else ""
    run.view.show_activity(f"validating on {len(ids)} samples{of_domain}{activity_suffix}")
    batches = valid_batches(dataset, ids, micro_batch, dp.index, dp.size)
    num_samples = micro_batch if len(run.inputs.data.valid_sources) > 1 else 0
    loss_sums = torch.stack(list(run.model.validation_sums(requests.batches_until_stop(batches), num_samples)))
    sums = sum_over_batches(loss_sums[..., :num_terms].contiguous())
    counts = labels_per_term(dataset.counts(ids).labels, len(ids), dataset.batch(ids[:1]))
    return (sums, counts, len(ids)), sums_of_samples(loss_sums[..., num_terms:], len(ids))


def sum_over_batches(batch_sums: Tensor) -> Sums:
    """Return the sums of [batches, 2, terms], the summed losses (row 0) and correct predictions (row 1) of each batch.

    because: fp32 counts no further than 16.8 million predictions
    """
    sums: Sums = batch_sums.sum(0, dtype=torch.float64).tolist()  # sync: validation ends
    return sums


def sums_of_samples(sample_sums: Tensor, num_samples: int) -> Sums:
    """Return the summed loss (row 0) and the correct predictions (row 1) of each of the first `num_samples` validation
    samples. `sample_sums` are the further columns of ParallelModel.validation_sums, [batches of a rank, 2, samples].
    """
    sums: Sums = sample_sums.transpose(0, 1).flatten(1)[:, :num_samples].tolist()
    return sums


def _sums_by_source(run: Run, part: Part, sample_sums: Sums) -> dict[str, Part]:
    """Return name -> Part (sums, label counts, number of samples) for each dataset of the blend that validation reads;
    {} if it reads no blend. `part` has the sums over all samples, `sample_sums` those of each sample, as `_sum_losses`
    returns them. Of many datasets, those with small shares are added up as "rest"; one without a validated sample is
    left out.
    """
    data, (_, _, num_samples) = run.inputs.data, part
    by_number = {counts.number: counts for counts in counts_by_source(data.valid[""], np.arange(num_samples))}
    parts: dict[str, Part] = {}
    for name, numbers in shown_sources(data.valid_sources).items():
        counts = [by_number[number] for number in numbers if number in by_number]
        rows = [row for source in counts for row in source.rows_S.tolist()]
        if rows:
            sums = [[math.fsum(values[row] for row in rows)] for values in sample_sums]
            parts[name] = (sums, (sum(source.labels for source in counts),), len(rows))
    return parts


def _row_values(terms: Sequence[str], sums: Sums, label_counts: Sequence[int], num_samples: int) -> dict[str, Any]:
    """Return the values of a validation row: loss, ppl, accuracy, samples, tokens, and, if there are several loss
    `terms`, loss and accuracy of each. `sums` has the summed loss of each term in row 0 and its correct predictions in
    row 1; `label_counts` has each term's number of labels.

    The first of `terms` is that of tokens. With several terms, the loss is the sum of their means; perplexity and
    accuracy are the first term's.
    """
    means, hits = ([total / num for total, num in zip(row, label_counts, strict=True)] for row in sums)
    values = {"loss": math.fsum(means), "ppl": math.exp(min(means[0], _MAX_NATS)), "accuracy": hits[0]}
    values |= {"samples": num_samples, "tokens": label_counts[0]}
    return values | dict(zip(term_measure_names(terms), (means if len(means) > 1 else []) + hits[1:], strict=True))


def valid_batches(
    dataset: Dataset, sample_ids: np.ndarray[Any, np.dtype[np.int64]], batch_size: int, dp_index: int, dp_size: int
) -> Iterator[Batch]:
    """Split the samples into batches of `batch_size`, deal these to the data-parallel ranks in turn, and yield the
    batches of the rank `dp_index`. All ranks yield equally many: a rank that would have one too few yields one without
    labels.

    because: ranks compute together, so that none may end earlier than the others
    """
    starts = range(0, len(sample_ids), batch_size)
    for first in starts[::dp_size]:
        fault_point("valid.batch")
        mine = first + dp_index * batch_size
        if mine in starts:
            yield dataset.batch(sample_ids[mine : mine + batch_size]).map(torch.from_numpy)
        else:
            yield dataset.batch(sample_ids[first : first + batch_size]).without_labels().map(torch.from_numpy)


def is_due(step: int, interval: int | None) -> bool:
    """Return whether the step is a multiple of the interval; None and 0 mean never."""
    return interval is not None and interval > 0 and step % interval == 0


def due_measurements(run: Run, evaluation: Evaluation | None) -> list[str]:
    """Return which of "validation" and "evaluation" must run after the current step, by their intervals or at the last
    step of the run or of a stage.
    """
    config, step = run.config, run.progress.step
    is_last = step == config.end_step
    validates = is_due(step, config.train.valid_interval_steps) or (is_last and bool(run.inputs.data.valid))
    evaluates = evaluation is not None and (is_due(step, config.eval.interval_steps) or is_last)
    return [VALIDATION] * validates + [EVALUATION] * evaluates


def measure(
    run: Run, requests: Requests, evaluation: Evaluation | None, names: Sequence[str]
) -> float | None:
    """Run the measurements `names` ("validation", "evaluation") in order, and return the validation loss; None if no
    validation was finished. The names of measurements that a stop or a lack of time prevents are stored in
    `run.progress.pending`. All ranks take part.
    """
    loss, pending = None, []
    for name in names:
        if requests.stop_if_no_time_for(name):
            pending.append(name)
            continue
        with run.durations.measuring(name) as measurement:
            if name == VALIDATION:
                measurement.counts = (loss := validate(run, requests)) is not None
            elif evaluation is not None:
                measurement.counts = evaluate(run, evaluation, requests)
        pending += [name] * (not measurement.counts)
    run.progress.pending = tuple(pending)
    if pending:
        run.view.show_note(
            f"{' and '.join(pending)} of step {run.progress.step}: left to the next start, since this one ends"
        )
    return loss


def measure_pending(run: Run, requests: Requests, evaluation: Evaluation | None) -> float | None:
    """Run the measurements in `run.progress.pending` ("validation", "evaluation"), which the run's previous start left
    out or cut off, and return the validation loss; None if no validation was finished. All ranks take part.

    A measurement for which this attempt has too little time either is dropped, because the run could otherwise never
    continue.
    """
    requests.start_vote()
    requests.finish_vote()
    is_available = {VALIDATION: bool(run.inputs.data.valid), EVALUATION: evaluation is not None}
    names = [name for name in run.progress.pending if is_available.get(name)]
    for name in [name for name in names if requests.lacks_time_for(name)]:
        names.remove(name)
        run.view.show_note(
            f"warning: {name} of step {run.progress.step} is left out; it takes longer than this run may"
        )
    return measure(run, requests, evaluation, names)
