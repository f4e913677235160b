"""What a folder of another program is: named, or refused by name with a way out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lmtrain.errors import CheckpointError, LmtrainError, MissingInputError, UsageError
from lmtrain.exchange.detect_model_folder_format import identify_source
from lmtrain.start.find_model_at_path import find_model

LLAMA = {"model_type": "llama"}
INDEX = "model.safetensors.index.json"
TRACKER = "latest_checkpointed_iteration.txt"


def folder(path: Path, *empty: str, **contents: Any) -> Path:
    """A folder with these files: empty ones, and those with JSON or bytes, whose `__` stand for a dot."""
    path.mkdir(parents=True, exist_ok=True)
    for name in empty:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).touch()
    for name, content in contents.items():
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        (path / name.replace("__", ".")).write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("files", "contents", "kind", "words"),
    [
        (["model.safetensors"], {"config__json": LLAMA}, "safetensors", "a Hugging Face folder"),
        (["a.safetensors", "tokenizer.json"], {
            "config__json": LLAMA, "model__safetensors__index__json": {"weight_map": {"x": "a.safetensors"}}
        }, "safetensors", "a Hugging Face folder"),
        (["model.safetensors"], {
            "config__json": LLAMA, "model__safetensors__index__json": {"weight_map": {"x": "absent.safetensors"}}
        }, "safetensors", "a Hugging Face folder"),
        (["mp_rank_00/model_optim_rng.pt"], {}, "torch", "a Megatron-LM checkpoint in the format torch"),
        (["mp_rank_01_003/model_optim_rng.pt"], {}, "torch", "a Megatron-LM checkpoint in the format torch"),
        ([".metadata", "common.pt", "__0_0.distcp", "metadata.json"], {}, "torch_dist",
         "a Megatron-LM checkpoint in the format torch_dist"),
        ([TRACKER, "iter_0000010/.metadata", "iter_0000005/mp_rank_00/a.pt"], {}, "torch_dist",
         "a Megatron-LM checkpoint in the format torch_dist"),
        ([TRACKER, "release/mp_rank_00/model_optim_rng.pt"], {}, "torch",
         "a Megatron-LM checkpoint in the format torch"),
    ],
)  # fmt: skip
def test_a_folder_is_named(
    tmp_path: Path, files: list[str], contents: dict[str, Any], kind: str, words: str
) -> None:
    found = identify_source(folder(tmp_path / "m", *files, **contents))
    assert (found.files, str(found)) == (kind, words)
    assert identify_source(tmp_path / "m", found.program) == found
    other = "megatron" if found.program == "hf" else "hf"
    with pytest.raises(UsageError, match=rf"m is a .*Use --format {found.program}\.$"):
        identify_source(tmp_path / "m", other)  # type: ignore[arg-type]


WRONG: dict[str, tuple[list[str], dict[str, Any], type[LmtrainError], str]] = {
    "empty": ([], {}, MissingInputError, "is an empty folder. Give the folder of a Hugging Face model"),
    "nothing known": (["a.csv", "b.csv"], {}, MissingInputError, "no model that can be imported (it has a.csv, b.csv)"),
    "gguf": (["model.Q4_K_M.gguf"], {}, CheckpointError, "GGUF files, which are quantized for llama.cpp"),
    "gguf beside a config": (["a.gguf"], {"config__json": LLAMA}, CheckpointError, "has GGUF files"),
    "pickle": (["pytorch_model.bin"], {"config__json": LLAMA}, CheckpointError,
               "its weights in pytorch_model.bin, a pickle, which can run code when it is read. Save the model again "
               "with transformers"),
    "pickles": (["pytorch_model.bin.index.json", "pytorch_model-00001-of-00002.bin"], {"config__json": LLAMA},
                CheckpointError, "a pickle, which can run code"),
    "tensorflow": (["tf_model.h5"], {"config__json": LLAMA}, CheckpointError, "tf_model.h5, a file of TensorFlow"),
    "llama's own": (["consolidated.00.pth", "params.json"], {}, CheckpointError, "Get the same model in transformers'"),
    "missing shard": (["a.safetensors"], {
        "config__json": LLAMA, "model__safetensors__index__json": {
            "weight_map": {"x": "a.safetensors", "y": "b.safetensors", "z": "c.safetensors"}
        }}, CheckpointError, f"is half a download: {INDEX} names 3 files and 2 of them are missing (b.safetensors)"),
    "unfinished": (["model.safetensors", ".cache/huggingface/download/ab12.incomplete"], {"config__json": LLAMA},
                   CheckpointError, "ab12.incomplete is unfinished. Run the download again"),
    "pointer": ([], {"config__json": LLAMA, "model__safetensors": b"version https://git-lfs.github.com/spec/v1\noid"},
                CheckpointError, "a pointer of git-lfs"),
    "adapter": (["adapter_config.json", "adapter_model.safetensors"], {}, CheckpointError,
                "is an adapter of peft (adapter_config.json), not a whole model. Merge it"),
    "adapter beside a config": (["adapter_config.json"], {"config__json": LLAMA}, CheckpointError, "Merge it"),
    "auto_map": (["model.safetensors"], {"config__json": LLAMA | {"auto_map": {"AutoModel": "m.M"}}}, CheckpointError,
                 "needs code of its own (auto_map in config.json), which lmtrain never runs"),
    "auto_map of another class": (["model.safetensors", "modeling_phi3.py"], {"config__json": {
        "model_type": "phi3", "architectures": ["Phi3ForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "modeling_phi3.Phi3SparseForCausalLM"},
    }}, CheckpointError, "needs code of its own (auto_map in config.json)"),
    "code": (["model.safetensors", "modeling_new.py"], {"config__json": LLAMA}, CheckpointError, "(modeling_new.py)"),
    "quantized": (["model.safetensors"], {"config__json": LLAMA | {"quantization_config": {"quant_method": "awq"}}},
                  CheckpointError, "holds quantized weights (awq)"),
    "no weights": ([], {"config__json": LLAMA}, MissingInputError, "has no model.safetensors"),
    "no config": (["model.safetensors"], {}, MissingInputError, "has weights and no config.json"),
    "tokenizer": (["tokenizer.json", "merges.txt"], {}, MissingInputError, "holds a tokenizer and no model"),
    "deepspeed": (["latest", "global_step5/mp_rank_00_model_states.pt"], {}, CheckpointError, "of DeepSpeed"),
    "zarr": (["metadata.json", "w/.zarray"], {}, CheckpointError, "in the format zarr"),
    "checkpoint": (["manifest.json", "rank_00000.safetensors"], {}, UsageError,
                   "is a checkpoint of lmtrain already, and needs no import. Begin a run from its weights with "
                   "`lmtrain pretrain checkpoint.init_from="),
    "checkpoints": (["step_00000000/manifest.json"], {}, UsageError, "is a folder of checkpoints of lmtrain already"),
    "run": (["metrics.jsonl", "checkpoints/step_00000001/manifest.json"], {"config__json": {"model": {}}}, UsageError,
            "is a run of lmtrain already"),
    "two programs": (["model.safetensors", "mp_rank_00/a.pt"], {"config__json": LLAMA}, UsageError,
                     "Add --format hf or --format megatron"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_folders_are_named_with_a_way_out(tmp_path: Path, name: str) -> None:
    files, contents, kind, says = WRONG[name]
    with pytest.raises(kind) as caught:
        identify_source(folder(tmp_path / "m", *files, **contents))
    assert says in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path / "m"))
    assert str(caught.value).endswith(".")


def test_a_model_to_load_is_judged_likewise(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin, a pickle"):
        find_model(folder(tmp_path / "m", "pytorch_model.bin", config__json=LLAMA))


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda path: path / "none", "does not exist. Give the folder"),
        (lambda path: Path("gpt-neox/pythia-70m"), "`hf download gpt-neox/pythia-70m --local-dir pythia-70m` fetches"),
        (lambda path: folder(path, "config.json", "model.safetensors") / "model.safetensors", "Give its folder, "),
        (lambda path: folder(path, "a.gguf") / "a.gguf", "GGUF files"),
        (lambda path: folder(path, "words.txt") / "words.txt", "words.txt is a file. Give the folder"),
    ],
)
def test_a_path_that_is_no_folder(tmp_path: Path, made: Callable[[Path], Path], says: str) -> None:
    with pytest.raises((MissingInputError, CheckpointError)) as caught:
        identify_source(made(tmp_path))
    assert says in str(caught.value)
