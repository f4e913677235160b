"""From one device to another: a checkpoint has the same bits there, and the run goes on as it would have.

Through real runs with folders, in workers of either device; in between it is resharded, which needs no device.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lmtrain.layout import Layout
from lmtrain.models.initial_weights import draw_parameter
from lmtrain.parallel.initialize_and_save_shards import draw_initial_values
from lmtrain.placement.layers_and_shards_of_ranks import placements_of_rank
from lmtrain.placement.parallel_settings import ParallelSettings
from tests.cli.harness import lmtrain
from tests.layouts.cases import MODELS, Case
from tests.layouts.outcome import FP32_LOSS
from tests.layouts.resuming import SAVE_STEP
from tests.layouts.test_resuming import Held, names, same_bits, work
from tests.layouts.workers import Pool

NAME = "deepgqa-fp32-micro2"


def begun(pool: Pool, folder: Path) -> Held:
    return work(pool, "unbroken", Case.named(NAME), folder / "dumped", {"run_dir": str(folder / "begun")})


def goes_on(pool: Pool, folder: Path, checkpoint: Path) -> Held:
    arguments = {"run_dir": str(folder / "run"), "checkpoint": str(checkpoint)}
    return work(pool, "resumed", Case.named(NAME), folder / "dumped", arguments)


def same(found: Held, expected: Held) -> bool:
    assert found.tensors.keys() == expected.tensors.keys() == names(Case.named(NAME))
    assert found.remembered == expected.remembered
    return all(same_bits(found.tensors[name], tensor) for name, tensor in expected.tensors.items())


@pytest.mark.wide
@pytest.mark.parametrize("there", ["cpu", "cuda"])
@pytest.mark.parametrize("resharded", [False, True])
def test_a_run_goes_on_elsewhere(
    device: torch.device, there: str, resharded: bool, pools: dict[str, Pool], tmp_path: Path
) -> None:
    if "cuda" in (device.type, there) and not torch.cuda.is_available():
        pytest.skip("no GPU")
    first = begun(pools[device.type], tmp_path)
    checkpoint = tmp_path / "begun/checkpoints" / f"step_{SAVE_STEP:08d}"
    if resharded:
        lmtrain("reshard", checkpoint, "--output", tmp_path / "cut", "--to", "pp=2,tp=2")
        checkpoint = tmp_path / "cut"
    found = goes_on(pools[there], tmp_path, checkpoint)
    assert same(found, first)
    after = first.losses[SAVE_STEP:]
    assert found.losses == (after if there == device.type else pytest.approx(after, rel=FP32_LOSS, abs=0))


def test_first_weights_are_the_same_bits(device: torch.device) -> None:
    """And the comparison would see one that is not."""
    settings = MODELS["tied"]
    places = placements_of_rank(settings, ParallelSettings(), Layout().coordinate(0))
    with torch.device("meta"):
        starts = settings.build().starts()
    held = {name: torch.empty(place.local_shape, device=device) for name, place in places.items()}
    draw_initial_values(held, places, starts, 7)
    for name, place in places.items():
        expected = torch.cat([block for _, block in draw_parameter(name, place.global_shape, starts[name], 7)])
        true_rows = held[name][: len(expected)].cpu()
        assert same_bits(true_rows, expected), name
        assert not same_bits(true_rows + 2**-20, expected)
