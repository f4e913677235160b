"""A new run from other programs' weights: its first loss is the imported model's own, at any layout."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from lmtrain.batch import IGNORED
from lmtrain.checkpoint.tensor_reader import CheckpointReader
from lmtrain.config.compose_run_settings import compose
from lmtrain.exchange.huggingface.compare_with_transformers import model_scores
from lmtrain.exchange.huggingface.import_and_export import export_hf
from lmtrain.observe.metrics import read_metrics
from lmtrain.train.run_config import RunConfig
from lmtrain.train.startup_checks.preflight import load_data
from tests.cli.harness import Toy, lmtrain, start
from tests.marks import wide

LLAMA = ("model=llama_tiny",)
BERT = ("model=bert_tiny", "data=masked")
# because: rotary angles go on where training stopped, so the length may change and the weights still fit
SHORT: dict[str, Any] = {"model__num_heads": 4, "train__steps": 3, "train__seed": 77, "model__seq_len": 24}
WORDS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "gpt": (LLAMA, SHORT), "bert": (BERT, {"train__steps": 3, "train__seed": 77})
}  # fmt: skip

CHAT_FILES = {"generation_config.json": '{"eos_token_id": [0, 7]}', "chat_template.jinja": "{{ messages }}"}


@dataclass
class Makers:
    """The data of each model, made when first asked for."""

    request: pytest.FixtureRequest

    def __getitem__(self, name: str) -> Toy:
        made: Toy = self.request.getfixturevalue({"gpt": "toy", "bert": "sentences"}[name])
        return made


@pytest.fixture(scope="module")
def makers(request: pytest.FixtureRequest) -> Makers:
    return Makers(request)


@dataclass
class Runs:
    """Trained models, each as a run, as a folder of Hugging Face's and imported from it, made when first asked for."""

    folder: Path
    makers: Makers

    def __getitem__(self, name: str) -> Path:
        imported = self.folder / f"{name}_imported"
        if not imported.exists():
            heads = {"model__num_heads": 4} if name == "gpt" else {}
            words = (*WORDS[name][0], *self.makers[name].settings(self.folder / name, train__steps=6, **heads))
            lmtrain("pretrain", *words)
            lmtrain("export", self.folder / name, "--to", "hf", "--output", self.folder / f"{name}_hf")
            for file, text in CHAT_FILES.items():
                (self.folder / f"{name}_hf" / file).write_text(text)
            lmtrain("import", self.folder / f"{name}_hf", "--output", imported)
        return imported


@pytest.fixture(scope="module")
def runs(makers: Makers, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"), makers)


def settings(makers: Makers, name: str, folder: Path, **changes: Any) -> list[str]:
    words, values = WORDS[name]
    return [*words, *makers[name].settings(folder, **(values | changes))]


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(folder / "metrics.jsonl") if row["event"] == "step"]


def direct_loss(given: list[str], checkpoint: Path) -> float:
    """Of the first step's samples, by the weights as they lie in the checkpoint, with no trainer."""
    config = compose(RunConfig, given)
    _, model, data = load_data(config)
    batch = data.train.batch(data.order.ids(0, config.train.global_batch)).map(torch.from_numpy)
    reader = CheckpointReader(checkpoint / "step_00000000")
    scores = model_scores(model, lambda name: reader.read(f"model.{name}"), batch)
    real = torch.ones_like(batch.tokens_BT, dtype=torch.bool) if batch.not_padding_BT is None else batch.not_padding_BT
    loss = F.cross_entropy(scores[0], batch.labels_BT[real].flatten(), ignore_index=IGNORED)
    return float(loss if len(scores) == 1 else loss + F.cross_entropy(scores[1], batch.pair_labels_B))


@pytest.mark.parametrize("name", ["gpt", *wide("bert")])
def test_the_first_loss_is_the_imported_model_s(makers: Makers, runs: Runs, tmp_path: Path, name: str) -> None:
    given = settings(makers, name, tmp_path / "one", checkpoint__init_from=runs[name])
    plan = json.loads(lmtrain("pretrain", *given, "--dry-run", "--json"))
    assert plan["weights_from"] == str(runs[name] / "step_00000000")
    assert plan["weights_are"] == f"imported from huggingface {'llama' if name == 'gpt' else 'megatron-bert'}"
    assert "a new run with the weights of" in lmtrain("pretrain", *given)
    right = direct_loss(given, runs[name])
    assert losses(tmp_path / "one")[0] == pytest.approx(right, rel=1e-5)
    fresh = settings(makers, name, tmp_path / "fresh", train__steps=1, schedule__warmup_steps=0)
    lmtrain("pretrain", *fresh)
    differs = abs(losses(tmp_path / "fresh")[0] - right)
    assert differs > 100 * 1e-5 * right, "random weights give another loss, far beyond the tolerance above"


