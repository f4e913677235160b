"""Checks before torch is imported: machine, data, tokenizer, processes, checkpoint to resume from.

Called by the command line right after the settings, for a run and for a dry run alike; set-up builds the run from the
result. These checks allocate and keep nothing on the machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lmtrain.checkpoint.find_and_prune import latest_checkpoint, list_checkpoints, list_damaged, resolve_checkpoint
from lmtrain.checkpoint.read_verified_contents import Contents, checked_model
from lmtrain.config.settings_base import show
from lmtrain.data.assemble_training_data import OpenDatasets, build_training_data, open_datasets
from lmtrain.data.cut_datasets_into_samples import TOKEN_SHARES, DataRequirements
from lmtrain.data.resume_position_by_source import NOTHING_READ, DataHistory
from lmtrain.data.training_data_by_source import TrainingData, epoch_warnings
from lmtrain.errors import (
    CheckpointError,
    DataError,
    LayoutError,
    LmtrainError,
    OutputError,
    SettingsError,
    StorageError,
    leave_out,
    way,
)
from lmtrain.models.model_settings import ModelSettings
from lmtrain.plan.run_estimates.checkpoint_size import check_manifest_limits, checkpoint_bytes, count_saved_tensors
from lmtrain.runfolder.file_names import CHECKPOINTS, CONFIG, ENVIRONMENT, LINEAGE, LOG, METRICS, TOKENIZER
from lmtrain.runfolder.folder_reader import is_run, read_settings
from lmtrain.runfolder.lineage import Parent
from lmtrain.runfolder.metrics_rows import read_metrics
from lmtrain.runfolder.settings_differences import compare_settings, first_start, flatten
from lmtrain.runtime.files.atomic_files import LOCK, check_output_folder, free_bytes
from lmtrain.runtime.files.existing_output import Kind, check_output
from lmtrain.runtime.processes.process_environment import ProcessEnv
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer
from lmtrain.train.run_config import RunConfig
from lmtrain.train.startup_checks.check_machine_and_processes import check_machine, check_port, layout_warnings
from lmtrain.train.startup_checks.check_weights_to_start_from import (
    ForeignWeights,
    ReadForeign,
    find_first_weights,
    find_lineage,
    no_foreign_weights,
    recorded_parent,
    tokenizer_of_first_weights,
)
from lmtrain.train.startup_checks.resume_checks import (
    another_run_dir,
    average_notes,
    check_branch_has_steps,
    check_same_run,
    history_of,
    newest_readable,
    open_resume_checkpoint,
    split_rule_of,
    tokens_at_checkpoint,
)
from lmtrain.units import format_bytes

_RECORDS_BYTES = 1 << 20  # bytes that a young run writes besides checkpoints
_FILE_OF_RUN = Kind("a file of a run", lambda path: False, takes_empty=False)


@dataclass(frozen=True)
class EvaluationTask:
    """An evaluation task of a run: its name, its file, the number of targets that it scores, and a digest of its
    text.
    """

    name: str
    data: str
    num_targets: int
    text_sha256: str


@dataclass(frozen=True)
class Inputs:
    """The results of the checks before torch is imported: model settings, tokenizer, data and checkpoints to load.
    `open_run` builds the run from them.
    """

    model: ModelSettings  # with the final vocabulary size
    tokenizer: Tokenizer
    data: TrainingData
    resume_from: Path | None
    # checkpoint with the first weights of a new run, or another program's folder until it has been imported; None for
    # random weights
    weights_from: Path | None = None
    extra_files: Mapping[str, bytes] = field(default_factory=dict)  # by name, of the checkpoint of the first weights
    evaluations: tuple[EvaluationTask, ...] = ()
    warnings: tuple[str, ...] = ()  # messages on settings that work but may be unintended
    config: RunConfig | None = None  # the settings of the stage that these are for; None if the run has no stages
    lineage: tuple[Parent, ...] = ()  # the checkpoints of other runs from which the run descends
    follows_stage: bool = False  # True if the same start trains the stage before
    later_stages: tuple[Inputs, ...] = ()  # of the stages that come after this one

    @property
    def epochs(self) -> float:
        """The number of times that the run, or this stage of it, reads the training data."""
        return self.data.num_samples / self.data.train.num_samples

    def steps_per_epoch(self, global_batch: int) -> int:
        """Return the number of steps of `global_batch` samples in which the training data are read once."""
        return -(-self.data.train.num_samples // global_batch)

    def stages(self, config: RunConfig) -> list[tuple[RunConfig, Inputs]]:
        """Return the settings and the inputs of each stage that a start trains; `config` are the run's settings."""
        return [(stage.config or config, stage) for stage in (self, *self.later_stages)]


