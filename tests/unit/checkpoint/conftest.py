"""A checkpoint of two processes to read and to damage, made with numpy only."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from lmtrain.checkpoint import read_verified_contents
from lmtrain.checkpoint.disk import block_hashed_file, safetensors_file
from lmtrain.checkpoint.disk import checkpoint_format as format_module
from lmtrain.checkpoint.reshard import reshard_tensors, write_target_files
from lmtrain.checkpoint.save.commit import commit_checkpoint, write_rank
from lmtrain.layout import Piece
from lmtrain.runtime.processes.fault_injection import arm
from tests.unit.checkpoint.arrays import rank_data

Arrays = dict[str, np.ndarray]


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    """A fault that did not strike must not strike in another test."""
    arm()
    yield
    arm()


@pytest.fixture(scope="session")
def arrays() -> Arrays:
    """A matrix of several blocks in each process, a vector, a scalar, an empty tensor and one of single bytes."""
    generator = np.random.default_rng(7)
    return {
        "wide": generator.standard_normal((110, 100), dtype=np.float32),
        "bias": generator.standard_normal(33, dtype=np.float32),
        "count": np.array(41, np.int64),
        "empty": np.zeros((0, 5), np.float16),
        "flags": generator.integers(0, 255, (3, 5), dtype=np.uint8),
    }


@pytest.fixture(scope="module")
def small_blocks() -> Iterator[None]:
    """Blocks of 4 KiB, so that small files have many."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (
            block_hashed_file, safetensors_file, read_verified_contents, format_module, write_target_files,
            reshard_tensors,
        ):
            patch.setattr(module, "BLOCK_BYTES", 4096)
        yield


@pytest.fixture(scope="module")
def small_parts(small_blocks: None) -> Iterator[None]:
    """Segments of 64 KiB and parts of 10 as well, so that a reshard or merge of a small model has many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reshard_tensors, "SEGMENT_BYTES", 64 << 10)
        patch.setattr(write_target_files, "PART_BYTES", 10 << 10)
        patch.setattr(write_target_files, "MIN_PART_BYTES", 10 << 10)
        yield


@pytest.fixture(scope="module")
def make_checkpoint(arrays: Arrays) -> Callable[[Path], Path]:
    """Two processes hold the left and the right columns of `wide`; the rest is with the second."""

    def make(folder: Path) -> Path:
        run = folder / f"step_00000007.tmp-{os.getpid()}-0"
        run.mkdir(parents=True)
        wide = arrays["wide"]
        left = [Piece("wide", wide.shape, (0, 0), wide[:, :60])]
        right = [Piece("wide", wide.shape, (0, 60), wide[:, 60:])]
        right += [Piece(n, a.shape, (0,) * a.ndim, a) for n, a in arrays.items() if n != "wide"]
        records = [write_rank(run, rank, rank_data(pieces)) for rank, pieces in enumerate((left, right))]
        state = {"step": 7, "model": {"kind": "gpt", "width": 8}, "lr": 0.1}
        path, _ = commit_checkpoint(run, 7, records, state, {"tokenizer.json": b'{"vocab": ["a", "b", "c"]}'})
        return path

    return make


@pytest.fixture(scope="module")
def checkpoint(
    make_checkpoint: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory, small_blocks: None
) -> Path:
    """To be read, not to be changed."""
    return make_checkpoint(tmp_path_factory.mktemp("whole"))
