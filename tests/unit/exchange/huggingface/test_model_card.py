"""The model card says what the checkpoint and the files beside it record, and nothing else."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lmtrain.checkpoint.disk.checkpoint_format import MANIFEST, encode_manifest
from lmtrain.checkpoint.find_and_prune import load_manifest
from lmtrain.checkpoint.view_with_ema_as_weights import WeightSet
from lmtrain.exchange.huggingface.import_and_export import export_hf, import_hf
from lmtrain.runfolder.run_facts import facts_of_checkpoint
from lmtrain.train.run_config import config_of_checkpoint
from tests.unit.exchange.huggingface.published import TOKENIZERS, exported, publish
from tests.unit.exchange.models import bert, llama

GOLDEN = Path(__file__).parents[3] / "golden/releases/0.1.0/run"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    shutil.copytree(GOLDEN, tmp_path / "run")
    return tmp_path / "run"


def card_of(source: Path, output: Path, weights: WeightSet = "model") -> str:
    export_hf(
        source, output, check=False, weights=weights,
        describe=lambda state: facts_of_checkpoint(config_of_checkpoint(state), state), is_path=lambda key: False,
    )  # fmt: skip
    return (output / "README.md").read_text()


def result(checkpoint: Path, step: int, *, weights: str = "model", **changes: Any) -> str:
    measured = {"task": "mine", "data": "/a/secret/place/held_out.txt", "headline": "bits_per_byte",
                "measures": {"perplexity": 21.5, "bits_per_byte": 1.25}}  # fmt: skip
    model = {"checkpoint": str(checkpoint), "step": step, "weights": weights}
    return json.dumps({"format": "lmtrain evaluation", "model": model, "results": [measured]} | changes)


def test_it_has_the_recipe_of_the_run(run: Path, tmp_path: Path) -> None:
    card = card_of(run, tmp_path / "tiny-gpt2")
    for line in (
        "# tiny-gpt2",
        "| architecture in transformers | `GPT2LMHeadModel` |",
        "| weights before the first step | random |",
        "| samples | 8 |",
        "| tokens | 128 |",
        "| batch | 2 samples of 16 tokens |",
        "| optimizer | adamw, learning rate 0.0003, weight decay 0.1 |",
        "| tokens of the training data | 3,368 |",
        "| SHA-256 of the training data | 530be483b035dcb9a188a8cf7dce5ad149127473f79be52109c1806d651166fb |",
        '  "betas": [',
        "No evaluation of this checkpoint was found beside it.",
    ):
        assert line in card.splitlines()
    head = card.split("---")[1]
    assert "library_name: transformers" in head
    assert "license" not in head
    assert str(tmp_path) not in card
    assert '"run"' not in card, "settings that hold paths are left out"


def test_evaluations_beside_the_checkpoint_are_listed(run: Path, tmp_path: Path) -> None:
    checkpoint = run / "checkpoints" / "step_00000004"
    (run / "mine.json").write_text(result(checkpoint, 4))
    (run / "older.json").write_text(result(checkpoint, 3))
    (run / "other_model.json").write_text(result(run / "checkpoints" / "step_00000002", 4))
    (run / "damaged.json").write_text(result(checkpoint, 4)[:-5])
    (run / "checkpoints" / "strange.json").write_text(result(checkpoint, 4, results=[{"task": "x"}]))
    with open(run / "metrics.jsonl", "a") as file:
        for step, loss in ((2, 5.5), (4, 5.25)):
            file.write(json.dumps({"event": "valid", "step": step, "attempt": 1, "loss": loss}) + "\n")
        measured = {"accuracy": 0.5, "bits_per_byte": 1.5}
        file.write(json.dumps({"event": "eval", "step": 4, "attempt": 1, "name": "wiki", "headline": "bits_per_byte",
                               "measures": measured}) + "\n")  # fmt: skip
    lines = card_of(run, tmp_path / "hf").splitlines()
    assert lines[lines.index("| what | result |") + 2 : lines.index("## Use") - 1] == [
        "| loss on the run's validation data, nats per token | 5.2500 |",
        "| wiki | bits per byte 1.5000; accuracy 50.00 % |",
        "| mine, on held_out.txt | bits per byte 1.2500; perplexity 21.50 |",
    ]


def test_an_import_is_said_to_be_one(tmp_path: Path) -> None:
    folder = exported(tmp_path, llama(vocab_size=450), TOKENIZERS["llama"]())
    publish(folder, {"_name_or_path": "someone/model"})
    card = card_of(Path(import_hf(folder, tmp_path / "imported")["checkpoint"]), tmp_path / "again")
    assert "imported from a Hugging Face folder of the name `someone/model` and not trained since." in card
    assert "learning rate" not in card


def test_the_code_that_loads_an_encoder_is_for_one(tmp_path: Path) -> None:
    card = (exported(tmp_path, bert(pair_head=False)) / "README.md").read_text()
    assert "pipeline_tag: fill-mask" in card
    assert 'model = AutoModelForMaskedLM.from_pretrained("hf")' in card
    assert "generate" not in card


def edit_manifest(checkpoint: Path, *, average: bool = False, **state: Any) -> None:
    """Write the checkpoint's manifest anew with further entries of its state, and with the optimizer's first moments as
    an average.
    """
    manifest, prefix = load_manifest(checkpoint), "optim.exp_avg." if average else "none"
    tensors = {
        name.replace(prefix, "ema.") if name.startswith(prefix) else name: tensor
        for name, tensor in manifest.tensors.items()
    }
    written = replace(manifest, tensors=tensors, state=manifest.state | state)
    (checkpoint / MANIFEST).write_bytes(encode_manifest(written))


def evaluations(card: str) -> list[str]:
    lines = card.splitlines()
    return lines[lines.index("## Evaluation") + 2 : lines.index("## Use") - 1]


@pytest.mark.wide
def test_a_card_of_the_average_has_what_was_measured_of_it(run: Path, tmp_path: Path) -> None:
    checkpoint = run / "checkpoints" / "step_00000004"
    entry = {"decay": 0.99, "every_steps": 2, "from_step": 0, "since_step": 1}
    edit_manifest(checkpoint, average=True, ema=entry)
    (run / "weights.json").write_text(result(checkpoint, 4))
    with open(run / "metrics.jsonl", "a") as file:
        for event in ({"event": "valid", "loss": 5.5, "ema": {"loss": 5.25}}, {
            "event": "eval", "name": "wiki", "headline": "bits_per_byte", "measures": {"bits_per_byte": 1.5},
            "ema": {"bits_per_byte": 1.25},
        }):  # fmt: skip
            file.write(json.dumps({"step": 4, "attempt": 1} | event) + "\n")
    card = card_of(run, tmp_path / "hf", "ema")
    made = "| weights | the exponential average of decay 0.99, updated every 2 steps since step 1 |"
    assert made in card.splitlines()
    assert evaluations(card)[2:] == [
        "| loss on the run's validation data, nats per token | 5.2500 |", "| wiki | bits per byte 1.2500 |",
    ]  # fmt: skip
    (run / "average.json").write_text(result(checkpoint, 4, weights="ema"))
    assert "mine, on held_out.txt" in evaluations(card_of(run, tmp_path / "again", "ema"))[-1]
    card = card_of(run, tmp_path / "weights")
    assert made not in card.splitlines()
    assert [line.split("|")[2].split()[-1] for line in evaluations(card)[2:]] == ["5.5000", "1.5000", "21.50"]


@pytest.mark.wide
def test_a_card_of_a_merge_has_no_measures_of_the_run(run: Path, tmp_path: Path) -> None:
    checkpoint = run / "checkpoints" / "step_00000004"
    parents = [
        {"run": str(run), "checkpoint": f"{run}/{step}", "step": step, "manifest_sha256": "", "weight": 0.5}
        for step in (2, 4)
    ]
    edit_manifest(checkpoint, merged={"mean": "uniform", "moments": "newest", "parents": parents})
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 4, "attempt": 1, "event": "valid", "loss": 5.5}) + "\n")
    card = card_of(run, tmp_path / "hf")
    assert "| merged | uniform mean of 2 checkpoints of steps 2 to 4 |" in card.splitlines()
    assert evaluations(card) == ["No evaluation of this checkpoint was found beside it."]