def preflight(
    config: RunConfig, env: ProcessEnv, *, starts_run: bool = True, read_foreign: ReadForeign = no_foreign_weights
) -> Inputs:
    """Check a run's settings, machine, data and checkpoints before torch is imported, and return the tokenizer, data,
    model settings and checkpoint paths that were found. Raise an LmtrainError if the run cannot work. `starts_run` is
    False for a dry run, which trains nothing; then a single process may check a run of many. `read_foreign` reads the
    facts about another program's folder in checkpoint.init_from; it is called for a new run alone.

    Called on every process of a run: one process per node builds a missing data index while the others wait for its
    lock.
    """
    is_here = check_machine(config, env, starts_run=starts_run)
    resume_from = find_resume_checkpoint(config)
    resumed = open_resume_checkpoint(config, resume_from)
    foreign = read_foreign(config) if resume_from is None else None
    first, *later = load_stages(config, resumed, foreign)
    model, tokenizer = first.model, first.tokenizer
    check_checkpoint_size(config, model)
    if resumed is not None:
        check_same_run(resumed.path, resumed.manifest, first.config or config, model, tokenizer, first.data)
        checked_model(resumed)
        check_branch_has_steps(config, resumed.path, resumed.manifest.step)
    stages = replace(first, later_stages=tuple(later)).stages(config)
    for stage, inputs in stages if is_here and starts_run else ():
        for dataset in inputs.data.datasets if stage.data.verify == "full" else ():
            # because: the processes of a node share the work, so each must check its part
            dataset.check_all(env.local_rank, max(env.local_world_size, 1))
    warnings = [*layout_warnings(config.parallel.layout, env)]
    warnings += dict.fromkeys(stage.data.warning for stage in (first, *later) if stage.data.warning)
    if resumed is not None and not starts_run:  # because: a start says it of the checkpoint that it then reads
        warnings += average_notes(config, resumed.path, resumed.manifest.state)
    warnings += epoch_warnings(
        [(stage.data, inputs.data, stage.seq_len) for stage, inputs in stages],
        *tokens_at_checkpoint(resumed, first.data),
    )
    if is_here and env.rank == 0:
        warnings += check_run_folder(
            config, model, tokenizer, check_lock=not starts_run,
            import_bytes=0 if foreign is None else foreign.num_bytes_to_write,
        )  # fmt: skip
    if is_here and not starts_run:
        check_port(env)  # because: a starting run opens the port right after this and reports the problem itself
    # because: once a run has its own checkpoint, the checkpoint of its first weights may be gone
    weights_from = find_first_weights(config, model, tokenizer, foreign) if resume_from is None else None
    lineage = find_lineage(config, resume_from, weights_from)
    return replace(
        first, resume_from=resume_from, weights_from=weights_from, warnings=tuple(warnings), lineage=lineage,
        later_stages=tuple(replace(stage, lineage=lineage) for stage in later),
    )  # fmt: skip


