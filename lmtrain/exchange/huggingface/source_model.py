"""The model that a Hugging Face folder describes, read without torch and without opening a weight.

Called by a run that starts from such a folder and by the verbs that load it, before torch is imported.
"""

from __future__ import annotations

from pathlib import Path

from lmtrain.errors import CheckpointError
from lmtrain.exchange.huggingface.config_json import settings_from_config
from lmtrain.exchange.source_format import WEIGHTS, WEIGHTS_INDEX
from lmtrain.models.model_settings import ModelSettings
from lmtrain.runtime.files.safe_files import open_fd, parse_json, read_json, read_range

MAX_HEADER_BYTES = 32 << 20  # of a safetensors file
_PAIR_HEAD = "cls.seq_relationship.weight"


def read_hf_model(folder: Path, dropout: object = None) -> tuple[str, ModelSettings]:
    """Return the family (model_type) and the settings of the model in the Hugging Face folder `folder`; `dropout`, if
    given, overrides that of its config.json. Raise CheckpointError if lmtrain does not compute the model.
    """
    config = read_json(folder / "config.json")
    is_bert = isinstance(config, dict) and "bert" in str(config.get("model_type"))
    pair_head = is_bert and _PAIR_HEAD in tensor_names(folder)
    return settings_from_config(config, folder / "config.json", pair_head=pair_head, dropout=dropout)


def tensor_names(folder: Path) -> set[str]:
    """Return the names of the tensors in a Hugging Face folder, from its index or the header of its only file."""
    if (folder / WEIGHTS_INDEX).is_file():
        places = read_json(folder / WEIGHTS_INDEX)
        weight_map = places.get("weight_map") if isinstance(places, dict) else None
        return set(weight_map) if isinstance(weight_map, dict) else set()
    path = folder / WEIGHTS
    with open_fd(path) as (fd, _):
        num_bytes = check_header_size(path, int.from_bytes(read_range(fd, 0, 8), "little"))
        header = parse_json(read_range(fd, 8, num_bytes), path, MAX_HEADER_BYTES)
    return set(header) if isinstance(header, dict) else set()


def check_header_size(path: Path, num_bytes: int) -> int:
    """Return the size that a safetensors file claims for its header. Raise CheckpointError if it is impossible."""
    if num_bytes > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path} is damaged: it states a header of {num_bytes} bytes; at most {MAX_HEADER_BYTES} are allowed. "
            "Get the file again."
        )
    return num_bytes
