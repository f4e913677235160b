"""Export a checkpoint as a folder that transformers loads without remote code, and import such a folder as a
checkpoint.

Called by `lmtrain export` and `lmtrain import`. Weights stream from one to the other in parts. Before an exported
folder takes its name, its model's scores of random tokens are compared with the source's. Imported weights are fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmtrain.checkpoint.disk.checkpoint_format import ITEM_BYTES
from lmtrain.checkpoint.find_and_prune import resolve_checkpoint
from lmtrain.checkpoint.read_verified_contents import checked_model
from lmtrain.checkpoint.tensor_reader import CheckpointReader
from lmtrain.checkpoint.unopened_model_on_disk import ORIGINAL_PREFIX
from lmtrain.checkpoint.view_with_ema_as_weights import WeightSet
from lmtrain.errors import CheckpointError, UsageError
from lmtrain.exchange.huggingface.compare_with_transformers import compare_ids, compare_scores
from lmtrain.exchange.huggingface.config_json import begin_and_end_ids, hf_config, hf_family, restored_config
from lmtrain.exchange.huggingface.exported_tokenizer_files import (
    check_one_tokenizer,
    json_bytes,
    special_ids,
    tokenizer_class_to_load,
    tokenizer_files,
)
from lmtrain.exchange.huggingface.folder_reader import HFFolder
from lmtrain.exchange.huggingface.model_card import model_card
from lmtrain.exchange.huggingface.model_family_base import families, weight_mappings
from lmtrain.exchange.huggingface.preserved_source_files import (
    CONFIG,
    GENERATION_CONFIG,
    parse_original,
    read_original_files,
    restore_names,
)
from lmtrain.exchange.huggingface.weight_names import HFRows, WeightMapping
from lmtrain.exchange.stream_tensors_to_disk import (
    DTYPES,
    Report,
    left_out_of_exports,
    load_tokenizer,
    parse_dtype,
    report_progress,
    row_ranges,
    save_imported,
    tensor_bytes,
    tensor_spec,
    write_tensors,
)
from lmtrain.layout import Piece
from lmtrain.runfolder.run_facts import RunFacts, facts_of_checkpoint
from lmtrain.runtime.files.atomic_files import new_folder
from lmtrain.runtime.processes.fault_injection import fault_point
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer

_TORCH_TYPES = {code: kind for kind, code in DTYPES.values()}  # by the type's name in safetensors
SHARD_BYTES = 5_000_000_000  # because: what transformers calls 5GB, where a download that breaks is not all lost


@dataclass(frozen=True)
class HFTensor:
    """A tensor of an exported folder: some rows of one of our weights, or a whole weight transposed. `code` is the
    safetensors name of its type.
    """

    rows: HFRows
    mapping: WeightMapping
    code: str

    @property
    def name(self) -> str:
        return self.rows.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.mapping.hf_shape(self.rows.num_rows)

    @property
    def num_bytes(self) -> int:
        return ITEM_BYTES[self.code] * math.prod(self.shape)


def export_hf(
    source: Path,
    output: Path,
    *,
    dtype: str | None = None,
    weights: WeightSet = "model",
    check: bool = True,
    report: Report | None = None,
    shard_bytes: int = SHARD_BYTES,
    describe: Callable[[Mapping[str, Any]], RunFacts] = partial(facts_of_checkpoint, None),
    is_path: Callable[[str], bool] | None = None,
    open_folder: Callable[[Path], AbstractContextManager[Path]] = new_folder,
) -> dict[str, Any]:
    """Export the checkpoint `source` as the Hugging Face folder `output`, and return the facts to report, such as the
    largest difference of logits. `dtype` is fp32, bf16 or fp16; None stands for the types of an imported model that was
    not trained since, otherwise for fp32. If `weights` is "ema", the average of the weights is exported. If `check`,
    logits and token ids are compared with the source's. `report` is called with bytes done and bytes in all. Files of
    several tensors have at most `shard_bytes`. `describe` returns what the run was at the checkpoint, from the state in
    its manifest; without it, the card has only what needs no settings. `is_path` is that of `model_card`. `open_folder`
    yields the folder to fill in place of `output`, which it becomes.
    """
    reader = CheckpointReader(resolve_checkpoint(source), weights)
    settings = checked_model(reader)
    original = restore_names(reader.read_extra_files(ORIGINAL_PREFIX))
    family = hf_family(settings, parse_original(original, CONFIG).get("model_type"))
    tokenizer = reader.read_file("tokenizer.json")
    dtype, codes = (dtype, {}) if dtype is not None else _types_of_import(reader)
    torch_type, code = parse_dtype(dtype)
    targets = [
        HFTensor(tensor, mapping, codes.get(tensor.name, code))
        for mapping in weight_mappings(settings, family)
        for tensor in mapping.hf_tensors
    ]
    torch_name = str(torch_type).removeprefix("torch.")
    if problem := families()[family].dtype_problem(settings, torch_name):
        raise CheckpointError(f"The model has {problem}")
    words = Tokenizer.from_bytes(tokenizer)
    special, tokenizer_class = special_ids(words), tokenizer_class_to_load(family, words)
    files = tokenizer_files(tokenizer, settings.shape.seq_len, family, causal=settings.shape.causal, original=original)
    if CONFIG in original:
        config = restored_config(settings, parse_original(original, CONFIG), special, torch_name)
        files |= {name: data for name, data in original.items() if name == GENERATION_CONFIG}
    else:
        config = hf_config(settings, special, torch_name)
        if settings.shape.causal:
            files[GENERATION_CONFIG] = json_bytes(begin_and_end_ids(special) | {"pad_token_id": special.get("pad")})
    files[CONFIG] = json_bytes(config)
    card = model_card(
        output.name, reader.path, reader.state, settings, config, original, tokenizer_class, weights,
        run=describe(reader.state), is_path=is_path,
    )  # fmt: skip
    files["README.md"] = card.encode()
    facts: dict[str, Any] = {"from": str(reader.path), "output": str(output), "model_type": family, "dtype": dtype}
    facts |= reader.describe_weights()
    facts |= {"tensors": len(targets), "left_out": left_out_of_exports(reader)}
    if tokenizer_class != "AutoTokenizer":
        facts["load_the_tokenizer_with"] = (
            f"{tokenizer_class}, because AutoTokenizer of transformers 5 builds a tokenizer with other rules in every "
            f"folder of model_type {family}"
        )
    with open_folder(output) as folder:
        facts["num_files"] = _write_weights(folder, reader, targets, shard_bytes, report)
        for name, data in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(data)
        if check:
            exact = all(target.code == "F32" for target in targets)
            facts |= compare_scores(folder, settings, lambda name: reader.read(f"model.{name}"), exact=exact)
            facts |= compare_ids(folder, words, family)
        fault_point("exchange.publish")
    return facts


def _types_of_import(reader: CheckpointReader) -> tuple[str, dict[str, str]]:
    """Return the number types of the Hugging Face folder that a checkpoint was imported from: (type of most elements,
    such as "bf16", tensor name -> type for tensors of other types, such as "F32"). Return ("fp32", {}) if it was not
    imported.
    """
    imported = reader.state.get("imported")
    if not isinstance(imported, dict) or imported.get("dtype") not in DTYPES:
        return "fp32", {}
    others: Any = imported.get("other_dtypes")
    is_known = isinstance(others, dict) and set(others.values()) <= _TORCH_TYPES.keys()
    return str(imported["dtype"]), dict(others) if is_known else {}


def _write_weights(
    folder: Path, reader: CheckpointReader, targets: Sequence[HFTensor], shard_bytes: int, report: Report | None
) -> int:
    """Write the tensors `targets`, read from a checkpoint, into `folder`: as model.safetensors or, if they exceed
    `shard_bytes`, as several files and an index. Return the number of safetensors files. `report` is called with bytes
    done and bytes in all.
    """
    shards: list[list[HFTensor]] = [[]]
    for target in targets:
        if shards[-1] and sum(t.num_bytes for t in shards[-1]) + target.num_bytes > shard_bytes:
            shards.append([])
        shards[-1].append(target)
    total, done = sum(target.num_bytes for target in targets), 0
    names = ["model.safetensors"]
    if len(shards) > 1:
        names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
        places = {target.name: name for name, shard in zip(names, shards, strict=True) for target in shard}
        (folder / "model.safetensors.index.json").write_bytes(
            json_bytes({"metadata": {"total_size": total}, "weight_map": places})
        )
    for name, shard in zip(names, shards, strict=True):
        # because: wide types first, so that every tensor begins at a multiple of its item size
        shard.sort(key=lambda target: -ITEM_BYTES[target.code])
        specs = [tensor_spec(target.name, target.code, target.shape) for target in shard]
        parts = (tensor_bytes(part.to(_TORCH_TYPES[t.code])) for t in shard for part in _read_parts(reader, t))
        write_tensors(folder / name, specs, report_progress(parts, total, report, done))
        done += sum(target.num_bytes for target in shard)
    return len(shards)


def _read_parts(reader: CheckpointReader, target: HFTensor) -> Iterator[Tensor]:
    """Yield the tensor `target` of an export, read from a checkpoint, as consecutive groups of rows, each of at most 64
    MiB in fp32 (or a single row).
    """
    name, shape = f"model.{target.mapping.name}", target.shape
    if target.mapping.transposed:
        for rows in row_ranges(shape[0], 4 * math.prod(shape[1:])):
            yield reader.read(name, (0, rows.start), (shape[1], len(rows))).T
        return
    for block in target.rows.rows:
        for rows in row_ranges(len(block), 4 * math.prod(shape[1:])):
            yield reader.read(name, (block.start + rows.start, *(0 for _ in shape[1:])), (len(rows), *shape[1:]))


class HFWeights:
    """The weights of a Hugging Face folder, read like those of a checkpoint for an evaluation."""
    def __init__(self, path: Path) -> None:
        self._folder = HFFolder(path)
        self._mappings = {f"model.{mapping.name}": mapping for mapping in self._folder.check_weights()}
        self.settings = self._folder.settings

    @torch.no_grad()
    def load_into(self, pieces: list[Piece]) -> None:
        """Copy the folder's weights into `pieces`, slices of the model's parameters: fill each `Piece.block` in place,
        converted to its type.
        """
        for piece in pieces:
            mapping = self._mappings[piece.name]
            for first, index, rows in _row_places(mapping, range(piece.offset[0], piece.offset[0] + len(piece.block))):
                part = self._folder.read_part(mapping, index, rows)
                if part.ndim > 1:
                    part = part[:, piece.offset[1] : piece.offset[1] + piece.block.shape[1]]
                at = first - piece.offset[0]
                piece.block[at : at + len(rows)].copy_(part)


def _row_places(mapping: WeightMapping, rows: range) -> list[tuple[int, int, range]]:
    """Return where the rows with the numbers `rows` of a weight of lmtrain's lie in Hugging Face's tensors, in parts of
    bounded size. A part is (the weight's first row in it, index of the tensor in `mapping.hf_tensors`, row numbers in
    that tensor).
    """
    return [
        (place.first + part.start, place.tensor, range(place.rows.start + part.start, place.rows.start + part.stop))
        for place in mapping.places(rows)
        for part in row_ranges(len(place.rows), 4 * math.prod(mapping.shape[1:]))
    ]


def check_settings(overrides: Mapping[str, object]) -> None:
    """Raise UsageError if `overrides`, the settings that a user gives to an import by --set, has any key but dropout.
    All other settings are in config.json.
    """
    unknown_overrides = overrides.keys() - {"dropout"}
    if unknown_overrides:
        raise UsageError(
            f"--set {min(unknown_overrides)} is in config.json already. "
            "Of a Hugging Face model only dropout can be set."
        )


def import_hf(
    folder: Path,
    output: Path,
    *,
    tokenizer: Path | None = None,
    overrides: Mapping[str, object] | None = None,
    report: Report | None = None,
    made_from: str | None = None,
) -> dict[str, Any]:
    """Import the Hugging Face folder `folder` as the checkpoint step_00000000 in `output`, and return the facts to
    report, such as the checkpoint's path. `tokenizer` is the path of a tokenizer, by default the folder's. `overrides`
    are settings by key; only dropout may be set. `report` is called with bytes done and bytes in all. The checkpoint
    records `made_from`, a text about inputs and options.
    """
    check_settings(overrides or {})
    source = HFFolder(folder, (overrides or {}).get("dropout"))
    loaded_tokenizer = load_tokenizer(tokenizer or folder)
    mappings = {mapping.name: mapping for mapping in source.check_weights()}

    def parts(name: str) -> Iterator[Tensor]:
        mapping = mappings[name]
        return (
            source.read_part(mapping, index, rows) for _, index, rows in _row_places(mapping, range(mapping.shape[0]))
        )

    origin = {"format": "huggingface", "model_type": source.family} | source.stored_types(mappings.values())
    files = read_original_files(folder, loaded_tokenizer, tokenizer)
    if tokenizer is None:
        check_one_tokenizer(folder, loaded_tokenizer, restore_names(files), source.family)
    facts = save_imported(
        output, source.settings, parts, loaded_tokenizer, origin, source=folder, files=files, report=report,
        made_from=made_from,
    )  # fmt: skip
    return {key: value for key, value in facts.items() if key != "other_dtypes"}  # because: there may be thousands
