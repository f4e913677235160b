"""An export loads in torch, and comes back as the weights that it was made of."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lmtrain.checkpoint.tensor_reader import CheckpointReader
from lmtrain.errors import CheckpointError
from lmtrain.exchange.huggingface.import_and_export import export_hf, import_hf
from lmtrain.exchange.megatron.import_and_export import export_megatron, import_megatron
from lmtrain.models.model_settings import ModelSettings
from tests.marks import wide
from tests.unit.exchange.models import as_imported, bert, gpt2, llama, same_weights, save

MODELS: dict[str, ModelSettings] = {
    "gpt2": gpt2(num_positions=56),
    "untied": gpt2(tied=False, activation="gelu"),
    "llama": llama(),
    "window": llama(tied=True, window=9),
    "words": llama(bias="qkv", qk_norm="head", norm_weight="from_zero", rotary_share=0.5, window=9, layer_pattern="wF"),
    "bert": bert(norm_order="pre"),
    "bert-fused": bert(norm_order="pre", activation="gelu_tanh", num_positions=56),
}


# because: what tp cuts and what pp cuts have nothing to do with each other, and a pickle holds each model as any other
@pytest.mark.parametrize(
    ("name", "tp", "pp"),
    [
        ("gpt2", 2, 1), ("gpt2", 1, 2), ("untied", 2, 2), ("llama", 2, 1), ("window", 1, 1), ("bert", 2, 2),
        ("bert-fused", 1, 1), *wide(("words", 2, 1), ("gpt2", 2, 2), ("llama", 2, 2), ("window", 2, 2), ("bert", 2, 1)),
    ],
)  # fmt: skip
def test_an_export_loads_in_torch_and_comes_back(name: str, tp: int, pp: int, tmp_path: Path) -> None:
    settings, source = MODELS[name], save(tmp_path / "run", MODELS[name])
    told: list[tuple[int, int]] = []
    export_megatron(
        source, tmp_path / "out", tp=tp, pp=pp, transformer_engine=pp == 1, report=lambda *now: told.append(now)
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
    assert CheckpointReader(back).state["model"] == as_imported(settings).to_dict()


def test_a_checkpoint_is_written_as_a_release_or_as_its_iteration(tmp_path: Path) -> None:
    source = save(tmp_path / "run", llama())
    step = CheckpointReader(source).step
    release = export_megatron(source, tmp_path / "a")
    iteration = export_megatron(source, tmp_path / "b c", tp=2, as_iteration=True)
    tracked = [(tmp_path / name / "latest_checkpointed_iteration.txt").read_text() for name in ("a", "b c")]
    assert tracked == ["release", str(step)]
    assert (tmp_path / "a" / "release" / "mp_rank_00" / "model_optim_rng.pt").is_file()
    file = tmp_path / "b c" / f"iter_{step:07d}" / "mp_rank_01" / "model_optim_rng.pt"
    with torch.serialization.safe_globals([argparse.Namespace]):
        assert torch.load(file, weights_only=True)["iteration"] == step
    assert release["written_as"].startswith("release, from whose weights Megatron-LM begins at iteration 0")
    assert iteration["written_as"].startswith(f"iter_{step:07d}, at which Megatron-LM goes on counting")
    parallel = "--tensor-model-parallel-size {} --pipeline-model-parallel-size 1"
    assert release["to_load"] == f"--load {tmp_path}/a --ckpt-format torch {parallel.format(1)}"
    assert iteration["to_load"] == (
        f'--load "{tmp_path}/b c" --ckpt-format torch {parallel.format(2)} --no-load-optim --no-load-rng'
    )
    for name in ("a", "b c"):
        back = import_megatron(tmp_path / name, tmp_path / f"back {name}")
        assert same_weights(source, Path(back["checkpoint"]))


@pytest.mark.parametrize(("dtype", "kind"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_weights_of_half_precision_go_through_both_formats_bit_for_bit(
    dtype: str, kind: torch.dtype, tmp_path: Path
) -> None:
    export_hf(save(tmp_path / "run", llama()), tmp_path / "hf", dtype=dtype, check=False)
    generation = '{"eos_token_id": [0, 3]}'
    (tmp_path / "hf" / "generation_config.json").write_text(generation)
    source = Path(import_hf(tmp_path / "hf", tmp_path / "imported")["checkpoint"])
    export_megatron(source, tmp_path / "out", tp=2, pp=2, dtype=dtype)
    back = Path(import_megatron(tmp_path / "out", tmp_path / "back")["checkpoint"])
    assert same_weights(source, back)
    export_hf(back, tmp_path / "again", dtype=dtype, check=False)
    came, returned = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "again"))
    assert returned.keys() == came.keys()
    assert all(came[name].dtype == kind and torch.equal(came[name], returned[name]) for name in came)
    assert (tmp_path / "again" / "generation_config.json").read_text() == generation


@pytest.mark.parametrize(
    ("settings", "tp", "pp", "said"),
    [
        (llama(), 4, 1, r"tp=4 does not divide model\.num_kv_heads=2"),
        (gpt2(), 1, 3, r"pp=3 does not divide model\.num_layers=2"),
        (gpt2(parallel_block="one_norm"), 1, 1, r"model\.parallel_block=one_norm"),
        (gpt2(bias="mlp"), 1, 1, r"model\.bias=mlp would have to be all, none or qkv"),
        (gpt2(norm_bias=False), 1, 1, r"model\.norm_bias=false would have to be true"),
        (gpt2(qk_norm="head"), 1, 1, r"model\.qk_norm=head would have to be none, or head with model\.norm=rmsnorm"),
        (llama(rotary_scaling="linear", rotary_factor=1.5), 1, 1, r"model\.rotary_factor=1\.5 .* a whole number"),
        (llama(rotary_scaling="llama3", rotary_factor=8.0, rotary_original_len=40), 1, 1, "len=40 .* to be 8192"),
        (llama(logit_cap=30.0), 1, 1, r"model\.logit_cap=30\.0 would have to be null"),
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
