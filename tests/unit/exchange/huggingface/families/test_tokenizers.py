"""AutoTokenizer of an exported folder of each family gives our ids, with each kind of tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lmtrain.exchange.huggingface.config_json import hf_config
from lmtrain.exchange.huggingface.exported_tokenizer_files import special_ids
from lmtrain.exchange.huggingface.import_and_export import export_hf, import_hf
from tests.unit.exchange.huggingface.families.drawing import Draw, configs
from tests.unit.exchange.huggingface.families.twins import Ours, make_folder, write_config
from tests.unit.exchange.huggingface.published import TOKENIZERS, mixed_texts
from tests.unit.exchange.huggingface.test_in_transformers import compare_ids

pytest.importorskip("transformers", reason="transformers is not installed")
KINDS = ("metaspace", "llama3", "gemma", "neox")
SEED = 1


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        pytest.param(family, kind, marks=pytest.mark.wide if kind == KINDS[number % len(KINDS)] else pytest.mark.slow)
        for number, family in enumerate(configs())
        for kind in KINDS
    ],
)
def test_ids_are_ours(family: str, kind: str, tmp_path: Path) -> None:
    config = configs()[family](Draw(family, SEED)) | {"vocab_size": 450}
    folder = make_folder(tmp_path / "hf", family, config, SEED)
    words: Any = TOKENIZERS[kind]()
    words.save(folder / "tokenizer.json")
    settings = Ours.load(folder).settings
    # because: a model that was trained here has the ids of its tokenizer in its config.json
    write_config(folder, hf_config(settings, special_ids(words), "float32", family), torch.float32)
    export_hf(Path(import_hf(folder, tmp_path / "imported")["checkpoint"]), tmp_path / "again", check=False)
    assert json.loads((tmp_path / "again" / "config.json").read_text())["model_type"] == family
    compare_ids(tmp_path / "again", words, list(mixed_texts(400)))
