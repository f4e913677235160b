"""Checks of the checkpoint that a run resumes from, without torch.

The checks: is it usable, does it belong to this run, are steps left, and which part of the data does data.split exclude
from training. Called by preflight, before anything of the configured size is built, and again by
run_objects_and_resume.py for the checkpoint that is then read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from lmtrain.checkpoint.disk.checkpoint_format import MANIFEST, Manifest, NewerFormatError, is_count
from lmtrain.checkpoint.find_and_prune import manifest_problem, newer_checkpoints, previous_checkpoint, rename_damaged
from lmtrain.checkpoint.read_verified_contents import Contents, model_of
from lmtrain.checkpoint.view_with_ema_as_weights import is_average_entry
from lmtrain.config.compose_run_settings import compose
from lmtrain.config.settings_base import facts_of, show
from lmtrain.data.cut_datasets_into_samples import ALL_SHARES, SHARES, TOKEN_SHARES
from lmtrain.data.resume_position_by_source import NOTHING_READ, DataHistory
from lmtrain.data.training_data_by_source import TrainingData
from lmtrain.errors import CheckpointError, LmtrainError, SettingsError, join_few, way
from lmtrain.models.model_settings import POSITIONS, ModelSettings
from lmtrain.runfolder.file_names import CHECKPOINTS
from lmtrain.runtime.files.atomic_files import storage_errors
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer
from lmtrain.train.run_config import RunConfig
from lmtrain.train.run_stage_settings import stage_may_set
from lmtrain.train.startup_checks.compare_past_stages import past_pairs

_MAX_CHARACTERS = 200  # characters of a value in a message
_DATASET_FACTS = ("data: num_tokens", "data: num_documents", "data: content")


def open_resume_checkpoint(config: RunConfig, path: Path | None) -> Contents | None:
    """Open the checkpoint at `path`, from which the run resumes; return None if `path` is None. Raise CheckpointError
    if the checkpoint is damaged, and SettingsError if its step lies beyond the run's last step.
    """
    if path is None:
        return None
    try:
        contents = Contents(path)
    except CheckpointError as error:
        if config.checkpoint.fallback or isinstance(error, NewerFormatError) or previous_checkpoint(path) is None:
            raise
        raise CheckpointError(
            f"The run cannot resume from {path}: {error} To resume from the checkpoint before it, add "
            "checkpoint.fallback=true."
        ) from error
    _check_steps_left(config, path, contents.manifest.step)
    return contents


def newest_readable(path: Path | None) -> Path | None:
    """Return the checkpoint at `path` if its manifest is readable, else the newest readable checkpoint before it in the
    same folder; `path` itself if there is none. Used with checkpoint.fallback only.
    """
    return path if path is None or manifest_problem(path) is None else previous_checkpoint(path) or path


def skipped_messages(path: Path) -> list[str]:
    """Return a message for each checkpoint in the same folder that is newer than the one at `path` and has an
    unreadable manifest. A run with checkpoint.fallback resumes from `path` instead of them.
    """
    return [
        f"{checkpoint} is passed over: {problem}"
        for checkpoint in newer_checkpoints(path) if (problem := manifest_problem(checkpoint)) is not None
    ]  # fmt: skip


def set_aside_damaged(path: Path, checkpoint_folder: Path, error: LmtrainError) -> None:
    """Rename the damaged checkpoint at `path`, so that the run resumes from the one before it. Raise `error`, the error
    that reading it gave, instead if it is not in the run's own `checkpoint_folder`, if no checkpoint precedes it, or if
    its files prove intact.

    because: without an earlier checkpoint the run would silently restart from the beginning, and an intact checkpoint
    does not fit the run for another reason
    """
    is_own = path.parent.resolve() == checkpoint_folder.resolve()
    if not is_own or previous_checkpoint(path) is None or not Contents(path).find_damage():
        raise error
    with storage_errors(path, "Renaming"):
        rename_damaged(path)


def split_rule_of(checkpoint: Contents | None) -> str:
    """Return the rule by which the run's first start applied data.split to the data: "tokens", "read" or "all", as
    described at SHARES. It is read from the checkpoint to resume from; None stands for a new run, which uses "tokens".
    """
    if checkpoint is None:
        return TOKEN_SHARES
    data = checkpoint.manifest.state.get("data")
    # because: checkpoints without this entry are from versions that cut all shares
    return str(data.get("shares", ALL_SHARES)) if isinstance(data, dict) else TOKEN_SHARES


def history_of(checkpoint: Contents | None) -> DataHistory | None:
    """Return the record of what the run had read of its datasets when it saved `checkpoint`; None if the checkpoint has
    no such record, as older ones and imported weights. If `checkpoint` is None, for a new run, return the record of a
    run that has read nothing. Raise CheckpointError if the record is damaged.
    """
    if checkpoint is None:
        return NOTHING_READ
    saved = checkpoint.manifest.state.get("history")
    try:
        return None if saved is None else DataHistory.from_dict(saved)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{checkpoint.path / MANIFEST} does not hold what the run had read of its data: {error!r}. Restore it from "
            "a copy."
        ) from error


def tokens_at_checkpoint(checkpoint: Contents | None, data: TrainingData) -> tuple[dict[str, int], int]:
    """Return (dataset key -> tokens that the run had read of it when it saved `checkpoint`, number of samples that it
    had read of the stage with the data `data`). Return ({}, 0) for a new run (None) and for a checkpoint of an older
    version. Raise CheckpointError if the counts are damaged.
    """
    state: Mapping[str, Any] = {} if checkpoint is None else checkpoint.manifest.state
    saved, samples = state.get("sources"), state.get("samples", 0)
    if checkpoint is None or saved is None:
        return {}, 0
    if not isinstance(saved, dict) or not all(type(count) is int for count in (*saved.values(), samples)):
        raise CheckpointError(
            f"{checkpoint.path / MANIFEST} does not hold how many tokens of each source the run had read. Restore it "
            "from a copy."
        )
    return saved, max(samples - data.first_position, 0)


def average_notes(config: RunConfig, path: Path, state: Mapping[str, Any]) -> list[str]:
    """Return a list of one message if the resumed run begins an average of its weights that the checkpoint at `path`
    does not have, or drops the one that it has; else []. `state` is the checkpoint's saved state.
    """
    settings, saved, step = config.checkpoint.ema, state.get("ema"), state["step"]
    if saved and not settings.covers(step):
        why = f"from_step={settings.from_step} begins a new one later" if settings.is_on else "decay=null keeps none"
        which = f"decay {saved['decay']:g}, since step {saved['since_step']}"
        return [f"the average of the weights in {path} ({which}) is left out, since checkpoint.ema.{why}"]
    if settings.covers(step) and not saved:
        return [
            f"{path} has no average of the weights; that of checkpoint.ema.decay={settings.decay:g} begins after step "
            f"{step} as a copy of them"
        ]
    return []


def check_same_run(
    path: Path, manifest: Manifest, config: RunConfig, model: ModelSettings, tokenizer: Tokenizer, data: TrainingData
) -> None:
    """Raise CheckpointError if the checkpoint's model, samples, tokenizer, seed, optimizer or batch sizes differ from
    the run's, or if its manifest lacks the state of a run. `path` is the checkpoint's folder.
    """
    state = manifest.state
    if "merged" in state and "data" in state and "optimizer" not in state:
        raise CheckpointError(
            f"The checkpoint {path} was merged without the optimizer's moments (--moments none), so no run can resume "
            f"from it. Begin a run from its weights, with a warm-up: {_from_weights(path)} in place of "
            "checkpoint.resume; or merge again with --moments newest."
        )
    if "data" not in state or "optimizer" not in state:
        raise CheckpointError(
            f"The checkpoint {path} holds weights imported from another program, and no run to resume. "
            f"Begin a run from these weights: {_from_weights(path)}."
        )
    if type_problems := list(_type_problems(manifest)):
        raise CheckpointError(
            f"{path / MANIFEST} does not hold the state of a run: {join_few(type_problems, '; ')}. "
            "Restore it from a copy."
        )
    # because: a checkpoint may be older than some settings, which then had today's default
    saved_model = model_of(state, path)
    saved_settings, unused_keys = saved_model.to_dict(), {problem.key for problem in saved_model.unused()}
    # because: a checkpoint at a border is of the stage behind, and the stage ahead may have other data and lengths
    is_border = state["step"] == config.first_step > 0
    if is_border:
        unused_keys |= {"num_positions", *(key for key in model.to_dict() if stage_may_set(f"model.{key}"))}
    unused_keys |= {key for key in model.to_dict() if "path" in facts_of(ModelSettings, key)}
    pairs = [
        *((f"model.{key}", v, saved_settings.get(key)) for key, v in model.to_dict().items() if key not in unused_keys),
        *([] if is_border else _data_pairs(state["data"], state.get("history"), config, data)),
        *past_pairs(config, state),
        ("tokenizer", tokenizer.fingerprint[:12], state["tokenizer"]["fingerprint"][:12]),
        ("train.seed", config.train.seed, state["seed"]),
        ("optim.kind", config.optim.kind, state["optimizer"]["kind"]),
        _batch_pair(config, state["step"], state["samples"]),
    ]
    differ = [
        (name, f"{name} is {current}, and was {str(saved_value)[:_MAX_CHARACTERS]}")
        for name, current, saved_value in pairs if current != saved_value
    ]  # fmt: skip
    if differ:
        raise CheckpointError(
            f"The checkpoint {path} was made with other settings: {'; '.join(text for _, text in differ)}. "
            f"Go on with its settings, {_advice_to_keep_changes(path, config, [name for name, _ in differ], state)}."
        )
    rows, saved_rows = (each.weights().get(POSITIONS, (None,))[0] for each in (model, saved_model))
    if rows != saved_rows:
        raise CheckpointError(
            f"The checkpoint {path} has {saved_rows} learned positions, and the run has {rows}. Such a table cannot "
            f"grow in a run. Leave model.num_positions out and use sequences of model.seq_len={saved_rows} or less; a "
            "new run with model.positions=rotary has no table."
        )


def _data_pairs(
    saved_data: dict[str, Any], saved_history: Any, config: RunConfig, data: TrainingData
) -> list[tuple[str, Any, Any]]:
    """Return (name, the run's value, the checkpoint's value) for each setting and dataset property that decides which
    samples are read in which order. `saved_data` and `saved_history` are entries of the checkpoint's state.

    If the dataset itself differs, return a single entry that says so.
    """
    saved = {"packing": "concatenate", "order": "own", "first_sample": 0, "blend": None, "held_out_tokens": 0}
    saved |= saved_data
    pairs = [(f"data: {key}", value, saved.get(key)) for key, value in data.sample_identity.items()]
    saved_content = saved_data.get("content_sha256")
    if data.content_sha256 is not None and saved_content is not None:
        pairs.append(("data: content", data.content_sha256[:12], saved_content[:12]))
    num_tokens, saved_num_tokens = data.sample_identity.get("num_tokens"), saved.get("num_tokens")
    if num_tokens is not None and any(
        current != saved_value for name, current, saved_value in pairs if name in _DATASET_FACTS
    ):
        key = f"data.path={getattr(config.data, 'path', None)}"
        return [(key, f"a dataset of {num_tokens:,} tokens", f"another one, of {saved_num_tokens or 0:,}")]
    history = NOTHING_READ if saved_history is None else DataHistory.from_dict(saved_history)
    is_in_stages = bool(config.stage_name or history.origin)  # because: other runs have one mixture, that of the pairs
    if saved_history is not None and is_in_stages and all(current == saved_value for _, current, saved_value in pairs):
        # because: a stage that trains on what was held out, or data that got or lost its sidecar, is another stream
        pairs.append(("data: streams", _describe_mixture(data.history), _describe_mixture(history)))
    return pairs


def _describe_mixture(history: DataHistory) -> str:
    """Return which streams a run reads, and from which of its samples on."""
    return f"{join_few(history.streams)} from sample {history.origin} of the run" if history.streams else "none yet"


def _batch_pair(config: RunConfig, saved_step: int, saved_samples: int) -> tuple[str, Any, Any]:
    """Return (name, the run's value, the checkpoint's value) to compare batch sizes: train.global_batch if the run has
    no ramp-up and the checkpoint's batches were equal, else the samples read up to `saved_step`. `saved_samples` counts
    the samples that the checkpoint's run has read.
    """
    is_whole = config.train.rampup is None and not config.stage_name
    if is_whole and saved_step and saved_samples % saved_step == 0:
        return "train.global_batch", config.train.global_batch, saved_samples // saved_step
    reached = config.batch_plan.range_of(saved_step)[0]
    return f"train.global_batch with train.rampup, as samples up to step {saved_step},", reached, saved_samples


def _advice_to_keep_changes(
    path: Path, config: RunConfig, changed_names: Sequence[str], state: Mapping[str, Any]
) -> str:
    """Return the end of an error message: how to train with the settings in `changed_names`, which differ from the
    checkpoint at `path` with the saved `state`. The advice is a branch if only the data differ, and a new run, from the
    checkpoint's weights if the model and tokenizer are the same.
    """
    is_own = path.resolve().is_relative_to(Path(config.run.dir).resolve())
    if is_own and _are_defaults(config, changed_names):
        # because: who has not typed these settings again means those of the run
        return f"which {way('--from-run', config.run.dir)} takes from it, or begin a new run: " + another_run_dir(
            config, "checkpoint.resume=none"
        )
    # because: with another tokenizer or model the weights do not fit
    if any(name == "tokenizer" or name.startswith("model.") for name in changed_names):
        return (
            f"or begin a new run: {another_run_dir(config, 'checkpoint.resume=none')}{_again(config)}" if is_own
            else f"or leave checkpoint.resume out to begin {config.run.dir} anew"
        )  # fmt: skip
    if is_own:
        is_branch = all(name.startswith("data") for name in changed_names) and not config.stages
        branch = _branch_with_data(config, state["step"]) if is_branch else ""
        anew = another_run_dir(config, "checkpoint.resume=none")
        weights = _from_weights(path, config)
        return f"{branch}begin a new run: {anew}{_again(config)}, or one from its weights alone: {weights}"
    return (
        f"begin a new run, without checkpoint.resume, or one from its weights alone: {_from_weights(path)}, "
        "without checkpoint.resume"
    )


def _are_defaults(config: RunConfig, names: Sequence[str]) -> bool:
    """Return whether a run has the values of conf/ for all of these settings, so that they were probably not typed."""
    with suppress(LmtrainError):
        defaults = compose(RunConfig, [f"data.path={getattr(config.data, 'path', 'unknown')}"]).to_dict()
        current = config.to_dict()
        return all(_value_at(current, name) == _value_at(defaults, name) is not None for name in names)
    return False


def _value_at(settings: Mapping[str, Any], name: str) -> Any:
    """Return the value of a dotted key in nested dicts; None if there is none."""
    node: Any = settings
    for part in name.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


def _branch_with_data(config: RunConfig, step: int) -> str:
    """Return a clause on how to go on, from the run's newest checkpoint, of `step`, with the data that are typed."""
    longer = [] if config.total_steps > step else [f"train.steps={step + 1000}"]
    words = another_run_dir(config, "--from-run", config.run.dir, *longer, instead_of="train.tokens" if longer else "")
    return f"go on from step {step} with these data in a branch: {words}, "


