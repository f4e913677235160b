"""A checkpoint of the run as it stands. Called by the loop, on every process."""

from __future__ import annotations

from lmtrain.errors import OutputError, StorageError, passed_on
from lmtrain.observe.measure import phases
from lmtrain.train import state
from lmtrain.train.record.records import report_save
from lmtrain.train.run import Run

MOST_FAILED = 3  # in a row


def save(run: Run) -> int:
    """Begin a checkpoint of this step. One that fails is said and survived, but not three in a row."""
    try:
        run.writer.wait()
        report_save(run)
    except (StorageError, OutputError) as error:
        _survive(run, "The checkpoint before this one", error)
    try:
        with phases.within("save"):
            run.writer.save(
                run.progress.step,
                run.model.owned(state.pieces(run.model, run.optimizer)),
                state.facts(run.config, run.inputs, run.model, run.optimizer, run.progress),
                {"tokenizer.json": run.inputs.tokenizer.to_bytes()},
            )
    except (StorageError, OutputError) as error:
        _survive(run, f"The checkpoint of step {run.progress.step}", error)
    return run.progress.step


def _survive(run: Run, which: str, error: StorageError | OutputError) -> None:
    run.failed_saves += 1
    if run.failed_saves == MOST_FAILED:
        # because: what is trained from here on would most likely be lost as well
        said = f"{MOST_FAILED} checkpoints in a row failed, the last with: {error}"
        raise passed_on(error.exit_code, said) from error
    run.view.note(f"{which} failed: {error} Training goes on.")
