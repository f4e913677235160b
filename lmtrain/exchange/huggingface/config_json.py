"""Convert between our model settings and Hugging Face's config.json, and read the model that a folder describes without
opening a weight. Torch-free.

Called by export and import, and by a run that starts from such a folder. Nothing is nearly equal: a model that no
Hugging Face architecture computes, or a config.json that asks for what our models lack, is refused with every setting
that stands in the way.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmtrain.config.settings_base import show
from lmtrain.errors import CheckpointError, join_few, shorten
from lmtrain.exchange.detect_model_folder_format import WEIGHTS, WEIGHTS_INDEX, has_shards, read_weight_map
from lmtrain.exchange.huggingface.ignored_and_refused_config_keys import (
    ignored_reason,
    is_known_key,
    uncomputed_keys,
    uncomputed_problem,
)
from lmtrain.exchange.huggingface.model_family_base import Config, Family, families, require_values
from lmtrain.exchange.settings_rules_for_all_formats import build_imported_settings
from lmtrain.models.bert_settings import BertSettings
from lmtrain.models.model_settings import ModelSettings
from lmtrain.runtime.files.atomic_files import open_fd, parse_json, read_json, read_range

# because: messages show a value; those of the second kind are lists, which no message shows
_LONGEST_VALUE, _LONGEST_LIST = 1000, 100_000  # characters
_LISTS = ("rope_parameters", "rope_scaling", "layer_types", "no_rope_layers")
# because: transformers 4.57 reports a wrong tokenizer for a vocabulary above 100,000 beside a config.json without a
# version, or with one before 5; our files hold what both 4 and 5 read
_FORMAT_VERSION = "5.0.0"
MAX_HEADER_BYTES = 32 << 20  # of a safetensors file
_PAIR_HEAD = "cls.seq_relationship.weight"


def hf_family(settings: ModelSettings, original: object = None) -> str:
    """Return the Hugging Face model_type, such as "llama", of an architecture that computes the same model as
    `settings`: `original`, the model_type of an imported model, if that fits, or else the fitting one of the lowest
    rank. Raise CheckpointError with the settings that stand in the way if none fits.
    """
    found = {
        name: [text for holds, text in family.rules(settings) if not holds]
        for name, family in families().items()
        if isinstance(settings, family.settings_class)
    }
    assert found, "a model of a new kind needs its families here"
    if isinstance(original, str) and found.get(original) == []:
        return original
    nearest = min(found, key=lambda name: len(found[name]))  # because: the first of equals has the lowest rank
    if problems := found[nearest]:
        raise CheckpointError(
            f"No Hugging Face architecture computes this model. The nearest is {nearest}, for which "
            f"{'; '.join(problems)}. Use the checkpoint with `lmtrain eval` and `lmtrain generate`."
        )
    return nearest


def hf_config(
    settings: ModelSettings, special: Mapping[str, int], dtype: str, original: object = None
) -> Config:
    """Return the entries of a new config.json for a model with these settings. `special` maps the roles of its
    tokenizer's special tokens, such as "eod" and "bos", to their ids; `dtype` is torch's name for the type of the
    weights, such as "bfloat16"; `original` is the model_type of an imported model, kept if it still fits. Raise
    CheckpointError if no Hugging Face architecture computes the model.
    """
    family = families()[hf_family(settings, original)]
    config = family.config(settings)
    if settings.shape.causal:
        config |= begin_and_end_ids(special)
    config |= {"pad_token_id": special.get("pad")}
    # because: transformers 4 reads the first of the two names of the type, and 5 the second
    types = {"torch_dtype": dtype, "dtype": dtype, "transformers_version": _FORMAT_VERSION}
    return {"architectures": [family.architecture_of(settings)], "model_type": family.model_type} | config | types


def begin_and_end_ids(special: Mapping[str, int]) -> dict[str, int | None]:
    """Return the bos_token_id and eos_token_id of a decoder, from the ids of its tokenizer's special tokens by role. An
    end-of-document token also begins a document if no other token does.
    """
    end = special.get("eod")
    return {"bos_token_id": special.get("bos", end), "eos_token_id": end}


def restored_config(settings: ModelSettings, original: Config, special: Mapping[str, int], dtype: str) -> Config:
    """Return the entries of config.json for the export of a model that was once imported with the config.json
    `original`. Its entries are kept, except where settings have changed since, and some are added so that transformers
    4 and 5 both read it; if it is now of another model_type, only its token ids are kept. `special` and `dtype` are
    those of `hf_config`.
    """
    now = hf_config(settings, special, dtype, original.get("model_type"))
    family = families()[now["model_type"]]
    original = _with_first_names(original, family)
    if original.get("model_type") != family.model_type:
        ids = {key: value for key, value in original.items() if key.endswith("_token_id")}
        return now | ids
    pair_head = isinstance(settings, BertSettings) and settings.pair_head
    kept_dropouts = True
    try:
        _, before = settings_from_config(original, "config.json", pair_head=pair_head)
    except CheckpointError:  # because: several dropouts, of which the import chose one
        kept_dropouts = False
        _, before = settings_from_config(
            original, "config.json", pair_head=pair_head, dropout=settings.to_dict()["dropout"]
        )
    then = hf_config(before, special, dtype, family.model_type)
    if family.rotary_keys and now[family.longest] < then[family.longest]:
        # because: a run on shorter texts than the model can read does not make it forget the others
        now[family.longest] = then[family.longest]
    changed = {key: value for key, value in now.items() if key not in then or then[key] != value}
    if not kept_dropouts:
        changed |= {key: now[key] for key in family.dropouts}
    always = {key: now[key] for key in ("architectures", "torch_dtype", "dtype")}
    always |= {key: now[key] for key in family.rewritten if key in original}
    version = {"transformers_version": now["transformers_version"]}
    gone = {"auto_map"} | (then.keys() - now.keys())  # because: the code that auto_map names is not exported
    kept = {key: value for key, value in original.items() if key not in gone}
    return version | kept | changed | always | _both_rotary_forms(kept, now, changed, family)


def _both_rotary_forms(original: Config, now: Config, changed: Config, family: Family[Any]) -> Config:
    """Return the entries about rotary angles to add to `original`, an imported config.json, so that transformers 4 and
    5 read the same angles. `now` is the config.json that would be written for today's settings, and `changed` has its
    entries that differ since the import. If one about angles is among them, all those of `now` are returned, otherwise
    those that `original` lacks.
    """
    entries = {key: now[key] for key in family.rotary_keys if key in now}
    if changed.keys() & {*entries, family.longest}:
        return entries
    has_old_form = original.get("rope_scaling") or "rope_parameters" not in entries
    return {
        key: value for key, value in entries.items()
        if original.get(key) is None or (key == "rope_parameters" and has_old_form)
    }  # fmt: skip


def _with_first_names(config: Config, family: Family[Any]) -> Config:
    """Return a config.json's entries by the first names of their keys."""
    second = {first: config[alias] for alias, first in family.aliases.items() if alias in config}
    return {key: value for key, value in config.items() if key not in family.aliases} | second


