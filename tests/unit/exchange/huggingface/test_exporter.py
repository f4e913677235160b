"""Export loads in transformers with the same scores, and import of it is the same to the bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lmtrain.checkpoint.tensor_reader import CheckpointReader
from lmtrain.errors import CheckpointError
from lmtrain.exchange.huggingface.compare_with_transformers import compare_scores, model_scores, random_batch
from lmtrain.exchange.huggingface.import_and_export import export_hf, import_hf
from lmtrain.models.model_settings import ModelSettings
from tests.marks import wide
from tests.unit.exchange.models import as_imported, bert, gpt2, llama, random_weights, same_weights, save, tokenizer_for

MODELS: dict[str, tuple[str, ModelSettings]] = {
    "gpt2": ("gpt2", gpt2(num_positions=56)),
    "gpt2-untied-gelu": ("gpt2", gpt2(tied=False, activation="gelu")),
    "llama": ("llama", llama()),
    "llama-tied-bias": ("llama", llama(tied=True, bias="all", rotary_base=500000.0)),
    "mistral": ("mistral", llama(window=9)),
    "bert": ("bert", bert()),
    "bert-one-head": ("bert", bert(pair_head=False, num_positions=56)),
    "megatron-bert": ("megatron-bert", bert(norm_order="pre")),
    "bert-tanh": ("bert", bert(activation="gelu_tanh", head_activation="gelu_tanh")),
}


@pytest.mark.parametrize(
    "name",
    ["gpt2", "llama-tied-bias", "mistral", "bert-one-head", "megatron-bert",
     *wide("gpt2-untied-gelu", "llama", "bert", "bert-tanh")],
)  # fmt: skip
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
    assert found == as_imported(settings).to_dict()
    scores = model_scores(settings, lambda n: CheckpointReader(back).read(f"model.{n}"), random_batch(settings))
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
        "README.md", "config.json", "generation_config.json", "model.safetensors", "special_tokens_map.json",
        "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip


def test_an_export_that_is_another_model_is_found(tmp_path: Path) -> None:
    settings = llama()
    export_hf(save(tmp_path / "run", settings), tmp_path / "hf", check=False)
    weights = random_weights(settings)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
    with pytest.raises(CheckpointError, match=r"transformers .* computes logits that differ from lmtrain.s by"):
        compare_scores(tmp_path / "hf", settings, weights.__getitem__, exact=True)
    weights["blocks.1.mlp.up.weight"][3, 4] += 1
    with pytest.raises(CheckpointError, match="does not hold the weights of its source"):
        compare_scores(tmp_path / "hf", settings, weights.__getitem__, exact=True)


def test_every_byte_is_told(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    source = save(tmp_path / "run", gpt2())
    export_hf(
        source,
        tmp_path / "hf",
        check=False,
        shard_bytes=60_000,
        report=lambda done, total: told.append((done, total)),
    )
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1] == 4 * gpt2().num_parameters