def _again(config: RunConfig) -> str:
    """Return the end of a clause: how to begin this run again in another folder."""
    words = another_run_dir(config, "--from-run", config.run.dir, "--from-beginning")
    return f", or {words} for all other settings of its first start"


def another_run_dir(config: RunConfig, *others: str, instead_of: str = "") -> str:
    """Return as a way out a folder for a new run beside that of `config`, which does not exist yet, and the words
    `others`. `instead_of` is a setting that they replace.
    """
    own = config.run.dir.rstrip("/")
    if Path(own).name in ("", ".."):
        own = str(Path(own).resolve())
    folders = (f"{own}-{number}" for number in count(2))
    folder = next(folder for folder in folders if not Path(folder).exists())
    return way(f"run.dir={folder}", *others, instead_of=instead_of or ())


def _from_weights(path: Path, config: RunConfig | None = None) -> str:
    """Return as a way out to begin a run from the weights of the checkpoint at `path`, in a folder beside that of
    `config`, if it is given, and not in the one that was typed.
    """
    word = f"checkpoint.init_from={path}"
    if config is None:
        return way(word, instead_of="checkpoint.resume")
    return another_run_dir(config, word, instead_of="checkpoint.resume")


def _type_problems(manifest: Manifest) -> Iterator[str]:
    """Yield a message for each entry of the checkpoint's saved state that has the wrong type or an impossible value."""
    kinds: dict[str, tuple[Callable[[Any], bool], str]] = {
        **dict.fromkeys(("samples", "tokens", "attempt", "skipped"), (is_count, "a number from 0")),
        "step": (lambda value: is_count(value) and value == manifest.step, f"the step {manifest.step}"),
        "seed": (lambda value: isinstance(value, int) and not isinstance(value, bool), "a whole number"),
        "data": (lambda value: isinstance(value, dict), "an object"),
        "data.content_sha256": (lambda value: value is None or isinstance(value, str), "a text"),
        "data.shares": (lambda value: value is None or value in SHARES, " or ".join(SHARES)),
        "tokenizer.fingerprint": (lambda value: isinstance(value, str), "a text"),
        "optimizer.kind": (lambda value: isinstance(value, str), "a text"),
        "optimizer.num_updates": (
            lambda value: is_count(value) and value <= manifest.step, f"a number from 0 to the step {manifest.step}",
        ),
        "owed": (
            lambda value: value is None or (isinstance(value, list) and all(isinstance(entry, str) for entry in value)),
            "a list of texts",
        ),
        "ema": (
            lambda value: value is None or (is_average_entry(value) and value["since_step"] <= manifest.step),
            f"an average's decay, interval and steps up to {manifest.step}",
        ),
        "precision": (lambda value: isinstance(value, dict), "an object"),
        "precision.loss_scale": (lambda value: value is None or _is_scale(value), "a number above 0"),
        "precision.good_steps": (lambda value: value is None or is_count(value), "a number from 0"),
    }  # fmt: skip
    for key, (is_right, rule) in kinds.items():
        value: Any = manifest.state
        for word in key.split("."):
            value = value.get(word) if isinstance(value, dict) else None
        if not is_right(value):
            yield f"state.{key}={show(value)[:_MAX_CHARACTERS]} is not {rule}"


