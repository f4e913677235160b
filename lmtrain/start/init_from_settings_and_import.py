"""checkpoint.init_from: the model that a new run takes from it unless the user chooses one, and the import of another
program's folder that it names.

Used by everything that composes a run's settings or starts a run. Torch is imported for the import alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmtrain.checkpoint.find_and_prune import is_best, latest_checkpoint, load_manifest, resolve_checkpoint
from lmtrain.checkpoint.read_verified_contents import Contents, checked_model
from lmtrain.config.compose_run_settings import Composed, Rewrite, Sources, compose, conf_dir
from lmtrain.config.strict_yaml import read_yaml
from lmtrain.config.typed_words import typed_value, typed_words
from lmtrain.errors import LmtrainError, MissingInputError
from lmtrain.exchange.detect_model_folder_format import Program, identify_source, lmtrain_kind
from lmtrain.models.model_settings import ModelSettings
from lmtrain.runfolder.file_names import CONFIG, IMPORTED
from lmtrain.runfolder.folder_reader import read_settings
from lmtrain.runtime.files.atomic_files import check_output_folder
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer
from lmtrain.train.run_config import RunConfig
from lmtrain.train.startup_checks.check_weights_to_start_from import ForeignWeights

if TYPE_CHECKING:
    from lmtrain.observe.screen.command_progress import ShowProgress
    from lmtrain.train.startup_checks.preflight import Inputs

_ROOT = "pretrain"  # the root config whose default model gives way


def compose_settings(
    overrides: Sequence[str], *, config_dir: Path | None = None, name: str = _ROOT,
    report: Callable[[str], None] | None = None, rewrite: Rewrite | None = None,
    on_composed: Callable[[Composed], None] | None = None,
) -> RunConfig:  # fmt: skip
    """Compose a run's settings from conf/NAME.yaml and the overrides, as `compose` does. If checkpoint.init_from is
    among the overrides and the user chooses no model (by `model=NAME`, by an experiment or by a root config of their
    own), the model is the one that it names instead of the default. `report`, `rewrite` and
    `on_composed` are those of `compose`.
    """
    sources = sources_of_run(overrides, config_dir, name)
    return compose(RunConfig, overrides, sources, report=report, rewrite=rewrite, on_composed=on_composed)


def sources_of_run(overrides: Sequence[str], config_dir: Path | None, name: str) -> Sources:
    """Return what a run's settings are composed from besides the overrides: conf/NAME.yaml (NAME is `name`), and the
    model that an override checkpoint.init_from=PATH names in place of its default model, unless the user chooses one.
    """
    path, sources = typed_value(overrides, "checkpoint.init_from"), Sources(config_dir, name)
    own_root = name != _ROOT or (config_dir is not None and (config_dir / f"{_ROOT}.yaml").is_file())
    if not path or isinstance(path, (bool, list, dict)):  # because: a value of another type is refused later
        return sources
    if own_root or {"model", "experiment"} & typed_words(overrides).keys():
        return sources
    default_run = read_yaml(conf_dir() / f"{_ROOT}.yaml").data["run"]["dir"]
    run = Path(str(typed_value(overrides, "run.dir") or default_run))
    model = _model_settings(Path(str(path)), run, typed_value(overrides, "model.dropout"))
    said = f"the model of checkpoint.init_from={typed_words(overrides)['checkpoint.init_from']}"
    return replace(sources, groups={"model": model}, origin_of_groups=said)


def _model_settings(path: Path, run: Path, dropout: object) -> dict[str, Any]:
    """Return, as a dict, the settings of the model at `path`: a checkpoint, a run's folder or another program's model
    folder. For the latter, take those of its import in the run's folder `run` if there is one; if `path` is gone, those
    recorded in `run`. `dropout`, if not None, replaces the dropout rates in another program's folder.
    """
    if is_best(path) or lmtrain_kind(path):
        model = checked_model(Contents(resolve_checkpoint(path)))
        # because: an older run may have recorded a setting without an effect, with which a run is now refused
        without_effect = {problem.key for problem in model.unused()}
        return {key: value for key, value in model.to_dict().items() if key not in without_effect}
    if (imported := latest_checkpoint(run / IMPORTED)) is not None:
        return checked_model(Contents(imported)).to_dict()
    if not path.exists() and (run / CONFIG).is_file() and isinstance(recorded := read_settings(run).get("model"), dict):
        return recorded
    if not path.exists():
        resolve_checkpoint(path)  # which raises: there is no such path
    with _named_setting():
        return _read_model(path, identify_source(path).program, dropout).to_dict()


def read_foreign_weights(config: RunConfig) -> ForeignWeights | None:
    """Return the model settings and tokenizer of another program's folder (Hugging Face, Megatron-LM) that
    checkpoint.init_from names; None if it names no such folder. If an earlier start has imported it already, return
    those of the import. Raise OutputError if the folder has changed since then.
    """
    path, imported = Path(config.checkpoint.init_from or ""), latest_checkpoint(Path(config.run.dir) / IMPORTED)
    if config.checkpoint.init_from is None or is_best(path) or lmtrain_kind(path):
        return None
    if imported is not None:
        from lmtrain.exchange.check_imported_files_unchanged import check_unchanged

        check_unchanged(path, load_manifest(imported).state.get("imported", {}), imported)
        return ForeignWeights(imported, checked_model(Contents(imported)), Tokenizer.load(imported), is_imported=True)
    if not path.is_dir():
        return None  # because: whoever looks for the checkpoint raises
    with _named_setting():
        model = _read_model(path, identify_source(path).program, config.model.to_dict().get("dropout"))
    return ForeignWeights(path, model, _tokenizer_of(path))


def _read_model(path: Path, program: Program, dropout: object) -> ModelSettings:
    """Return the settings of the model in a folder written by `program`; `dropout`, unless it is None, replaces the
    dropout rates in the folder.
    """
    if program == "hf":
        from lmtrain.exchange.huggingface.config_json import read_hf_model

        return read_hf_model(path, dropout)[1]
    from lmtrain.exchange.megatron.model_settings_of_checkpoint import read_megatron_model

    return read_megatron_model(path, None, {} if dropout is None else {"dropout": dropout}).settings


def _tokenizer_of(folder: Path) -> Tokenizer | None:
    """Return the tokenizer in a model's folder; None if it holds none."""
    try:
        return Tokenizer.load(folder)
    except MissingInputError:
        return None


