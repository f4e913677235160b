"""Megatron-LM's files built from facts about them, for the tests that read them."""

from __future__ import annotations

import argparse
import io
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from lmtrain.checkpoint.tensor_reader import CheckpointReader
from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.models.model_settings import ModelSettings
from tests.unit.exchange.models import tokenizer_for


def fused_by_hand(whole: Tensor, s: GPTSettings, version: float, rank: int, tp: int) -> Tensor:
    """One rank's rows in words: for each of its heads or groups, one row after another."""
    per_key, heads, keys = s.num_heads // s.kv_heads, s.num_heads, s.kv_heads
    queries = {h: whole[h * s.head : (h + 1) * s.head] for h in range(heads)}
    ks = {g: whole[(heads + g) * s.head : (heads + g + 1) * s.head] for g in range(keys)}
    vs = {g: whole[(heads + keys + g) * s.head : (heads + keys + g + 1) * s.head] for g in range(keys)}
    mine = range(rank * heads // tp, (rank + 1) * heads // tp)
    rows: list[Tensor] = []
    if version == 0:
        rows = [group[h] for group in (queries, ks, vs) for h in mine]
    elif version == 1:
        rows = [group[h][i : i + 1] for h in mine for i in range(s.head) for group in (queries, ks, vs)]
    else:
        for group in range(rank * keys // tp, (rank + 1) * keys // tp):
            rows += [*(queries[group * per_key + i] for i in range(per_key)), ks[group], vs[group]]
    return torch.cat(rows)


def old_state(weights: dict[str, Tensor], s: GPTSettings, version: float, rank: int, tp: int) -> dict[str, Any]:
    """The model of a rank as of 2019 and 2021: a dict for each module, and rows of the vocabulary padded to 384."""

    def rows(tensor: Tensor) -> Tensor:
        return tensor.chunk(tp)[rank].clone()

    inside = {
        "attention_norm": "input_layernorm", "attention.qkv": "attention.query_key_value",
        "attention.out": "attention.dense", "mlp_norm": "post_attention_layernorm", "mlp.up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h",
    }  # fmt: skip
    layers: dict[str, Tensor] = {}
    for name, value in weights.items():
        if name.startswith("blocks."):
            layer = name.split(".")[1]
            inner, leaf = name.split(".", 2)[2].rsplit(".", 1)
            if inner == "attention.qkv":
                value = fused_by_hand(value, s, version, rank, tp)
            elif inner == "mlp.up":
                value = rows(value)
            elif leaf == "weight" and inner in ("attention.out", "mlp.down"):
                value = value.chunk(tp, 1)[rank].clone()
            layers[f"layers.{layer}.{inside[inner]}.{leaf}"] = value
    layers |= {f"final_layernorm.{leaf}": weights[f"norm.{leaf}"] for leaf in ("weight", "bias")}
    padded = torch.cat((weights["embedding.token.weight"], torch.ones(53, s.width)))
    embedding = {
        "word_embeddings": {"weight": rows(padded)},
        "position_embeddings": {"weight": weights["embedding.position.weight"]},
    }
    body = "transformer" if version < 2 else "encoder"
    return {
        "language_model": {"embedding": embedding, body: layers},
        "word_embeddings_for_head": {"weight": rows(padded)},
    }


def arguments(s: GPTSettings, **more: Any) -> argparse.Namespace:
    values = {
        "num_layers": s.num_layers, "hidden_size": s.width, "num_attention_heads": s.num_heads,
        "max_position_embeddings": s.seq_len, "layernorm_epsilon": s.norm_eps, "bias_gelu_fusion": True,
        "hidden_dropout": 0.0, "vocab_size": s.vocab_size, "init_method_std": 0.02,
    }  # fmt: skip
    return argparse.Namespace(**(values | more))


def llama_arguments(s: GPTSettings, **more: Any) -> argparse.Namespace:
    values = {
        "swiglu": True, "group_query_attention": True, "num_query_groups": s.kv_heads, "normalization": "RMSNorm",
        "position_embedding_type": "rope", "rotary_base": 10000, "kv_channels": s.head,
    }  # fmt: skip
    return arguments(s, **(values | more))


def stacked_state(weights: dict[str, Tensor], s: GPTSettings) -> dict[str, Tensor]:
    """A distributed checkpoint's tensors: all layers in one, norms inside the linears that follow them."""
    names = {
        "attention_norm": "self_attention.linear_qkv.layer_norm_weight",
        "attention.qkv": "self_attention.linear_qkv.weight", "attention.out": "self_attention.linear_proj.weight",
        "mlp_norm": "mlp.linear_fc1.layer_norm_weight", "mlp.up": "mlp.linear_fc1.weight",
        "mlp.down": "mlp.linear_fc2.weight",
    }  # fmt: skip
    result = {
        "embedding.word_embeddings.weight": torch.cat((weights["embedding.token.weight"], torch.ones(53, s.width))),
        "decoder.final_layernorm.weight": weights["norm.weight"],
        "output_layer.weight": torch.cat((weights["head.weight"], torch.ones(53, s.width))),
    }
    for ours, theirs in names.items():
        values = [weights[f"blocks.{layer}.{ours}.weight"] for layer in range(s.num_layers)]
        values = [fused_by_hand(v, s, 3, 0, 1) for v in values] if ours == "attention.qkv" else values
        result[f"decoder.layers.{theirs}"] = torch.stack(values)
    return result


def write_distributed(folder: Path, tensors: dict[str, Tensor], common: dict[str, Any], *, in_file: bool) -> None:
    """Write a torch_dist folder. `common` is in a file of its own, or since core v0.19 an object beside the tensors."""
    saved = io.BytesIO()
    torch.save([common], saved)
    objects = {} if in_file else {"common_state/shard_0_1": saved}
    save_distributed({**tensors, **objects}, checkpoint_id=folder, planner=_SavedObjects(), no_dist=True)
    if in_file:
        torch.save(common, folder / "common.pt")


class _SavedObjects(DefaultSavePlanner):
    """Writes the bytes of an object that is saved already, as Megatron-LM's planner does; torch's saves it again."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        return object


def write_rank(folder: Path, name: str, state: dict[str, Any], *, legacy: bool = False) -> None:
    (folder / name).mkdir(parents=True)
    torch.save(state, folder / name / "model_optim_rng.pt", _use_new_zipfile_serialization=not legacy)


def tokenizer_file(folder: Path, settings: ModelSettings) -> Path:
    path = folder / "words" / "tokenizer.json"
    tokenizer_for(settings).save(path)
    return path


def assert_same(found: dict[str, Any], weights: dict[str, Tensor]) -> None:
    reader = CheckpointReader(found["checkpoint"])
    assert reader.manifest.tensors.keys() == {f"model.{name}" for name in weights}
    for name, value in weights.items():
        assert torch.equal(reader.read(f"model.{name}"), value), name
