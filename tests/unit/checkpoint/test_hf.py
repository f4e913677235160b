"""Export loads in transformers with the same scores, import of it is the same to the bit, and the rest is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lmtrain.checkpoint.reader import CheckpointReader
from lmtrain.errors import CheckpointError, DataError, MissingInputError, OutputError, UsageError
from lmtrain.exchange.huggingface.config import family_of, settings_of
from lmtrain.exchange.huggingface.exporter import compare, export_hf
from lmtrain.exchange.huggingface.importer import import_hf
from lmtrain.exchange.scores import answers, random_batch
from lmtrain.models.model_settings import ModelSettings
from tests.unit.checkpoint.models import bert, gpt2, llama, random_weights, same_weights, save, tokenizer_for

MODELS: dict[str, tuple[str, ModelSettings]] = {
    "gpt2": ("gpt2", gpt2()),
    "gpt2-untied-gelu": ("gpt2", gpt2(tied=False, activation="gelu")),
    "llama": ("llama", llama()),
    "llama-tied-bias": ("llama", llama(tied=True, bias=True, rotary_base=500000.0)),
    "mistral": ("mistral", llama(window=9)),
    "bert": ("bert", bert()),
    "bert-one-head": ("bert", bert(pair_head=False)),
    "megatron-bert": ("megatron-bert", bert(norm_order="pre")),
    "bert-tanh": ("bert", bert(activation="gelu_tanh", head_activation="gelu_tanh")),
}


@pytest.mark.parametrize("name", MODELS)
def test_transformers_loads_an_export_and_import_gives_it_back(name: str, tmp_path: Path) -> None:
    family, settings = MODELS[name]
    source = save(tmp_path / "run", settings)
    facts = export_hf(source, tmp_path / "hf", shard_bytes=60_000)
    assert facts["model_type"] == family
    assert facts["compared_with"].startswith("transformers")
    assert facts["largest_difference"] < 1e-5
    assert facts["num_files"] > 1
    back = Path(import_hf(tmp_path / "hf", tmp_path / "back")["checkpoint"])
    assert same_weights(source, back)
    found = CheckpointReader(back).state["model"]
    assert found == settings.to_dict()
    scores = answers(settings, lambda n: CheckpointReader(back).read(f"model.{n}"), random_batch(settings))
    assert scores[0].std() > 0.1


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_the_tokenizer_gives_the_same_ids(name: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    settings = MODELS[name][1]
    export_hf(save(tmp_path / "run", settings), tmp_path / "hf", check=False)
    ours, theirs = tokenizer_for(settings), AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = "the cat sat on a hill"
    assert theirs(text, add_special_tokens=False)["input_ids"] == ours.encode(text)
    if name == "bert":
        first, second = ours.encode("the cat"), ours.encode("a dog")
        cls, sep = ours.special["cls"], ours.special["sep"]
        pair = theirs("the cat", "a dog")
        assert pair["input_ids"] == [cls, *first, sep, *second, sep]
        assert pair["token_type_ids"] == [0] * (len(first) + 2) + [1] * (len(second) + 1)
    else:
        assert theirs.eos_token_id == ours.eod_id
    assert theirs.model_max_length == settings.shape.seq_len


def test_one_small_export_is_one_file_and_says_its_types(tmp_path: Path) -> None:
    facts = export_hf(save(tmp_path / "run", llama()), tmp_path / "hf", dtype="bf16")
    assert facts["num_files"] == 1
    assert 0 < facts["largest_difference"] < 0.5
    held = load_file(tmp_path / "hf" / "model.safetensors")
    assert {tensor.dtype for tensor in held.values()} == {torch.bfloat16}
    assert len(held["model.embed_tokens.weight"]) == 331  # no rows of padding
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "special_tokens_map.json", "tokenizer.json",
        "tokenizer_config.json",
    ]  # fmt: skip


def test_an_export_that_is_another_model_is_found(tmp_path: Path) -> None:
    settings = llama()
    export_hf(save(tmp_path / "run", settings), tmp_path / "hf", check=False)
    weights = random_weights(settings)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
    with pytest.raises(CheckpointError, match=r"transformers .* scores random tokens .* off"):
        compare(tmp_path / "hf", settings, weights.__getitem__, exact=True)
    weights["blocks.1.mlp.up.weight"][3, 4] += 1
    with pytest.raises(CheckpointError, match="does not hold the source's weights"):
        compare(tmp_path / "hf", settings, weights.__getitem__, exact=True)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (gpt2(parallel_block=True), "model.parallel_block=true"),
        (gpt2(bias=False), "model.bias=false"),
        (gpt2(norm="rmsnorm", window=5), "model.norm=rmsnorm .*; model.window=5"),
        (gpt2(num_kv_heads=2), "model.num_kv_heads=2 would have to be 4"),
        (gpt2(head_width=16), "model.head_width=16"),
        (llama(activation="gelu"), "nearest is llama, .* model.activation=gelu would have to be swiglu"),
        (llama(window=5, bias=True), "nearest is mistral, .* model.bias=true"),
        (bert(activation="gelu_tanh"), "model.head_activation=gelu would have to be model.activation=gelu_tanh"),
    ],
)
def test_a_model_that_none_of_theirs_equals_is_refused(settings: ModelSettings, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        family_of(settings)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "t5"}, "model_type t5"),
        ({"model_type": ["gpt2"]}, "model_type"),
        ([], "model_type null"),
        ({"model_type": "gpt2", "activation_function": "relu"}, "activation_function=relu"),
        ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=true"),
        ({"model_type": "llama", "rope_scaling": {"rope_type": "llama3", "factor": 8}}, "type llama3"),
        ({"model_type": "llama", "attention_bias": True}, "mlp_bias=false would have to be true"),
        ({"model_type": "llama", "hidden_size": "many"}, "model.width=many"),
        ({"model_type": "bert", "hidden_act": "relu", "type_vocab_size": 1}, "hidden_act=relu .*type_vocab_size=1"),
    ],
)
def test_a_config_that_asks_for_what_we_lack_is_refused(config: Any, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        settings_of(config, "config.json", pair_head=True)


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    export_hf(save(tmp_path / "run", gpt2()), tmp_path / "hf", check=False)
    return tmp_path / "hf"


def test_names_of_files_are_never_paths(exported: Path, tmp_path: Path) -> None:
    index = {"weight_map": {"transformer.wte.weight": "../outside.safetensors"}}
    (exported / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="Use plain names"):
        import_hf(exported, tmp_path / "back")
    (exported / "model.safetensors.index.json").unlink()
    (exported / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    (exported / "model.safetensors").symlink_to(tmp_path / "elsewhere.safetensors")
    with pytest.raises(DataError, match="leads out of its folder"):
        import_hf(exported, tmp_path / "back")


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
    with pytest.raises(CheckpointError, match=r"transformer\.h\.0\.adapter\.weight has no place"):
        import_hf(exported, tmp_path / "back")
    save_file({name: tensor for name, tensor in held.items() if name != "transformer.ln_f.bias"}, path)
    with pytest.raises(CheckpointError, match=r"transformer\.ln_f\.bias is missing"):
        import_hf(exported, tmp_path / "back")
    save_file(held | {"transformer.wpe.weight": torch.zeros(3, 48)}, path)
    with pytest.raises(CheckpointError, match=r"has shape \[3, 48\] and not \[40, 48\]"):
        import_hf(exported, tmp_path / "back")
    path.write_bytes(b"\xff" * 100)
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        import_hf(exported, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_old_names_and_bare_models_are_known(exported: Path, tmp_path: Path) -> None:
    """The hub's first GPT-2 has no prefix and holds its masks; nothing of that changes the weights."""
    held = load_file(exported / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in held.items()}
    save_file(bare | {"h.0.attn.bias": torch.ones(1, 1, 40, 40)}, exported / "model.safetensors")
    back = Path(import_hf(exported, tmp_path / "back")["checkpoint"])
    assert same_weights(back, tmp_path / "run" / "step_00000007")


def test_output_is_never_mixed_with_what_is_there(exported: Path, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="not empty"):
        export_hf(tmp_path / "run", exported)
    with pytest.raises(UsageError, match="--dtype=int8"):
        export_hf(tmp_path / "run", tmp_path / "other", dtype="int8")
    import_hf(exported, tmp_path / "back")
    with pytest.raises(OutputError, match="holds a checkpoint already"):
        import_hf(exported, tmp_path / "back")


def test_every_byte_is_told(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    source = save(tmp_path / "run", gpt2())
    export_hf(
        source,
        tmp_path / "hf",
        check=False,
        shard_bytes=60_000,
        progress=lambda done, total: told.append((done, total)),
    )
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1] == 4 * gpt2().num_parameters
