"""A folder of Hugging Face's as data: config.json and safetensors files, by one name for each tensor.

Called by import and by export's own check. Nothing in the folder runs: pickled weights and remote code are never
opened. Names of files are plain names in this folder; links are followed only as the hub's own cache lays them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lmtrain.errors import CheckpointError, DataError, MissingInputError, join_few, shorten
from lmtrain.exchange.huggingface.config import Match, matches, settings_of
from lmtrain.models.model_settings import ModelSettings
from lmtrain.runtime.files.files import is_safe_name, open_fd, read_json, read_range

_INDEX = "model.safetensors.index.json"
_PREFIXES = {"gpt2": "transformer.", "llama": "model.", "mistral": "model.", "bert": "bert.", "megatron-bert": "bert."}
_UNUSED = (".attn.bias", ".attn.masked_bias", ".inv_freq", ".position_ids")  # tables that can be computed
_SECOND_NAMES = ("lm_head.weight", "cls.predictions.decoder.weight")  # of the embedding, where the two are tied
_AT_ONCE = 1 << 20  # numbers that are compared
_OTHER_NAMES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}  # BERT's first ones
_TYPES = ("F32", "F16", "BF16")
_MAX_HEADER_BYTES = 32 << 20
_KEPT_BYTES = 128 << 20  # because: what was read of an open file counts as our memory


class _Found(NamedTuple):
    """A tensor of the folder: its file, its name there, its shape and its type."""

    file: str
    name: str
    shape: tuple[int, ...]
    kind: str


class HFFolder:
    """An opened folder. `family` and `settings` say what it is, `rows` reads."""

    def __init__(self, path: Path, dropout: object = None) -> None:
        """`dropout`: what the user chooses instead of what config.json says."""
        self.path = path
        if not path.is_dir():
            raise MissingInputError(f"{path} is not a folder. Give one with config.json and model.safetensors.")
        self._last: tuple[str, Any] | None = None
        self._left = 0
        config = read_json(self._file("config.json"))
        where = path / "config.json"
        self._where = self._find(config.get("model_type") if isinstance(config, dict) else None)
        self.family, self.settings = settings_of(
            config, where, pair_head="cls.seq_relationship.weight" in self._where, dropout=dropout
        )
        layers = self.settings.shape.num_layers
        if layers > len(self._where):
            # because: the weights of a model are listed by name before they are looked for
            raise CheckpointError(
                f"{where} tells of {layers} layers and the files hold {len(self._where)} tensors. "
                "Get the whole model again."
            )

    def matches(self) -> list[Match]:
        """Return all of the model's weights; raise unless each is there in its shape and no other weight is."""
        found = list(matches(self.settings, self.family))
        asked = {name: match.their_shape(rows) for match in found for name, rows in match.theirs}
        wrong = [text for name, shape in asked.items() for text in self._difference(name, shape)]
        tied = {name for name in _SECOND_NAMES if name in self._where} if self.settings.ties() else set()
        others = sorted(self._where.keys() - asked.keys() - tied)
        wrong += [f"{shorten(name)} has no place in this model" for name in others if not name.endswith(_UNUSED)]
        if wrong:
            raise CheckpointError(
                f"{self.path} does not hold the model of its config.json: {join_few(wrong, '; ')}. "
                "Give the folder of a pretraining model of this architecture."
            )
        first = next(match.theirs[0][0] for match in found if match.name == "embedding.token.weight")
        for name in sorted(tied):
            if not self._are_one(first, name):
                raise CheckpointError(
                    f"{self.path} holds {name} with other numbers than {first}, and its config.json says that they are "
                    "one weight. Set tie_word_embeddings to false there if they are not; otherwise get the model again."
                )
        return found

    def _are_one(self, first: str, second: str) -> bool:
        """Return whether two tensors are equal, bit for bit."""
        a, b = self._where[first], self._where[second]
        if (a.shape, a.kind) != (b.shape, b.kind):
            return False
        step = max(1, _AT_ONCE // max(1, a.shape[-1]))
        return all(
            torch.equal(*(self._rows(found, rows).contiguous().view(torch.uint8) for found in (a, b)))
            for rows in (range(at, min(at + step, a.shape[0])) for at in range(0, a.shape[0], step))
        )

    def weights(self, settings: ModelSettings) -> Callable[[str], Tensor]:
        """Our weights by our names, made of theirs."""
        known = {match.name: match for match in matches(settings, self.family)}

        def weight(name: str) -> Tensor:
            match = known[name]
            return torch.cat([self.part(match, i, range(rows)) for i, (_, rows) in enumerate(match.theirs)])

        return weight

    def part(self, match: Match, index: int, rows: range) -> Tensor:
        """Return some of our rows that a foreign tensor holds."""
        return self._rows(self._where[match.theirs[index][0]], rows, turned=match.turned)

    def _rows(self, found: _Found, rows: range, *, turned: bool = False) -> Tensor:
        with _readable(self.path / found.file):
            stored = self._opened(found.file).get_slice(found.name)
            part: Tensor = stored[:, rows.start : rows.stop].T if turned else stored[rows.start : rows.stop]
            self._left -= part.nbytes
            return part

    def _find(self, family: object) -> dict[str, _Found]:
        """Return where each tensor is, by its name in the pretraining model of transformers."""
        prefix, result = _PREFIXES.get(str(family), ""), dict[str, _Found]()
        for file in self._weight_files():
            with _readable(self.path / file):
                tensors = self._opened(file)
                for theirs in tensors.keys():  # noqa: SIM118 - not a dict
                    name = theirs
                    for old, new in _OTHER_NAMES.items():
                        name = name.replace(old, new) if name.endswith(old) else name
                    if not name.startswith((prefix, "lm_head.", "cls.")):
                        name = prefix + name  # a model that was saved without its heads
                    if name in result:
                        raise CheckpointError(
                            f"{self.path / file} holds {shorten(name)} a second time. Get it again."
                        )
                    stored = tensors.get_slice(theirs)
                    result[name] = _Found(file, theirs, tuple(stored.get_shape()), str(stored.get_dtype()))
        decoder = result.pop("cls.predictions.decoder.bias", None)
        return result if decoder is None else {"cls.predictions.bias": decoder} | result

    def _weight_files(self) -> list[str]:
        if (self.path / _INDEX).exists():
            places = read_json(self._file(_INDEX))
            named = places.get("weight_map") if isinstance(places, dict) else None
            values = named.values() if isinstance(named, dict) else ()
            files = sorted({name if isinstance(name, str) else "" for name in values})
            bad = [name for name in files if not is_safe_name(name) or not name.endswith(".safetensors")]
            if bad or not files:
                raise CheckpointError(
                    f"{self.path / _INDEX} names {shorten(bad[0]) if bad else 'no file'}. "
                    "Use plain names of files here."
                )
            return files
        if (self.path / "model.safetensors").exists():
            return ["model.safetensors"]
        for name in ("pytorch_model.bin", "pytorch_model.bin.index.json"):
            if (self.path / name).exists():
                raise CheckpointError(
                    f"{self.path} has its weights in {name}, a pickle, which can run code when it is read. "
                    "Save the model again with transformers: save_pretrained(DIR) writes safetensors."
                )
        raise MissingInputError(f"{self.path} has no model.safetensors. Give the folder of a whole model.")

    def _file(self, name: str) -> Path:
        """Return the path of a file in this folder; a link must stay in it, or lead to the blobs of the hub's cache."""
        path = self.path / name
        if path.is_symlink():
            real, home = Path(os.path.realpath(path)), self.path.resolve()
            homes = [home, *([home.parents[1] / "blobs"] if home.parent.name == "snapshots" else [])]
            if not any(real.is_relative_to(place) for place in homes):
                raise DataError(f"{path} is a link that leads out of its folder. Put the file itself in its place.")
        return path

    def _difference(self, name: str, shape: tuple[int, ...]) -> list[str]:
        found = self._where.get(name)
        if found is None:
            return [f"{name} is missing"]
        if found.shape != shape:
            return [f"{name} has shape {list(found.shape)[:8]} and not {list(shape)}"]
        return [] if found.kind in _TYPES else [f"{name} is {found.kind}, which is none of {', '.join(_TYPES)}"]

    def _opened(self, name: str) -> Any:
        """Open a file of tensors, kept open for the next part; raise if its header claims an impossible length."""
        if self._last is not None and self._last[0] == name and self._left > 0:
            return self._last[1]
        path = self._file(name)
        with open_fd(path) as (fd, _):
            header_bytes = int.from_bytes(read_range(fd, 0, 8), "little")
        if header_bytes > _MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{path} cannot be read: it claims a header of {header_bytes} bytes, and no list of tensors has more "
                f"than {_MAX_HEADER_BYTES}. Get it again."
            )
        self._last, self._left = (name, safe_open(path, framework="pt")), _KEPT_BYTES
        return self._last[1]


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise MissingInputError(f"{path} does not exist. Get the whole model.") from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read ({shorten(error)}). Get it again.") from error
