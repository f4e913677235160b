"""What a run measures besides its steps, where it is due and there is time: validation, then evaluations.

Called by the loop, on every process. What a stop cuts off is owed: the checkpoint says so, and the next start measures
it before its first step, so that no row is missing in the end. Where the time that is left is too short, the run stops.
"""

from __future__ import annotations

from collections.abc import Sequence

from lmtrain.train.costs import EVALUATION, VALIDATION
from lmtrain.train.in_loop.evaluate import Evaluation, evaluate
from lmtrain.train.in_loop.requests import Requests
from lmtrain.train.in_loop.validate import validate
from lmtrain.train.run import Run


def is_due(step: int, interval: int | None) -> bool:
    return interval is not None and interval > 0 and step % interval == 0


def due(run: Run, evaluation: Evaluation | None) -> list[str]:
    """At the step that the run has reached."""
    config, step = run.config, run.progress.step
    last = step == config.total_steps
    validates = is_due(step, config.train.valid_interval_steps) or (last and bool(run.inputs.data.valid))
    evaluates = evaluation is not None and (is_due(step, config.eval.interval_steps) or last)
    return [VALIDATION] * validates + [EVALUATION] * evaluates


def measure(run: Run, requests: Requests, evaluation: Evaluation | None, names: Sequence[str]) -> float | None:
    """These, in turn; the loss of the validation, if it was one of them and came to its end."""
    loss, owed = None, []
    for name in names:
        if requests.stop_without_time_for(name):
            owed.append(name)
            continue
        with run.costs.measuring(name) as cost:
            if name == VALIDATION:
                cost.counts = (loss := validate(run, requests)) is not None
            elif evaluation is not None:
                cost.counts = evaluate(run, evaluation, requests)
        owed += [name] * (not cost.counts)
    run.progress.owed = tuple(owed)
    if owed:
        run.view.note(f"{' and '.join(owed)} of step {run.progress.step}: left to the next start, since this one ends")
    return loss


def measure_what_is_owed(run: Run, requests: Requests, evaluation: Evaluation | None) -> float | None:
    """What the attempt before had no time for. If this one has not either, it stays out, or no step would ever come."""
    requests.ask()
    requests.answer()
    there = {VALIDATION: bool(run.inputs.data.valid), EVALUATION: evaluation is not None}
    names = [name for name in run.progress.owed if there.get(name)]
    for name in [name for name in names if requests.has_no_time_for(name)]:
        names.remove(name)
        run.view.note(f"warning: {name} of step {run.progress.step} is left out; it takes longer than this run may")
    return measure(run, requests, evaluation, names)
