"""What a run writes down so that two of them can be told apart later: the data, the first weights, a step's batch.

Called by records, on every process. It costs a pass over the weights at the start, and nothing between rows.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist

from lmtrain.data.loader import StepBatches
from lmtrain.observe.measure import phases
from lmtrain.parallel.model import ParallelModel
from lmtrain.runtime.files.files import read_json
from lmtrain.runtime.machine.device import device_name

if TYPE_CHECKING:
    from lmtrain.train.run import Run

_LARGEST = 1 << 18  # bytes of settings; because: what reads rows refuses one of a MiB
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def first_evidence(run: Run) -> dict[str, Any]:
    return {
        "weights_digest": weights_digest(run.model), "data_sha256": run.inputs.data.content_sha256,
        "device": device_name(run.model.device), "world_size": run.mesh.world.size,
    } | (ran_with(run.folder) if run.metrics is not None else {})  # fmt: skip


def ran_with(folder: Path) -> dict[str, Any]:
    """What stands in these files until the next start writes its own."""
    paths = {name: folder / file for name, file in (("settings", "config.json"), ("environment", "environment.json"))}
    return {name: read_json(path) for name, path in paths.items() if path.stat().st_size < _LARGEST}


def weights_digest(model: ParallelModel) -> str:
    """The same for the same weights at any layout, and another when any one bit is: the sum of their bits as integers,
    each tensor's times an odd number of its own."""
    total = torch.zeros((), dtype=torch.int64, device=model.device)
    for piece in model.owned(model.pieces()):
        bits = piece.block.detach().view(_INTEGERS[piece.block.element_size()])
        total += bits.sum(dtype=torch.int64) * (2 * crc32(piece.name.encode()) + 1)
    if model.mesh.world.size > 1:
        with phases.within("collective", "the digest of the first weights"):
            # collective: each rank's part of the sum over the world, once a start
            dist.all_reduce(total, group=model.mesh.world.group)
    return f"{int(total) % (1 << 64):016x}"  # sync: once a start


def samples_hash(sample_ids: np.ndarray[Any, np.dtype[np.int64]]) -> str:
    """A short name for exactly these samples in this order, so that two runs' data can be compared row by row."""
    return hashlib.sha256(sample_ids.astype("<i8").tobytes()).hexdigest()[:16]


def batch_digest(batches: StepBatches) -> str:
    """Of the tokens that this rank reads in this step: other text under the same ids is another batch."""
    digest = 0
    for batch in batches.microbatches:
        digest = crc32(batch.tokens_BT.numpy(), digest)
    return f"{digest:08x}"
