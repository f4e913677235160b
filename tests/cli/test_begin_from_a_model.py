"""A run that begins from a model of another program, or from an import: no setting of the model is typed again."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lmtrain.config.compose_run_settings import conf_dir
from lmtrain.exchange.huggingface.import_and_export import export_hf
from lmtrain.exchange.megatron.import_and_export import export_megatron
from lmtrain.observe.metrics import read_metrics
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer
from lmtrain.train.startup_checks import preflight
from tests.cli.harness import Toy, lmtrain, outcome, start
from tests.marks import wide

IMPORTED = "imported/step_00000000"


@dataclass
class Models:
    """A trained model in each form."""

    run: Path
    hf: Path
    megatron: Path
    imported: Path


@pytest.fixture(scope="module")
def models(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("models")
    heads = {"model__num_heads": 4, "model__rotary_base": 20000}
    lmtrain("pretrain", "model=llama_tiny", *toy.settings(folder / "run", train__steps=4, **heads))
    export_hf(folder / "run", folder / "hf", check=False)
    export_megatron(folder / "run", folder / "megatron", tp=2)
    (folder / "megatron" / "tokenizer.json").unlink()  # Megatron-LM itself writes none
    lmtrain("import", folder / "hf", "--output", folder / "imported")
    return Models(folder / "run", folder / "hf", folder / "megatron", folder / "imported")


def words(toy: Toy, folder: Path, **changes: Any) -> list[str]:
    """The settings of a run but for its model."""
    typed = toy.settings(folder, schedule="constant", **({"train__steps": 2, "schedule__warmup_steps": 0} | changes))
    return [word for word in typed if not word.startswith("model.")]


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(folder / "metrics.jsonl") if row["event"] == "step"]


def settled(*arguments: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(lmtrain("pretrain", *arguments, "--print-config", "--json"))
    return found


@pytest.mark.parametrize("kind", ["hf", *wide("run", "megatron", "imported")])
def test_the_model_is_that_of_the_weights(toy: Toy, models: Models, tmp_path: Path, kind: str) -> None:
    source = getattr(models, kind)
    found = settled(*words(toy, tmp_path / "a"), f"checkpoint.init_from={source}")
    model = found["model"]
    assert (model["kind"], model["num_heads"], model["rotary_base"], model["norm"]) == ("gpt", 4, 20000.0, "rmsnorm")
    assert (model["width"], model["seq_len"], model["activation"], model["gated"]) == (32, 32, "silu", True)
    longer = settled(*words(toy, tmp_path / "a"), f"checkpoint.init_from={source}", "model.seq_len=64")
    assert longer["model"] == model | {"seq_len": 64}
    chosen = settled(*words(toy, tmp_path / "a"), f"checkpoint.init_from={source}", "model=gpt_tiny")
    assert chosen["model"]["rotary_base"] == 10000.0
    assert not (tmp_path / "a").exists()


def test_a_root_config_of_ones_own_chooses_the_model(toy: Toy, models: Models, tmp_path: Path) -> None:
    own = tmp_path / "mine" / "pretrain.yaml"
    own.parent.mkdir()
    own.write_text((conf_dir() / "pretrain.yaml").read_text().replace("model: gpt_tiny", "model: gpt2_small"))
    before = own.read_text()
    typed = [*words(toy, tmp_path / "a"), f"checkpoint.init_from={models.hf}", "--config-dir", own.parent]
    assert settled(*typed)["model"]["width"] == 768
    assert own.read_text() == before
    (own.parent / "pretrain.yaml").rename(own.parent / "other.yaml")
    assert settled(*typed)["model"]["width"] == 32


def test_from_run_of_an_import_is_init_from(toy: Toy, models: Models, tmp_path: Path) -> None:
    typed = words(toy, tmp_path / "a")
    expected = settled(*typed, f"checkpoint.init_from={models.imported}")
    assert settled("--from-run", models.imported, *typed) == expected
    checkpoint = models.imported / "step_00000000"
    found = settled("--from-run", checkpoint, *typed)
    assert found["checkpoint"].pop("init_from") == str(checkpoint)
    assert found["model"] == expected["model"]
    said = lmtrain("pretrain", "--from-run", models.imported, *typed, f"checkpoint.resume={models.run}", code=2)
    assert "is an imported model" in said
    said = lmtrain("pretrain", "--from-run", models.hf, *typed, code=2)
    assert "is a Hugging Face folder, and not a run. Begin a run from" in said
    plans = lmtrain("pretrain", "-m", "--from-run", models.imported, *typed, "train.seed=1,2", "--dry-run")
    assert f"{tmp_path / 'a' / 'train.seed_2'}" in plans
    lmtrain("pretrain", "--from-run", models.imported, *typed)
    assert "at step 2" in lmtrain("pretrain", "--from-run", models.imported, *typed, "train.steps=3")
    assert len(losses(tmp_path / "a")) == 3
    assert (tmp_path / "a/checkpoints/step_00000003/huggingface.generation_config.json").is_file()


@pytest.mark.parametrize("kind", ["hf", *wide("megatron")])
def test_a_folder_is_imported_on_the_way(toy: Toy, models: Models, tmp_path: Path, kind: str) -> None:
    source = Path(shutil.copytree(getattr(models, kind), tmp_path / "source"))
    lmtrain("pretrain", *words(toy, tmp_path / "expected"), f"checkpoint.init_from={models.imported}")
    typed = [*words(toy, tmp_path / "a"), f"checkpoint.init_from={source}"]
    plan = json.loads(lmtrain("pretrain", *typed, "--dry-run", "--json"))
    assert plan["weights_from"] == str(source)
    assert plan["weights_are"] == f"another program's, and will be imported into {tmp_path / 'a' / 'imported'}"
    assert not (tmp_path / "a").exists()
    said = lmtrain("pretrain", *typed)
    (imported,) = (tmp_path / "a" / "imported").glob("step_*")
    assert f"a new run with the weights of {imported}" in said
    assert losses(tmp_path / "a") == losses(tmp_path / "expected")
    shutil.rmtree(source)
    assert "at step 2" in lmtrain("pretrain", *typed, "train.steps=3")
    kept = tmp_path / "a/checkpoints/step_00000003/huggingface.generation_config.json"
    assert kept.is_file() == (kind == "hf")
    assert settled(*typed)["model"]["rotary_base"] == 20000.0


@pytest.mark.wide
def test_a_folder_and_a_text_are_enough(models: Models, tmp_path: Path) -> None:
    text, run = tmp_path / "notes.txt", tmp_path / "run"
    text.write_text("\n\n".join(f"Paragraph {number} of the notes is about {number * 7}." for number in range(400)))
    typed = [f"checkpoint.init_from={models.hf}", f"data.text={text}", f"run.dir={run}", "compute.device=cpu"]
    said = lmtrain("pretrain", *typed, "train.steps=2", "train.global_batch=4")
    assert f"read from {models.hf}" in said
    assert Tokenizer.load(run).fingerprint == Tokenizer.load(models.hf).fingerprint
    assert "at step 2" in lmtrain("pretrain", *typed, "train.steps=3", "train.global_batch=4")


@pytest.mark.wide
@pytest.mark.parametrize("point", ["ckpt.begin", "ckpt.mid_write", "ckpt.before_manifest", "ckpt.before_rename"])
def test_killed_while_it_imports_it_begins_anew(toy: Toy, models: Models, tmp_path: Path, point: str) -> None:
    typed = [*words(toy, tmp_path / "a"), f"checkpoint.init_from={models.hf}"]
    assert killed(["pretrain", *typed], point) == -9
    assert not list((tmp_path / "a").rglob("step_????????"))
    lmtrain("pretrain", *typed)
    assert os.listdir(tmp_path / "a" / "imported") in (["step_00000000", ".lock"], [".lock", "step_00000000"])


def killed(arguments: Sequence[object], point: str) -> int:
    env = {"LMTRAIN_FAULT": f"kill:point={point}", "LMTRAIN_ALLOW_FAULTS": "1"}
    process = start(*arguments, env=env)
    process.communicate(timeout=600)
    return process.returncode


@pytest.mark.wide
def test_what_was_imported_is_used_again_unless_the_source_has_changed(
    toy: Toy, models: Models, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(models.hf, tmp_path / "source"))
    typed = [*words(toy, tmp_path / "a"), f"checkpoint.init_from={source}"]
    assert killed(["pretrain", *typed], "start.build") == -9  # the import is made, and no step
    before = (tmp_path / "a" / IMPORTED / "manifest.json").stat().st_mtime_ns
    os.utime(source / "model.safetensors")
    config = source / "config.json"
    text = config.read_text()
    config.write_text(text.replace("20000.0", "30000.0"))
    said = lmtrain("pretrain", *typed, code=73)
    assert f"{source} is not what {tmp_path / 'a' / IMPORTED} was imported from: config.json differs." in said
    assert f"use checkpoint.init_from={tmp_path / 'a' / IMPORTED}." in said
    config.write_text(text)
    lmtrain("pretrain", *typed)
    assert (tmp_path / "a" / IMPORTED / "manifest.json").stat().st_mtime_ns == before


@pytest.mark.wide
def test_processes_share_one_import(toy: Toy, models: Models, tmp_path: Path) -> None:
    for count in (1, 2):
        typed = words(toy, tmp_path / str(count), parallel__dp_shard=count, parallel__timeout_s=60)
        process = start("pretrain", "--nproc", count, *typed, f"checkpoint.init_from={models.hf}")
        output = process.communicate(timeout=600)[0]
        assert process.returncode == 0, output
    assert losses(tmp_path / "2") == pytest.approx(losses(tmp_path / "1"), rel=1e-5)


def test_data_without_a_tokenizer_takes_the_models(toy: Toy, models: Models, tmp_path: Path) -> None:
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{toy.data}{suffix}", tmp_path / f"bare{suffix}")
    typed = words(toy, tmp_path / "a", data__path=tmp_path / "bare")
    assert "data.tokenizer=null names no tokenizer" in lmtrain("pretrain", *typed, code=2)
    for number, source in enumerate((models.imported, models.hf)):
        again = [*typed, f"run.dir={tmp_path / str(number)}", f"checkpoint.init_from={source}"]
        lmtrain("pretrain", *again)
        assert "at step 2" in lmtrain("pretrain", *again, "train.steps=3")
    said = lmtrain("pretrain", *typed, f"checkpoint.init_from={models.megatron}", code=2)
    assert "data.tokenizer=null names no tokenizer" in said


def test_a_folder_that_cannot_be_imported_stops_the_run_before_anything(
    toy: Toy, models: Models, tmp_path: Path
) -> None:
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "llama.Q4.gguf").touch()
    said = lmtrain("pretrain", *words(toy, tmp_path / "a"), f"checkpoint.init_from={tmp_path / 'gguf'}", code=65)
    assert f"{tmp_path / 'gguf'} has GGUF files" in said
    assert "It is the folder that checkpoint.init_from names." in said
    other = words(toy, tmp_path / "a", model__width=64)
    said = lmtrain("pretrain", *other, "model.width=64", f"checkpoint.init_from={models.hf}", code=2)
    assert f"init_from={models.hf} has a model with other weights: model.width is 64 here and 32 there" in said
    assert not (tmp_path / "a").exists()


@pytest.mark.wide
def test_the_disk_has_to_have_room_for_the_import_too(
    toy: Toy, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = words(toy, tmp_path / "a", checkpoint__interval_steps=0, checkpoint__interval_s="null")
    plan = json.loads(lmtrain("pretrain", *typed, f"checkpoint.init_from={models.imported}", "--dry-run", "--json"))
    import_bytes = 4 * plan["parameters"]

    def code(source: Path, free: int) -> object:
        monkeypatch.setattr(preflight, "free_bytes", lambda folder: free)
        return outcome("pretrain", *typed, f"checkpoint.init_from={source}", "--dry-run")[0]

    enough = next(free for free in range(1 << 20, 1 << 24, import_bytes // 2) if code(models.imported, free) == 0)
    assert code(models.hf, enough) == 74
    assert "a checkpoint and the run's records and the imported model need " in lmtrain(
        "pretrain", *typed, f"checkpoint.init_from={models.hf}", "--dry-run", code=74
    )
    assert code(models.hf, enough + import_bytes) == 0


def test_config_explain_says_where_the_model_is_from(models: Models) -> None:
    typed = [f"checkpoint={{init_from: {models.hf}}}", "model.seq_len=64"]
    rows = json.loads(lmtrain("config", "explain", "model", *typed, "--json"))
    found = {row["key"]: (row["value"], row["from"]) for row in rows}
    assert found["model.width"] == (32, f"the command line: the model of checkpoint.init_from={models.hf}")
    assert found["model.seq_len"] == (64, "the command line: model.seq_len=64")


def test_a_plan_is_of_the_model_that_the_run_would_have(models: Models) -> None:
    found = json.loads(lmtrain("plan", "gpus=1", "hardware=h100", f"checkpoint.init_from={models.hf}", "--json"))
    assert found["model"]["rotary_base"] == 20000.0
