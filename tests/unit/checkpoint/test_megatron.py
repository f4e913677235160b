"""Megatron-LM's files, built here from facts about them, give the weights they were built from; pickles stay data."""

from __future__ import annotations

import argparse
import os
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from lmtrain.checkpoint.reader import CheckpointReader
from lmtrain.errors import CheckpointError, DataError, LmtrainError, UsageError
from lmtrain.exchange.megatron.args import Found, settings_from
from lmtrain.exchange.megatron.exporter import export_megatron
from lmtrain.exchange.megatron.folder import open_megatron
from lmtrain.exchange.megatron.importer import import_megatron
from lmtrain.exchange.torch_files.pickle_data import Made
from lmtrain.exchange.torch_files.reader import StoredTensor, TorchFile
from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.models.model_settings import ModelSettings
from tests.unit.checkpoint.models import bert, gpt2, llama, random_weights, same_weights, save, tokenizer_for

MODELS: dict[str, ModelSettings] = {
    "gpt2": gpt2(),
    "untied": gpt2(tied=False, activation="gelu"),
    "llama": llama(),
    "window": llama(tied=True, window=9),
    "bert": bert(norm_order="pre"),
    "bert-fused": bert(norm_order="pre", activation="gelu_tanh"),
}


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("name", MODELS)
def test_an_export_loads_in_torch_and_comes_back(name: str, tp: int, pp: int, tmp_path: Path) -> None:
    settings, source = MODELS[name], save(tmp_path / "run", MODELS[name])
    told: list[tuple[int, int]] = []
    export_megatron(
        source, tmp_path / "out", tp=tp, pp=pp, transformer_engine=pp == 1, progress=lambda *now: told.append(now)
    )
    assert told[-1][0] == told[-1][1] == max(told)[0]
    files = sorted(tmp_path.glob("out/release/mp_rank_*/model_optim_rng.pt"))
    assert len(files) == tp * pp
    with torch.serialization.safe_globals([argparse.Namespace]):
        states = [torch.load(file, weights_only=True) for file in files]
    assert states[0]["args"].padded_vocab_size == (384 if tp == 1 else 512)
    assert len(states[0]["model"]["embedding.word_embeddings.weight"]) == (384 if tp == 1 else 256)
    if pp > 1 and settings.ties():
        assert torch.equal(
            states[0]["model"]["embedding.word_embeddings.weight"], states[1]["model"]["output_layer.weight"]
        )
    back = Path(import_megatron(tmp_path / "out", tmp_path / "back")["checkpoint"])
    assert same_weights(source, back)
    assert CheckpointReader(back).state["model"] == settings.to_dict()


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


def write_rank(folder: Path, name: str, state: dict[str, Any], *, legacy: bool = False) -> None:
    (folder / name).mkdir(parents=True)
    torch.save(state, folder / name / "model_optim_rng.pt", _use_new_zipfile_serialization=not legacy)


def tokenizer_file(folder: Path, settings: ModelSettings) -> Path:
    path = folder / "words" / "tokenizer.json"
    tokenizer_for(settings).save(path)
    return path


def assert_same(found: dict[str, Any], weights: dict[str, Tensor]) -> None:
    reader = CheckpointReader(found["checkpoint"])
    assert reader.names == sorted(f"model.{name}" for name in weights)
    for name, value in weights.items():
        assert torch.equal(reader.read(f"model.{name}"), value), name


@pytest.mark.parametrize("version", [0, 1, 2])
@pytest.mark.parametrize("tp", [1, 2])
def test_old_files_are_read_in_every_order_of_query_key_value(version: int, tp: int, tmp_path: Path) -> None:
    settings = gpt2()
    weights = random_weights(settings)
    for rank in range(tp):
        state = {"args": arguments(settings), "iteration": 9, "model": old_state(weights, settings, version, rank, tp)}
        state |= {"checkpoint_version": float(version)} if version else {}
        write_rank(tmp_path / "old" / "iter_0000009", f"mp_rank_{rank:02d}", state, legacy=version == 0)
    (tmp_path / "old" / "latest_checkpointed_iteration.txt").write_text("9")
    found = import_megatron(tmp_path / "old", tmp_path / "out", tokenizer=tokenizer_file(tmp_path, settings))
    assert_same(found, weights)
    assert CheckpointReader(found["checkpoint"]).state["model"] == settings.to_dict()
    assert found["iteration"] == 9


