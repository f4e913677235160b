"""A checkpoint of the run as it stands. Called by the loop, on every process."""

from __future__ import annotations

from lmtrain.errors import OutputError, StorageError
from lmtrain.observe import phases
from lmtrain.train import state
from lmtrain.train.records import report_save
from lmtrain.train.setup import Run


def save(run: Run) -> int:
    """Begin a checkpoint of this step. A save that fails is said and survived: the run goes on to the next one."""
    try:
        run.writer.wait()
        report_save(run)
    except (StorageError, OutputError) as error:
        run.view.note(f"The checkpoint before this one failed: {error} Training goes on.")
    try:
        with phases.within("save"):
            run.writer.save(
                run.progress.step,
                run.model.owned(state.pieces(run.model, run.optimizer)),
                state.facts(run.config, run.inputs, run.model, run.optimizer, run.progress),
                {"tokenizer.json": run.inputs.tokenizer.to_bytes()},
            )
    except (StorageError, OutputError) as error:
        run.view.note(f"The checkpoint of step {run.progress.step} failed: {error} Training goes on.")
    return run.progress.step
