"""The config.json files of published models: read and exported again with the same meaning, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lmtrain.errors import CheckpointError
from lmtrain.exchange.detect_model_folder_format import identify_source
from lmtrain.exchange.huggingface.config_json import restored_config, settings_from_config

Config = dict[str, Any]
CONFIGS: dict[str, Config] = json.loads((Path(__file__).parent / "published_configs.json").read_text())
REFUSED = {
    "OLMo-1.7-7B": "clip_qkv=8.0 would have to be null",
    "Mistral-7B with document attention": "document_attention=true is not known to lmtrain",
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_config_is_read_and_exported_or_refused_rightly(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    for file in ("model.safetensors", *(f"{name}.py" for name in ("modeling_phi3",) if "auto_map" in config)):
        (tmp_path / file).touch()
    identify_source(tmp_path)
    if name in REFUSED:
        with pytest.raises(CheckpointError, match=REFUSED[name]):
            settings_from_config(config, "config.json", pair_head=False)
        return
    model_type, settings = settings_from_config(config, "config.json", pair_head=config["model_type"] == "bert")
    dtype = str(config.get("torch_dtype", config.get("dtype", "float32")))
    exported = restored_config(settings, config, {}, dtype)
    again = settings_from_config(exported, "config.json", pair_head=config["model_type"] == "bert")
    assert again == (model_type, settings)
    assert "auto_map" not in exported  # because: the code that it names is not exported


def test_the_code_of_a_changed_class_is_refused() -> None:
    config = CONFIGS["Phi-3-mini-4k-instruct"] | {"auto_map": {"AutoModelForCausalLM": "modeling_phi3.Phi3Sparse"}}
    with pytest.raises(CheckpointError, match="auto_map would have to name Phi3ForCausalLM"):
        settings_from_config(config, "config.json", pair_head=False)


def test_configs_of_every_family_are_there() -> None:
    from_families = {config["model_type"] for config in CONFIGS.values()}
    assert len(CONFIGS) >= 60
    assert from_families >= {"gpt2", "bert", "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text",
                             "olmo", "olmo2", "olmo3", "smollm3", "phi3", "gpt_neox", "stablelm", "starcoder2",
                             "granite"}  # fmt: skip
