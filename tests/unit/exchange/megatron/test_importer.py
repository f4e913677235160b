"""Megatron-LM's files, built here from facts about them, give the weights they were built from."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lmtrain.checkpoint.tensor_reader import CheckpointReader
from lmtrain.errors import CheckpointError, UsageError
from lmtrain.exchange.megatron.import_and_export import import_megatron
from lmtrain.exchange.megatron.model_settings_of_checkpoint import read_megatron_model
from tests.unit.exchange.megatron.folders import (
    arguments,
    assert_same,
    fused_by_hand,
    llama_arguments,
    old_state,
    stacked_state,
    tokenizer_file,
    write_distributed,
    write_rank,
)
from tests.unit.exchange.models import gpt2, llama, random_weights


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
    with pytest.raises(CheckpointError, match="--set num_heads=N"):
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


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("halves", "master", "in_file"), [(False, "fp32_param", True), (True, "param", False)])
def test_distributed_folders_and_the_optimizers_weights(
    halves: bool, master: str, in_file: bool, tmp_path: Path
) -> None:
    """The optimizer's fp32 weights are called fp32_param or, in the form fully_reshardable, param."""
    settings = llama()
    parts = {kind: random_weights(settings, seed) for seed, kind in enumerate((master, "exp_avg", "exp_avg_sq"))}
    weights = {name: value.bfloat16() for name, value in parts[master].items()}
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
    args = llama_arguments(settings, untie_embeddings_and_output_weights=True, rotary_base=500)
    common = {"args": args, "iteration": 12, "checkpoint_version": 3.0}
    write_distributed(tmp_path / "dist", state, common, in_file=in_file)
    found = import_megatron(tmp_path / "dist", tmp_path / "out", tokenizer=tokenizer_file(tmp_path, settings))
    reader = CheckpointReader(found["checkpoint"])
    assert found["weights_from"] == "the optimizer, in float32"
    assert reader.state["model"]["rotary_base"] == 500
    for name, value in parts[master].items():
        assert torch.equal(reader.read(f"model.{name}"), value), name
    assert reader.manifest.tensors.keys() == {f"model.{name}" for name in weights}
    assert found["left_out"]["optimizer"].startswith("a run goes on from its data's order")
    assert reader.step == 12
    if halves:
        state = {name: value for name, value in state.items() if not name.endswith("layers.0.mlp.linear_fc1.weight_v")}
        write_distributed(tmp_path / "torn", state, common, in_file=in_file)
        with pytest.raises(CheckpointError, match=r"blocks\.0\.mlp\.up\.weight has 1 parts of shape .* which do not"):
            import_megatron(tmp_path / "torn", tmp_path / "none", tokenizer=tokenizer_file(tmp_path, settings))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("prefix", "dtype", "taken"),
    [
        ("optimizer.state.param", torch.bfloat16, r"the model, in bfloat16: .*--dist-ckpt-optim-fully-reshardable"),
        ("optimizer.distributed.bucket_0", torch.float32, r"the model, in bfloat16: the optimizer's float32 weights"),
        (None, None, "the model, in bfloat16$"),
    ],
)
def test_weights_of_less_precision_are_never_taken_silently(
    prefix: str | None, dtype: torch.dtype, taken: str, tmp_path: Path
) -> None:
    settings = llama()
    state = {k: v.bfloat16() for k, v in stacked_state(random_weights(settings), settings).items()}
    state |= {f"{prefix}.{name}": value.to(dtype) for name, value in state.items()} if prefix else {}
    args = llama_arguments(settings, untie_embeddings_and_output_weights=True)
    write_distributed(tmp_path / "dist", state, {"args": args}, in_file=True)
    model = read_megatron_model(tmp_path / "dist", None, {})
    assert re.match(taken, model.weights_from())
    assert ("optimizer" in model.left_out()) == (prefix is not None)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("in_file", [False, True])
def test_a_distributed_folder_without_arguments_is_refused(in_file: bool, tmp_path: Path) -> None:
    """The shapes of a model do not tell its base of angles, its norm and its activation."""
    state = stacked_state(random_weights(llama()), llama())
    write_distributed(tmp_path / "dist", state, {"iteration": 3}, in_file=in_file)
    with pytest.raises(CheckpointError, match=r"does not hold the arguments of its model.* or, since core v0\.19"):
        read_megatron_model(tmp_path / "dist", None, {"num_heads": 4, "num_kv_heads": 2, "vocab_size": 331})


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"num_experts": 8}, "--num-experts 8"),
        ({"qk_layernorm": True, "use_mup": True}, "--use-mup true .*; --qk-layernorm true"),
        ({"apply_residual_connection_post_layernorm": True}, "--apply-residual-connection-post-layernorm"),
        ({"num_attention_heads": 5}, "describes a model with invalid settings"),
        ({"num_attention_heads": 2, "kv_channels": 12}, "does not hold the model of its arguments"),
    ],
)
def test_a_model_that_ours_do_not_compute_is_refused(more: dict[str, Any], said: str, tmp_path: Path) -> None:
    settings = gpt2()
    state = {"args": arguments(settings, **more), "model": old_state(random_weights(settings), settings, 2, 0, 1)}
    write_rank(tmp_path / "old", "mp_rank_00", state)
    with pytest.raises(CheckpointError, match=said):
        import_megatron(tmp_path / "old", tmp_path / "out", tokenizer=tokenizer_file(tmp_path, settings))


def test_missing_ranks_and_foreign_weights_are_named(tmp_path: Path) -> None:
    settings = gpt2()
    weights, words = random_weights(settings), tokenizer_file(tmp_path, settings)
    state = {"args": arguments(settings), "checkpoint_version": 3.0, "model": old_state(weights, settings, 3, 1, 2)}
    write_rank(tmp_path / "old", "mp_rank_01", state)
    with pytest.raises(CheckpointError, match=r"lacks the files of 1 ranks, the first at \(tp, pp\) = \(0, 0\)"):
        import_megatron(tmp_path / "old", tmp_path / "out", tokenizer=words)
    write_rank(
        tmp_path / "other", "mp_rank_00", state | {"model": {"decoder.layers.0.mlp.router.weight": torch.ones(2)}}
    )
    with pytest.raises(CheckpointError, match=r"mlp\.router\.weight"):
        import_megatron(tmp_path / "other", tmp_path / "out", tokenizer=words)