def load_stages(config: RunConfig, resumed: Contents | None, foreign: ForeignWeights | None) -> list[Inputs]:
    """Load the tokenizer and the data of each training stage that is left to train, and return the Inputs of each, in
    order; a list of one for a run without stages. `resumed` is the checkpoint to resume from, `foreign` another
    program's folder to start from. Raise SettingsError if the stages' tokenizers differ.
    """
    step = 0 if resumed is None else resumed.manifest.step
    history, split_rule = history_of(resumed), split_rule_of(resumed)
    if history is not None and history.origin == 0 and not config.stages:
        history = NOTHING_READ  # because: a run that never had a border reads what its settings say, as at its start
    first = config.stage_at(step)
    if resumed is not None and first.first_step == step and _owes_measurements(config, resumed):
        first = config.stage_at(step - 1)  # because: they are made with the data of the stage that they belong to
    loaded: list[Inputs] = []
    for stage in config.stage_configs:
        # because: a checkpoint without a history is older than stages, and the stages behind tell what was read
        if stage.end_step <= first.first_step and (history is not None or resumed is None):
            continue
        tokenizer, model, data = load_data(
            stage, split_rule=split_rule, foreign=foreign, history=history or NOTHING_READ
        )  # fmt: skip
        history = data.history
        if stage.end_step <= first.first_step:
            continue
        if loaded and tokenizer.fingerprint != loaded[0].tokenizer.fingerprint:
            raise SettingsError([
                f"The data of the stage {stage.stage_name} has another tokenizer than that of the stage "
                f"{first.stage_name}: fingerprint {tokenizer.fingerprint[:12]} and not "
                f"{loaded[0].tokenizer.fingerprint[:12]}. Preprocess all data of a run with one tokenizer."
            ])
        loaded.append(Inputs(
            model, tokenizer, data, None, follows_stage=bool(loaded), config=stage if config.stages else None
        ))  # fmt: skip
    sizes = [inputs.model.shape.vocab_size for inputs in loaded]
    if resumed is not None and config.stages:
        sizes.append(_saved_vocab_size(resumed))  # because: the data of a stage behind may have had higher ids
    return [replace(inputs, model=(inputs.config or config).model.with_vocab(max(sizes))) for inputs in loaded]


def _owes_measurements(config: RunConfig, resumed: Contents) -> bool:
    """Return True if the run itself, and not one from which it branches off, was stopped in a measurement at the step
    of its checkpoint `resumed`.
    """
    is_own = resumed.path.resolve().is_relative_to(Path(config.run.dir).resolve())
    return is_own and resumed.manifest.step > 0 and bool(resumed.manifest.state.get("owed"))


def _saved_vocab_size(resumed: Contents) -> int:
    """Return the vocabulary size of a checkpoint's model; 0 if its state is damaged, which is checked later."""
    model = resumed.manifest.state.get("model")
    size = model.get("vocab_size") if isinstance(model, dict) else None
    return size if isinstance(size, int) else 0


def load_data(
    config: RunConfig, *, with_validation: bool = True, split_rule: str = TOKEN_SHARES,
    foreign: ForeignWeights | None = None, history: DataHistory = NOTHING_READ,
) -> tuple[Tokenizer, ModelSettings, TrainingData]:
    """Load the tokenizer and the datasets of a stage or of a run without stages, and return the tokenizer, the model
    settings with the vocabulary size that the data needs, and the training data. `with_validation` also opens the
    validation data if the run validates. `split_rule`, an entry of SHARES, says how data.split separates training from
    validation data. `foreign` is another program's folder that a new run starts from. `history` is what the run has
    read before the stage.
    """
    opened = open_datasets(config.data)
    tokenizer = _load_tokenizer(config, opened, foreign)
    model = _model_with_vocab(config, opened, tokenizer)
    start, end = (config.batch_plan.range_of(step)[0] for step in (config.first_step, config.end_step))
    request = DataRequirements(
        seq_len=config.seq_len, vocab_size=model.shape.vocab_size, seed=config.train.seed, num_samples=end - start,
        first_position=start, history=history, tokenizer=tokenizer, shares=split_rule,
        validate=with_validation and config.train.valid_interval_steps > 0,
    )  # fmt: skip
    return tokenizer, model, build_training_data(config.data, opened, request)


def find_model(config: RunConfig) -> ModelSettings:
    """Return the model settings with the vocabulary size that the datasets and their tokenizer need. No data index is
    built.
    """
    last = config.stage_configs[-1]  # because: the data of a stage that a branch has left behind may be gone
    opened = open_datasets(last.data)
    return _model_with_vocab(config, opened, _load_tokenizer(last, opened, None))


