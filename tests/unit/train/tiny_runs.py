"""Runs of a tiny model on toy data in this process, opened as the command line opens them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from lmtrain.checkpoint.checkpoint_settings import CheckpointSettings
from lmtrain.data.data_settings import DataSettings
from lmtrain.data.sample_dataset_interface import ShuffledOrder
from lmtrain.data.training_data_by_source import TrainingData
from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.optim.adamw_settings import AdamWSettings
from lmtrain.optim.schedule_settings import ConstantSettings
from lmtrain.parallel.device_and_precision_settings import ComputeSettings, Fp32Settings
from lmtrain.parallel.mesh import build_mesh
from lmtrain.placement.parallel_settings import ParallelSettings
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer
from lmtrain.tokenizer.train import train_wordpiece
from lmtrain.train.run_config import RunConfig
from lmtrain.train.run_objects_and_resume import Run
from lmtrain.train.set_up_run import open_run
from lmtrain.train.startup_checks.preflight import Inputs, find_resume_checkpoint
from lmtrain.train.train_settings import ObserveSettings, RunSettings, TrainSettings
from tests.layouts.cases import SEQ_LEN, VOCAB
from tests.layouts.toy_data import NUM_SAMPLES, ToyData

CPU = torch.device("cpu")
CONFIG = RunConfig(
    model=GPTSettings(num_layers=1, width=8, num_heads=2, vocab_size=VOCAB, seq_len=SEQ_LEN),
    data=DataSettings(path="toy"), schedule=ConstantSettings(warmup_steps=0),
    train=TrainSettings(steps=6, global_batch=2, micro_batch=2, valid_interval_steps=5, valid_samples=2),
    observe=ObserveSettings(tensorboard=False), run=RunSettings(dir="x"), checkpoint=CheckpointSettings(),
    optim=AdamWSettings(lr=1e-2), precision=Fp32Settings(), parallel=ParallelSettings(), compute=ComputeSettings(),
)  # fmt: skip


@cache
def tokenizer() -> Tokenizer:
    return train_wordpiece(["a cat sat on a mat"], 40, lowercase=True)


def inputs_of(folder: Path, config: RunConfig = CONFIG) -> Inputs:
    config = replace(config, run=RunSettings(dir=str(folder)))
    identity = {"num_documents": NUM_SAMPLES, "blend": None}
    samples = ToyData(SEQ_LEN, documents=False)
    data = TrainingData(samples, ShuffledOrder(NUM_SAMPLES, 1), {"": samples}, [], identity, 0, NUM_SAMPLES)
    return Inputs(config.model, tokenizer(), data, find_resume_checkpoint(config))


@contextmanager
def opened(folder: Path, **checkpoint: Any) -> Iterator[Run]:
    """A run in this folder, which goes on from the newest checkpoint there; `checkpoint` are settings of that group."""
    config = replace(CONFIG, run=RunSettings(dir=str(folder)), checkpoint=CheckpointSettings(**checkpoint))
    mesh = build_mesh(config.parallel.layout, CPU)
    with open_run(config, inputs_of(folder, config), Console(quiet=True), mesh, CPU) as run:
        yield run
