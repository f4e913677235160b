"""What a worker does for test_resuming.py: runs with a folder and checkpoints, built and gone on with as users' are.

Only data and tokenizer are toys. What a run holds right after a save, and right after it was loaded, leaves as plain
files of this rank's pieces, so that a mistake which the store makes in both directions is seen.
"""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from rich.console import Console

from lmtrain.checkpoint.checkpoint_settings import CheckpointSettings
from lmtrain.checkpoint.weight_ema_settings import WeightAverageSettings
from lmtrain.data.data_settings import DataChoice, DataSettings, MaskedSettings
from lmtrain.data.sample_dataset_interface import ShuffledOrder
from lmtrain.data.training_data_by_source import TrainingData
from lmtrain.optim.schedule_settings import CosineSettings
from lmtrain.parallel.mesh import build_mesh
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer
from lmtrain.tokenizer.train import train_wordpiece
from lmtrain.train import run_objects_and_resume
from lmtrain.train.record.metrics_writer import save
from lmtrain.train.run_config import RunConfig
from lmtrain.train.run_objects_and_resume import Run
from lmtrain.train.set_up_run import open_run
from lmtrain.train.startup_checks.preflight import Inputs
from lmtrain.train.step import train_step
from lmtrain.train.train_settings import ObserveSettings, RunSettings, TrainSettings
from tests.layouts.cases import Case
from tests.layouts.toy_data import NUM_SAMPLES, data_of
from tests.layouts.training import OPTIM, SEED, device, write_pieces

SAVE_STEP, LAST_STEP = 2, 4


def unbroken(name: str, run_dir: str, dumped: str) -> dict[str, Any]:
    """Four steps with a checkpoint after the second, which training does not wait for."""
    with _open_queues(name, run_dir, "auto") as run:
        before = _go_on(run, SAVE_STEP)
        save(run)
        pieces = write_pieces(run_objects_and_resume.held_pieces(run.model, run.optimizer, run.average), Path(dumped))
        remembered = _remembered(run)
        losses = before + _go_on(run, LAST_STEP)
        return {"losses": losses, "pieces": pieces, "remembered": remembered, "last_averages": _digest(run)}


def resumed(name: str, run_dir: str, checkpoint: str, dumped: str) -> dict[str, Any]:
    """The last two steps of a run of this layout that begins from a checkpoint of another."""
    with _open_queues(name, run_dir, checkpoint) as run:
        pieces = write_pieces(run_objects_and_resume.held_pieces(run.model, run.optimizer, run.average), Path(dumped))
        remembered = _remembered(run)
        losses = _go_on(run, LAST_STEP)
        return {"losses": losses, "pieces": pieces, "remembered": remembered, "last_averages": _digest(run)}


def _open_queues(name: str, run_dir: str, resume: str) -> Any:
    case = Case.named(name)
    config = RunConfig(
        model=case.model_settings, data=_data_settings(case), optim=OPTIM, schedule=CosineSettings(warmup_steps=2),
        precision=case.precision_settings, parallel=case.parallel, compute=case.compute,
        train=TrainSettings(
            steps=LAST_STEP, global_batch=case.global_batch, micro_batch=case.train.micro_batch, seed=SEED
        ),
        checkpoint=CheckpointSettings(resume=resume, ema=WeightAverageSettings(decay=0.9)),
        observe=ObserveSettings(tensorboard=False), run=RunSettings(dir=run_dir),
    )  # fmt: skip
    mesh = build_mesh(case.parallel.layout, device(), timeout_s=180.0)
    return open_run(config, _inputs(case), Console(quiet=True), mesh, device(), ["here"] * case.num_processes)


def _data_settings(case: Case) -> DataChoice:
    return DataSettings(path="toy") if case.model_settings.terms == ("lm",) else MaskedSettings(path="toy")


def _inputs(case: Case) -> Inputs:
    samples = data_of(case)
    identity = {"num_documents": NUM_SAMPLES, "blend": None}
    data = TrainingData(samples, ShuffledOrder(NUM_SAMPLES, SEED), {}, [], identity, 0, LAST_STEP * case.global_batch)
    return Inputs(case.model_settings, _tokenizer(), data, None)


@cache
def _tokenizer() -> Tokenizer:
    return train_wordpiece(["a cat sat on a mat", "a dog ran after it"], 40, lowercase=True)


def _go_on(run: Run, stop: int) -> list[float]:
    """The steps up to `stop`, as the loop makes them."""
    config, progress, losses = run.config, run.progress, []
    for batches in run.loader.steps(progress.step, stop):
        lr = config.optim.lr * config.schedule.factor(batches.step, config.total_steps)
        losses.append(train_step(run.model, run.optimizer, batches, lr, config.optim.clip_norm).loss)
        progress.step += 1
        run.average.update(progress.step)
        progress.samples += batches.num_samples
        progress.tokens += batches.num_tokens
    return losses


def _digest(run: Run) -> str:
    """Return the SHA-256 of the averages of the weights that this rank holds, without padding."""
    pieces = run_objects_and_resume.average_pieces(run.model, run.average)
    return sha256(b"".join(piece.block.cpu().contiguous().numpy().tobytes() for piece in pieces)).hexdigest()


def _remembered(run: Run) -> dict[str, Any]:
    """All of a run's state that is no tensor, but for its settings and how often it was begun."""
    parts = (run.config, run.inputs, run.model, run.optimizer, run.progress, run.average)
    facts = run_objects_and_resume.checkpoint_state(*parts)
    return {key: value for key, value in facts.items() if key not in ("settings", "attempt")}