def test_files_without_arguments_need_the_number_of_heads(tmp_path: Path) -> None:
    settings, words = gpt2(), tokenizer_file(tmp_path, gpt2())
    weights = random_weights(settings)
    write_rank(tmp_path / "old", "mp_rank_00", {"model": old_state(weights, settings, 0, 0, 1)}, legacy=True)
    with pytest.raises(CheckpointError, match="--set num_heads=16"):
        import_megatron(tmp_path / "old", tmp_path / "out", tokenizer=words)
    with pytest.raises(UsageError, match="--tokenizer"):
        import_megatron(tmp_path / "old", tmp_path / "out")
    given = {"num_heads": 4, "vocab_size": 331}
    assert_same(import_megatron(tmp_path / "old", tmp_path / "out", tokenizer=words, overrides=given), weights)


def test_grouped_queries_and_virtual_stages(tmp_path: Path) -> None:
    """Chunk 0 of all stages comes before chunk 1 of any; each counts its layers from 0."""
    settings = llama(num_layers=4, tied=True)
    weights = random_weights(settings)
    names = {
        "attention_norm": "input_layernorm", "attention.qkv": "self_attention.linear_qkv",
        "attention.out": "self_attention.linear_proj", "mlp_norm": "pre_mlp_layernorm", "mlp.up": "mlp.linear_fc1",
        "mlp.down": "mlp.linear_fc2",
    }  # fmt: skip
    for stage in range(2):
        state: dict[str, Any] = {"checkpoint_version": 3.0, "args": llama_arguments(settings)}
        for chunk in range(2):
            layer = 2 * chunk + stage
            model = {}
            for ours, theirs in names.items():
                value = weights[f"blocks.{layer}.{ours}.weight"]
                fused = fused_by_hand(value, settings, 3, 0, 1) if ours == "attention.qkv" else value
                model[f"decoder.layers.0.{theirs}.weight"] = fused
            if (stage, chunk) == (0, 0):
                model["embedding.word_embeddings.weight"] = weights["embedding.token.weight"]
            if (stage, chunk) == (1, 1):
                model["decoder.final_layernorm.weight"] = weights["norm.weight"]
                model["decoder.layers.0.self_attention.linear_qkv._extra_state"] = torch.zeros(0)
            state[f"model{chunk}"] = model
        write_rank(tmp_path / "vp", f"mp_rank_00_{stage:03d}", state)
    found = import_megatron(tmp_path / "vp", tmp_path / "out", tokenizer=tokenizer_file(tmp_path, settings))
    assert_same(found, weights)


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


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("halves", [False, True])
def test_distributed_folders_with_their_optimizer(halves: bool, tmp_path: Path) -> None:
    settings = llama()
    parts = {kind: random_weights(settings, seed) for seed, kind in enumerate(("fp32_param", "exp_avg", "exp_avg_sq"))}
    weights = {name: value.bfloat16() for name, value in parts["fp32_param"].items()}
    state = stacked_state({name: value.float() for name, value in weights.items()}, settings)
    state = {name: value.bfloat16() for name, value in state.items()}
    for kind, values in parts.items():
        state |= {f"optimizer.state.{kind}.{name}": value for name, value in stacked_state(values, settings).items()}
    if halves:  # newer folders: every layer by itself, and a gated input in two
        for name in [name for name in state if "decoder.layers." in name]:
            before, after = name.split("decoder.layers.")
            for layer, value in enumerate(state.pop(name)):
                both = {"": value}
                if after == "mlp.linear_fc1.weight":
                    gate, up = value.chunk(2)
                    both = {"_w": gate.clone(), "_v": up.clone()}
                state |= {f"{before}decoder.layers.{layer}.{after}{end}": v for end, v in both.items()}
    save_distributed(state, checkpoint_id=tmp_path / "dist", no_dist=True)
    common = {"args": llama_arguments(settings, untie_embeddings_and_output_weights=True), "iteration": 12}
    torch.save(common | {"checkpoint_version": 3.0}, tmp_path / "dist" / "common.pt")
    found = import_megatron(tmp_path / "dist", tmp_path / "out", tokenizer=tokenizer_file(tmp_path, settings))
    reader = CheckpointReader(found["checkpoint"])
    for kind, values in parts.items():
        prefix = "model" if kind == "fp32_param" else f"optim.{kind}"
        for name, value in values.items():
            assert torch.equal(reader.read(f"{prefix}.{name}"), value), name
    assert reader.state["optimizer"] == {"kind": "adamw", "num_updates": 12}
    assert reader.step == 12


