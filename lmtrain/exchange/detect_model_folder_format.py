"""Name the format of another program's model folder, and refuse by name what cannot be imported. Torch-free.

Called by `lmtrain import`, by checkpoint.init_from and by the verbs that load a Hugging Face folder, before anything is
read or written. Only names of files and small JSON files are looked at; the formats' own folders read the rest.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lmtrain.checkpoint.disk.checkpoint_format import MANIFEST
from lmtrain.errors import CheckpointError, LmtrainError, MissingInputError, UsageError, join_few, shorten, way
from lmtrain.runfolder.file_names import step_from_name
from lmtrain.runfolder.folder_reader import is_run
from lmtrain.runtime.files.atomic_files import is_safe_name, open_fd, read_json, read_range
from lmtrain.runtime.files.similar_path import missing_path
from lmtrain.runtime.files.unreadable_files import explain_unreadable

Program = Literal["hf", "megatron"]
TRACKER = "latest_checkpointed_iteration.txt"  # Megatron-LM writes the newest iteration into it
METADATA = ".metadata"  # torch's list of the tensors of a distributed checkpoint
WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
RANK_FOLDER = re.compile(r"mp_rank_([0-9]{2,5})(?:_([0-9]{3,5}))?(_[0-9]{3,5})?")
_PROGRAMS: dict[Program, str] = {"hf": "a Hugging Face folder", "megatron": "a Megatron-LM checkpoint"}
_FOLDERS = "the folder of a Hugging Face model or of a Megatron-LM checkpoint"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_DOWNLOADS = Path(".cache/huggingface/download")  # where the hub's client keeps what it has not finished
_CODE = re.compile(r"(?:modeling|configuration|tokenization)_.*\.py")
_POINTER = b"version https://git-lfs"
_SAVE_AGAIN = "Save the model again with transformers: save_pretrained(DIR) writes safetensors."
_ADAPTER = (
    "is an adapter of peft (adapter_config.json), not a whole model. Merge it into its base model with peft "
    "(merge_and_unload, then save_pretrained) and import the result."
)
# Files of weights in other formats: the end of the name, what it is, the way out.
_OTHER_WEIGHTS = (
    (".gguf", "GGUF files, which are quantized for llama.cpp and which lmtrain cannot read",
     "Get the safetensors that they were made from."),
    (".bin", "its weights in {name}, a pickle, which can run code when it is read", _SAVE_AGAIN),
    (".bin.index.json", "its weights in pickles ({name}), which can run code when they are read", _SAVE_AGAIN),
    (".h5", "its weights in {name}, a file of TensorFlow", _SAVE_AGAIN),
    (".msgpack", "its weights in {name}, a file of Flax", _SAVE_AGAIN),
    (".onnx", "its weights in {name}, a file of ONNX", "Get the safetensors that it was made from."),
    (".pth", "its weights in {name}, a pickle in the model's own format",
     "Get the same model in transformers' format, with config.json and safetensors."),
    (".pt", "its weights in {name}, a pickle, which can run code when it is read", _SAVE_AGAIN),
    (".ckpt", "its weights in {name}, a pickle, which can run code when it is read", _SAVE_AGAIN),
)  # fmt: skip


@dataclass(frozen=True)
class SourceFormat:
    """The format of a folder that can be imported: the program that wrote it, and the kind of its files."""

    program: Program
    files: str  # safetensors, torch (a file for each rank) or torch_dist

    def __str__(self) -> str:
        return _PROGRAMS[self.program] + ("" if self.program == "hf" else f" in the format {self.files}")


def identify_source(path: Path, program: Program | None = None) -> SourceFormat:
    """Return the format of the model folder `path`: which program wrote it, and the kind of its files. `program` is the
    program that the user names, None to find out. Raise MissingInputError, CheckpointError or UsageError if the folder
    cannot be imported; the message says what the path holds instead.
    """
    names = _list_folder(path)
    if kind := lmtrain_kind(path):
        raise UsageError(
            f"{path} is a {kind} of lmtrain already, and needs no import. Begin a run from its weights with "
            f"`lmtrain pretrain checkpoint.init_from={path} ...`, or give it to lmtrain eval, generate, reshard or "
            "export as it is."
        )
    found: list[SourceFormat] = [SourceFormat("hf", "safetensors")] if "config.json" in names else []
    if files := _megatron_files(path, names):
        found.append(SourceFormat("megatron", files))
    if not found:
        raise _unknown_folder(path, names)
    if program is None and len(found) > 1:
        raise UsageError(
            f"{path} holds {_PROGRAMS['hf']} and {_PROGRAMS['megatron']}. "
            f"Add {way('--format', 'hf')} or {way('--format', 'megatron')}."
        )
    chosen = next((source for source in found if source.program == program), found[0])
    if program is not None and chosen.program != program:
        raise UsageError(
            f"{path} is {_PROGRAMS[chosen.program]}, and not {_PROGRAMS[program]}. "
            f"Use {way('--format', chosen.program)}."
        )
    if chosen.program == "hf":
        _check_huggingface(path, names)
    return chosen


def _list_folder(path: Path) -> list[str]:
    """Return the sorted names of the entries of the folder `path`. Raise MissingInputError if it does not exist, is
    empty or is a file, and CheckpointError if it is a file of weights in a format that lmtrain does not read.
    """
    if path.is_dir():
        if names := sorted(os.listdir(path)):
            return names
        raise MissingInputError(f"{path} is an empty folder. Give {_FOLDERS}.")
    if not path.exists():
        hint = f"Give {_FOLDERS}."
        if _HUB_NAME.fullmatch(str(path)):
            hint = f"lmtrain downloads no models. Get it first: hf download {path} --local-dir DIR; then give DIR."
        raise MissingInputError(missing_path(path, hint))
    if path.suffix == ".safetensors" and (path.parent / "config.json").is_file():
        raise MissingInputError(f"{path} is a single file of a model. Give its folder, "
                                f"{way(str(path.parent), instead_of=str(path))}.")  # fmt: skip
    if path.suffix == ".bin" and not _is_pickle(path):
        raise MissingInputError(f"{explain_unreadable(path)} It is no model: give {_FOLDERS}.")
    if unreadable_weights := _other_weights([path.name]):
        raise CheckpointError(f"{path} is a file, and a folder with such a file would have {unreadable_weights}")
    raise MissingInputError(f"{path} is a file. Give {_FOLDERS}.")


def _is_pickle(path: Path) -> bool:
    """Return whether a file begins as a pickle, or as the archive in which torch puts one."""
    with open_fd(path) as (fd, _):
        return read_range(fd, 0, 2) in (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


def lmtrain_kind(path: Path) -> str:
    """Return which kind of lmtrain's own folders `path` is: "checkpoint", "folder of checkpoints" or "run". Return an
    empty text if it is none of these.
    """
    names = os.listdir(path) if path.is_dir() else []
    if MANIFEST in names and any(name.startswith("rank_") for name in names):
        return "checkpoint"
    if step_from_name(path.name) is not None and names and "config.json" not in names:  # an export may be named so
        return "checkpoint"
    if any(step_from_name(name) is not None for name in names):
        return "folder of checkpoints"
    return "run" if is_run(path) else ""


def _megatron_files(path: Path, names: list[str]) -> str | None:
    """Return the format of the Megatron-LM checkpoint in the folder `path`: "torch" (a file for each rank) or
    "torch_dist" (torch's distributed format). Return None if the folder is no such checkpoint. `names` are the sorted
    names of its entries.
    """
    if METADATA in names:
        return "torch_dist"
    if any(RANK_FOLDER.fullmatch(name) for name in names):
        return "torch"
    if TRACKER not in names:
        return None
    newest = [name for name in names if name == "release" or name.startswith("iter_")][-1:]
    return "torch_dist" if newest and (path / newest[0] / METADATA).is_file() else "torch"


def _check_huggingface(path: Path, names: list[str]) -> None:
    """Raise an error that names the obstacle unless the folder `path`, which has a config.json, holds a whole model in
    safetensors: MissingInputError if it has no weights, CheckpointError for anything else, such as half a download, an
    adapter or quantized weights. `names` are the folder's entries.
    """
    config = read_json(path / "config.json")
    if not isinstance(config, dict):
        raise CheckpointError(f"{path / 'config.json'} holds no settings of a model. Get the folder again.")
    if problem := next(_download_problems(path, names), None):
        raise CheckpointError(f"{path} is half a download: {problem}. Run the download again, which gets the rest.")
    if code := _code_of_its_own(config, names):
        raise CheckpointError(
            f"{path} needs code of its own ({shorten(code)}), which lmtrain never runs. "
            "Choose a model whose architecture is part of transformers."
        )
    if "adapter_config.json" in names:
        raise CheckpointError(f"{path} {_ADAPTER}")
    quantized = config.get("quantization_config")
    if quantized is not None:
        method = quantized.get("quant_method") if isinstance(quantized, dict) else None
        raise CheckpointError(
            f"{path} holds quantized weights ({shorten(method or 'quantization_config')}), which lmtrain cannot read. "
            "Get the model that it was made from, in fp32, bf16 or fp16."
        )
    if WEIGHTS in names or WEIGHTS_INDEX in names:
        return
    if unreadable_weights := _other_weights(names):
        raise CheckpointError(f"{path} has {unreadable_weights}")
    raise MissingInputError(f"{path} has no {WEIGHTS}. Give the folder of a whole model.")


def _code_of_its_own(config: dict[str, Any], names: list[str]) -> str:
    """Return what shows that the model of a Hugging Face folder needs code that transformers lacks: the key auto_map of
    its config.json, `config`, or a file among the folder's entries `names`. Return an empty text if it needs none: also
    if auto_map names a class as transformers would, by the model_type, as in Phi-3. Whoever knows the model_type's
    class has to check that the two are the same.
    """
    auto_map, architectures = config.get("auto_map"), config.get("architectures")
    if isinstance(auto_map, dict) and isinstance(architectures, list):
        usual = {f"modeling_{config.get('model_type')}.{name}" for name in architectures}
        if auto_map.get("AutoModelForCausalLM") in usual:
            return ""
    return "auto_map in config.json" if "auto_map" in config else next(filter(_CODE.fullmatch, names), "")


def _other_weights(names: list[str]) -> str:
    """Return the part of a message that says which weights in another format than safetensors are among the file names
    `names`, and what the user can do instead. Return an empty text if there are none.
    """
    for ending, words, way_out in _OTHER_WEIGHTS:
        if name := next((name for name in names if name.endswith(ending)), None):
            return f"{words.format(name=shorten(name))}. {way_out}"
    return ""


def _download_problems(path: Path, names: list[str]) -> Iterator[str]:
    """Yield a clause for a message for each sign that the download of the Hugging Face folder `path` has not finished,
    such as a missing shard or a pointer of git-lfs. `names` are the folder's entries.
    """
    if has_shards(names):
        shards = sorted({name for name in read_weight_map(path / WEIGHTS_INDEX).values() if is_safe_name(name)})
        if missing := [name for name in shards if not os.path.lexists(path / name)]:
            yield f"{WEIGHTS_INDEX} names {len(shards)} files and {len(missing)} of them are missing ({missing[0]})"
    blobs = [path.parents[1] / "blobs"] if path.parent.name == "snapshots" else []
    for folder in (path, path / _DOWNLOADS, *blobs):
        files = sorted(os.listdir(folder)) if folder.is_dir() else []
        if partial := next((name for name in files if name.endswith(".incomplete")), None):
            yield f"{folder / shorten(partial)} is unfinished"
    for name in names:
        if name.endswith(".safetensors") and _is_pointer(path / name):
            yield f"{name} is a pointer of git-lfs and not the file (`git lfs pull` gets it)"


def has_shards(names: Iterable[str]) -> bool:
    """Return whether the weights of a Hugging Face folder with the entries `names` are in the files that its index
    names. A model.safetensors beside an index is the whole model, for transformers too: a save in one file leaves the
    index of an earlier save in place.
    """
    return WEIGHTS_INDEX in names and WEIGHTS not in names


def read_weight_map(index: Path) -> dict[str, Any]:
    """Return tensor name -> file name, the table weight_map of `index`, a model.safetensors.index.json; {} if it has no
    such table. The file names are not checked: they may be values of any type.
    """
    value = read_json(index)
    weight_map = value.get("weight_map") if isinstance(value, dict) else None
    return weight_map if isinstance(weight_map, dict) else {}


def _is_pointer(path: Path) -> bool:
    """Return whether `path` is the small text file that git-lfs puts in place of a large file it has not downloaded;
    False if it is no plain file.
    """
    if not path.is_file():
        return False
    with open_fd(path) as (fd, _):
        return read_range(fd, 0, len(_POINTER)) == _POINTER


def _unknown_folder(path: Path, names: list[str]) -> LmtrainError:
    """Return the error to raise for a folder that is neither a Hugging Face folder nor a Megatron-LM checkpoint. Its
    message says what the folder holds instead, such as a checkpoint of DeepSpeed. `names` are its entries.
    """
    other = _other_weights(names)
    kinds: tuple[tuple[bool, type[LmtrainError], str], ...] = (
        ("adapter_config.json" in names or any(name.startswith("adapter_model.") for name in names),
         CheckpointError, _ADAPTER),
        ("latest" in names or any(name.startswith("global_step") for name in names),
         CheckpointError,
         "is a checkpoint of DeepSpeed, which lmtrain cannot read. Convert it to a Hugging Face folder."),
        ("metadata.json" in names or any(os.path.isfile(path / name / ".zarray") for name in names[:100]),
         CheckpointError, "is a checkpoint in the format zarr, which lmtrain cannot read. Save it again with "
         "--ckpt-format torch_dist or --ckpt-format torch."),
        (bool(other), CheckpointError, f"has {other}"),
        (WEIGHTS in names or WEIGHTS_INDEX in names,
         MissingInputError, "has weights and no config.json, which says what they compute. Get the whole folder."),
        ("tokenizer.json" in names or "tokenizer.model" in names,
         MissingInputError, f"holds a tokenizer and no model. Give {_FOLDERS}."),
        (True, MissingInputError,
         f"holds no model that can be imported (it has {join_few(map(shorten, names))}). Give {_FOLDERS}."),
    )  # fmt: skip
    return next(error(f"{path} {text}") for holds, error, text in kinds if holds)
