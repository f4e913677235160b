"""What a run is made of between its start and its end. Built by setup, used by the loop and by what happens in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lmtrain.checkpoint.save.writer import CheckpointWriter
from lmtrain.data.loader import Loader
from lmtrain.observe.measure.memory import Memory
from lmtrain.observe.measure.throughput import Throughput
from lmtrain.observe.metrics import MetricsLog
from lmtrain.observe.screen.display import RunView
from lmtrain.observe.sinks.behind import Behind
from lmtrain.parallel.mesh import Mesh
from lmtrain.parallel.model import ParallelModel
from lmtrain.train import state
from lmtrain.train.before.preflight import Inputs
from lmtrain.train.config import RunConfig
from lmtrain.train.costs import Costs


@dataclass
class Run:
    """All that the loop needs; lives as long as the `open_run` block."""

    config: RunConfig
    inputs: Inputs
    folder: Path
    mesh: Mesh
    model: ParallelModel
    optimizer: torch.optim.Optimizer
    progress: state.Progress
    loader: Loader
    writer: CheckpointWriter
    metrics: MetricsLog | None  # on rank 0 alone
    sinks: Sequence[Behind]
    view: RunView
    throughput: Throughput
    costs: Costs
    memory: Memory
    before: Mapping[str, object]  # how the start before this one ended
    passed_over: tuple[str, ...] = ()  # damaged checkpoints that the run does not go on from, in words
    reported_save: int | None = None  # the newest checkpoint that metrics and view have told of
    failed_saves: int = 0  # since then
