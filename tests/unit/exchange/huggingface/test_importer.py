"""What a folder of Hugging Face's may hold, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lmtrain.errors import CheckpointError, DataError, MissingInputError, OutputError, UsageError
from lmtrain.exchange.huggingface.config_json import settings_from_config, tensor_names
from lmtrain.exchange.huggingface.import_and_export import export_hf, import_hf
from lmtrain.exchange.import_foreign_model import import_folder
from tests.unit.exchange.models import gpt2, same_weights, save


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    export_hf(save(tmp_path / "run", gpt2()), tmp_path / "hf", check=False)
    return tmp_path / "hf"


def test_names_of_files_are_never_paths(exported: Path, tmp_path: Path) -> None:
    index = {"weight_map": {"transformer.wte.weight": "../outside.safetensors"}}
    (exported / "model.safetensors.index.json").write_text(json.dumps(index))
    (exported / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    with pytest.raises(CheckpointError, match="Use plain names"):
        import_hf(exported, tmp_path / "back")
    (exported / "model.safetensors.index.json").unlink()
    (exported / "model.safetensors").symlink_to(tmp_path / "elsewhere.safetensors")
    with pytest.raises(DataError, match="is a symbolic link out of its folder"):
        import_hf(exported, tmp_path / "back")


@pytest.mark.parametrize("has_stale_shard", [True, False])
def test_one_file_is_read_in_place_of_the_shards_of_an_earlier_save(
    exported: Path, tmp_path: Path, has_stale_shard: bool
) -> None:
    expected = import_hf(exported, tmp_path / "alone")["checkpoint"]
    weights = load_file(exported / "model.safetensors")
    if has_stale_shard:
        save_file({name: value + 1 for name, value in weights.items()}, exported / "shard.safetensors")
    index = {"weight_map": dict.fromkeys(weights, "shard.safetensors") | {"cls.seq_relationship.weight": "shard"}}
    (exported / "model.safetensors.index.json").write_text(json.dumps(index))
    assert same_weights(Path(import_hf(exported, tmp_path / "beside")["checkpoint"]), Path(expected))
    assert tensor_names(exported) - {"__metadata__"} == weights.keys()


def test_the_hubs_own_links_are_followed(exported: Path, tmp_path: Path) -> None:
    cache, snapshot = tmp_path / "models--a--b", tmp_path / "models--a--b" / "snapshots" / "0f"
    (cache / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(exported.iterdir())):
        path.rename(cache / "blobs" / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    assert import_hf(snapshot, tmp_path / "back")["model_type"] == "gpt2"


def test_pickled_weights_are_not_opened(exported: Path, tmp_path: Path) -> None:
    (exported / "model.safetensors").rename(exported / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="a pickle, which can run code"):
        import_hf(exported, tmp_path / "back")
    (exported / "pytorch_model.bin").unlink()
    with pytest.raises(MissingInputError, match=r"no model\.safetensors"):
        import_hf(exported, tmp_path / "back")


def test_weights_that_are_not_the_configs_are_refused(exported: Path, tmp_path: Path) -> None:
    path = exported / "model.safetensors"
    held = load_file(path)
    save_file({**held, "transformer.h.0.adapter.weight": torch.zeros(2)}, path)
    with pytest.raises(CheckpointError, match=r"transformer\.h\.0\.adapter\.weight is not a weight of this"):
        import_hf(exported, tmp_path / "back")
    save_file({name: tensor for name, tensor in held.items() if name != "transformer.ln_f.bias"}, path)
    with pytest.raises(CheckpointError, match=r"transformer\.ln_f\.bias is missing"):
        import_hf(exported, tmp_path / "back")
    save_file(held | {"transformer.wpe.weight": torch.zeros(3, 48)}, path)
    with pytest.raises(CheckpointError, match=r"has shape \[3, 48\] and not \[40, 48\]"):
        import_hf(exported, tmp_path / "back")
    path.write_bytes(b"\xff" * 100)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged: it states a header"):
        import_hf(exported, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_old_names_and_bare_models_are_known(exported: Path, tmp_path: Path) -> None:
    """The hub's first GPT-2 has no prefix and holds its masks; nothing of that changes the weights."""
    held = load_file(exported / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in held.items()}
    save_file(bare | {"h.0.attn.bias": torch.ones(1, 1, 40, 40)}, exported / "model.safetensors")
    back = Path(import_hf(exported, tmp_path / "back")["checkpoint"])
    assert same_weights(back, tmp_path / "run" / "step_00000007")


def test_a_second_copy_of_a_tied_weight_is_the_same_or_refused(exported: Path, tmp_path: Path) -> None:
    path = exported / "model.safetensors"
    held = load_file(path)
    table = held["transformer.wte.weight"]
    save_file(held | {"lm_head.weight": table.clone()}, path)
    import_hf(exported, tmp_path / "same")
    for second in (table + (table == table[-1, -1]), table.half(), table[:-1].clone()):
        save_file(held | {"lm_head.weight": second}, path)
        with pytest.raises(CheckpointError, match=r"holds different numbers for lm_head\.weight and transformer\.wte"):
            import_hf(exported, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_output_is_never_mixed_with_what_is_there(exported: Path, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="not empty"):
        export_hf(tmp_path / "run", exported)
    with pytest.raises(UsageError, match="--dtype=int8"):
        export_hf(tmp_path / "run", tmp_path / "other", dtype="int8")
    import_folder(exported, tmp_path / "back")
    assert import_folder(exported, tmp_path / "back").keys() == {"checkpoint"}  # it is there already
    with pytest.raises(OutputError, match="step_00000000 is there already"):
        import_folder(exported, tmp_path / "back", overrides={"dropout": 0.5})
    assert "settings" in import_folder(exported, tmp_path / "back", overrides={"dropout": 0.5}, overwrite=True)
    for output in (exported / "back", exported):
        with pytest.raises(OutputError, match="which is only read"):
            import_folder(exported, output)


@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral", "bert", "megatron-bert"])
def test_what_a_config_leaves_out_is_what_transformers_takes_for_it(family: str) -> None:
    from transformers import AutoConfig

    told = AutoConfig.for_model(family).to_dict()
    found = [settings_from_config(config, "here", pair_head=True)[1] for config in ({"model_type": family}, told)]
    silent, explicit = (one.to_dict() | {"num_kv_heads": one.shape.num_kv_heads} for one in found)
    assert silent == explicit
