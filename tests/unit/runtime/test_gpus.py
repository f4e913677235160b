"""Without torch the same is known of GPUs as with it."""

from __future__ import annotations

import pytest

from lmtrain.runtime.gpus import Gpus, device_problem


def test_what_is_found_is_what_torch_finds() -> None:
    torch = pytest.importorskip("torch")
    found = Gpus.found()
    assert (found.built_for, found.torch) == (torch.version.cuda, torch.__version__)
    assert found.count == (torch.cuda.device_count() if torch.cuda.is_available() else 0)


@pytest.mark.parametrize(
    ("name", "gpus", "local_rank", "said"),
    [
        ("cpu", Gpus(None, 0), 9, None), ("auto", Gpus(None, 0), 9, None), ("auto", Gpus("13.0", 2), 1, None),
        ("cuda", Gpus(None, None), 0, None), ("cuda", Gpus("13.0", 1), 0, None),
        ("cuda", Gpus(None, 0, "2.13"), 0, "torch 2.13 sees no GPU (it is built without CUDA). Use compute.device=cpu"),
        ("cuda", Gpus("13.0", 0, "2.13"), 0, "sees no GPU (it is built for CUDA 13.0)"),
        ("auto", Gpus("13.0", 2), 2, "local rank 2 has no GPU of its own, since this node shows 2. Start at most 2"),
    ],
)  # fmt: skip
def test_a_device_that_a_process_cannot_have(name: str, gpus: Gpus, local_rank: int, said: str | None) -> None:
    problem = device_problem(name, gpus, local_rank)
    assert (problem is None) == (said is None)
    assert said is None or said in str(problem)
