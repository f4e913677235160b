"""Read a Hugging Face folder as data: config.json and safetensors files, with one name for each tensor.

Called by import and by export's own check. Nothing in the folder runs: pickled weights and remote code are never
opened. Names of files are plain names in this folder; links are followed only as the hub's own cache lays them.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lmtrain.errors import CheckpointError, MissingInputError, join_few, shorten
from lmtrain.exchange.detect_model_folder_format import (
    WEIGHTS,
    WEIGHTS_INDEX,
    has_shards,
    identify_source,
    read_weight_map,
)
from lmtrain.exchange.huggingface.config_json import check_header_size, settings_from_config
from lmtrain.exchange.huggingface.model_family_base import families, weight_mappings
from lmtrain.exchange.huggingface.preserved_source_files import path_in_folder
from lmtrain.exchange.huggingface.weight_names import WeightMapping
from lmtrain.models.model_settings import ModelSettings
from lmtrain.runtime.files.atomic_files import is_safe_name, open_fd, read_json, read_range

_COMPARED_AT_ONCE = 1 << 20  # numbers that are compared
_OTHER_NAMES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}  # in the first BERT files
_TYPES = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}
_REOPEN_BYTES = 128 << 20  # because: what was read of an open file counts as our memory


class _TensorPlace(NamedTuple):
    """The place of a tensor in a folder: its file and its name there, with its shape and type."""

    file: str
    name: str
    shape: tuple[int, ...]
    kind: str


class HFFolder:
    """An opened Hugging Face folder. `family` and `settings` describe its model; `read_part` and `weight_reader` read
    weights.
    """

    def __init__(self, path: Path, dropout: object = None) -> None:
        """Open a folder; `dropout`, if given, overrides the dropout of config.json."""
        self.path = path
        identify_source(path, "hf")
        self._open_tensors: tuple[str, Any] | None = None
        self._bytes_left = 0
        config = read_json(path_in_folder(self.path, "config.json"))
        where = path / "config.json"
        self._places = self._find_tensors(config.get("model_type") if isinstance(config, dict) else None)
        self.family, self.settings = settings_from_config(
            config, where, pair_head="cls.seq_relationship.weight" in self._places, dropout=dropout
        )
        layers = self.settings.shape.num_layers
        if layers > len(self._places):
            # because: the weights of a model are listed by name before they are looked for
            raise CheckpointError(
                f"{where} describes {layers} layers, but the model's files hold only {len(self._places)} tensors. "
                "Get the whole model again."
            )

    def check_weights(self) -> list[WeightMapping]:
        """Return for each weight of the model which tensors of the folder hold its rows. Raise CheckpointError if one
        of these tensors is missing or has another shape or an unknown type, if tied tensors differ, or if there are
        other tensors besides tables that can be computed, such as inv_freq.
        """
        mappings = list(weight_mappings(self.settings, self.family))
        family = families()[self.family]
        expected = {
            tensor.name: mapping.hf_shape(tensor.num_rows) for mapping in mappings for tensor in mapping.hf_tensors
        }
        problems = [text for name, shape in expected.items() for text in self._mismatch(name, shape)]
        tied = {name for name in family.tied_names if name in self._places} if self.settings.ties() else set()
        problems += [
            f"{shorten(name)} is not a weight of this model"
            for name in sorted(self._places.keys() - expected.keys() - tied)
            if not name.endswith(family.tables)
        ]
        if problems:
            raise CheckpointError(
                f"{self.path} does not hold the model of its config.json: {join_few(problems, '; ')}. "
                "Give the folder of a pretraining model of this architecture."
            )
        first = next(mapping.hf_tensors[0].name for mapping in mappings if mapping.name == "embedding.token.weight")
        for name in sorted(tied):
            if not self._are_equal(first, name):
                raise CheckpointError(
                    f"{self.path} holds different numbers for {name} and {first}, but its config.json says that they "
                    "are one weight. Set tie_word_embeddings to false there if they are not, or get the model again."
                )
        return mappings

    @property
    def num_tensors(self) -> int:
        """The number of tensors in the folder."""
        return len(self._places)

    def left_out(self) -> dict[str, str]:
        """Return tensor name -> reason for the folder's tensors that no weight of the model is read from: computed
        tables, and the embedding under a second name.
        """
        mappings, tables = weight_mappings(self.settings, self.family), families()[self.family].tables
        used = {tensor.name for mapping in mappings for tensor in mapping.hf_tensors}
        return {
            name: "it is computed, not trained" if name.endswith(tables) else "it is the embedding under a second name"
            for name in sorted(self._places.keys() - used)
        }

    def stored_types(self, mappings: Iterable[WeightMapping]) -> dict[str, Any]:
        """Return {"dtype": the number type of most elements of the weights in `mappings`, such as "bf16"}. If some
        tensors have other types, "other_dtypes" maps the name of each such tensor to its type, as safetensors names it
        ("F32").
        """
        kinds = {name: self._places[name].kind for mapping in mappings for name, *_ in mapping.hf_tensors}
        sizes = Counter[str]()
        for name, kind in kinds.items():
            sizes[kind] += math.prod(self._places[name].shape)
        (most, _), *others = sizes.most_common()
        return {"dtype": _TYPES[most]} | (
            {"other_dtypes": {name: kind for name, kind in kinds.items() if kind != most}} if others else {}
        )

    def _are_equal(self, first: str, second: str) -> bool:
        """Return whether two tensors of the folder, given by their names, have the same shape, type and bits."""
        a, b = self._places[first], self._places[second]
        if (a.shape, a.kind) != (b.shape, b.kind):
            return False
        step = max(1, _COMPARED_AT_ONCE // max(1, a.shape[-1]))
        return all(
            torch.equal(*(self._read_rows(place, rows).contiguous().view(torch.uint8) for place in (a, b)))
            for rows in (range(at, min(at + step, a.shape[0])) for at in range(0, a.shape[0], step))
        )

    def weight_reader(self, settings: ModelSettings) -> Callable[[str], Tensor]:
        """Return a function that takes the name of a weight of lmtrain's model and reads it from the folder: the whole
        weight, joined from the tensors that hold its rows, in their type. `settings` are the model's.
        """
        mappings = {mapping.name: mapping for mapping in weight_mappings(settings, self.family)}

        def weight(name: str) -> Tensor:
            mapping = mappings[name]
            return torch.cat([
                self.read_part(mapping, place.tensor, place.rows) for place in mapping.places(range(mapping.shape[0]))
            ])  # fmt: skip

        return weight

    def read_part(self, mapping: WeightMapping, index: int, rows: range) -> Tensor:
        """Return rows of an lmtrain weight from the Hugging Face tensor at `index` of its mapping. `rows` are counted
        within that tensor.
        """
        return self._read_rows(self._places[mapping.hf_tensors[index].name], rows, transposed=mapping.transposed)

    def _read_rows(self, place: _TensorPlace, rows: range, *, transposed: bool = False) -> Tensor:
        with _load_errors(self.path / place.file):
            stored = self._open_weights(place.file).get_slice(place.name)
            part: Tensor = stored[:, rows.start : rows.stop].T if transposed else stored[rows.start : rows.stop]
            self._bytes_left -= part.nbytes
            return part

    def _find_tensors(self, family: object) -> dict[str, _TensorPlace]:
        """Return tensor name -> the tensor's file, its name there, shape and type, for all tensors in the folder. The
        names are made those of the model class with a head (such as GPT2LMHeadModel), whatever prefix the files use.
        `family` is the model_type in config.json. Raise CheckpointError if two tensors get the same name.
        """
        known = families().get(str(family))
        prefixes = ("",) if known is None else (known.prefix, *known.heads)
        result = dict[str, _TensorPlace]()
        for file in self._weight_files():
            with _load_errors(self.path / file):
                tensors = self._open_weights(file)
                for stored_name in tensors.keys():  # noqa: SIM118 - not a dict
                    name = stored_name
                    for old, new in _OTHER_NAMES.items():
                        name = name.replace(old, new) if name.endswith(old) else name
                    if not name.startswith(prefixes):
                        name = prefixes[0] + name  # a model that was saved without its heads
                    if name in result:
                        raise CheckpointError(
                            f"{self.path / file} holds {shorten(name)}, which was already found. Get the model again."
                        )
                    stored = tensors.get_slice(stored_name)
                    result[name] = _TensorPlace(file, stored_name, tuple(stored.get_shape()), str(stored.get_dtype()))
        decoder = result.pop("cls.predictions.decoder.bias", None)
        return result if decoder is None else {"cls.predictions.bias": decoder} | result

    def _weight_files(self) -> list[str]:
        if not has_shards(os.listdir(self.path)):
            return [WEIGHTS]
        weight_map = read_weight_map(path_in_folder(self.path, WEIGHTS_INDEX))
        files = sorted({name if isinstance(name, str) else "" for name in weight_map.values()})
        bad = [name for name in files if not is_safe_name(name) or not name.endswith(".safetensors")]
        if bad or not files:
            raise CheckpointError(
                f"{self.path / WEIGHTS_INDEX} names {shorten(bad[0]) if bad else 'no file'} as a file of weights. "
                "Use plain names that end in .safetensors."
            )
        return files

    def _mismatch(self, name: str, shape: tuple[int, ...]) -> list[str]:
        place = self._places.get(name)
        if place is None:
            return [f"{name} is missing"]
        if place.shape != shape:
            return [f"{name} has shape {list(place.shape)[:8]} and not {list(shape)}"]
        return [] if place.kind in _TYPES else [f"{name} is {place.kind}, which is none of {', '.join(_TYPES)}"]

    def _open_weights(self, name: str) -> Any:
        """Open the safetensors file `name` of the folder and return it; the next calls for the same file return it
        again, until 128 MiB of it have been read. Raise CheckpointError if it states an impossible size of its header.
        """
        if self._open_tensors is not None and self._open_tensors[0] == name and self._bytes_left > 0:
            return self._open_tensors[1]
        path = path_in_folder(self.path, name)
        with open_fd(path) as (fd, _):
            check_header_size(path, int.from_bytes(read_range(fd, 0, 8), "little"))
        self._open_tensors, self._bytes_left = (name, safe_open(path, framework="pt")), _REOPEN_BYTES
        return self._open_tensors[1]


@contextmanager
def _load_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise MissingInputError(f"{path} does not exist. Get the whole model.") from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read ({shorten(error)}). Get the file again.") from error