def test_distributed_tensors_in_pieces(tmp_path: Path) -> None:
    """Two ranks' halves of one tensor, in two files, behind something else."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    value, chunks, places = torch.randn(4, 6), [], {}
    for rank in range(2):
        offset, half = torch.Size([2 * rank, 0]), value[2 * rank : 2 * rank + 2].clone()
        with open(tmp_path / f"__{rank}_0.distcp", "wb") as file:
            file.write(b"something else")
            torch.save(half, file)
            length = file.tell() - 14
        chunks.append(ChunkStorageMetadata(offset, half.shape))
        places[MetadataIndex("embedding.word_embeddings.weight", offset)] = _StorageInfo(
            f"__{rank}_0.distcp", 14, length
        )
    entry = TensorStorageMetadata(TensorProperties(torch.float32), value.shape, chunks)
    (tmp_path / ".metadata").write_bytes(
        pickle.dumps(Metadata({"embedding.word_embeddings.weight": entry}, storage_data=places))
    )
    (part,) = open_megatron(tmp_path).weights["embedding.token.weight"]
    assert torch.equal(part.read(), value)
    entry.chunks.pop()
    (tmp_path / ".metadata").write_bytes(
        pickle.dumps(Metadata({"embedding.word_embeddings.weight": entry}, storage_data=places))
    )
    with pytest.raises(CheckpointError, match="is not whole"):
        open_megatron(tmp_path)


class Danger:
    """What a pickle of an attacker holds: a call that is made on reading."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("legacy", [False, True])
def test_nothing_in_a_file_is_called(legacy: bool, tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    torch.save(
        {"args": Danger(trap), "model": {"a": torch.ones(3)}}, tmp_path / "a.pt",
        _use_new_zipfile_serialization=not legacy,
    )  # fmt: skip
    value = TorchFile(tmp_path / "a.pt").value
    assert isinstance(value["args"], Made)
    assert value["args"].path in ("posix.mkdir", "nt.mkdir")
    assert isinstance(value["model"]["a"], StoredTensor)
    assert torch.equal(value["model"]["a"].read(), torch.ones(3))
    assert not trap.exists()
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / ".metadata").write_bytes(pickle.dumps(Danger(trap)))
    with pytest.raises(CheckpointError, match="not torch's list of tensors"):
        open_megatron(tmp_path / "dist")
    assert not trap.exists()


@pytest.mark.parametrize(
    "program",
    [
        b"\x80\x02]q\x00" + b"h\x00h\x00\x86q\x00" * 60 + b"}h\x00K\x01s.",  # a key that takes forever to hash
        b"\x80\x04\x8e" + b"\xff" * 8 + b".",  # bytes without end
        b"\x80\x02" + b"(" * 100_000,
        b"\x80\x02\x82\x01.",  # the registry of extensions
        b"cos\nsystem\n0.",
        b"",
        b".",
    ],
)
def test_hostile_programs_end_in_an_error(program: bytes, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(program)
    with pytest.raises(DataError):
        open_megatron(tmp_path)


@pytest.mark.parametrize("legacy", [False, True])
def test_damaged_files_are_errors_and_never_tensors_of_another_size(legacy: bool, tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"a": torch.randn(40, 3), "b": [torch.ones(5).bfloat16(), None, 2.5]}, path,
               _use_new_zipfile_serialization=not legacy)  # fmt: skip
    whole, chance = path.read_bytes(), random.Random(3)
    said: list[str] = []
    for _ in range(150):
        data = bytearray(whole)
        if chance.random() < 0.3:
            del data[chance.randrange(len(data)) :]
        else:
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        path.write_bytes(data)
        try:
            value = TorchFile(path).value
            tensors = [v for v in value.values() if isinstance(v, StoredTensor)] if isinstance(value, dict) else []
            assert sum(tensor.read().nbytes for tensor in tensors) <= len(whole)
        except LmtrainError as error:
            said.append(str(error))
    assert len(said) > 20
    assert all("a.pt" in text for text in said)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"num_experts": 8}, "--num-experts 8"),
        ({"qk_layernorm": True, "rotary_percent": 0.5}, r"--qk-layernorm .*; --rotary-percent 0\.5"),
        ({"apply_residual_connection_post_layernorm": True}, "--apply-residual-connection-post-layernorm"),
        ({"num_attention_heads": 5}, "describes no model that works"),
        ({"num_attention_heads": 2, "kv_channels": 12}, "does not hold the model of its arguments"),
    ],
)
def test_a_model_that_ours_do_not_compute_is_refused(more: dict[str, Any], said: str, tmp_path: Path) -> None:
    settings = gpt2()
    state = {"args": arguments(settings, **more), "model": old_state(random_weights(settings), settings, 2, 0, 1)}
    write_rank(tmp_path / "old", "mp_rank_00", state)
    with pytest.raises(CheckpointError, match=said):
        import_megatron(tmp_path / "old", tmp_path / "out", tokenizer=tokenizer_file(tmp_path, settings))


