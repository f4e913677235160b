"""The parts of a running run, the state that a resumed run needs, and the resume itself.

Built by set_up_run.py, used by the loop and by the modules it calls. No random state is saved: weights, order and
dropout are pure functions of the seed, the step and the micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from zlib import crc32

import torch

from lmtrain.batch import StepBatches
from lmtrain.checkpoint.save.background_writer import CheckpointWriter
from lmtrain.checkpoint.tensor_reader import CheckpointReader
from lmtrain.checkpoint.view_with_ema_as_weights import WeightSet
from lmtrain.data.data_settings import REST
from lmtrain.data.loader import Loader
from lmtrain.data.training_data_by_source import TrainingPart, shown_sources, tokens_of_order
from lmtrain.errors import CheckpointError, LmtrainError, OutputError, StoppedEarly, StorageError
from lmtrain.layout import Piece
from lmtrain.observe.measure.process_and_gpu_memory import Memory
from lmtrain.observe.measure.throughput import Throughput
from lmtrain.observe.metrics import MetricsLog
from lmtrain.observe.screen.training_view import RunView
from lmtrain.observe.sinks.queued_sink import QueuedSink
from lmtrain.optim.optimizer_state import apply_num_updates, num_updates, state_tensors
from lmtrain.parallel.mesh import Mesh
from lmtrain.parallel.parallel_model import ParallelModel
from lmtrain.runfolder.file_names import CHECKPOINTS, step_from_name
from lmtrain.runtime.processes import current_phase
from lmtrain.runtime.processes.fault_injection import fault_point
from lmtrain.runtime.processes.succeed_on_all_ranks_or_none import Peers, collective_phase
from lmtrain.train.exponential_weight_average import WeightAverage
from lmtrain.train.run_config import RunConfig
from lmtrain.train.startup_checks.preflight import Inputs, find_resume_checkpoint
from lmtrain.train.startup_checks.resume_checks import average_notes, check_same_run, set_aside_damaged
from lmtrain.train.step import StepResult
from lmtrain.train.step_and_save_durations import Durations


@dataclass
class Progress:
    """The position of a run. `step` is the number of steps done; `skipped` counts those without an update because of an
    fp16 overflow.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0
    attempt: int = 1  # number of this start of the run, from 1; correct on rank 0, which alone writes it
    skipped: int = 0
    pending: tuple[str, ...] = ()  # pending measurements of this step
    source_tokens: dict[str, int] = field(default_factory=dict)  # tokens read of each dataset, by its key
    # by the name of a blend's dataset: (summed loss, number of labels) of its samples since the last row
    source_losses: dict[str, tuple[float, int]] = field(default_factory=dict)

    def is_over(self, total_steps: int) -> bool:
        """Return whether no step and no measurement is left to do."""
        return self.step == total_steps and not self.pending

    def count(self, batches: StepBatches, result: StepResult, parts: Sequence[TrainingPart]) -> None:
        """Add a finished step: its samples and tokens, the tokens read from each dataset and, for a blend, the summed
        loss and the number of labels of each dataset since the last "step" row. `parts` are the datasets that the run
        trains on.
        """
        self.step += 1
        self.samples += batches.num_samples
        self.tokens += batches.num_tokens
        self.skipped += result.skipped
        for part in () if batches.by_source else parts:  # because: a single dataset has all tokens
            self.source_tokens[part.key] = self.source_tokens.get(part.key, 0) + batches.num_tokens
        for counts in batches.by_source:
            part = parts[counts.number]
            self.source_tokens[part.key] = self.source_tokens.get(part.key, 0) + counts.tokens
            loss, labels = self.source_losses.get(part.name, (0.0, 0))
            loss += math.fsum(result.sample_losses[row] for row in counts.rows_S.tolist())
            self.source_losses[part.name] = (loss, labels + counts.labels)

    def take_source_values(self, parts: Sequence[TrainingPart]) -> dict[str, Any]:
        """Return {"sources": values} for a "step" row, with the tokens, epochs and loss of each dataset of a blend,
        those with small shares added up as "rest"; {} for a single dataset. The loss is the mean since the last such
        call, and is left out if there was no label. `parts` are the datasets that the run trains on.
        """
        if len(parts) < 2:
            return {}
        values: dict[str, dict[str, Any]] = {}
        for name, indices in shown_sources(parts).items():
            group = [parts[index] for index in indices]
            sums = [self.source_losses.get(part.name, (0.0, 0)) for part in group]
            labels = sum(count for _, count in sums)
            contents = {part.key: part.num_tokens for part in group}  # because: equal contents have one count
            tokens = sum(self.source_tokens.get(key, 0) for key in contents)
            values[name] = {"loss": math.fsum(loss for loss, _ in sums) / labels} if labels else {}
            values[name] |= {"tokens": tokens, "epochs": tokens / max(sum(contents.values()), 1), "labels": labels}
            values[name] |= {"sources": len(group)} if name == REST else {}
        self.source_losses = {}
        return {"sources": values}