def ignored_keys(config: Config) -> dict[str, str]:
    """Return key -> reason for the keys of a config.json that lmtrain's model settings are not read from. Its
    model_type must be a known one.
    """
    family = families()[config["model_type"]]
    config = _with_first_names(config, family)
    read = family.defaults.keys() | {"model_type"}
    if config.get("rope_scaling"):
        read -= {"rope_parameters"}
    return {
        key: ignored_reason(key, family)
        for key in sorted(config.keys() - read)
        if config[key] is not None or key not in family.inert
    }


def settings_from_config(
    config: Any, where: object, *, pair_head: bool, dropout: object = None
) -> tuple[str, ModelSettings]:
    """Return (model_type, lmtrain's settings) of the model that `config`, a parsed config.json, describes. `where` is
    its path, for messages; `pair_head` tells whether the weights of a BERT have a sentence-pair head; `dropout`, if
    given, overrides config.json. Raise CheckpointError for a model that lmtrain does not compute.
    """
    name = config.get("model_type") if isinstance(config, dict) else None
    for family in families().values():
        if isinstance(name, str) and name in family.other_types:
            raise CheckpointError(f"{where} has model_type {name}, which {family.other_types[name]}")
    if not isinstance(name, str) or name not in families():
        raise CheckpointError(
            f"{where} has model_type {show(None) if name is None else shorten(name)}, which lmtrain cannot import. "
            f"Choose a model of one of these types: {', '.join(families())}."
        )
    family = families()[name]
    config = _with_first_names(config, family)
    completed = {**family.defaults, **config}
    uncomputed = uncomputed_keys(config, family)
    for key in sorted((family.defaults.keys() & config.keys()) | uncomputed.keys()):
        limit = _LONGEST_LIST if key in _LISTS and key in family.defaults else _LONGEST_VALUE
        if len(str(config[key])) > limit:
            raise CheckpointError(
                f"{where} gives {key} a value of more than {limit} characters. Get the file again."
            )
    problems = [uncomputed_problem(key, value) for key, value in uncomputed.items()]
    problems += [
        f"{shorten(key)}={shorten(show(value))} is not known to lmtrain, and would have to be removed if it has no "
        "effect on this model"
        for key, value in config.items()
        if value is not None and not is_known_key(key, family)
    ]
    code = config.get("auto_map")
    if isinstance(code, dict) and not any(str(name).endswith(f".{family.architecture}") for name in code.values()):
        problems.append(f"auto_map would have to name {family.architecture}, the class that transformers has")
    require_values(completed, problems, family.required)
    values = family.settings(completed, problems)
    if values["kind"] == "bert":
        values |= {"pair_head": pair_head}
    values["dropout"] = _dropout(completed, family, problems) if dropout is None else dropout
    if problems:
        raise CheckpointError(
            f"{where} describes a model that lmtrain does not compute: {join_few(problems, '; ')}. "
            "Choose a model with such settings: an import must compute exactly the same."
        )
    return name, build_imported_settings(values, where, "Check the file.")