@pytest.mark.parametrize(
    "name", [pytest.param("gpt", marks=pytest.mark.wide), pytest.param("bert", marks=pytest.mark.slow)]
)
def test_another_layout_begins_from_the_same_weights(makers: Makers, runs: Runs, tmp_path: Path, name: str) -> None:
    lmtrain("pretrain", *settings(makers, name, tmp_path / "one", checkpoint__init_from=runs[name]))
    given = settings(makers, name, tmp_path / "two", checkpoint__init_from=runs[name], parallel__pp=2)
    process = start("pretrain", "--nproc", 2, *given, "parallel.timeout_s=60")
    output = process.communicate(timeout=900)[0]
    assert process.returncode == 0, output
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


@pytest.mark.wide
def test_from_megatron_it_is_the_same_run(makers: Makers, runs: Runs, tmp_path: Path) -> None:
    lmtrain("export", runs["gpt"], "--to", "megatron", "--layout", "tp=2,pp=2", "--output", tmp_path / "megatron")
    lmtrain("import", tmp_path / "megatron", "--output", tmp_path / "imported")
    for folder, source in ((tmp_path / "a", runs["gpt"]), (tmp_path / "b", tmp_path / "imported")):
        lmtrain("pretrain", *settings(makers, "gpt", folder, checkpoint__init_from=source))
    assert losses(tmp_path / "a") == losses(tmp_path / "b")


def test_the_same_command_goes_on_and_needs_those_weights_no_more(makers: Makers, runs: Runs, tmp_path: Path) -> None:
    shutil.copytree(runs["gpt"], tmp_path / "source")
    given = settings(makers, "gpt", tmp_path / "run", checkpoint__init_from=tmp_path / "source", schedule="constant")
    lmtrain("pretrain", *given)
    shutil.rmtree(tmp_path / "source")
    assert "at step 3" in lmtrain("pretrain", *given, "train.steps=5")
    whole = settings(makers, "gpt", tmp_path / "whole", checkpoint__init_from=runs["gpt"], schedule="constant")
    lmtrain("pretrain", *whole, "train.steps=5")
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    _check_small_files(tmp_path, runs["gpt"].with_name("gpt_hf"))
    other = settings(makers, "gpt", tmp_path / "other", checkpoint__init_from=tmp_path / "source")
    assert "does not exist" in lmtrain("pretrain", *other, code=66)


def _check_small_files(folder: Path, came: Path) -> None:
    """Check that the resumed run in `folder` passes on the small files of the import that it began from."""
    lmtrain("reshard", folder / "run", "--to", "tp=2", "--output", folder / "resharded")
    for source in ("run", "resharded"):
        export_hf(folder / source, folder / f"{source}_hf", check=False)
        for name in (*CHAT_FILES, "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
            assert (folder / f"{source}_hf" / name).read_bytes() == (came / name).read_bytes()
    card = (folder / "run_hf" / "README.md").read_text()
    assert "| weights before the first step | those of source |" in card
    assert "| steps | 5 |" in card


@pytest.mark.wide
def test_two_dropouts_are_not_taken_for_one(runs: Runs, tmp_path: Path) -> None:
    shutil.copytree(runs["bert"].with_name("bert_hf"), tmp_path / "hf")
    config = json.loads((tmp_path / "hf/config.json").read_text())
    (tmp_path / "hf/config.json").write_text(json.dumps(config | {"attention_probs_dropout_prob": 0.1}))
    command = ["import", tmp_path / "hf", "--output", tmp_path / "out"]
    output = lmtrain(*command, code=65)
    assert "hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.1 would have to be equal" in output
    assert "choose it with --set dropout=SHARE" in output
    assert "Of a Hugging Face model only dropout can be set." in lmtrain(*command, "--set", "width=64", code=2)
    lmtrain(*command, "--set", "dropout=0.1")
    state = json.loads((tmp_path / "out/step_00000000/manifest.json").read_text())["state"]
    assert state["model"]["dropout"] == 0.1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"model__width": 64, "model__rotary_base": 500},
            "model.head_width is 16 here and 8 there. Add model.width=32 model.rotary_base=10000.",
        ),
        ({"model__vocab_size": 512}, "model.vocab_size is 512 here and 400 there. Add model.vocab_size=400."),
        ({"checkpoint__resume": "runs/other"}, "Leave it out, or leave out checkpoint.resume."),
        ({"checkpoint__init_from": "''"}, "checkpoint.init_from= is empty"),
    ],
)
def test_refusals(makers: Makers, runs: Runs, tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    given = settings(makers, "gpt", tmp_path / "run", **{"checkpoint__init_from": runs["gpt"]} | changes)
    assert said in lmtrain("pretrain", *given, code=2)
    assert not (tmp_path / "run").exists()


def test_there_is_no_run_to_go_on_with(makers: Makers, runs: Runs, tmp_path: Path) -> None:
    output = lmtrain("pretrain", *settings(makers, "gpt", tmp_path, checkpoint__resume=runs["gpt"]), code=65)
    assert f"Begin a run from these weights: checkpoint.init_from={runs['gpt']}/step_00000000." in output


@pytest.mark.wide
def test_another_tokenizer_s_ids_are_refused(makers: Makers, runs: Runs, tmp_path: Path) -> None:
    given = settings(makers, "gpt", tmp_path / "run", checkpoint__init_from=runs["bert"])
    output = lmtrain("pretrain", *given, code=2)
    assert f"--tokenizer {runs['bert']}/step_00000000/tokenizer.json" in output
