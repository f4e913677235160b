"""All that can be judged before torch is imported: the data, its tokenizer, the processes, what a resume finds.

Called by the command line right after the settings; its answer is what set-up builds from.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from lmtrain.checkpoint.store import CHECKPOINTS, latest, resolve
from lmtrain.data.data_settings import DataChoice
from lmtrain.data.dataset import Dataset
from lmtrain.data.format import IndexedDataset, part
from lmtrain.data.training_data import Asked, Opened, TrainingData, build_training_data, open_datasets
from lmtrain.errors import DataError, LayoutError, OutputError, SettingsError
from lmtrain.models.model_settings import ModelSettings
from lmtrain.runtime.process import ProcessEnv
from lmtrain.tokenizer.base import Tokenizer
from lmtrain.train.config import RunConfig


@dataclass(frozen=True)
class Inputs:
    model: ModelSettings  # with the true vocabulary size
    tokenizer: Tokenizer
    data: TrainingData
    resume_from: Path | None

    @property
    def train(self) -> Dataset:
        return self.data.train

    @property
    def valid(self) -> Dataset | None:
        return self.data.valid

    def epochs(self, config: RunConfig) -> float:
        first, count = config.batch_plan.range_of(config.total_steps - 1)
        return (first + count) / self.train.num_samples


def preflight(config: RunConfig, env: ProcessEnv) -> Inputs:
    """Refuse what cannot work, or say what the run is made of."""
    _check_processes(config, env)
    tokenizer, model, data = load_data(config)
    return Inputs(model, tokenizer, data, find_resume(config))


def load_data(config: RunConfig, *, validate: bool = True) -> tuple[Tokenizer, ModelSettings, TrainingData]:
    """The data of a run, its tokenizer, and the model with the vocabulary that follows from both."""
    opened = open_datasets(config.data)
    tokenizer = _tokenizer(config.data, opened)
    model = _model(config, opened, tokenizer)
    first, count = config.batch_plan.range_of(config.total_steps - 1)
    asked = Asked(
        seq_len=config.seq_len, vocab_size=model.shape.vocab_size, seed=config.train.seed, num_samples=first + count,
        validate=validate and config.train.valid_interval_steps > 0,
    )  # fmt: skip
    return tokenizer, model, build_training_data(config.data, opened, asked)


def _check_processes(config: RunConfig, env: ProcessEnv) -> None:
    layout = config.parallel.layout
    if env.world_size != layout.world_size:
        raise LayoutError(
            f"{env.launcher} started {env.world_size} processes but parallel.* asks for {layout.world_size}. "
            f"Start {layout.world_size}, without {env.launcher} if that is one."
        )
    if config.compute.compile and not any(shutil.which(cc) for cc in ("c++", "g++", "clang++")):
        raise SettingsError(
            ["compute.compile=true needs a C++ compiler and none of c++, g++ and clang++ is here. "
             "Install one or set compute.compile=false."]
        )


def _tokenizer(settings: DataChoice, opened: Opened) -> Tokenizer:
    """The one that made the datasets: beside one of them, or named by the user for foreign ones."""
    beside = next((file for file in map(_beside, opened.all) if file.exists()), None)
    if settings.tokenizer is None and beside is None:
        first = opened.train[0]
        raise SettingsError(
            [f"data.tokenizer=null leaves open who made {first.prefix}: there is no {_beside(first).name} beside it. "
             "Add data.tokenizer=PATH of the tokenizer that wrote it."]
        )
    path = Path(settings.tokenizer) if settings.tokenizer else beside
    assert path is not None
    tokenizer = Tokenizer.load(path)
    for one in opened.all:
        if one.info is not None and one.info.tokenizer_fingerprint != tokenizer.fingerprint:
            raise DataError(
                f"{path} has the fingerprint {tokenizer.fingerprint[:12]}, but {one.prefix} was written with "
                f"{one.info.tokenizer_fingerprint[:12]}. Use that tokenizer, or preprocess again."
            )
    return tokenizer


def _beside(dataset: IndexedDataset) -> Path:
    return part(dataset.prefix, ".tokenizer.json")


def _model(config: RunConfig, opened: Opened, tokenizer: Tokenizer) -> ModelSettings:
    highest = max(one.info.max_id if one.info else -1 for one in opened.all)
    return config.model.with_vocab(max(tokenizer.vocab_size, highest + 1))


def find_resume(config: RunConfig) -> Path | None:
    """Where the run goes on from: its own newest checkpoint, or at its very start the one that the user names."""
    own = Path(config.run.dir) / CHECKPOINTS
    newest = latest(own)
    if config.checkpoint.resume == "auto":
        return newest
    if config.checkpoint.resume == "none":
        if newest is not None:
            raise OutputError(
                f"run.dir={config.run.dir} already holds checkpoints and checkpoint.resume=none would start over. "
                "Choose another run.dir, or checkpoint.resume=auto to go on."
            )
        return None
    given = resolve(Path(config.checkpoint.resume))
    if newest is not None and given.parent.resolve() == own.resolve() and given.name != newest.name:
        raise OutputError(
            f"checkpoint.resume={given} goes back in a run that has reached {newest.name}. "
            "Choose another run.dir to branch off there."
        )
    return newest or given


def settled(config: RunConfig, inputs: Inputs) -> RunConfig:
    """The settings with what the data decided filled in: what the run folder and the checkpoints record."""
    return replace(config, model=inputs.model)