def _is_scale(value: Any) -> bool:
    """Return whether a value can be a loss scale: a finite number above 0."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def check_branch_has_steps(config: RunConfig, path: Path, saved_step: int) -> None:
    """Raise SettingsError if another run has saved the checkpoint at `path`, at step `saved_step`, and this run would
    end at that step too, with nothing done and nothing saved.
    """
    is_own = path.parent.resolve() == (Path(config.run.dir) / CHECKPOINTS).resolve()
    if is_own or saved_step < config.total_steps:
        return
    longer = way(f"train.steps={saved_step + 1000}", instead_of="train.tokens")
    way_out = f"Give the length of the whole run, as in {longer}"
    if config.stages:
        way_out = f"Make the stage {[*config.stages][-1]} longer"
    raise SettingsError([
        f"The checkpoint {path} is that of step {saved_step}, at which this run ends too, so that no step is left for "
        f"it. {way_out}; a new run with the weights alone begins with checkpoint.init_from."
    ])


def _check_steps_left(config: RunConfig, path: Path, saved_step: int) -> None:
    """Raise SettingsError if `saved_step`, the step of the checkpoint at `path`, is beyond the run's last step."""
    total = config.total_steps
    if saved_step <= total:
        return
    if config.stages:
        raise SettingsError([
            f"The stages {join_few(config.stages)} end after step {total}, before step {saved_step}, which the "
            f"checkpoint {path} has reached. Make the stage {[*config.stages][-1]} longer, or choose another run.dir "
            "for a new run."
        ])
    setting, words = f"train.steps={total}", [f"train.steps={saved_step + 1}"]
    if config.train.steps is None:
        setting = f"train.tokens={show(config.train.tokens)}, {total} steps,"
        words.insert(0, "train.tokens=null")
    raise SettingsError([
        f"{setting} ends before step {saved_step}, which the checkpoint {path} has reached. "
        f"Use {way(*words)} or more to go on, or another run.dir for a new run, such as {another_run_dir(config)}."
    ])
