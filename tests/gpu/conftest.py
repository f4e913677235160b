"""Where the tests of this folder compute: on the CPU, so that they are known to work, and on a GPU where there is one.

What only a GPU has (NCCL, its memory, its queues) takes `gpu` instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lmtrain.models.layers import flex_attention_block_masks
from tests.cli.harness import toy as toy
from tests.layouts.workers import Pool

NO_GPU = "no GPU"


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip(NO_GPU)
    return torch.device(request.param)


@pytest.fixture(scope="session")
def gpu() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip(NO_GPU)
    return torch.device("cuda")


@pytest.fixture(autouse=True)
def _nothing_stays_compiled() -> Iterator[None]:
    """because: cases share functions, and of one a compiler keeps eight forms: the ninth fails, or is not compiled"""
    yield
    torch._dynamo.reset()
    flex_attention_block_masks._compiled.cache_clear()


@pytest.fixture(scope="session")
def pools(pool: Pool) -> Iterator[dict[str, Pool]]:
    """Workers that compute on the CPU, and those that all compute on one GPU."""
    with Pool(device="cuda") as on_gpu:
        yield {"cpu": pool, "cuda": on_gpu}


@pytest.fixture
def alone(device: torch.device, tmp_path: Path) -> Iterator[None]:
    """A world of one, with a process group: gloo's, and NCCL's for what lies on a GPU."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
