"""What an imported folder holds besides weights comes back as it came."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lmtrain.checkpoint.tensor_reader import CheckpointReader
from lmtrain.errors import CheckpointError, DataError
from lmtrain.exchange.huggingface.config_json import restored_config, settings_from_config
from lmtrain.exchange.huggingface.exported_tokenizer_files import tokenizer_class_to_load
from lmtrain.exchange.huggingface.import_and_export import export_hf, import_hf
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer
from lmtrain.tokenizer.train import train_wordpiece
from tests.unit.exchange.huggingface.published import TOKENIZERS, exported, publish, small_files
from tests.unit.exchange.models import bert, gpt2, llama

CLASSES = {"wordpiece": "BertTokenizer", "cased": "BertTokenizerFast", "bpe": "GPT2Tokenizer"}
ADDED_KEYS = {"dtype", "torch_dtype", "rope_theta", "rope_parameters", "transformers_version", "architectures"}


@pytest.fixture
def published(tmp_path: Path) -> Path:
    folder = exported(tmp_path, llama(vocab_size=450), TOKENIZERS["llama"]())
    publish(folder)
    return folder


def and_back(folder: Path, name: str = "again", **options: Any) -> Path:
    """The folder as it comes back from an import and an export."""
    checkpoint = import_hf(folder, folder.parent / f"{name}_imported")["checkpoint"]
    export_hf(Path(checkpoint), folder.parent / name, check=False, **options)
    return folder.parent / name


def test_small_files_come_back_byte_for_byte(published: Path) -> None:
    came = small_files(published)
    returned = small_files(and_back(published))
    assert returned.keys() == came.keys()
    assert {name for name in came if came[name] != returned[name]} == {"config.json"}
    config = json.loads(returned["config.json"])
    assert json.loads(came["config.json"]).items() <= config.items()
    assert config.keys() - json.loads(came["config.json"]).keys() <= ADDED_KEYS


def test_they_are_hashed_files_of_the_checkpoint(published: Path, tmp_path: Path) -> None:
    path = Path(import_hf(published, tmp_path / "imported")["checkpoint"])
    kept = CheckpointReader(path).read_extra_files("huggingface.")
    assert kept["huggingface.generation_config.json"] == (published / "generation_config.json").read_bytes()
    assert "huggingface.additional_chat_templates.tool_use.jinja" in kept
    (path / "huggingface.generation_config.json").write_text("{}")
    with pytest.raises(DataError, match=r"huggingface\.generation_config\.json"):
        export_hf(path, tmp_path / "hf", check=False)


@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral", "bert", "megatron-bert"])
def test_a_config_that_leaves_all_out_comes_back_with_no_more_than_types(family: str) -> None:
    original = {"model_type": family, "eos_token_id": [1, 2], "_note": "x"}
    _, settings = settings_from_config(original, "here", pair_head=True)
    config = restored_config(settings, original, {"eod": 5}, "bfloat16")
    assert original.items() <= config.items()
    assert config.keys() - original.keys() <= ADDED_KEYS


def test_settings_that_have_changed_since_are_exported_as_they_are_now() -> None:
    original = {"model_type": "llama", "max_position_embeddings": 64, "attention_dropout": 0.0, "eos_token_id": 9}
    _, settings = settings_from_config(original | {"rms_norm_eps": 1e-5}, "here", pair_head=False)
    config = restored_config(settings, original, {}, "float32")
    assert (config["rms_norm_eps"], config["eos_token_id"]) == (1e-5, 9)
    original = {"model_type": "gpt2", "num_attention_heads": 6, "resid_pdrop": 0.3}
    _, settings = settings_from_config(original, "here", pair_head=False, dropout=0.2)
    config = restored_config(settings, original, {}, "float32")
    assert [config[key] for key in ("resid_pdrop", "embd_pdrop", "attn_pdrop")] == [0.2] * 3
    assert (config["n_head"], "num_attention_heads" in config) == (6, False)


@pytest.mark.parametrize(("trained", "written"), [(32, 64), (64, 64), (128, 128)])
def test_training_on_short_texts_leaves_the_longest_text_as_it_was(trained: int, written: int) -> None:
    original = {"model_type": "llama", "max_position_embeddings": 64}
    _, settings = settings_from_config(original | {"max_position_embeddings": trained}, "here", pair_head=False)
    assert restored_config(settings, original, {}, "float32")["max_position_embeddings"] == written


def test_ids_stay_when_the_family_has_changed() -> None:
    original = {"model_type": "llama", "eos_token_id": [3, 4], "hidden_size": 8}
    config = restored_config(llama(window=4), original, {"eod": 1}, "float32")
    assert (config["model_type"], config["hidden_size"], config["eos_token_id"]) == ("mistral", 48, [3, 4])


def test_the_first_token_of_documents_is_the_one_that_the_tokenizer_has(tmp_path: Path) -> None:
    folder = exported(tmp_path, llama(vocab_size=450), TOKENIZERS["llama"]())
    for name in ("config.json", "generation_config.json"):
        config = json.loads((folder / name).read_text())
        assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)
    assert json.loads((folder / "special_tokens_map.json").read_text())["bos_token"] == "<s>"  # noqa: S105


def test_files_of_another_tokenizer_are_not_kept(published: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    TOKENIZERS["llama3"]().save(other)
    checkpoint = import_hf(published, tmp_path / "imported", tokenizer=other)["checkpoint"]
    export_hf(Path(checkpoint), tmp_path / "again", check=False)
    came, returned = small_files(published), small_files(tmp_path / "again")
    assert returned["generation_config.json"] == came["generation_config.json"]
    assert "chat_template.jinja" not in returned
    assert json.loads(returned["tokenizer_config.json"])["eos_token"] == "<|end_of_text|>"  # noqa: S105


def test_files_of_a_given_folder_s_tokenizer_are_kept(published: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (published / name).rename(tmp_path / "elsewhere" / name)
    checkpoint = import_hf(published, tmp_path / "imported", tokenizer=tmp_path / "elsewhere")["checkpoint"]
    export_hf(Path(checkpoint), tmp_path / "again", check=False)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "elsewhere" / name).read_bytes()


@pytest.mark.parametrize("text", ["[]", "{", '{"a": 1, "a": 2}'])
def test_a_damaged_small_file_is_refused_before_anything_is_written(published: Path, tmp_path: Path, text: str) -> None:
    (published / "generation_config.json").write_text(text)
    with pytest.raises(DataError, match=r"generation_config\.json"):
        import_hf(published, tmp_path / "imported")
    assert not (tmp_path / "imported").exists()


@pytest.mark.parametrize("settings", [gpt2(), llama(tied=True), llama(window=9), bert(), bert(norm_order="pre")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_come_back_in_the_type_in_which_they_came(settings: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = exported(tmp_path, settings)
    path = folder / "model.safetensors"
    came = {name: tensor.to(dtype) for name, tensor in load_file(path).items()}
    norm = next(name for name in came if "norm" in name.lower() or "ln_" in name)
    came[norm] = came[norm].float() + 1e-3  # as of folders in which norms are more exact than all else
    save_file(came, path)
    again = and_back(folder)
    returned = load_file(again / "model.safetensors")
    assert returned.keys() == came.keys()
    for name, tensor in came.items():
        assert returned[name].dtype == tensor.dtype
        assert torch.equal(returned[name].view(torch.uint8), tensor.view(torch.uint8)), name
    assert json.loads((again / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    assert {t.dtype for t in load_file(and_back(folder, "half", dtype="bf16") / "model.safetensors").values()} == {
        torch.bfloat16
    }


@pytest.mark.parametrize(
    ("settings", "kind", "config", "said"),
    [
        (bert(vocab_size=400), "wordpiece", {"do_lower_case": False}, "do_lower_case is false in tokenizer_config"),
        (bert(vocab_size=400), "wordpiece", {"strip_accents": True}, "strip_accents is true in tokenizer_config"),
        (bert(vocab_size=400), "cased", None, "do_lower_case is true by default, and false in"),
        (gpt2(), "bpe", {"add_prefix_space": True}, "add_prefix_space is true in tokenizer_config.json, and false"),
    ],
)
def test_a_folder_with_two_tokenizers_is_refused_unless_one_is_chosen(
    settings: Any, kind: str, config: dict[str, Any] | None, said: str, tmp_path: Path
) -> None:
    tokenizer = train_wordpiece(["a Cat sat"], 60, lowercase=kind != "cased") if kind != "bpe" else None
    folder = exported(tmp_path, settings, tokenizer)
    path = folder / "tokenizer_config.json"
    path.unlink() if config is None else path.write_text(json.dumps({"tokenizer_class": CLASSES[kind]} | config))
    with pytest.raises(CheckpointError, match=said):
        import_hf(folder, tmp_path / "imported")
    checkpoint = import_hf(folder, tmp_path / "imported", tokenizer=folder / "tokenizer.json")["checkpoint"]
    export_hf(Path(checkpoint), tmp_path / "again", check=False)
    again = json.loads((tmp_path / "again" / "tokenizer_config.json").read_text())
    assert again["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert again.get("add_prefix_space", False) is False


@pytest.mark.parametrize(
    ("kind", "named", "returned"),
    [
        ("llama", "LlamaTokenizer", "PreTrainedTokenizerFast"),
        ("llama", None, "PreTrainedTokenizerFast"),
        ("metaspace", "LlamaTokenizerFast", "LlamaTokenizerFast"),
        ("metaspace", None, None),
        ("llama3", "LlamaTokenizer", "PreTrainedTokenizerFast"),
        ("llama", "GemmaTokenizer", "PreTrainedTokenizerFast"),
        ("qwen", "Qwen2Tokenizer", "Qwen2Tokenizer"),
        ("llama3", "Qwen2TokenizerFast", "PreTrainedTokenizerFast"),
    ],
)
def test_a_class_comes_back_if_it_takes_the_vocabulary_s_file_as_it_is(
    kind: str, named: str | None, returned: str | None, published: Path, tmp_path: Path
) -> None:
    TOKENIZERS[kind]().save(published / "tokenizer.json")
    config = json.loads((published / "tokenizer_config.json").read_text())
    del config["tokenizer_class"]
    (published / "tokenizer_config.json").write_text(json.dumps(config | ({"tokenizer_class": named} if named else {})))
    again = json.loads((and_back(published) / "tokenizer_config.json").read_text())
    assert again.get("tokenizer_class") == returned
    assert config.items() <= again.items()


@pytest.mark.parametrize(
    ("part", "value", "load_with"),
    [
        ("decoder", None, "AutoTokenizer"),
        ("normalizer", None, "PreTrainedTokenizerFast"),
        ("pre_tokenizer", TOKENIZERS["llama3"]().tree["pre_tokenizer"], "PreTrainedTokenizerFast"),
        ("model", TOKENIZERS["qwen"]().tree["model"] | {"ignore_merges": True}, "PreTrainedTokenizerFast"),
    ],
)
def test_auto_tokenizer_loads_what_is_of_qwens_kind(part: str, value: Any, load_with: str) -> None:
    """Name another class in folders of Qwen 2, where transformers 5 builds such a tokenizer whatever they hold."""
    changed = Tokenizer.from_bytes(json.dumps(TOKENIZERS["qwen"]().tree | {part: value}).encode())
    assert tokenizer_class_to_load("qwen2", changed) == load_with
    assert tokenizer_class_to_load("qwen3", changed) == "AutoTokenizer"


def test_what_transformers_5_writes_is_exported_for_4_as_well(published: Path) -> None:
    path = published / "tokenizer_config.json"
    newer = {"backend": "tokenizers", "tokenizer_class": "TokenizersBackend", "extra_special_tokens": ["<x>"]}
    path.write_text(json.dumps(newer))
    (published / "special_tokens_map.json").unlink()
    returned = json.loads((and_back(published) / "tokenizer_config.json").read_text())
    assert returned["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert returned["additional_special_tokens"] == ["<x>"]
    assert "extra_special_tokens" not in returned