def read_hf_model(folder: Path, dropout: object = None) -> tuple[str, ModelSettings]:
    """Return (model_type, lmtrain's settings) of the model in the Hugging Face folder `folder`, without reading
    weights. `dropout`, if given, overrides that of its config.json. Raise CheckpointError if lmtrain does not compute
    the model.
    """
    config = read_json(folder / "config.json")
    is_bert = isinstance(config, dict) and "bert" in str(config.get("model_type"))
    pair_head = is_bert and _PAIR_HEAD in tensor_names(folder)
    return settings_from_config(config, folder / "config.json", pair_head=pair_head, dropout=dropout)


def tensor_names(folder: Path) -> set[str]:
    """Return the names of the tensors in a Hugging Face folder without reading them: from its index if it has shards,
    or else from the header of its model.safetensors, whose key __metadata__ may be among them.
    """
    if has_shards(os.listdir(folder)):
        return set(read_weight_map(folder / WEIGHTS_INDEX))
    path = folder / WEIGHTS
    with open_fd(path) as (fd, _):
        num_bytes = check_header_size(path, int.from_bytes(read_range(fd, 0, 8), "little"))
        header = parse_json(read_range(fd, 8, num_bytes), path, MAX_HEADER_BYTES)
    return set(header) if isinstance(header, dict) else set()


def check_header_size(path: Path, num_bytes: int) -> int:
    """Return `num_bytes`, the size that the safetensors file `path` states for its header. Raise CheckpointError if it
    is above MAX_HEADER_BYTES.
    """
    if num_bytes > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path} is damaged: it states a header of {num_bytes} bytes; at most {MAX_HEADER_BYTES} are allowed. "
            "Get the file again."
        )
    return num_bytes


def _dropout(c: Config, family: Family[Any], problems: list[str]) -> Any:
    """Return the dropout probability of the config.json `c`, completed with defaults. lmtrain has one for embeddings,
    attention and residuals together, so append a message to `problems` if the keys of this family's dropouts differ, or
    if its only one, for attention, is not 0.
    """
    shares = {key: c[key] for key in family.dropouts}
    first, *others = shares.values()
    shares_text = ", ".join(f"{key}={show(share)}" for key, share in shares.items())
    way_out = "as lmtrain has one share for embeddings, attention and residuals: choose it with --set dropout=SHARE"
    if any(share != first for share in others):
        problems.append(f"{shares_text} would have to be equal, {way_out}")
    if not others and first != 0:
        problems.append(f"{shares_text}, which is for attention alone, would have to be 0, {way_out}")
    return first
