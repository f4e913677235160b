"""All that can be judged before torch is imported: the data, its tokenizer, the processes, what a resume finds.

Called by the command line right after the settings; its answer is what set-up builds from.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from lmtrain.checkpoint.store import CHECKPOINTS, latest, resolve
from lmtrain.data.causal import CausalDataset
from lmtrain.data.format import IndexedDataset
from lmtrain.data.sample_index import split_documents
from lmtrain.errors import DataError, LayoutError, OutputError, SettingsError
from lmtrain.models.model_settings import ModelSettings
from lmtrain.runtime.process import ProcessEnv
from lmtrain.tokenizer.base import Tokenizer
from lmtrain.train.config import RunConfig


@dataclass(frozen=True)
class Inputs:
    model: ModelSettings  # with the true vocabulary size
    tokenizer: Tokenizer
    train: CausalDataset
    valid: CausalDataset | None
    data: IndexedDataset  # the files behind `train`
    resume_from: Path | None

    def epochs(self, config: RunConfig) -> float:
        first, count = config.batch_plan.range_of(config.total_steps - 1)
        return (first + count) / self.train.num_samples


def preflight(config: RunConfig, env: ProcessEnv) -> Inputs:
    """Refuse what cannot work, or say what the run is made of."""
    _check_processes(config, env)
    dataset = IndexedDataset.open(config.data.path)
    tokenizer = _tokenizer(config, dataset)
    model = _model(config, dataset, tokenizer)
    train, valid = _parts(config, dataset, tokenizer, model.shape.vocab_size)
    return Inputs(model, tokenizer, train, valid, dataset, find_resume(config))


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


def _tokenizer(config: RunConfig, dataset: IndexedDataset) -> Tokenizer:
    """The one that made the dataset: beside it, or named by the user for a foreign dataset."""
    beside = Path(f"{config.data.path}.tokenizer.json")
    if config.data.tokenizer is None and not beside.exists():
        raise SettingsError(
            [f"data.tokenizer=null leaves open who made {config.data.path}: there is no {beside.name} beside it. "
             "Add data.tokenizer=PATH of the tokenizer that wrote it."]
        )
    tokenizer = Tokenizer.load(Path(config.data.tokenizer) if config.data.tokenizer else beside)
    if dataset.info is not None and dataset.info.tokenizer_fingerprint != tokenizer.fingerprint:
        raise DataError(
            f"{config.data.tokenizer or beside} has the fingerprint {tokenizer.fingerprint[:12]}, but "
            f"{config.data.path} was written with {dataset.info.tokenizer_fingerprint[:12]}. "
            "Use that tokenizer, or preprocess again."
        )
    return tokenizer


def _model(config: RunConfig, dataset: IndexedDataset, tokenizer: Tokenizer) -> ModelSettings:
    return config.model.with_vocab(max(tokenizer.vocab_size, dataset.info.max_id + 1 if dataset.info else 0))


def _parts(
    config: RunConfig, dataset: IndexedDataset, tokenizer: Tokenizer, vocab_size: int
) -> tuple[CausalDataset, CausalDataset | None]:
    mask, seq_len = config.data.document_mask, config.seq_len
    ranges = split_documents(dataset.num_documents, config.data.split)
    train = CausalDataset(dataset, ranges[0], seq_len, mask, vocab_size)
    if config.train.valid_interval_steps == 0:
        return train, None
    if config.data.valid_path is None:
        if len(ranges[1]) == 0:
            raise SettingsError([
                f"data.split={list(config.data.split)} leaves no document to validate on. Give the second part a "
                "share, set data.valid_path=PREFIX, or train.valid_interval_steps=0."
            ])
        return train, CausalDataset(dataset, ranges[1], seq_len, mask, vocab_size)
    other = IndexedDataset.open(config.data.valid_path)
    if other.info is not None and other.info.tokenizer_fingerprint != tokenizer.fingerprint:
        raise DataError(
            f"{config.data.valid_path} was written with another tokenizer than {config.data.path}. Preprocess it again."
        )
    return train, CausalDataset(other, range(other.num_documents), seq_len, mask, vocab_size)


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