def _load_tokenizer(config: RunConfig, opened: OpenDatasets, foreign: ForeignWeights | None) -> Tokenizer:
    """Load the tokenizer from data.tokenizer, or else from the file `PREFIX.tokenizer.json` next to a dataset, or else
    that of the model which the run starts from (`foreign` if it is another program's folder). Raise SettingsError if
    there is none, and DataError if a dataset was written with a different tokenizer.
    """
    stored = next((dataset.tokenizer_path for dataset in opened.datasets if dataset.tokenizer_path.exists()), None)
    infos = {dataset.prefix: dataset.info for dataset in opened.datasets if dataset.info is not None}
    path = Path(config.data.tokenizer) if config.data.tokenizer else stored
    if path is not None:
        info, place = next(iter(infos.values()), None), str(path)
        tokenizer = Tokenizer.load(path) if info is None else Tokenizer.load_lazily(
            path, sha256=info.tokenizer_sha256, fingerprint=info.tokenizer_fingerprint, vocab_size=info.vocab_size,
            eod_id=info.eod_id,
        )  # fmt: skip
    elif (of_weights := tokenizer_of_first_weights(config, foreign)) is not None:
        tokenizer, place = of_weights, f"of checkpoint.init_from={config.checkpoint.init_from}"
    else:
        first = opened.train[0]
        raise SettingsError([
            f"data.tokenizer=null names no tokenizer for the dataset {first.prefix}, "
            f"and there is no {first.tokenizer_path.name} beside it. "
            "Give data.tokenizer=PATH, the tokenizer with which the dataset was written."
        ])
    own_one = "Give that tokenizer"
    if config.data.tokenizer and stored:
        own_one = leave_out("data.tokenizer", shown="Leave data.tokenizer out to use that one")
    for prefix, info in infos.items():
        if info.tokenizer_fingerprint != tokenizer.fingerprint:
            raise DataError(
                f"The tokenizer {place} has the fingerprint {tokenizer.fingerprint[:12]}, but the dataset {prefix} was "
                f"written with a tokenizer of fingerprint {info.tokenizer_fingerprint[:12]}. {own_one}, or preprocess "
                "the text again."
            )
    return tokenizer


def _model_with_vocab(config: RunConfig, opened: OpenDatasets, tokenizer: Tokenizer) -> ModelSettings:
    """Return the model settings with a vocabulary that covers the tokenizer's ids and the highest id in the
    datasets.
    """
    highest_id = max(dataset.info.max_id if dataset.info else -1 for dataset in opened.datasets)
    return config.model.with_vocab(max(tokenizer.vocab_size, highest_id + 1))


def find_resume_checkpoint(config: RunConfig) -> Path | None:
    """Return the checkpoint to resume from: the newest in the run's folder, or else the path in checkpoint.resume; None
    for a new run. Raise OutputError if checkpoint.resume contradicts the checkpoints in the folder: if it is "none", an
    older one of them, or a checkpoint from which the run in the folder did not begin.

    With checkpoint.fallback, unreadable checkpoints are skipped here; else readability is checked when it is opened.
    """
    own_folder, settings = Path(config.run.dir) / CHECKPOINTS, config.checkpoint
    newest, damaged = latest_checkpoint(own_folder), list_damaged(own_folder)
    if newest is None and damaged:
        raise CheckpointError(
            f"run.dir={config.run.dir} holds no checkpoint but {damaged[-1].name}, which is damaged. "
            f"Choose another run.dir for a new run, such as {another_run_dir(config)}, or move the damaged checkpoint "
            "away."
        )
    if settings.fallback:
        newest = newest_readable(newest)
    parent = recorded_parent(config)
    if newest is not None and settings.init_from is not None and parent is None:
        _check_began_from_weights(config, settings.init_from)
    if settings.resume == "auto":
        return newest
    if settings.resume == "none":
        if newest is not None:
            raise OutputError(
                f"checkpoint.resume=none begins a new run, but run.dir={config.run.dir} already holds checkpoints. "
                f"Choose another run.dir, such as {another_run_dir(config)}, or give no checkpoint.resume to go on."
            )
        return None
    if parent is not None and newest is not None:
        return newest  # because: a run that has saved itself no longer needs the run that it began from
    chosen = resolve_checkpoint(parent if parent is not None else Path(settings.resume))
    if settings.fallback:
        chosen = newest_readable(chosen) or chosen
    is_own = chosen.parent.resolve() == own_folder.resolve()
    if newest is not None and is_own and chosen.name != newest.name:
        raise OutputError(
            f"checkpoint.resume={chosen} is not the newest checkpoint of run.dir={config.run.dir}, which is "
            f"{newest.name}. Choose another run.dir to go on from the older one, such as {another_run_dir(config)}."
        )
    began_there = is_own or _recorded_settings(config).get("checkpoint.resume") == settings.resume
    if newest is not None and not began_there:
        raise OutputError(
            f"checkpoint.resume={settings.resume} begins a run, but run.dir={config.run.dir} already holds checkpoints "
            f"of a run that did not begin there. Choose another run.dir, such as {another_run_dir(config)}, or "
            f"{leave_out('checkpoint.resume', shown='leave checkpoint.resume out')} to go on with the run in it."
        )
    return newest or chosen