def import_first_weights(config: RunConfig, inputs: Inputs, show_progress: ShowProgress) -> Inputs:
    """Convert the other program's model folder that a new run starts from into a checkpoint in the run's folder. Return
    `inputs` with that checkpoint's path in `weights_from`; unchanged if the run starts from no such folder. All
    processes of a run may call this: one converts and the others wait. `show_progress` shows how far it is.
    """
    path, output = inputs.weights_from, Path(config.run.dir) / IMPORTED
    if path is None or lmtrain_kind(path):
        return inputs
    check_output_folder(Path(config.run.dir), f"run.dir={config.run.dir}", check_lock=True)
    stopped = f"{output} holds no checkpoint; the same command begins anew."
    with show_progress("imported", "bytes", stopped) as report, _named_setting():
        from lmtrain.exchange.import_foreign_model import import_once

        dropout = {"dropout": config.model.to_dict()["dropout"]}
        tokenizer = Path(inputs.tokenizer.source) if _tokenizer_of(path) is None else None
        checkpoint = import_once(path, output, tokenizer, dropout, report)
    return replace(inputs, weights_from=checkpoint)


@contextmanager
def _named_setting() -> Iterator[None]:
    """Context manager: add to each LmtrainError from its body a note that the folder is the one named by
    checkpoint.init_from.
    """
    try:
        yield
    except LmtrainError as error:
        error.add_note("It is the folder that checkpoint.init_from names.")
        raise
