"""Where a run starts from: another run's checkpoint, or another program's weights. Torch-free.

Called by preflight, which checks here whether the weights that checkpoint.init_from names fit the run's model and
tokenizer. A checkpoint is judged by its manifest. Another program's folder is judged by its settings, which the caller
reads, since no module of this room knows other programs' formats; it is imported after all checks. The lineage, the
checkpoints of other runs from which a run descends, is recorded in its folder at its first start, and in each of its
checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmtrain.checkpoint.disk.checkpoint_format import MANIFEST
from lmtrain.checkpoint.find_and_prune import BEST_SUFFIX, load_manifest, resolve_checkpoint
from lmtrain.checkpoint.read_verified_contents import Contents, checked_model
from lmtrain.config.parse_and_apply_overrides import override_text
from lmtrain.config.settings_base import facts_of, show
from lmtrain.errors import CheckpointError, MissingInputError, SettingsError, leave_out, way
from lmtrain.models.model_settings import ModelSettings, differing_keys, with_explicit_sizes
from lmtrain.runfolder.file_names import CHECKPOINTS, TOKENIZER
from lmtrain.runfolder.lineage import RESUMED, WEIGHTS, Parent, file_sha256, parse_lineage, read_lineage
from lmtrain.runfolder.settings_differences import compare_settings
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer
from lmtrain.train.run_config import RunConfig


@dataclass(frozen=True)
class ForeignWeights:
    """Another program's folder that a new run starts from: its path, the settings of its model, and its tokenizer, or
    None if it has none. If an earlier start has imported it, `path` is the checkpoint that it made.
    """

    path: Path
    model: ModelSettings
    tokenizer: Tokenizer | None
    is_imported: bool = False

    @property
    def num_bytes_to_write(self) -> int:
        """The size of the checkpoint that its import will write into the run's folder, in fp32."""
        return 0 if self.is_imported else 4 * self.model.num_parameters


ReadForeign = Callable[[RunConfig], ForeignWeights | None]  # None if checkpoint.init_from names no such folder


def no_foreign_weights(config: RunConfig) -> None:
    """Return None: for callers that accept checkpoints alone."""


def find_first_weights(
    config: RunConfig, model: ModelSettings, tokenizer: Tokenizer, foreign: ForeignWeights | None
) -> Path | None:
    """Return the path of the checkpoint, or of another program's folder (`foreign`), that checkpoint.init_from names;
    None if it is not set. Raise SettingsError if its tokenizer or model differs from the run's.
    """
    if config.checkpoint.init_from is None:
        return None
    weights = config.checkpoint.init_weights
    if foreign is not None:
        if weights == "ema":
            raise SettingsError([
                f"checkpoint.init_weights=ema reads the average that a checkpoint holds, and "
                f"checkpoint.init_from={foreign.path} is another program's folder, which holds none. "
                f"{leave_out('checkpoint.init_weights', shown='Leave checkpoint.init_weights out')}."
            ])  # fmt: skip
        if foreign.tokenizer is not None and foreign.tokenizer.fingerprint != tokenizer.fingerprint:
            raise _tokenizer_error(foreign.path, foreign.tokenizer.fingerprint, tokenizer, foreign.path)
        _check_model(foreign.path, model, foreign.model)
        return foreign.path
    path = resolve_checkpoint(Path(config.checkpoint.init_from))
    contents = Contents(path, weights=weights)
    saved_model = checked_model(contents)
    saved_tokenizer = contents.manifest.state.get("tokenizer")
    fingerprint = saved_tokenizer.get("fingerprint") if isinstance(saved_tokenizer, dict) else None
    if fingerprint != tokenizer.fingerprint:
        raise _tokenizer_error(path, str(fingerprint), tokenizer, path / "tokenizer.json")
    _check_model(path, model, saved_model)
    return path


def tokenizer_of_first_weights(config: RunConfig, foreign: ForeignWeights | None) -> Tokenizer | None:
    """Return the tokenizer of the model that checkpoint.init_from names, for data that comes without one; None if it
    names no model, or the model has no tokenizer. `foreign` describes that model if it is another program's folder.
    Once the run has begun, the copy of the tokenizer in the run's folder is used.
    """
    if config.checkpoint.init_from is None:
        return None
    own = Path(config.run.dir) / TOKENIZER  # because: once a run has begun, what it began from may be gone
    if own.is_file():
        return Tokenizer.load(own)
    if foreign is not None:
        return foreign.tokenizer
    try:
        path = resolve_checkpoint(Path(config.checkpoint.init_from)) / TOKENIZER
    except MissingInputError:  # because: it is another program's folder, which the caller has not read
        return None
    return Tokenizer.load(path) if path.is_file() else None


def _tokenizer_error(path: Path, fingerprint: str, tokenizer: Tokenizer, place: Path) -> SettingsError:
    """Return the error for checkpoint.init_from=`path` if this model was trained with another tokenizer than
    `tokenizer`, that of the data. `fingerprint` is that of the model's tokenizer, and `place` is its path, to which the
    message points.
    """
    return SettingsError([
        f"checkpoint.init_from={path} was trained with a tokenizer of fingerprint {fingerprint[:12]}, but the data was "
        f"written with one of fingerprint {tokenizer.fingerprint[:12]}. Preprocess the text with --tokenizer {place}."
    ])  # fmt: skip


