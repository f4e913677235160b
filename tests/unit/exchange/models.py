"""Small models of every family, saved as checkpoints: what the exchanges with other formats are tried on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmtrain.checkpoint.tensor_reader import CheckpointReader
from lmtrain.exchange.stream_tensors_to_disk import save_imported
from lmtrain.models.bert_settings import BertSettings
from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.models.model_settings import ModelSettings, unpadded_shapes
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer
from lmtrain.tokenizer.train import train_bpe, train_wordpiece

TEXT = ["the cat sat on the mat", "a dog ran over the hill and the cat saw it", "cats and dogs sat down"] * 3
VOCAB = 331  # not divisible by anything, and more than the tokenizers have


def gpt2(**changes: Any) -> GPTSettings:
    values: dict[str, Any] = {"num_layers": 2, "width": 48, "num_heads": 4, "seq_len": 40, "vocab_size": VOCAB}
    return GPTSettings(**(values | changes))


def llama(**changes: Any) -> GPTSettings:
    values: dict[str, Any] = {
        "num_kv_heads": 2, "ffn_width": 80, "positions": "rotary", "norm": "rmsnorm", "activation": "silu",
        "gated": True, "bias": "none", "tied": False,
    }  # fmt: skip
    return gpt2(**(values | changes))


def bert(**changes: Any) -> BertSettings:
    values: dict[str, Any] = {
        "num_layers": 2, "width": 48, "num_heads": 4, "seq_len": 40, "vocab_size": VOCAB, "norm_order": "post"
    }  # fmt: skip
    return BertSettings(**(values | changes))


def as_imported(settings: ModelSettings) -> ModelSettings:
    """Return the settings of a model that was exported and imported: its length is that of its table of positions."""
    assert isinstance(settings, (GPTSettings, BertSettings))
    return replace(settings, seq_len=settings.position_rows, num_positions=None)


def tokenizer_for(settings: ModelSettings) -> Tokenizer:
    if settings.shape.causal:
        return train_bpe(TEXT, 280)
    return train_wordpiece(TEXT, 60, lowercase=True)


def random_weights(settings: ModelSettings, seed: int = 1) -> dict[str, Tensor]:
    """Large enough that a wrong order of heads or a lost norm is seen in the scores."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in unpadded_shapes(settings).items():
        is_norm = name.endswith("norm.weight")
        weights[name] = torch.randn(shape, generator=generator) * 0.2 + (1.0 if is_norm else 0.0)
    return weights


def save(folder: Path, settings: ModelSettings, seed: int = 1, tokenizer: Tokenizer | None = None) -> Path:
    weights, tokenizer = random_weights(settings, seed), tokenizer or tokenizer_for(settings)
    facts = save_imported(folder, settings, lambda name: [weights[name]], tokenizer, {"format": "test"}, step=7)
    return Path(facts["checkpoint"])


def same_weights(left: Path, right: Path) -> bool:
    a, b = CheckpointReader(left), CheckpointReader(right)
    names = a.manifest.tensors.keys()
    return names == b.manifest.tensors.keys() and all(torch.equal(a.read(name), b.read(name)) for name in names)