def held_pieces(
    model: ParallelModel, optimizer: torch.optim.Optimizer, average: WeightAverage | None = None
) -> list[Piece]:
    """Return all pieces of weights, optimizer state and the weights' average that this process holds, including copies
    that another rank saves.
    """
    return model.pieces() + optimizer_pieces(model, optimizer) + average_pieces(model, average)


def optimizer_pieces(model: ParallelModel, optimizer: torch.optim.Optimizer) -> list[Piece]:
    """Return the pieces of the optimizer's state that this process holds."""
    return model.pieces_of(state_tensors(optimizer, model.parameters), "optim")


def average_pieces(model: ParallelModel, average: WeightAverage | None) -> list[Piece]:
    """Return the pieces of the weights' average that this process holds, named `ema.NAME`; none if there is none."""
    return [] if average is None else model.pieces_of(average.tensors, "ema")


def checkpoint_state(
    config: RunConfig, inputs: Inputs, model: ParallelModel, optimizer: torch.optim.Optimizer, progress: Progress,
    average: WeightAverage | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return the part of a checkpoint that is not tensors: progress, settings, identity of tokenizer and data, the
    optimizer's update count, the loss scale, and the decay and steps of the weights' average. It is stored as JSON.
    """
    return {
        "step": progress.step,
        "samples": progress.samples,
        "tokens": progress.tokens,
        "attempt": progress.attempt,
        "skipped": progress.skipped,
        "sources": dict(progress.source_tokens),
        "seq_len": config.seq_len,
        "seed": config.train.seed,
        "settings": config.to_dict(),
        "model": inputs.model.to_dict(),
        "tokenizer": {
            "fingerprint": inputs.tokenizer.fingerprint,
            "eod_id": inputs.tokenizer.eod_id,
            "vocab_size": inputs.tokenizer.vocab_size,
        },
        "data": inputs.data.sample_identity | {"content_sha256": inputs.data.content_sha256},
        "history": inputs.data.history.to_dict(),
        "optimizer": {"kind": config.optim.kind, "num_updates": num_updates(optimizer)},
        "precision": {"kind": config.precision.kind} | model.loss_scale.state(),
    } | {key: value for key, value in (
        ("owed", list(progress.pending)), ("source_losses", dict(progress.source_losses)),
        ("lineage", [parent.to_dict() for parent in inputs.lineage]),
        ("ema", None if average is None else average.state()),
    ) if value}  # fmt: skip


def restore(
    reader: CheckpointReader, model: ParallelModel, optimizer: torch.optim.Optimizer,
    average: WeightAverage | None = None,
) -> Progress:  # fmt: skip
    """Load weights, optimizer state and the weights' average into `model`, `optimizer` and `average` from a checkpoint,
    which may have another layout, and return the saved progress with `attempt` raised by one. The average begins anew
    if the checkpoint has none, or was saved before step checkpoint.ema.from_step.

    Each process reads its own parts; no collective takes place.
    """
    fault_point("start.load")
    state = reader.state
    saved = state.get("ema") if average is not None and average.settings.covers(state["step"]) else None
    pieces = optimizer_pieces(model, optimizer) + (average_pieces(model, average) if saved else [])
    model.load(reader.load_into, extra_pieces=pieces)
    if average is not None:
        average.since_step = saved["since_step"] if saved else None
    apply_num_updates(optimizer, state["optimizer"]["num_updates"])
    model.loss_scale.load(state["precision"])
    return Progress(
        state["step"], state["samples"], state["tokens"], attempt=state["attempt"] + 1, skipped=state["skipped"],
        pending=tuple(state.get("owed", ())), source_tokens=dict(state.get("sources", {})),
        source_losses={name: (loss, labels) for name, (loss, labels) in state.get("source_losses", {}).items()},
    )  # fmt: skip


def resume(
    config: RunConfig, inputs: Inputs, model: ParallelModel, optimizer: torch.optim.Optimizer,
    average: WeightAverage, peers: Peers, skip_messages: list[str],
) -> tuple[Inputs, Progress]:  # fmt: skip
    """Load the checkpoint `inputs.resume_from` into `model`, `optimizer` and `average`, and return (`inputs` with the
    path of the checkpoint that was used, saved progress). With checkpoint.fallback, a damaged checkpoint is renamed, a
    message on it appended to `skip_messages`, and the newest intact one before it used. All ranks must call this.
    """
    current_phase.enter("load")
    while True:
        path = inputs.resume_from
        assert path is not None
        with collective_phase(peers):
            reader = CheckpointReader(path)
            check_same_run(path, reader.manifest, config, inputs.model, inputs.tokenizer, inputs.data)
            if inputs.follows_stage and reader.state["step"] < config.first_step:
                raise StorageError(
                    f"The stage {config.stage_name} cannot begin, since the checkpoint of step {config.first_step}, at "
                    f"the end of the stage before, could not be saved; the newest is {path}. Free some space, and run "
                    "the same command again."
                )
        try:
            with collective_phase(peers):
                progress = restore(reader, model, optimizer, average)
                has_same_data = reader.state["data"].get("content_sha256") == inputs.data.content_sha256
                # because: older versions, without stages, did not count them
                if "sources" not in reader.state and has_same_data and not inputs.data.first_position:
                    progress.source_tokens = tokens_of_order(inputs.data, progress.samples, progress.tokens)
                notes = () if inputs.follows_stage else average_notes(config, path, reader.state)
                inputs = replace(inputs, warnings=(*inputs.warnings, *notes))
                return with_extra_files(inputs, reader, peers), progress
        except LmtrainError as error:
            if not config.checkpoint.fallback or error.exit_code != CheckpointError.exit_code:
                raise
            folder = Path(config.run.dir)
            with collective_phase(peers):
                if peers.rank == 0:
                    set_aside_damaged(path, folder / CHECKPOINTS, error)
            skip_messages.append(f"The checkpoint {path} is set aside: {error}")
            inputs = replace(inputs, resume_from=agree_on_resume(folder, config, peers))
            _check_same_stage(config, path, inputs.resume_from)


def _check_same_stage(config: RunConfig, damaged: Path, intact: Path | None) -> None:
    """Raise StoppedEarly if the checkpoint `intact`, from which the run resumes in place of `damaged`, is of a stage
    before that of `config`, because data and settings were prepared for this one. The next start prepares that stage's.
    """
    step = step_from_name(intact.name) if intact is not None else None
    if step is not None and step < config.first_step:
        raise StoppedEarly(
            f"The checkpoint {damaged} is damaged and set aside, and {intact}, the newest before it, belongs to a "
            f"stage before {config.stage_name}. Run the same command again to go on from there."
        )


def load_first_weights(
    inputs: Inputs, checkpoint: Path, weights: WeightSet, model: ParallelModel, peers: Peers
) -> Inputs:
    """Load the first weights of a new run from another run's checkpoint, or the average of its weights if `weights` is
    "ema", and return `inputs` with the checkpoint's extra files added. All ranks must call this.
    """
    with collective_phase(peers):
        reader = CheckpointReader(checkpoint, weights)
        model.load(reader.load_into)
        return with_extra_files(inputs, reader, peers)


def with_extra_files(inputs: Inputs, reader: CheckpointReader, peers: Peers) -> Inputs:
    """Return the inputs with the extra files of the checkpoint that the run begins from, on rank 0, which saves them
    again with each checkpoint: an imported model's files are then exported after training, too.
    """
    return replace(inputs, extra_files=reader.read_extra_files()) if peers.rank == 0 else inputs


def agree_on_resume(folder: Path, config: RunConfig, peers: Peers) -> Path | None:
    """Return the checkpoint from which all ranks resume, or None for a new run. Raise OutputError on every rank if the
    ranks find different ones, as they do if the run's `folder` is not on a disk that all nodes share. All ranks must
    call this.
    """
    fault_point("start.folder")
    with collective_phase(peers, 1) as exchange:
        if not folder.is_dir():
            raise OutputError(
                f"run.dir={folder} does not exist on rank {peers.rank}. Give a folder that all nodes share."
            )
        path = find_resume_checkpoint(config)
        exchange.own_numbers = (crc32(str(path).encode()),)
    if len({number for (number,) in exchange.all_numbers}) > 1:
        raise OutputError(f"Ranks see different checkpoints in run.dir={folder}. Give a folder that all nodes share.")
    return path


@dataclass
class Run:
    """The objects that the loop needs; lives as long as the `open_run` block."""

    config: RunConfig
    inputs: Inputs
    folder: Path
    mesh: Mesh
    model: ParallelModel
    optimizer: torch.optim.Optimizer
    average: WeightAverage
    progress: Progress
    loader: Loader
    writer: CheckpointWriter
    metrics: MetricsLog | None  # on rank 0 only
    sinks: Sequence[QueuedSink]
    view: RunView
    throughput: Throughput
    durations: Durations
    memory: Memory
    previous_end: Mapping[str, object]  # how the previous start ended
    changed_settings: Mapping[str, list[Any]]  # settings that differ from the previous start: [old, new]
    hosts: Sequence[str] = ()  # host names by rank, on rank 0
    skipped_checkpoints: tuple[str, ...] = ()  # messages on damaged checkpoints that the resume skipped
    reported_save: int | None = None  # step of the newest checkpoint reported to metrics and view
    failed_saves: int = 0  # failed saves since that checkpoint