def _check_model(path: Path, model: ModelSettings, saved_model: ModelSettings) -> None:
    """Raise SettingsError if `model`, of the run, and `saved_model`, of the checkpoint at `path`, differ in a setting
    that changes the model's outputs; settings such as dropout may differ.
    """
    values, saved_values, typed = with_explicit_sizes(model), with_explicit_sizes(saved_model), saved_model.to_dict()
    if differing := differing_keys(model, saved_model):
        differences = ", ".join(
            f"model.{key} is {show(values.get(key))} here and {show(saved_values[key])} there" for key in differing
        )
        wanted = {key: typed[key] for key in differing} | _length_and_rows(model, saved_values, differing)
        settings = [
            f"model.{key}={override_text(value)}" for key, value in wanted.items() if value != model.to_dict().get(key)
        ]
        way_out = "Choose a model of the same kind." if "kind" in differing else f"Add {way(*settings)}."
        others = "weights" if model.weights() != saved_model.weights() else "settings"
        raise SettingsError([f"checkpoint.init_from={path} has a model with other {others}: {differences}. {way_out}"])


def _length_and_rows(model: ModelSettings, saved_values: dict[str, Any], differing: Sequence[str]) -> dict[str, Any]:
    """Return the seq_len and num_positions that give the run's `model` as many learned positions as the checkpoint has
    by its settings `saved_values`; {} if num_positions is not among the keys `differing`. The run's seq_len stays
    unless it is larger than that number.
    """
    if "num_positions" not in differing:
        return {}
    rows, values = saved_values["num_positions"], model.to_dict()
    length = min(values.get("seq_len", rows), rows)
    is_default = values.get("num_positions") is None and length == rows
    return {"seq_len": length, "num_positions": None if is_default else rows}


def find_lineage(config: RunConfig, resume_from: Path | None, weights_from: Path | None) -> tuple[Parent, ...]:
    """Return the checkpoints of other runs from which this run descends, oldest first. `resume_from` is the checkpoint
    that it resumes from, `weights_from` the one whose weights it begins with.
    """
    folder = Path(config.run.dir)
    path = resume_from or weights_from
    if path is None or not (path / MANIFEST).is_file():
        return tuple(read_lineage(folder))
    state = load_manifest(path).state
    earlier = parse_lineage(state.get("lineage"), path / MANIFEST)
    is_imported = "data" not in state and "merged" not in state  # from another program
    if path.resolve().is_relative_to(folder.resolve()) or is_imported:
        return tuple(earlier)
    return (*earlier, _parent(WEIGHTS if resume_from is None else RESUMED, path, state, config))


def _parent(kind: str, path: Path, state: Mapping[str, Any], config: RunConfig) -> Parent:
    """Return the lineage entry of the checkpoint at `path`, from which this run descends: its step, the digest of its
    manifest, and the settings that differ between it and `config`. `state` is what the checkpoint saved besides
    tensors; `kind` says whether the run resumed from it or only took its weights.
    """
    before, after = (dict(_leaves(settings)) for settings in (state.get("settings", {}), config.to_dict()))
    # because: stages of a branch are there in place of the run's length, and are settings of the branch alone
    differences: dict[str, list[Any]] = compare_settings(before, after)
    added = {key: [None, value] for key, value in after.items() if key.startswith("stages.") and key not in before}
    return Parent.of_checkpoint(
        kind, path, int(state["step"]), file_sha256(path / MANIFEST),
        {key: values for key, values in (differences | added).items()
         if key != "model.vocab_size" and facts_of(RunConfig, key).get("path") != "checkpoint"},
    )  # fmt: skip


def _leaves(settings: Mapping[str, Any], key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for each setting; lists, such as data.datasets, stay whole."""
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{key}{name}.")
        else:
            yield f"{key}{name}", value


def recorded_parent(config: RunConfig) -> Path | None:
    """Return the path of the other run's checkpoint from which this run has begun, as recorded in this run's folder;
    None if it began from none, or if the settings no longer name that run. Raise CheckpointError if that checkpoint was
    replaced by another since.
    """
    parents = read_lineage(Path(config.run.dir))
    named = config.checkpoint.init_from or config.checkpoint.resume
    if not parents or named in ("auto", "none"):
        return None
    parent, folder = parents[-1], Path(config.run.dir)
    path = Path(parent.checkpoint)
    if not Path(named.removesuffix(BEST_SUFFIX)).resolve().is_relative_to(parent.folder):
        return None
    digest = file_sha256(path / MANIFEST) if (path / MANIFEST).is_file() else None
    if digest is not None and digest != parent.manifest_sha256:
        raise CheckpointError(
            f"The run in {folder} began from the checkpoint {path}, and another checkpoint is there now: its manifest "
            f"has the SHA-256 {digest[:12]}..., and {parent.manifest_sha256[:12]}... is recorded. "
            f"Restore the checkpoint, or choose another run.dir to begin anew{_way_on(folder)}."
        )
    return path


def _way_on(folder: Path) -> str:
    """Return the clause of a message that says how a run in `folder` goes on without its parent; "" if it cannot."""
    has_own = any((folder / CHECKPOINTS).glob(f"step_*/{MANIFEST}"))
    return "; checkpoint.resume=auto goes on from the run's own checkpoints" if has_own else ""