def _check_began_from_weights(config: RunConfig, init_from: str) -> None:
    """Raise OutputError if the run in run.dir, which has saved checkpoints, did not begin from the weights `init_from`:
    it would go on, and they would not be read.
    """
    metrics, recorded = Path(config.run.dir) / METRICS, [_recorded_settings(config)]
    if not recorded[0].get("checkpoint.init_from") and metrics.is_file():  # because: a later start may leave it out
        starts = (row for row in read_metrics(metrics) if row["event"] == "start")
        recorded.append(dict(flatten(first_start(starts) or {})))
    named = {Path(path).resolve() for settings in recorded if (path := settings.get("checkpoint.init_from"))}
    if Path(init_from).resolve() not in named:
        raise OutputError(
            f"checkpoint.init_from={init_from} begins a run, but run.dir={config.run.dir} already holds checkpoints of "
            f"a run that did not begin there. Choose another run.dir, such as {another_run_dir(config)}, or "
            f"{leave_out('checkpoint.init_from', shown='leave checkpoint.init_from out')} to go on with the run in it."
        )


def with_final_model(config: RunConfig, inputs: Inputs) -> RunConfig:
    """Return the settings with the vocabulary that the data gave the model, as the run folder and checkpoints record
    them.
    """
    return replace(config, model=config.model.with_vocab(inputs.model.shape.vocab_size))


def changed_settings(config: RunConfig, inputs: Inputs) -> dict[str, list[Any]]:
    """Compare the settings with those that the run's folder recorded at its previous start, or for a new run that goes
    on from another run's checkpoint with that run's, and return each key that differs -> [old value, new value]; empty
    for another new run.
    """
    known = _recorded_settings(config)
    if not known and inputs.resume_from is not None:
        resumed = str(inputs.resume_from.resolve())
        return next((dict(parent.differences) for parent in inputs.lineage[-1:] if parent.checkpoint == resumed), {})
    return compare_settings(known, dict(flatten(with_final_model(config, inputs).to_dict()))) if known else {}


def _recorded_settings(config: RunConfig) -> dict[str, Any]:
    """Return key -> value of the settings that the run's folder recorded at its previous start; empty for a new run."""
    folder = Path(config.run.dir)
    if not (folder / CONFIG).is_file():
        return {}
    try:
        return dict(flatten(read_settings(folder)))
    except LmtrainError:  # because: a damaged record is rewritten, and should not stop a run
        return {}


