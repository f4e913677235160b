"""Checks before torch is imported: machine, data, tokenizer, processes, checkpoint to resume from.

Called by the command line right after the settings, for a run and for a dry run alike; set-up builds the run from the
result. These checks allocate and keep nothing on the machine.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lmtrain.checkpoint.contents import Contents, checked_model
from lmtrain.checkpoint.store import latest, list_checkpoints, list_set_aside, resolve
from lmtrain.config.base import show
from lmtrain.data.data_settings import DataChoice
from lmtrain.data.store.indexed import IndexedDataset, dataset_file
from lmtrain.data.training_data import (
    TOKEN_SHARES,
    DataRequirements,
    OpenDatasets,
    TrainingData,
    build_training_data,
    open_datasets,
)
from lmtrain.errors import (
    CheckpointError,
    DataError,
    LayoutError,
    LmtrainError,
    OutputError,
    SettingsError,
    StorageError,
)
from lmtrain.layout import Layout, divisors
from lmtrain.models.model_settings import ModelSettings
from lmtrain.plan.run_model.checkpoint_size import check_manifest_limits, checkpoint_bytes
from lmtrain.runfolder.changes import compare_settings
from lmtrain.runfolder.differences import flatten
from lmtrain.runfolder.folder import read_settings
from lmtrain.runfolder.names import CHECKPOINTS, CONFIG
from lmtrain.runtime.files.files import check_output_folder, free_bytes
from lmtrain.runtime.machine.gpus import Gpus, device_problem
from lmtrain.runtime.machine.install_command import install_command
from lmtrain.runtime.processes.process import DRY_RUN_LAUNCHER, ProcessEnv, Rendezvous, listen
from lmtrain.tokenizer.base import Tokenizer
from lmtrain.train.before.resume_checks import check_resumed, open_resumed, readable, shares_of
from lmtrain.train.config import RunConfig
from lmtrain.train.train_settings import TrainSettings
from lmtrain.units import format_bytes

_FREE = ("dropout", "init_std", "vocab_multiple")  # these change no weight's shape and no output of the model
_RECORDS_BYTES = 1 << 20  # bytes that a young run writes besides checkpoints
_EFFECTIVE = ("num_kv_heads", "head_width", "ffn_width")  # null means a default, which other models state explicitly


@dataclass(frozen=True)
class Evaluated:
    """An evaluation task of a run, with the facts that training needs."""

    name: str
    data: str
    num_targets: int
    text_sha256: str


@dataclass(frozen=True)
class Inputs:
    model: ModelSettings  # with the final vocabulary size
    tokenizer: Tokenizer
    data: TrainingData
    resume_from: Path | None
    weights_from: Path | None = None  # checkpoint with the first weights of a new run; None for random weights
    evaluations: tuple[Evaluated, ...] = ()
    warnings: tuple[str, ...] = ()  # messages on settings that work but may be unintended

    def epochs(self, config: RunConfig) -> float:
        first, count = config.batch_plan.range_of(config.total_steps - 1)
        return (first + count) / self.data.train.num_samples


def preflight(config: RunConfig, env: ProcessEnv, *, starting: bool = True) -> Inputs:
    """Return the inputs of a run; raise if it cannot work.

    Called on every process of a run: one process per node builds a missing data index while the others wait for its
    lock. Without `starting`, a single process may check a run of many.
    """
    _check_processes(config, env, starting)
    # else a single process checks a run of many
    is_here = env.world_size == config.parallel.layout.world_size and env.launcher != DRY_RUN_LAUNCHER
    if is_here:
        check_device(config, env)
    if is_here and env.rank == 0:
        check_sinks(config)
    resume_from = find_resume(config)
    resumed = open_resumed(config, resume_from)
    tokenizer, model, data = load_data(config, shares=shares_of(resumed))
    check_pieces(config, model)
    if resumed is not None:
        check_resumed(resumed, config, model, tokenizer, data)
    if is_here and starting and config.data.verify == "full":
        for dataset in data.datasets:  # because: the processes of a node share the work, so each must check its part
            dataset.check_all(env.local_rank, max(env.local_world_size, 1))
    warnings = [*_warnings(config.parallel.layout, env), *([data.warning] if data.warning else [])]
    if is_here and env.rank == 0:
        warnings += check_folder(config, model, tokenizer, lock=not starting)
    if is_here and not starting:
        check_port(env)  # because: a starting run opens the port right after this and reports the problem itself
    # because: once a run has its own checkpoint, the checkpoint of its first weights may be gone
    weights_from = find_first_weights(config, model, tokenizer) if resume_from is None else None
    return Inputs(model, tokenizer, data, resume_from, weights_from, warnings=tuple(warnings))


def load_data(
    config: RunConfig, *, validate: bool = True, shares: str = TOKEN_SHARES
) -> tuple[Tokenizer, ModelSettings, TrainingData]:
    """Return the tokenizer, the model with its final vocabulary size, and the data of a run."""
    opened = open_datasets(config.data)
    tokenizer = _tokenizer(config.data, opened)
    model = _model(config, opened, tokenizer)
    first, count = config.batch_plan.range_of(config.total_steps - 1)
    asked = DataRequirements(
        seq_len=config.seq_len, vocab_size=model.shape.vocab_size, seed=config.train.seed, num_samples=first + count,
        validate=validate and config.train.valid_interval_steps > 0, tokenizer=tokenizer, shares=shares,
    )  # fmt: skip
    return tokenizer, model, build_training_data(config.data, opened, asked)


def find_model(config: RunConfig) -> ModelSettings:
    """Return the model with its final vocabulary size, without indexing the data."""
    opened = open_datasets(config.data)
    return _model(config, opened, _tokenizer(config.data, opened))


def _check_processes(config: RunConfig, env: ProcessEnv, starting: bool) -> None:
    problems = list(compiler_problems(config))
    counts = starting or env.launcher != "single"
    wrong = list(process_problems(config.parallel.layout, env, config.train)) if counts else []
    if wrong:
        raise LayoutError("\n".join(wrong + problems))
    if problems:
        raise SettingsError(problems)


def process_problems(layout: Layout, env: ProcessEnv, train: TrainSettings | None = None) -> Iterator[str]:
    """Yield a message if the number of processes does not match the layout.

    `train` adds the batch settings that have to change to the way out.
    """
    if env.world_size != layout.world_size:
        sizes = {axis: getattr(layout, axis) for axis in ("pp", "dp_replicate", "dp_shard", "tp")}
        factors = [f"{axis}={size}" for axis, size in sizes.items() if size > 1]
        asked = f"{' x '.join(factors)} =" if len(factors) > 1 else f"parallel.{(factors or ['*'])[0]} asks for"
        ways = f"Start {_processes(layout.world_size)}"
        ways += f" with --nproc {layout.world_size}" if env.launcher == "single" else ""
        axis = "dp_replicate" if layout.dp_replicate > 1 and layout.dp_shard == 1 else "dp_shard"
        fitting, rest = divmod(env.world_size * sizes[axis], layout.world_size)
        if rest == 0:
            words = [f"parallel.{axis}={fitting}", *_batch_for(replace(layout, **{axis: fitting}), train)]
            ways += f" or set {' '.join(words)}"
        ways += ", or add --elastic, which takes the nearest layout for them" if train else ""
        were = "was" if env.world_size == 1 else "were"
        yield f"{_processes(env.world_size)} {were} started but {asked} {layout.world_size}. {ways}."


def _batch_for(layout: Layout, train: TrainSettings | None) -> Iterator[str]:
    """Yield the batch settings that must change for this layout's number of replicas."""
    if train is None:
        return
    share = -(-train.global_batch // layout.dp)
    if share * layout.dp != train.global_batch:
        yield f"train.global_batch={share * layout.dp}"
    if share % train.micro_batch:
        yield f"train.micro_batch={divisors(share, train.micro_batch)[-1]}"


def _warnings(layout: Layout, env: ProcessEnv) -> Iterator[str]:
    if env.local_world_size and env.local_world_size % layout.tp:
        inside = [size for size in divisors(env.local_world_size) if size <= layout.tp]
        yield (
            f"parallel.tp={layout.tp} goes across nodes, as {env.host} has {env.local_world_size} processes: each "
            "layer waits for sums over the links between them. If these are slower than those inside a node, "
            f"parallel.tp={inside[-1]} is faster."
        )


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"


def _tokenizer(settings: DataChoice, opened: OpenDatasets) -> Tokenizer:
    """Return the tokenizer that wrote the datasets: from beside a dataset, or from data.tokenizer for foreign ones."""
    beside = next((file for file in map(_beside, opened.datasets) if file.exists()), None)
    if settings.tokenizer is None and beside is None:
        first = opened.train[0]
        raise SettingsError(
            [f"data.tokenizer=null does not say who made {first.prefix}, and no {_beside(first).name} is beside it. "
             "Add data.tokenizer=PATH of the tokenizer that wrote it."]
        )
    path = Path(settings.tokenizer) if settings.tokenizer else beside
    assert path is not None
    said = next((one.info for one in opened.datasets if one.info is not None), None)
    tokenizer = Tokenizer.load(path) if said is None else Tokenizer.load_lazily(
        path, sha256=said.tokenizer_sha256, fingerprint=said.tokenizer_fingerprint, vocab_size=said.vocab_size,
        eod_id=said.eod_id,
    )  # fmt: skip
    for one in opened.datasets:
        if one.info is not None and one.info.tokenizer_fingerprint != tokenizer.fingerprint:
            raise DataError(
                f"{path} has the fingerprint {tokenizer.fingerprint[:12]}, but {one.prefix} was written with "
                f"{one.info.tokenizer_fingerprint[:12]}. Use that tokenizer, or preprocess again."
            )
    return tokenizer


def _beside(dataset: IndexedDataset) -> Path:
    return dataset_file(dataset.prefix, ".tokenizer.json")


def _model(config: RunConfig, opened: OpenDatasets, tokenizer: Tokenizer) -> ModelSettings:
    highest = max(one.info.max_id if one.info else -1 for one in opened.datasets)
    return config.model.with_vocab(max(tokenizer.vocab_size, highest + 1))


def find_resume(config: RunConfig) -> Path | None:
    """Return the run's newest checkpoint, or on its first start the one given by the user; None for a new run.

    With checkpoint.fallback, unreadable checkpoints are skipped here; else readability is checked when it is opened.
    """
    own, settings = Path(config.run.dir) / CHECKPOINTS, config.checkpoint
    newest, damaged = latest(own), list_set_aside(own)
    if newest is None and damaged:
        raise CheckpointError(
            f"run.dir={config.run.dir} holds no checkpoint but {damaged[-1].name}, which is damaged. "
            "Choose another run.dir to begin anew, or move it away."
        )
    if settings.fallback:
        newest = readable(newest)
    if settings.resume == "auto":
        return newest
    if settings.resume == "none":
        if newest is not None:
            raise OutputError(
                f"run.dir={config.run.dir} already holds checkpoints and checkpoint.resume=none would start over. "
                "Choose another run.dir, or checkpoint.resume=auto to go on."
            )
        return None
    given = resolve(Path(settings.resume))
    if settings.fallback:
        given = readable(given) or given
    if newest is not None and given.parent.resolve() == own.resolve() and given.name != newest.name:
        raise OutputError(
            f"checkpoint.resume={given} goes back in a run that has reached {newest.name}. "
            "Choose another run.dir to branch off there."
        )
    return newest or given


def settled(config: RunConfig, inputs: Inputs) -> RunConfig:
    """Return the settings completed with the model that the data decided, as run folder and checkpoints record them."""
    return replace(config, model=inputs.model)


def changed_settings(config: RunConfig, inputs: Inputs) -> dict[str, list[Any]]:
    """Return key -> [old, new] for the settings that differ from those of the last start in the same run folder."""
    folder = Path(config.run.dir)
    if not (folder / CONFIG).is_file():
        return {}
    try:
        known = dict(flatten(read_settings(folder)))
    except LmtrainError:  # because: a damaged record is rewritten, and should not stop a run
        return {}
    return compare_settings(known, dict(flatten(settled(config, inputs).to_dict())))


def find_first_weights(config: RunConfig, model: ModelSettings, tokenizer: Tokenizer) -> Path | None:
    """Return the checkpoint that `checkpoint.init_from` names, or None; raise with all differences if it is unfit."""
    if config.checkpoint.init_from is None:
        return None
    path = resolve(Path(config.checkpoint.init_from))
    contents = Contents(path)
    theirs = checked_model(contents)
    told = contents.manifest.state.get("tokenizer")
    fingerprint = told.get("fingerprint") if isinstance(told, dict) else None
    if fingerprint != tokenizer.fingerprint:
        raise SettingsError([
            f"checkpoint.init_from={path} knows the ids of the tokenizer {str(fingerprint)[:12]} and the data has "
            f"those of {tokenizer.fingerprint[:12]}. Preprocess the text with --tokenizer {path / 'tokenizer.json'}."
        ])  # fmt: skip
    _check_model(path, model, theirs)
    return path


def _check_model(path: Path, ours: ModelSettings, theirs: ModelSettings) -> None:
    mine, other, typed = written_out(ours), written_out(theirs), theirs.to_dict()
    free = {*_FREE, *(problem.key for problem in theirs.unused())}
    if "embedding.position.weight" not in theirs.weights():
        free.add("seq_len")  # because: rotary positions have no table that limits the length
    wrong = [key for key in other if key not in free and mine.get(key) != other[key]]
    if wrong:
        found = ", ".join(f"model.{key} is {show(mine.get(key))}, there {show(other[key])}" for key in wrong)
        settings = " ".join(f"model.{key}={show(typed[key])}" for key in wrong if typed[key] != ours.to_dict().get(key))
        way_out = "Choose a model of that kind." if "kind" in wrong else f"Add {settings}."
        what = "is of another model" if ours.weights() != theirs.weights() else "computes with other settings"
        raise SettingsError([f"checkpoint.init_from={path} {what}: {found}. {way_out}"])


def written_out(model: ModelSettings) -> dict[str, Any]:
    """Return the settings with nulls replaced by the sizes they stand for."""
    values, shape = model.to_dict(), model.shape
    return values | {key: getattr(shape, key) for key in _EFFECTIVE if key in values}


def compiler_problems(config: RunConfig) -> Iterator[str]:
    if config.compute.compile is True and not any(shutil.which(cc) for cc in ("c++", "g++", "clang++")):
        yield (
            "compute.compile=true needs a C++ compiler and none of c++, g++ and clang++ is here. "
            "Install one or set compute.compile=false."
        )


def check_device(config: RunConfig, env: ProcessEnv) -> None:
    if config.compute.device == "cpu":
        return
    gpus = Gpus.detect()
    if problem := device_problem(config.compute.device, gpus, env):
        raise problem
    if config.compute.tf32 and gpus.count == 0:
        raise SettingsError(["compute.tf32=true is of GPUs, and none is here. Use compute.tf32=false."])


def check_sinks(config: RunConfig) -> None:
    """Raise SettingsError if the package that observe.wandb needs is not installed."""
    if config.observe.wandb == "none":
        return
    found = importlib.util.find_spec("wandb")
    if found is None or found.origin is None:  # because: a mere folder named wandb is not the package
        raise SettingsError([
            f"observe.wandb={config.observe.wandb} needs the package wandb, which is not installed. "
            f"Run `{install_command('wandb')}`, or set observe.wandb=none."
        ])  # fmt: skip


def check_folder(config: RunConfig, model: ModelSettings, tokenizer: Tokenizer, *, lock: bool) -> list[str]:
    """Raise if the run's folder is unusable or has no room for its checkpoints; return warnings on room that may lack.

    `lock`: also check whether another run holds the folder.
    """
    folder, settings = Path(config.run.dir), config.checkpoint
    check_output_folder(folder, f"run.dir={config.run.dir}", lock=lock)
    if settings.interval_steps is None:
        return []
    there, extra, free = len(list_checkpoints(folder / CHECKPOINTS)), len(tokenizer.to_bytes()), free_bytes(folder)
    size, records = check_pieces(config, model) + extra, extra + _RECORDS_BYTES
    room = max(0, free - records) // size
    # because: a resumed run already has its newest checkpoints, and writes the next before the oldest is deleted
    surely, at_most = (max(1, count - there) for count in settings.num_at_once(config.total_steps))
    if room >= at_most:
        return []
    need = surely if room < surely else at_most
    them = "A checkpoint" if need == 1 else f"{need} checkpoints, {format_bytes(size)} each,"
    lack = (
        f"{them} and the run's records need {format_bytes(need * size + records)} in run.dir={config.run.dir} "
        f"and its disk has {format_bytes(free)} free"
    )
    if room < surely:
        raise StorageError(
            f"{lack}. Free some space, choose another run.dir, {_fewer(config, there + room, there)}"
            "or set checkpoint.interval_steps=null to save none."
        )
    keys = ", ".join(f"checkpoint.{key}={show(getattr(settings, key))}" for key in settings.keeping())
    return [f"{lack}, for {room}. So many may come to lie there ({keys}); what finds no room is not saved."]


def _fewer(config: RunConfig, in_all: int, there: int) -> str:
    """Return the part of a message with settings that need fewer checkpoints."""
    if 1 < in_all <= config.checkpoint.keep_last:
        return f"set checkpoint.keep_last={in_all - 1}, "
    one = "set checkpoint.interval_steps=0 checkpoint.interval_s=null to save only at the end, "
    return one if in_all == 1 and not there else ""


def check_pieces(config: RunConfig, model: ModelSettings) -> int:
    """Return the size of a checkpoint in bytes; raise LayoutError if such checkpoints could not be written.

    Return 0 instead of raising if the run saves none.
    """
    slots = config.optim.num_slots
    try:
        return check_manifest_limits(model, config.parallel.layout, slots, checkpoint_bytes(model, slots))
    except CheckpointError as error:
        if config.checkpoint.interval_steps is None:
            return 0
        raise LayoutError(f"{error} checkpoint.interval_steps=null saves none.") from error


def check_port(env: ProcessEnv) -> None:
    """Check that the processes' meeting port can be opened; the port is free again afterwards."""
    if env.world_size == 1:
        return
    host, port = "127.0.0.1", 0  # because: our own launcher takes any free port
    if env.launcher != "lmtrain":
        at = Rendezvous.detect(env)
        if env.rank > 0 or at.held_by_launcher or at.listen_fd is not None:
            return
        host, port = host if at.stays_on_node else "", at.port
    os.close(listen(host, port))
