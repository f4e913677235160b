"""`lmtrain import` and `lmtrain export` as users type them: the table, wrong sources, kills."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lmtrain.exchange.huggingface.import_and_export import export_hf
from lmtrain.exchange.megatron.import_and_export import export_megatron
from tests.cli.harness import lmtrain, start
from tests.marks import wide
from tests.unit.exchange.models import bert, gpt2, llama, same_weights, save, tokenizer_for


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints `gpt2` and `llama`, with folders of other programs."""
    folder = tmp_path_factory.mktemp("models")
    save(folder / "gpt2", gpt2())
    save(folder / "llama", llama())
    export_hf(folder / "gpt2", folder / "hf", check=False)
    export_megatron(folder / "llama", folder / "megatron", tp=2)
    return folder


def test_the_table_and_json_have_the_same_facts(models: Path, tmp_path: Path) -> None:
    said = lmtrain("import", models / "hf", "--output", tmp_path / "a")
    told = lmtrain("import", models / "hf", "--output", tmp_path / "b", "--json")
    facts: dict[str, Any] = json.loads(told[told.index("{") : told.rindex("}") + 1])
    assert "imported a Hugging Face folder\n" in said
    assert f"checkpoint      {tmp_path / 'a' / 'step_00000000'}\n" in said
    assert facts["checkpoint"] == str(tmp_path / "b" / "step_00000000")
    assert f"tensors read    {facts['tensors_read']}\n" in said
    assert "left out        nothing\n" in said
    rows = facts["settings"]["vocab_size"]
    assert facts["tokens"] + facts["rows_without_token"] == rows
    assert f"without token   {facts['rows_without_token']}\n" in said
    assert f"compared with   {facts['compared_with']}\n" in said
    assert "architectures: the model is found by its model_type" in said
    settings = facts["settings"]
    assert f" {' '.join(f'{key}={settings[key]}' for key in ('num_layers', 'width', 'num_heads'))} " in said
    assert ", and defaults\n" in said
    assert settings["logit_cap"] is None
    assert "logit_cap" not in said
    lmtrain("export", tmp_path / "a", "--to", "megatron", "--layout", "pp=2", "--output", tmp_path / "m")
    said = lmtrain("import", tmp_path / "m", "--output", tmp_path / "c")
    assert "imported a Megatron-LM checkpoint in the format torch\n" in said
    assert "compared with   nothing: Megatron-LM is not run here\n" in said


def bad_tokenizer(models: Path, folder: Path) -> list[object]:
    """A tokenizer with more tokens than the model has rows."""
    settings = gpt2()
    tokenizer_for(settings).save(folder / "small.json")
    data = json.loads((folder / "small.json").read_text())
    words = data["model"]["vocab"]
    words |= {f"extra{number}": len(words) + number for number in range(settings.shape.vocab_size)}
    (folder / "big.json").write_text(json.dumps(data))
    return [models / "hf", "--tokenizer", folder / "big.json"]