@pytest.mark.parametrize(
    ("told", "given", "activation"),
    [
        ({"bias_gelu_fusion": True}, {}, "gelu_tanh"),
        ({"bias_gelu_fusion": False}, {}, "gelu"),
        ({}, {"activation": "gelu"}, "gelu"),
        ({}, {}, r"does not tell which gelu it has"),
        ({"bias_gelu_fusion": True, "openai_gelu": True}, {}, "--openai-gelu would have to be left out"),
    ],
)
def test_which_gelu_a_bert_has(told: dict[str, object], given: dict[str, object], activation: str) -> None:
    """The fused kernel of its blocks is one by tanh, that of its head never is."""
    found = Found(
        num_layers=2, width=48, ffn_width=192, num_positions=40, is_encoder=True, has_bias=True, norm_has_bias=True,
        has_output=False, has_pair=True,
    )  # fmt: skip
    get = ({"num_attention_heads": 4} | told).get
    if activation.startswith("gelu"):
        settings = settings_from(get, found, 331, given, "here")
        assert settings.to_dict() == bert(norm_order="pre", activation=activation).to_dict()
    else:
        with pytest.raises(CheckpointError, match=activation):
            settings_from(get, found, 331, given, "here")


def test_missing_ranks_and_foreign_weights_are_named(tmp_path: Path) -> None:
    settings = gpt2()
    weights, words = random_weights(settings), tokenizer_file(tmp_path, settings)
    state = {"args": arguments(settings), "checkpoint_version": 3.0, "model": old_state(weights, settings, 3, 1, 2)}
    write_rank(tmp_path / "old", "mp_rank_01", state)
    with pytest.raises(CheckpointError, match=r"lacks the files of 1 ranks, as of tp, pp=\(0, 0\)"):
        import_megatron(tmp_path / "old", tmp_path / "out", tokenizer=words)
    write_rank(
        tmp_path / "other", "mp_rank_00", state | {"model": {"decoder.layers.0.mlp.router.weight": torch.ones(2)}}
    )
    with pytest.raises(CheckpointError, match=r"mlp\.router\.weight"):
        import_megatron(tmp_path / "other", tmp_path / "out", tokenizer=words)


@pytest.mark.parametrize(
    ("settings", "tp", "pp", "said"),
    [
        (llama(), 4, 1, r"tp=4 does not divide model\.num_kv_heads=2"),
        (gpt2(), 1, 3, r"pp=3 does not divide model\.num_layers=2"),
        (gpt2(parallel_block=True), 1, 1, r"model\.parallel_block=true"),
        (bert(norm_order="post"), 1, 1, r"model\.norm_order=post"),
        (bert(norm_order="pre", head_activation="gelu_tanh"), 1, 1, r"model\.head_activation=gelu_tanh"),
    ],
)
def test_what_megatron_cannot_be_is_refused(
    settings: ModelSettings, tp: int, pp: int, said: str, tmp_path: Path
) -> None:
    source = save(tmp_path / "run", settings)
    with pytest.raises(CheckpointError, match=said):
        export_megatron(source, tmp_path / "out", tp=tp, pp=pp)
    assert not (tmp_path / "out").exists()
