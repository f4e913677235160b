"""Importing a folder of any format: what is told of it, and that a model which computes otherwise is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lmtrain.errors import CheckpointError, OutputError
from lmtrain.exchange.check_imported_files_unchanged import check_unchanged, source_identity
from lmtrain.exchange.huggingface import compare_with_transformers
from lmtrain.exchange.huggingface.import_and_export import export_hf
from lmtrain.exchange.import_foreign_model import import_folder
from lmtrain.exchange.megatron.import_and_export import export_megatron
from tests.unit.exchange.models import gpt2, llama, save

TRANSFORMERS = pytest.mark.skipif(find_spec("transformers") is None, reason="it compares with transformers")


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    export_hf(save(tmp_path / "run", gpt2()), tmp_path / "hf", check=False)
    return tmp_path / "hf"


@TRANSFORMERS
def test_what_is_read_left_out_ignored_and_compared_is_told(exported: Path, tmp_path: Path) -> None:
    path = exported / "model.safetensors"
    held = load_file(path)
    second = {"lm_head.weight": held["transformer.wte.weight"].clone()}
    save_file(held | second | {"transformer.h.0.attn.bias": torch.ones(1, 1, 40, 40)}, path)
    config = json.loads((exported / "config.json").read_text())
    (exported / "config.json").write_text(json.dumps(config | {"use_cache": True, "_new_key": 1}))
    facts = import_folder(exported, tmp_path / "out")
    assert facts["tensors_read"] == len(held)
    assert facts["left_out"] == {
        "lm_head.weight": "it is the embedding under a second name",
        "transformer.h.0.attn.bias": "it is computed, not trained",
    }
    assert facts["ignored"]["use_cache"].startswith("it chooses outputs")
    assert facts["ignored"]["_new_key"] == "it is kept for an export"
    assert facts["settings"]["num_heads"] == gpt2().num_heads
    assert facts["compared_with"].startswith("transformers ")
    assert 0 <= facts["largest_difference"] <= facts["allowed_difference"] < 1e-3
    assert facts["tokens_compared"] == 80


@TRANSFORMERS
def test_a_model_with_other_logits_is_refused_and_nothing_stays(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No folder is known that both programs accept and compute otherwise, so here no rounding is allowed."""
    monkeypatch.setattr(compare_with_transformers, "TOLERANCE", 0.0)
    assert import_folder(exported, tmp_path / "rounded")["largest_difference"] > 0
    monkeypatch.setattr(compare_with_transformers, "_ROUNDINGS", 0)
    with pytest.raises(CheckpointError, match=r"computes other logits than transformers .*Nothing was imported"):
        import_folder(exported, tmp_path / "new" / "out")
    assert not (tmp_path / "new").exists()


def test_why_nothing_was_compared_is_told(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sysconf", lambda name: 1 << 9)
    facts = import_folder(exported, tmp_path / "out")
    assert facts["compared_with"].startswith("nothing: transformers would need ")
    monkeypatch.undo()
    export_megatron(save(tmp_path / "llama", llama()), tmp_path / "megatron", tp=2)
    facts = import_folder(tmp_path / "megatron", tmp_path / "other")
    assert facts["compared_with"] == "nothing: Megatron-LM is not run here"
    assert facts["left_out"] == {f"{512 - llama().shape.vocab_size} rows of the embedding": "they pad the vocabulary"}
    assert "make_vocab_size_divisible_by" in facts["ignored"]
    assert "num_attention_heads" not in facts["ignored"]


def test_leftovers_of_a_killed_import_are_removed(exported: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / "step_00000000.tmp-1-1").mkdir(parents=True)
    import_folder(exported, tmp_path / "out")
    assert sorted(os.listdir(tmp_path / "out")) == [".lock", "step_00000000"]


def test_what_a_folder_is_known_by(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "README.md"):
        (tmp_path / name).write_bytes(b"a")
    with open(tmp_path / "model.safetensors", "r+b") as file:
        file.truncate(20 << 20)
    before = source_identity(tmp_path)
    (tmp_path / "README.md").write_bytes(b"changed")
    os.utime(tmp_path / "config.json", (1, 1))
    assert source_identity(tmp_path) == before
    check_unchanged(tmp_path, {"files": before}, tmp_path)
    check_unchanged(tmp_path / "gone", {"files": before}, tmp_path)
    with open(tmp_path / "model.safetensors", "r+b") as file:
        file.write(bytes([1]) * (1 << 20))
    with pytest.raises(OutputError, match=r"is not what .* was imported from: model\.safetensors differs"):
        check_unchanged(tmp_path, {"files": before}, tmp_path / "x")
    (tmp_path / "config.json").unlink()
    with pytest.raises(OutputError, match=r"config\.json differs, and 1 more files"):
        check_unchanged(tmp_path, {"files": before}, tmp_path / "x")


def test_folders_are_looked_at_without_torch() -> None:
    code = (
        "import sys; import lmtrain.exchange.huggingface.config_json; "
        "import lmtrain.exchange.megatron.model_settings_of_checkpoint; "
        "assert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
