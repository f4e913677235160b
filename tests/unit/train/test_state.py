"""A run resumes with the step of its checkpoint and with the fp16 loss scale."""

from __future__ import annotations

from pathlib import Path

import torch

from lmtrain.checkpoint.save.background_writer import CheckpointWriter
from lmtrain.checkpoint.tensor_reader import CheckpointReader
from lmtrain.layout import Layout
from lmtrain.optim.optimizer_state import num_updates
from lmtrain.parallel.device_and_precision_settings import Fp16Settings
from lmtrain.parallel.parallel_model import ParallelModel
from lmtrain.train import run_objects_and_resume
from lmtrain.train.set_up_run import build_optimizer
from lmtrain.train.step import train_step
from tests.unit.parallel.spread import OPTIM, build, step_of
from tests.unit.train.tiny_runs import CONFIG, inputs_of


def make() -> tuple[ParallelModel, torch.optim.Optimizer]:
    model = build({}, Fp16Settings(initial_scale=2.0**40, growth_interval_steps=20))
    return model, build_optimizer(OPTIM, model)


def go_on(
    model: ParallelModel, optimizer: torch.optim.Optimizer, progress: run_objects_and_resume.Progress, stop: int
) -> list[tuple[float, bool, float]]:
    """Loss, whether it was skipped, and the scale after it, of each step."""
    rows = []
    while progress.step < stop:
        batches = step_of(progress.step, Layout(), 1, 0)
        done = train_step(model, optimizer, batches, OPTIM.lr, OPTIM.clip_norm)
        progress.count(batches, done, ())
        rows.append((done.loss, done.skipped, model.loss_scale.value))
    return rows


def test_a_run_that_skipped_steps_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    model, optimizer = make()
    progress = run_objects_and_resume.Progress()
    go_on(model, optimizer, progress, 24)
    assert 0 < progress.skipped < 22
    progress.source_tokens, progress.source_losses = {"a": 64, "b": 32}, {"wiki": (2.5, 7)}
    facts = run_objects_and_resume.checkpoint_state(CONFIG, inputs_of(tmp_path), model, optimizer, progress)
    with CheckpointWriter(tmp_path, keep_last=1, asynchronous=False) as writer:
        writer.save(progress.step, model.owned_pieces(run_objects_and_resume.held_pieces(model, optimizer)), facts, {})
    expected = go_on(model, optimizer, progress, 27)
    again, its_optimizer = make()
    found = run_objects_and_resume.restore(CheckpointReader(tmp_path / "step_00000024"), again, its_optimizer)
    assert (found.step, found.skipped, found.attempt) == (24, progress.skipped, 2)
    sums = (found.source_tokens, found.source_losses)
    assert sums == (progress.source_tokens, progress.source_losses), "those since the last row too"
    assert go_on(again, its_optimizer, found, 27) == expected
    assert (found.samples, found.tokens) == (progress.samples, progress.tokens)
    assert num_updates(its_optimizer) == num_updates(optimizer) == 27 - progress.skipped