def half_a_download(models: Path, folder: Path) -> list[object]:
    shutil.copytree(models / "hf", folder / "half")
    (folder / "half" / "model.safetensors").rename(folder / "half" / "model-00001-of-00002.safetensors")
    places = {"transformer.wte.weight": "model-00001-of-00002.safetensors", "x": "model-00002-of-00002.safetensors"}
    (folder / "half" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return [folder / "half"]


def adapter(models: Path, folder: Path) -> list[object]:
    shutil.copytree(models / "hf", folder / "lora")
    (folder / "lora" / "adapter_config.json").write_text("{}")
    return [folder / "lora"]


def pickled(models: Path, folder: Path) -> list[object]:
    shutil.copytree(models / "hf", folder / "old")
    (folder / "old" / "model.safetensors").unlink()
    torch.save({}, folder / "old" / "pytorch_model.bin")
    return [folder / "old"]


WRONG: dict[str, tuple[Callable[[Path, Path], list[object]], int, str]] = {
    "another program": (lambda models, folder: [models / "hf", "--format", "megatron"], 2, "Use --format hf."),
    "no tokenizer": (lambda models, folder: [strip(models, folder)], 66, "--tokenizer PATH"),
    "a setting of its own": (lambda models, folder: [models / "hf", "--set", "width=64"], 2, "only dropout can be set"),
    "no setting": (lambda models, folder: [models / "hf", "--set", "width"], 2, "Give KEY=VALUE"),
    "another tokenizer": (bad_tokenizer, 65, "but the model has only 331. Give the tokenizer"),
    "half a download": (half_a_download, 65, "is half a download: "),
    "adapter": (adapter, 65, "an adapter of peft"),
    "pickle": (pickled, 65, "a pickle, which can run code when it is read"),
    "checkpoint": (lambda models, folder: [models / "gpt2"], 2, "needs no import"),
    "nothing": (lambda models, folder: [folder / "none"], 66, "none does not exist"),
    "file": (lambda models, folder: [models / "hf" / "config.json"], 66, "config.json is a file"),
}


def strip(models: Path, folder: Path) -> Path:
    copy = Path(shutil.copytree(models / "hf", folder / "bare"))
    for name in copy.glob("*token*"):
        name.unlink()
    return copy


@pytest.mark.parametrize("name", WRONG)
def test_wrong_sources_are_named_and_nothing_is_written(models: Path, tmp_path: Path, name: str) -> None:
    make, code, says = WRONG[name]
    arguments = make(models, tmp_path)
    before = sorted(os.listdir(tmp_path))
    said = lmtrain("import", *arguments, "--output", tmp_path / "new" / "out", code=code)
    assert says in said
    assert "Traceback" not in said
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--to", "hf", "--layout", "tp=2"), "a Hugging Face folder has no parallel layout. Leave --layout out"),
        (("--to", "megatron", "--layout", "dp=2"), "Give tp=NUMBER, pp=NUMBER or both"),
        (("--to", "megatron", "--layout", "tp=0"), "Give tp=NUMBER, pp=NUMBER or both"),
        (("--to", "megatron", "--layout", "tp=2,tp=2"), "each only once"),
        (("--to", "gguf"), "error: --to gguf is not one of hf, megatron. GGUF is not written here"),
        (("--to", "transformers"), "error: --to transformers is not one of hf, megatron. Did you mean hf?"),
    ],
)
def test_wrong_exports(models: Path, tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    assert says in lmtrain("export", models / "gpt2", *arguments, "--output", tmp_path / "out", code=2)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("to", "fault"),
    wide(
        ("megatron", "exchange.publish"), ("hf", "exchange.part:count=5"), ("megatron", "exchange.part:count=9"),
        ("hf", "exchange.publish"),
    ),
)
def test_a_killed_export_is_absent_and_the_same_command_begins_anew(
    models: Path, tmp_path: Path, to: str, fault: str
) -> None:
    command = ("export", models / "llama", "--to", to, "--output", tmp_path / "out")
    assert killed(command, fault) == -9
    assert len(os.listdir(tmp_path)) == 1  # what was written so far, under a hidden name
    assert not (tmp_path / "out").exists()
    lmtrain(*command)
    assert os.listdir(tmp_path) == ["out"]
    lmtrain("import", tmp_path / "out", "--output", tmp_path / "back")


@pytest.mark.wide
@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("hf", "ckpt.begin"), ("hf", "exchange.part:count=3"), ("hf", "ckpt.mid_write"), ("hf", "ckpt.before_manifest"),
        ("hf", "ckpt.before_rename"), ("megatron", "ckpt.mid_write"), ("megatron", "ckpt.before_rename"),
    ],
)  # fmt: skip
def test_a_killed_import_is_absent_and_the_same_command_begins_anew(
    models: Path, tmp_path: Path, source: str, fault: str
) -> None:
    command = ("import", models / source, "--output", tmp_path / "out")
    assert killed(command, fault) == -9
    assert not list((tmp_path / "out").glob("step_????????"))
    lmtrain(*command)
    (checkpoint,) = (path for path in (tmp_path / "out").iterdir() if path.name != ".lock")
    lmtrain("verify", checkpoint)
    assert same_weights(checkpoint, models / ("gpt2" if source == "hf" else "llama") / "step_00000007")


def killed(command: tuple[object, ...], fault: str) -> int:
    process = start(*command, env={"LMTRAIN_FAULT": f"kill:point={fault}", "LMTRAIN_ALLOW_FAULTS": "1"})
    process.communicate(timeout=600)
    return process.returncode


@pytest.mark.wide
def test_two_exports_to_one_folder_do_not_disturb_each_other(models: Path, tmp_path: Path) -> None:
    """An export neither waits for the other nor removes what the other writes."""
    command = ("export", models / "llama", "--to", "megatron", "--output", tmp_path / "out")
    process = start(*command, env={"LMTRAIN_FAULT": "stop:point=exchange.publish", "LMTRAIN_ALLOW_FAULTS": "1"})
    try:
        while not [name for name in os.listdir(tmp_path) if name.startswith(".out.tmp-")]:
            assert process.poll() is None
        lmtrain("export", models / "llama", "--to", "megatron", "--output", tmp_path / "out")
        assert len(os.listdir(tmp_path)) == 2
    finally:
        process.kill()
        process.communicate()


@pytest.mark.wide
def test_bert_and_its_pair_head_go_there_and_back(tmp_path: Path) -> None:
    save(tmp_path / "run", bert())
    lmtrain("export", tmp_path / "run", "--to", "hf", "--output", tmp_path / "hf")
    said = lmtrain("import", tmp_path / "hf", "--output", tmp_path / "back")
    assert "kind=bert " in said
    assert "pair_head=false" not in said
