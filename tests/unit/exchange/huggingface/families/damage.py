"""Ways to damage a Hugging Face folder, each with a word that a refusal has to say; several are parted by |."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lmtrain.exchange.huggingface.model_family_base import families
from tests.unit.exchange.huggingface.families.drawing import Config
from tests.unit.exchange.huggingface.families.keys import SETTINGS

Damage = Callable[[Path], None]
Tensors = dict[str, Tensor]
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD = "model-00001-of-00001.safetensors"


def damages(folder: Path, family: str) -> Iterator[tuple[str, str, Damage]]:
    """Yield (what is done, a word of the message, the function that does it to a copy of `folder`)."""
    tensors = load_file(folder / WEIGHTS)
    yield from _of_tensors(tensors)
    yield from _of_files(tensors)
    yield from _of_config(json.loads((folder / "config.json").read_text()), family)
    yield from _of_heads(tensors, family)


def _of_tensors(tensors: Tensors) -> Iterator[tuple[str, str, Damage]]:
    inside = [name for name in tensors if ".0." in name]
    outside = [name for name in tensors if not any(part.isdigit() for part in name.split("."))]
    for name in (*inside, *outside):
        yield f"{name} is removed", name, _change(_remove(name))
    for name in inside[:3]:
        yield f"{name} has another name", name, _change(_rename(name, f"{name}s"))
    for name in inside[:4]:
        yield f"{name} lacks a row", name, _change(_put(name, tensors[name][1:]))
    matrices = [name for name in inside if tensors[name].ndim == 2 and len(set(tensors[name].shape)) == 2]
    for name in matrices[:3]:
        yield f"{name} is transposed", name, _change(_put(name, tensors[name].T))
        yield f"{name} is flat", name, _change(_put(name, tensors[name].flatten()))
    for kind in (torch.float64, torch.int8, torch.bool):
        yield f"{inside[0]} is {kind}", inside[0], _change(_put(inside[0], tensors[inside[0]].to(kind)))
    bias = inside[0].rpartition(".")[0] + ".bias"
    if bias not in tensors:
        yield f"{bias} is more than there is", bias, _change(_put(bias, torch.zeros(4)))
    beyond = inside[0].replace(".0.", ".99.")
    yield "there is a layer more", beyond, _change(_put(beyond, tensors[inside[0]]))


def _of_files(tensors: Tensors) -> Iterator[tuple[str, str, Damage]]:
    yield "the weights are cut off", WEIGHTS, lambda folder: _cut(folder / WEIGHTS, -5)
    yield "the header is cut off", WEIGHTS, lambda folder: _cut(folder / WEIGHTS, 40)
    yield "the file is empty", WEIGHTS, lambda folder: _cut(folder / WEIGHTS, 0)
    yield "the header is longer than any", WEIGHTS, _long_header
    yield "the weights are missing", "safetensors", lambda folder: (folder / WEIGHTS).unlink()
    names = list(tensors)
    there = dict.fromkeys(names, SHARD)
    for word, places in (
        ("absent.safetensors", there | {names[0]: "absent.safetensors"}),
        ("../", there | {names[0]: "../x.safetensors"}), ("model.bin", there | {names[0]: "model.bin"}),
        (INDEX, {}), (INDEX, 3),
    ):  # fmt: skip
        yield f"the index is {str(places)[:40]}", word, _index(json.dumps({"weight_map": places}))
    yield "the index is no JSON", INDEX, _index("{")
    yield "a tensor is in two files", names[0], _twice(names[0], tensors[names[0]])
    yield "config.json is no JSON", "config.json", _write("config.json", "{")
    yield "config.json is a list", "config.json", _write("config.json", "[]")
    yield "config.json is missing", "config.json", lambda folder: (folder / "config.json").unlink()


def _of_config(config: Config, family: str) -> Iterator[tuple[str, str, Damage]]:
    defaults = families()[family].defaults
    for key, (setting,) in SETTINGS.items():
        if key in defaults and not key.endswith("softcapping"):  # because: 1.5 is a cap
            odd: tuple[Any, ...] = (-1, 0, "many", 1.5, [4], 10**30)
            for value in odd:
                yield f"{key} is {value}", f"{setting}|{key}", _set(key, value)
    for key in ("num_hidden_layers", "vocab_size", "intermediate_size"):
        for step in (-1, 1):
            yield f"{key} is {step} off", "", _set(key, config[key] + step)
    yield "model_type is another", "model_type", _set("model_type", "t5")
    yield "model_type is missing", "model_type", _set("model_type", None)
    yield "there is an unknown key", "twist", _set("twist", 2)
    yield "there is a key of other families", "embedding_scale", _set("embedding_scale", 2)
    if "rope_theta" in defaults:
        for base in (-1.0, 0, "far", [1e4]):
            yield f"rope_theta is {base}", "rotary_base|rope_theta=", _set_base(base)
        for scaling, word in (
            ({"rope_type": "twisted"}, "twisted"), ({"rope_type": "linear"}, "factor"),
            ({"rope_type": "linear", "factor": "x"}, "rotary_factor|linear"),
            ({"rope_type": "linear", "factor": -2.0}, "rotary_factor|linear"),
            ({"rope_type": "linear", "factor": 2.0, "odd": 1}, "odd"),
            ({"rope_type": "llama3", "factor": 2.0}, "low_freq_factor"),
            ({"rope_type": "longrope", "short_factor": [1.0]}, "long_factor"),
            ({"rope_type": ["linear"]}, "type"), ([1], "rope_scaling"), ("linear", "rope_scaling"),
            ({"rope_type": "dynamic", "factor": 2.0}, "dynamic"),
        ):  # fmt: skip
            if family == "olmo3":  # because: it compares the group with those of rope_parameters first
                word += "|rope_scaling would have to have all numbers"
            yield f"rope_scaling is {scaling}", word, _set("rope_scaling", scaling)


def _of_heads(tensors: Tensors, family: str) -> Iterator[tuple[str, str, Damage]]:
    names = families()[family].names.other_parts
    head, token = (f"{names[part][0]}.weight" for part in ("head", "embedding.token"))
    if head in tensors:
        yield "a tied model has another head", head, _set("tie_word_embeddings", True)
    else:
        yield "a tied model has another head", head, _change(_put(head, tensors[token] + 1))
        yield "an untied model has no head", head, _set("tie_word_embeddings", False)


def _change(change: Callable[[Tensors], object]) -> Damage:
    def damage(folder: Path) -> None:
        held = load_file(folder / WEIGHTS)
        change(held)
        save_file({name: value.contiguous() for name, value in held.items()}, folder / WEIGHTS)

    return damage


def _put(name: str, value: Tensor) -> Callable[[Tensors], object]:
    return lambda held: held.update({name: value.clone()})


def _remove(name: str) -> Callable[[Tensors], object]:
    return lambda held: held.pop(name)


def _rename(name: str, other: str) -> Callable[[Tensors], object]:
    return lambda held: held.update({other: held.pop(name)})


def _write(name: str, text: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).write_text(text)

    return damage


def _index(text: str) -> Damage:
    """Put the weights into a shard, with `text` as the index."""
    def damage(folder: Path) -> None:
        (folder / WEIGHTS).rename(folder / SHARD)
        (folder / INDEX).write_text(text)

    return damage


def _set(key: str, value: Any) -> Damage:
    def damage(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text()) | {key: value}
        (folder / "config.json").write_text(json.dumps(config))

    return damage


def _set_base(value: Any) -> Damage:
    def damage(folder: Path) -> None:
        _set("rope_theta", value)(folder)
        _set("rope_parameters", None)(folder)

    return damage


def _cut(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:num_bytes])


def _long_header(folder: Path) -> None:
    path = folder / WEIGHTS
    path.write_bytes(struct.pack("<Q", 1 << 40) + path.read_bytes()[8:])


def _twice(name: str, value: Tensor) -> Damage:
    def damage(folder: Path) -> None:
        held = load_file(folder / WEIGHTS)
        save_file({name: value.clone()}, folder / "more.safetensors")
        places = dict.fromkeys(held, SHARD) | {"another": "more.safetensors"}
        _index(json.dumps({"weight_map": places}))(folder)

    return damage
