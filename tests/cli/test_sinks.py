"""Runs with Weights & Biases, histograms and a profile: what they leave, and that they learn the same bit for bit.

The package itself, in offline mode: it runs where `pip install lmtrain[wandb]` was typed.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from lmtrain.observe.metrics import read_metrics
from lmtrain.observe.profile.kernel_times import read_tables, read_trace
from lmtrain.observe.sinks.weights_and_biases import WeightsAndBiases
from lmtrain.runtime.machine.pip_install_hint import install_command
from tests.cli.harness import Toy, lmtrain

EXACT = ("step", "loss", "grad_norm", "samples_hash", "tokens", "lr")
has_wandb = pytest.mark.skipif(
    getattr(find_spec("wandb"), "origin", None) is None, reason="wandb is not installed"
)  # fmt: skip


def curve(folder: Path) -> list[tuple[Any, ...]]:
    rows = read_metrics(folder / "metrics.jsonl")
    return [tuple(row[key] for key in EXACT) for row in rows if row["event"] == "step"]


@pytest.fixture(scope="module")
def usual(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, ...]]:
    folder = tmp_path_factory.mktemp("usual") / "run"
    lmtrain("pretrain", *toy.settings(folder))
    return curve(folder)


def records(folder: Path) -> list[Any]:
    """Of a run in offline mode: the file is LevelDB's log of the package's own messages."""
    messages = importlib.import_module("wandb.proto.wandb_internal_pb2")
    found, part = [], b""
    (file,) = (folder / "wandb").glob("offline-run-*/run-*.wandb")
    data, at = file.read_bytes(), 7
    while at + 7 <= len(data):
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part of one
            one = messages.Record()
            one.ParseFromString(part)
            found.append(one)
            part = b""
        at += -at % 32768 if 32768 - at % 32768 < 7 else 0
    return found


def test_without_the_package_a_run_is_refused_with_the_way_to_get_it(toy: Toy, tmp_path: Path) -> None:
    if getattr(find_spec("wandb"), "origin", None) is not None:
        pytest.skip("wandb is installed")
    said = lmtrain("pretrain", *toy.settings(tmp_path / "run", observe__wandb="online"), code=2)
    assert "observe.wandb=online needs the package wandb" in said
    assert install_command("wandb") in said
    assert not (tmp_path / "run").exists()


@pytest.mark.wide
@has_wandb
def test_a_run_in_offline_mode_is_read_back_and_goes_on_under_its_id(
    toy: Toy, usual: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    more = {"observe__wandb": "offline", "observe__wandb_name": "mine", "observe__wandb_tags": "[a,b]"}
    lmtrain("pretrain", *toy.settings(run, **more))
    assert curve(run) == usual
    found = records(run)
    (begun,) = [one.run for one in found if one.WhichOneof("record_type") == "run"]
    assert (begun.project, begun.display_name, list(begun.tags)) == ("lmtrain", "mine", ["a", "b"])
    assert begun.run_id == (run / "wandb/run_id").read_text()
    logged = [one.history for one in found if one.WhichOneof("record_type") == "history"]
    values = [{item.key or "/".join(item.nested_key): item.value_json for item in one.item} for one in logged]
    assert [float(one["loss/train"]) for one in values] == [loss for _, loss, *_ in usual]
    assert [one.exit.exit_code for one in found if one.WhichOneof("record_type") == "exit"] == [0]
    (first,) = (run / "wandb").glob("offline-run-*")
    first.rename(tmp_path / "first")
    lmtrain("pretrain", *toy.settings(run, **more, train__steps=16))
    again = [one.run.run_id for one in records(run) if one.WhichOneof("record_type") == "run"]
    assert again == [begun.run_id]


@pytest.mark.wide
@has_wandb
@pytest.mark.parametrize("victim", ["ours", "its own"])
def test_its_process_killed_midway_leaves_the_curve_alone(
    toy: Toy, usual: list[tuple[Any, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str
) -> None:
    row = WeightsAndBiases.write_row

    def deadly(sink: WeightsAndBiases, one: Any) -> None:
        if one["event"] == "step" and one["step"] == 6:
            child = sink._process.pid
            listed = subprocess.run(["ps", "-eo", "pid,ppid"], capture_output=True, text=True, check=True).stdout
            below = [int(pid) for pid, above in map(str.split, listed.splitlines()[1:]) if above == str(child)]
            assert below
            for pid in [child] if victim == "ours" else below:
                os.kill(pid, signal.SIGKILL)
        row(sink, one)

    monkeypatch.setattr(WeightsAndBiases, "write_row", deadly)
    said = lmtrain("pretrain", *toy.settings(tmp_path / "run", observe__wandb="offline"))
    assert curve(tmp_path / "run") == usual
    assert said.count("Weights & Biases failed: ") == 1
    assert "records did not reach Weights & Biases; metrics.jsonl has them all." in said


@pytest.mark.wide
def test_a_profile_and_histograms_change_no_loss(toy: Toy, usual: list[tuple[Any, ...]], tmp_path: Path) -> None:
    run = tmp_path / "run"
    more = {"observe__tensorboard": "true", "observe__histograms_every_steps": 4}
    lmtrain("pretrain", *toy.settings(run, **more, **{"observe.profile_steps": "[2,3]"}))
    assert curve(run) == usual
    (table,) = read_tables(run / "profile")
    assert (table.first_step, table.last_step, table.rank, table.device) == (2, 3, 0, "cpu")
    assert min(table.classes[kind] for kind in ("products", "attention", "norms", "optimizer", "elementwise")) > 0
    (trace,) = (run / "profile").glob("*.json.gz")
    assert any(event.get("name") == "aten::addmm" for event in read_trace(trace))
    assert "profile of steps 2 to 3" in (run / "log.txt").read_text()


@pytest.mark.wide
def test_a_run_that_ends_in_the_window_leaves_what_there_was(toy: Toy, tmp_path: Path) -> None:
    fault = {"LMTRAIN_FAULT": "exc:point=step:step=4", "LMTRAIN_ALLOW_FAULTS": "1"}
    words = toy.settings(tmp_path / "run", **{"observe.profile_steps": "[3,9]"})
    lmtrain("pretrain", *words, code=1, env=fault)
    lmtrain("pretrain", *words)
    assert [(table.first_step, table.last_step) for table in read_tables(tmp_path / "run/profile")][-1] == (5, 9)


def histograms_of(folder: Path) -> dict[str, tuple[float, ...]]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    found = {name: events.Histograms(name)[0].histogram_value for name in events.Tags()["histograms"]}
    return {name: (one.num, sum(one.bucket), one.min, one.max, one.sum) for name, one in found.items()}


@pytest.mark.wide
def test_histograms_and_memory_are_those_of_all_ranks(toy: Toy, tmp_path: Path) -> None:
    more: dict[str, object] = {"train__steps": 2, "train__micro_batch": 1, "observe__histograms_every_steps": 1}
    # because: gradients of the keys' biases are nothing but rounding, of which Adam makes steps where eps is tiny
    more |= {"schedule__warmup_steps": 0, "optim__eps": 1e-3}
    more |= {"observe__tensorboard": "true", "checkpoint__interval_steps": "null", "model__num_layers": 2}
    lmtrain("pretrain", *toy.settings(tmp_path / "one", **more))
    layout = {"parallel__tp": 2, "parallel__pp": 2, "observe.profile_steps": "[1,2]", "observe.profile_ranks": "[0,3]"}
    words = toy.settings(tmp_path / "four", **more, **layout)
    done = subprocess.run(
        [sys.executable, "-m", "lmtrain", "pretrain", *words, "--nproc", "4"],
        capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    one, four = histograms_of(tmp_path / "one"), histograms_of(tmp_path / "four")
    assert len(one) > 10
    assert one.keys() == four.keys()
    for name, found in one.items():
        assert four[name] == pytest.approx(found, rel=1e-3, abs=1e-6), name
        assert found[0] == found[1]
    assert [table.rank for table in read_tables(tmp_path / "four/profile")] == [0, 3]
    rows = [row for row in read_metrics(tmp_path / "four/metrics.jsonl") if row["event"] == "step"]
    assert all(row["memory_bytes"] > 1 << 20 and row["memory_rank"] in range(4) for row in rows)