def check_run_folder(
    config: RunConfig, model: ModelSettings, tokenizer: Tokenizer, *, check_lock: bool, import_bytes: int = 0
) -> list[str]:
    """Raise an error if run.dir cannot be written or its disk is too full for the checkpoints that the run needs at
    once. Return a warning, in a list, if the disk is too full for all checkpoints that the settings may keep.
    `check_lock`: also raise if another run uses the folder now. `import_bytes` is the size of the model that is still
    to be imported into the folder.
    """
    folder, settings = Path(config.run.dir), config.checkpoint
    check_output_folder(folder, f"run.dir={config.run.dir}", check_lock=check_lock)
    if not is_run(folder) and not (folder / LOCK).exists():
        # because: a run replaces these, and the folder may be a tokenizer, a model or a checkpoint
        for name in (CONFIG, ENVIRONMENT, LINEAGE, LOG, TOKENIZER):
            check_output(folder / name, _FILE_OF_RUN, overwrite=False)
    if settings.interval_steps is None:
        return []
    num_existing, tokenizer_bytes = len(list_checkpoints(folder / CHECKPOINTS)), len(tokenizer.to_bytes())
    size, records = check_checkpoint_size(config, model) + tokenizer_bytes, tokenizer_bytes + _RECORDS_BYTES
    records, free = records + import_bytes, free_bytes(folder)
    room = max(0, free - records) // size
    # because: a resumed run already has its newest checkpoints, and writes the next before the oldest is deleted
    num_needed, num_wanted = (
        max(1, count - num_existing) for count in settings.num_on_disk(config.total_steps, config.border_steps)
    )
    if room >= num_wanted:
        return []
    need = num_needed if room < num_needed else num_wanted
    subject = "a checkpoint" if need == 1 else f"{need} checkpoints, {format_bytes(size)} each,"
    others = "the run's records" if import_bytes == 0 else "the run's records and the imported model"
    needed_and_free = (
        f"{subject} and {others} need {format_bytes(need * size + records)}, but {format_bytes(free)} are free"
    )
    if room < num_needed:
        hint = _fewer_checkpoints_hint(config, num_existing + room, num_existing)
        # because: a run goes from one stage to the next by a checkpoint
        ways_out = (
            f"{hint}or choose another run.dir" if config.border_steps
            else f"choose another run.dir, {hint}or save none (checkpoint.interval_steps)"
        )  # fmt: skip
        raise StorageError(
            f"The disk of run.dir={config.run.dir} is too full: {needed_and_free}. Free some space, {ways_out}."
        )
    keys = ", ".join(f"checkpoint.{key}={show(getattr(settings, key))}" for key in settings.retention_keys())
    keys += ", and the end of each stage" if config.border_steps else ""
    return [
        f"The disk of run.dir={config.run.dir} may become too full: {needed_and_free}, enough for {room}. The settings "
        f"may keep more checkpoints at once ({keys}); a checkpoint that does not fit on the disk is not saved."
    ]


def _fewer_checkpoints_hint(config: RunConfig, num_fitting: int, num_existing: int) -> str:
    """Return a clause for the message on a full disk that suggests settings which keep fewer checkpoints, or "" if no
    setting helps. `num_fitting` checkpoints fit on the disk in total; `num_existing` of them are already written.
    """
    keep_last = config.checkpoint.keep_last
    if num_fitting > 1 and (keep_last == "all" or num_fitting <= keep_last):
        return f"set {way(f'checkpoint.keep_last={num_fitting - 1}')}, "
    at_end = way("checkpoint.interval_steps=0", "checkpoint.interval_s=null")
    return f"set {at_end} to save only at the end, " if num_fitting == 1 and not num_existing else ""


def check_checkpoint_size(config: RunConfig, model: ModelSettings) -> int:
    """Return the size of a checkpoint in bytes. Raise LayoutError if the checkpoint's manifest would exceed its limits
    at this layout; if the run saves no checkpoints, return 0 instead of raising.
    """
    slots = count_saved_tensors(config.optim.num_slots, keeps_average=config.checkpoint.ema.is_on)
    try:
        return check_manifest_limits(model, config.parallel.layout, slots, checkpoint_bytes(model, slots))
    except CheckpointError as error:
        if config.checkpoint.interval_steps is None:
            return 0
        way_out = "" if config.border_steps else " Or save none (checkpoint.interval_steps)."
        raise LayoutError(f"This layout cannot save checkpoints: {error.marked}{way_out}") from error
