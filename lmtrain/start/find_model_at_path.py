"""Find the model at a path: a checkpoint of any layout, or a Hugging Face folder, converted while it is loaded.

Called by `lmtrain eval`, `lmtrain generate` and the Python interface. Torch-free until weights are opened.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lmtrain.checkpoint.find_and_prune import checkpoint_of_step
from lmtrain.checkpoint.unopened_model_on_disk import ModelSource, Weights, checkpoint_source
from lmtrain.checkpoint.view_with_ema_as_weights import check_weight_set
from lmtrain.errors import CheckpointError, MissingInputError, way
from lmtrain.exchange.detect_model_folder_format import identify_source
from lmtrain.exchange.huggingface.config_json import settings_from_config
from lmtrain.runtime.files.atomic_files import MAX_JSON_BYTES, read_bytes, read_json
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer
from lmtrain.tokenizer.vocabulary_files import END_ID_FILES, end_ids


def find_model(path: Path, weights: str = "model", step: int | None = None) -> ModelSource:
    """Find the model at `path` (a checkpoint, a run folder or a Hugging Face folder) without reading its weights. With
    `step`, `path` is the folder of a run that has a checkpoint of this step; raise an LmtrainError if it is not.
    Return its settings, with functions that load its tokenizer and open its weights, or the average of its weights if
    `weights` is "ema". Raise CheckpointError if there is no average, as in every Hugging Face folder, and UsageError if
    `weights` is neither "model" nor "ema".
    """
    weight_set = check_weight_set(weights)
    path = path if step is None else checkpoint_of_step(path, step)
    if (path / "config.json").is_file():
        config = read_json(path / "config.json")
        if not isinstance(config, dict) or "model" not in config:  # because: a run folder has a config.json too
            if weight_set == "ema":
                raise CheckpointError(
                    f"{path} is a Hugging Face folder, which holds one set of weights and no average of them, and the "
                    "average was asked for (weights ema). Use weights "
                    f"{way('model', instead_of='ema')}, which is the default, or give a "
                    "checkpoint of a run with checkpoint.ema.decay."
                )
            return _huggingface_source(path, config)
    return checkpoint_source(path, weight_set)


def _huggingface_source(path: Path, config: Any) -> ModelSource:
    """Return the settings of the model in the Hugging Face folder `path`, with functions that load its tokenizer and
    open its weights; neither is read yet. `config` is the parsed config.json. Raise an error if lmtrain does not
    compute the model.
    """
    identify_source(path, "hf")  # because: what it holds in place of safetensors is named before torch is imported
    family, settings = settings_from_config(config, path / "config.json", pair_head=False, dropout=None)

    def open_weights() -> Weights:
        # because: weights need torch, and a wrong model is refused before that is imported
        from lmtrain.exchange.huggingface.import_and_export import HFWeights

        return HFWeights(path)

    def tokenizer() -> Tokenizer:
        try:
            files = {name: read_bytes(path / name, MAX_JSON_BYTES) for name in END_ID_FILES if (path / name).is_file()}
            return Tokenizer.load(path).with_end_ids(end_ids(files))
        except MissingInputError as error:
            raise MissingInputError(
                f"The tokenizer of {path} could not be read: {error.marked} Put a tokenizer there, or convert {path} "
                "with `lmtrain import --tokenizer PATH`."
            ) from error

    return ModelSource(
        path=path, settings=settings, open=open_weights, tokenizer=tokenizer,
        facts={"checkpoint": str(path), "format": "huggingface", "model_type": family},
    )  # fmt: skip
