"""Random small models of each family have transformers' logits and gradients, and come back as they went."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lmtrain.exchange.huggingface.config_json import hf_config
from lmtrain.exchange.huggingface.import_and_export import export_hf, import_hf
from tests.unit.exchange.huggingface.families.drawing import NUM_SEEDS, configs, draw_config
from tests.unit.exchange.huggingface.families.twins import (
    SEEN,
    TOLERANCE,
    Ours,
    difference,
    gradients,
    lengths,
    load_theirs,
    make_folder,
    other_settings,
    random_tokens,
    scores,
    their_gradients_in_our_form,
    write_config,
)

transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed")
NUM_SAMPLES = 4  # seeds in `make test-all`; all of them are in `make test-slow`
CASES = [
    pytest.param(family, seed, marks=pytest.mark.wide if seed < NUM_SAMPLES else pytest.mark.slow)
    for family in configs()
    for seed in range(NUM_SEEDS)
]
# What an export adds to a config.json of which nothing has changed.
ADDED = {
    "architectures", "transformers_version", "dtype", "torch_dtype", "rope_theta", "rope_parameters", "rope_scaling",
    "original_max_position_embeddings", "rope_local_base_freq", "partial_rotary_factor", "rotary_pct",
    "rotary_emb_base", "layer_types",
}  # fmt: skip


@pytest.mark.parametrize(("family", "seed"), CASES)
def test_logits_are_theirs_and_every_setting_is_seen_in_them(family: str, seed: int, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "hf", family, draw_config(family, seed), seed)
    theirs, ours = load_theirs(folder), Ours.load(folder)
    model = ours.build()
    batches = [random_tokens(length, ours.settings.vocab_size or 0, seed) for length in lengths(ours.settings)]
    with torch.no_grad():
        expected = [theirs(tokens).logits for tokens in batches]
        for tokens, logits in zip(batches, expected, strict=True):
            found = difference(scores(model, tokens, ours.settings), logits)
            assert found <= TOLERANCE, f"{tokens.shape[1]} tokens: {found}"
        for key, others in other_settings(ours.settings).items():
            # because: some settings act on short or on long texts only
            moved = max(
                difference(scores(ours.build(settings), tokens, ours.settings), logits)
                for settings in others
                for tokens, logits in zip(batches[::-1], expected[::-1], strict=True)
            )
            assert moved >= SEEN, f"{key} is not seen in the logits: {moved}"


@pytest.mark.parametrize(("family", "seed"), CASES)
def test_gradients_are_theirs(family: str, seed: int, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "hf", family, draw_config(family, seed), seed)
    theirs, ours = load_theirs(folder), Ours.load(folder)
    model, tokens = ours.build(), random_tokens(ours.settings.seq_len, ours.settings.vocab_size or 0, seed)
    found = gradients(model, scores(model, tokens, ours.settings), seed)
    held = gradients(theirs, theirs(tokens).logits, seed)
    expected = their_gradients_in_our_form(ours, held, names_in_memory(theirs))
    whole = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    for name, gradient in expected.items():
        norm = gradient.norm() if gradient.norm() >= 1e-6 * whole else whole
        off = (found[name][: len(gradient)] - gradient).norm() / norm
        assert off <= 1e-4, f"{name}: {off}"


def names_in_memory(theirs: Any) -> dict[str, str]:
    """Return the names of weights that files have under others: GPT-NeoX's head in transformers 5."""
    held = {name for name, _ in theirs.named_parameters()}
    return {"embed_out.weight": "lm_head.weight"} if "embed_out.weight" not in held else {}


@pytest.mark.parametrize(("family", "seed"), CASES)
def test_a_folder_comes_back_as_it_went(family: str, seed: int, tmp_path: Path) -> None:
    dtype = (torch.float32, torch.bfloat16, torch.float16)[seed % 3]
    folder = make_folder(tmp_path / "hf", family, draw_config(family, seed), seed, dtype)
    checkpoint = import_hf(folder, tmp_path / "imported")["checkpoint"]
    export_hf(Path(checkpoint), tmp_path / "again", check=False)
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "again"))
    assert before.keys() == after.keys()
    for name, weight in before.items():
        assert weight.dtype == after[name].dtype == dtype
        assert torch.equal(weight, after[name]), name
    came, went = (json.loads((path / "config.json").read_text()) for path in (folder, tmp_path / "again"))
    assert {key for key in came.keys() | went.keys() if came.get(key) != went.get(key)} <= ADDED
    assert what_transformers_reads(tmp_path / "again") == what_transformers_reads(folder)


def what_transformers_reads(folder: Path) -> dict[str, Any]:
    config = transformers.AutoConfig.from_pretrained(folder).to_dict()
    unread = ("_name_or_path", "transformers_version", "architectures", "torch_dtype", "dtype", "rope_parameters",
              "rope_scaling")  # fmt: skip
    return {key: value for key, value in config.items() if key not in unread}


@pytest.mark.parametrize(("family", "seed"), CASES)
def test_our_own_config_json_describes_the_same_model(family: str, seed: int, tmp_path: Path) -> None:
    """Export as a model that was trained here, which has no original files."""
    folder = make_folder(tmp_path / "hf", family, draw_config(family, seed), seed)
    ours, before = Ours.load(folder), load_theirs(folder)
    tokens = random_tokens(ours.settings.seq_len, ours.settings.vocab_size or 0, seed)
    config = hf_config(ours.settings, {}, "float32", family)
    assert config["model_type"] == family
    write_config(folder, config, torch.float32)
    assert Ours.load(folder).settings == ours.settings
    with torch.no_grad():
        assert difference(load_theirs(folder)(tokens).logits, before(tokens).logits) <= TOLERANCE
