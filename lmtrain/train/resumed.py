"""What the checkpoint that a run goes on from decides before torch is there: whether steps are left to do, and what
data.split keeps from training.

Called by preflight. Whether the checkpoint is of this run at all is state.py's question.
"""

from __future__ import annotations

from pathlib import Path

from lmtrain.checkpoint.contents import Contents
from lmtrain.config.base import show
from lmtrain.data.training_data import ALL_SHARES, READ_SHARES
from lmtrain.errors import SettingsError
from lmtrain.train.config import RunConfig


def shares_of(config: RunConfig, resume_from: Path | None) -> str:
    """Asked.shares as the run began with it; refuses a run that is to end before its checkpoint."""
    if resume_from is None:
        return READ_SHARES
    manifest = Contents(resume_from).manifest
    _refuse_shorter(config, resume_from, manifest.step)
    data = manifest.state.get("data")
    # because: checkpoints that do not say are of a time when all shares were cut
    return str(data.get("shares", ALL_SHARES)) if isinstance(data, dict) else READ_SHARES


def _refuse_shorter(config: RunConfig, path: Path, reached: int) -> None:
    total = config.total_steps
    if reached <= total:
        return
    by_steps = config.train.steps is not None
    given = f"train.steps={total}" if by_steps else f"train.tokens={show(config.train.tokens)}, {total} steps,"
    longer = "train.steps" if by_steps else "train.tokens=null train.steps"
    raise SettingsError([
        f"{given} ends before step {reached}, which {path} has reached. "
        f"Use {longer}={reached + 1} or more to go on, or another run.dir for a new run."
    ])
