"""Opening a run's folder with several processes succeeds on all of them or on none."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from lmtrain.checkpoint.disk.safetensors_file import RankData
from lmtrain.checkpoint.find_and_prune import new_leftover_path
from lmtrain.checkpoint.save.commit import save_checkpoint
from lmtrain.config.compose_run_settings import compose
from lmtrain.errors import OutputError
from lmtrain.layout import Layout
from lmtrain.parallel.mesh import Axis, build_mesh
from lmtrain.runfolder.file_names import CHECKPOINTS
from lmtrain.runtime.files.atomic_files import folder_lock
from lmtrain.train.run_config import RunConfig
from lmtrain.train.set_up_run import build_throughput, open_run_folder
from lmtrain.train.train_settings import RunSettings
from tests.unit.checkpoint.seats import Outcome, Seat, on_ranks
from tests.unit.train.tiny_runs import CPU, inputs_of


def enter(num_ranks: int, *folders: Path) -> list[Outcome]:
    """What each rank finds in the folder; the last rank looks into the last one."""
    config = compose(RunConfig, ["data.path=x"])
    configs = [replace(config, run=RunSettings(dir=str(folder))) for folder in folders]

    def work(seat: Seat) -> Outcome:
        last = seat.rank == num_ranks - 1
        with ExitStack() as stack:
            path = open_run_folder(stack, folders[-last], configs[-last], seat)
            seat.gather([])  # the lock is held until all are through
            return path

    return on_ranks(num_ranks, work)


def test_all_find_the_checkpoint_that_a_sweep_brought_back(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / CHECKPOINTS, 7, RankData([], []), {}, {})
    home = tmp_path / CHECKPOINTS / "step_00000007"
    home.rename(new_leftover_path(home.parent, 7, "replaced"))
    (tmp_path / "stop.json").write_text("{}")
    assert enter(3, tmp_path) == [home] * 3
    assert not (tmp_path / "stop.json").exists()


def test_a_locked_folder_refuses_every_rank(tmp_path: Path) -> None:
    (tmp_path / "stop.json").write_text("{}")
    with folder_lock(tmp_path):
        errors = enter(3, tmp_path)
    assert {type(error) for error in errors} == {OutputError}
    assert "is in use by" in str(errors[0])
    assert str(errors[2]) == f"rank 0 of 3: {errors[0]}"
    assert (tmp_path / "stop.json").exists()


def test_a_folder_that_is_not_shared_is_refused(tmp_path: Path) -> None:
    errors = enter(3, tmp_path / "run", tmp_path / "elsewhere")
    assert "does not exist on rank 2. Give a folder that all nodes share." in str(errors[2])
    assert str(errors[0]) == f"rank 2 of 3: {errors[2]}"
    save_checkpoint(tmp_path / "run" / CHECKPOINTS, 7, RankData([], []), {}, {})
    (tmp_path / "elsewhere").mkdir()
    errors = enter(3, tmp_path / "run", tmp_path / "elsewhere")
    assert all("Ranks see different checkpoints" in str(error) for error in errors)


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_the_share_of_the_peak_is_of_all_processes_together(num_ranks: int) -> None:
    config = compose(RunConfig, ["data.path=x", "observe.peak_tflops=2.0"])
    mesh = replace(build_mesh(Layout(), CPU), world=Axis(num_ranks, ranks=tuple(range(num_ranks))))
    throughput = build_throughput(config, inputs_of(Path("x")), mesh, CPU)
    throughput.start(0, 0.0)
    for step in (1, 2):
        throughput.step_done(step, float(step), tokens=1000)
    rates = throughput.rates()
    assert rates.flops_per_s
    assert rates.mfu == pytest.approx(rates.flops_per_s / (num_ranks * 2e12))
