"""The decoder equals transformers' GPT-2 and LLaMA, keeps documents apart, and can be cut where it says."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lmtrain.batch import Batch
from lmtrain.errors import SettingsError
from lmtrain.models.gpt import GPT, build
from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.models.objectives.causal_and_masked_objectives import CausalLM
from lmtrain.spec import Split, Tie
from tests.unit.models.first_weights import start

VOCAB, LENGTH = 97, 24


def tiny(**changes: Any) -> GPTSettings:
    values: dict[str, Any] = {"num_layers": 3, "width": 48, "num_heads": 4, "seq_len": LENGTH, "vocab_size": VOCAB}
    return GPTSettings(**(values | changes))


def llama(**changes: Any) -> GPTSettings:
    values: dict[str, Any] = {
        "positions": "rotary",
        "norm": "rmsnorm",
        "activation": "silu", "gated": True,
        "bias": "none",
        "tied": False,
        "ffn_width": 80,
    }
    return tiny(**(values | changes))


def model_of(settings: GPTSettings, seed: int = 1) -> GPT:
    model = build(settings)
    start(model, seed)
    # because: 0.02 would leave the residual stream almost untouched, and a wrong block almost unseen
    with torch.no_grad():
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
            if name in ("embedding.token.weight", "head.weight"):
                parameter[VOCAB:] = 0
    return model.eval()


def batch_of(num_samples: int = 3, length: int = LENGTH, seed: int = 0, **extra: Any) -> Batch:
    tokens = torch.randint(0, VOCAB, (num_samples, length + 1), generator=torch.Generator().manual_seed(seed))
    return Batch(tokens[:, :-1], tokens[:, 1:].contiguous(), **extra)


def logits_of(model: GPT, batch: Batch) -> Tensor:
    with torch.no_grad():
        return model.logits(model(batch))


def copy_gpt2(ours: GPT, theirs: Any) -> None:
    state = {name.removeprefix("transformer."): value for name, value in theirs.state_dict().items()}
    names = {
        "attention_norm": "ln_1", "attention.qkv": "attn.c_attn", "attention.out": "attn.c_proj",
        "mlp_norm": "ln_2", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj",
    }  # fmt: skip
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            part, _, leaf = name.rpartition(".")
            if part.startswith("blocks."):
                _, layer, inner = part.split(".", 2)
                value = state[f"h.{layer}.{names[inner]}.{leaf}"]
                parameter.copy_(value.T if value.ndim == 2 else value)  # theirs are stored [in, out]
            elif part == "norm":
                parameter.copy_(state[f"ln_f.{leaf}"])
            else:
                value = state["wte.weight" if part == "embedding.token" else "wpe.weight"]
                parameter[: len(value)] = value


def copy_llama(ours: GPT, theirs: Any) -> None:
    state = {name.removeprefix("model."): value for name, value in theirs.state_dict().items()}
    names = {
        "attention_norm": ["input_layernorm"],
        "attention.qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        "attention.out": ["self_attn.o_proj"],
        "mlp_norm": ["post_attention_layernorm"],
        "mlp.up": ["mlp.gate_proj", "mlp.up_proj"],
        "mlp.down": ["mlp.down_proj"],
    }
    outside = {"embedding.token": "embed_tokens", "norm": "norm", "head": "lm_head"}
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            part = name.rpartition(".")[0]
            if part in outside:
                value = state[f"{outside[part]}.weight"]
            else:
                _, layer, inner = part.split(".", 2)
                value = torch.cat([state[f"layers.{layer}.{n}.weight"] for n in names[inner]])
            parameter[: len(value)] = value


def test_equals_transformers_gpt2() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=LENGTH, n_embd=48, n_layer=3, n_head=4, initializer_range=0.2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    theirs = GPT2LMHeadModel(config).eval()
    ours = model_of(tiny())
    copy_gpt2(ours, theirs)
    batch = batch_of()
    with torch.no_grad():
        expected = theirs(batch.tokens_BT).logits
    logits = logits_of(ours, batch)
    assert expected.std() > 0.1
    assert (logits[..., :VOCAB] - expected).abs().max() < 1e-5
    assert logits.shape[-1] == 128
    assert (logits[..., VOCAB:] == -math.inf).all()


def test_rows_of_positions_behind_the_sequence_change_nothing() -> None:
    """A short model with a long table is a long model on short samples; the rest of the table gets no gradient."""
    found = []
    for settings in (tiny(num_positions=2 * LENGTH), tiny(seq_len=2 * LENGTH)):
        model, batch = model_of(settings), batch_of()
        logits = model.logits(model(batch))
        weights = dict(model.named_parameters())
        gradients = torch.autograd.grad(logits[..., :VOCAB].square().sum(), list(weights.values()))
        found.append({"logits": logits} | dict(zip(weights, gradients, strict=True)))
        assert sum(p.numel() for p in model.parameters()) - 31 * 48 == settings.num_parameters
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())
    assert found[0]["embedding.position.weight"][LENGTH:].eq(0).all()


@pytest.mark.parametrize(("kv_heads", "base"), [(4, 10000.0), (2, 500000.0), (1, 10000.0)])
def test_equals_transformers_llama(kv_heads: int, base: float) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=kv_heads, max_position_embeddings=LENGTH, rms_norm_eps=1e-5, initializer_range=0.2,
        tie_word_embeddings=False, rope_parameters={"rope_type": "default", "rope_theta": base},
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    theirs = LlamaForCausalLM(config).eval()
    ours = model_of(llama(num_kv_heads=kv_heads, rotary_base=base))
    copy_llama(ours, theirs)
    batch = batch_of()
    with torch.no_grad():
        expected = theirs(batch.tokens_BT).logits
    assert expected.std() > 0.1
    assert (logits_of(ours, batch)[..., :VOCAB] - expected).abs().max() < 1e-5


def packed(first: int = 10) -> Batch:
    """Two documents in a row, positions restarting."""
    documents = (torch.arange(LENGTH) >= first).int().expand(1, -1)
    positions = torch.cat((torch.arange(first), torch.arange(LENGTH - first))).expand(1, -1)
    return batch_of(1, positions_BT=positions, documents_BT=documents)


@pytest.mark.parametrize("settings", [tiny(), llama(num_kv_heads=2), tiny(window=5)], ids=["gpt", "llama", "window"])
def test_documents_do_not_leak(settings: GPTSettings) -> None:
    """Changing document A leaves B's logits bit-identical; without the mask it changes them."""
    first, model, batch = 10, model_of(settings), packed()
    tokens = batch.tokens_BT.clone()
    tokens[:, :first] = (tokens[:, :first] + 1) % VOCAB
    changed = Batch(tokens, batch.labels_BT, batch.positions_BT, batch.documents_BT)
    before, after = logits_of(model, batch), logits_of(model, changed)
    assert not torch.equal(before[:, :first], after[:, :first])
    assert torch.equal(before[:, first:], after[:, first:])
    open_before, open_after = (
        logits_of(model, Batch(b.tokens_BT, b.labels_BT, b.positions_BT)) for b in (batch, changed)
    )
    assert not torch.allclose(open_before[:, first:, :VOCAB], open_after[:, first:, :VOCAB], atol=1e-3)


@pytest.mark.parametrize("settings", [tiny(), llama(num_kv_heads=2)], ids=["gpt", "llama"])
def test_packed_document_equals_it_alone(settings: GPTSettings) -> None:
    first, model, batch = 10, model_of(settings), packed()
    alone = Batch(batch.tokens_BT[:, first:], batch.labels_BT[:, first:])
    difference = logits_of(model, batch)[:, first:, :VOCAB] - logits_of(model, alone)[..., :VOCAB]
    assert difference.abs().max() < 1e-5


def test_window_hides_what_lies_behind_it() -> None:
    """With one layer the logits of token i hang on tokens i-4 .. i alone."""
    model, batch = model_of(tiny(num_layers=1, window=5)), batch_of(1)
    tokens = batch.tokens_BT.clone()
    tokens[:, 7] = (tokens[:, 7] + 1) % VOCAB
    before, after = logits_of(model, batch), logits_of(model, Batch(tokens, batch.labels_BT))
    changed = (before != after).any(-1)[0].nonzero().flatten().tolist()
    assert changed == [7, 8, 9, 10, 11]


def test_window_as_long_as_the_sequence_is_none() -> None:
    batch = batch_of(2)
    assert torch.equal(logits_of(model_of(tiny(window=LENGTH)), batch), logits_of(model_of(tiny()), batch))


def test_padded_vocabulary_gets_no_gradient() -> None:
    model, batch = model_of(llama()), batch_of()
    torch.autograd.backward(CausalLM().loss_sums(model, model(batch), batch).sum())
    for name in ("embedding.token.weight", "head.weight"):
        gradient = model.get_parameter(name).grad
        assert gradient is not None
        assert gradient[:VOCAB].abs().sum() > 0
        assert (gradient[VOCAB:] == 0).all()


def test_unpadded_vocabulary_has_no_infinite_logits() -> None:
    model = model_of(tiny(vocab_multiple=1))
    logits = logits_of(model, batch_of())
    assert logits.shape[-1] == VOCAB
    assert logits.isfinite().all()


def test_dropout_acts_in_training_only() -> None:
    model, batch = model_of(tiny(dropout=0.3)), batch_of()
    assert torch.equal(logits_of(model, batch), logits_of(model, batch))
    assert torch.equal(logits_of(model, batch), logits_of(model_of(tiny()), batch))
    model.train()
    torch.manual_seed(0)
    first = logits_of(model, batch)
    assert not torch.equal(first, logits_of(model, batch))
    torch.manual_seed(0)
    assert torch.equal(first, logits_of(model, batch))


def test_bf16_stays_close_and_in_bf16() -> None:
    batch, expected = batch_of(), logits_of(model_of(llama(num_kv_heads=2)), batch_of())
    logits = logits_of(model_of(llama(num_kv_heads=2)).bfloat16(), batch)
    assert logits.dtype == torch.bfloat16
    difference = (logits[..., :VOCAB].float() - expected[..., :VOCAB]).abs()
    assert difference.mean() < 0.02 * expected[..., :VOCAB].std()


def test_pipeline_stages_chain_to_the_whole() -> None:
    """Parts set to None pass hidden states through; blocks keep their names."""
    whole, batch = model_of(llama()), batch_of()
    first, last = model_of(llama()), model_of(llama())
    del first.blocks["2"], last.blocks["0"], last.blocks["1"]
    first.norm = first.head = last.embedding = None
    with torch.no_grad():
        hidden = first.logits(first(batch))
        logits = last.logits(last(batch, hidden))
    assert hidden.shape == (3, LENGTH, 48)
    assert torch.equal(logits, logits_of(whole, batch))
    assert set(first.cuts()) | set(last.cuts()) == set(whole.cuts())


def test_heads_follow_from_the_weights() -> None:
    """Half of the heads, cut as the words say, gives a share of the output: the two shares add up to the whole."""
    model = model_of(llama(num_kv_heads=2))
    attention: Any = model.blocks["0"].attention
    cuts = model.cuts()
    x = torch.randn(2, LENGTH, 48)
    whole = attention(x, None, None)
    qkv, out = attention.qkv.weight.data, attention.out.weight.data
    assert cuts["blocks.0.attention.out.weight"].split is Split.ROW
    total = torch.zeros_like(whole)
    for rank in range(2):
        sections = qkv.split(cuts["blocks.0.attention.qkv.weight"].sections)
        attention.qkv.weight.data = torch.cat([section.chunk(2)[rank] for section in sections])
        attention.out.weight.data = out.chunk(2, dim=1)[rank]
        total += attention(x, None, None)
    assert torch.allclose(total, whole, atol=1e-5)


def test_tied_weight_is_one_object() -> None:
    model = build(tiny())
    assert model.ties() == (Tie("embedding.token.weight", "head.weight"),)
    assert model.get_parameter("embedding.token.weight") is model.get_parameter("head.weight")
    assert "head.weight" not in dict(model.named_parameters())
    assert "head.weight" in dict(build(tiny(tied=False)).named_parameters())
    assert build(tiny(tied=False)).ties() == ()


def test_vocabulary_must_be_known() -> None:
    with pytest.raises(SettingsError, match="vocab_size=null"):
        build(tiny(vocab_size=None))


@pytest.mark.wide
@pytest.mark.parametrize(
    ("backend", "settings"),
    [
        pytest.param("inductor", tiny(num_layers=1), marks=pytest.mark.slow),
        ("aot_eager", llama(num_layers=1, num_kv_heads=2, window=5)),
    ],
    ids=["inductor", "masked_rotary"],
)
def test_compiled_block_equals_the_plain_one(backend: str, settings: GPTSettings) -> None:
    """One graph, forward and backward, with mask and rotation handed in."""
    model, batch = model_of(settings), batch_of(1)
    block, around = model.blocks["0"], model.block_contexts(batch)["0"]
    compiled = torch.compile(block, fullgraph=True, dynamic=False, backend=backend)
    x = torch.randn(1, LENGTH, 48, requires_grad=True)
    results = []
    for run in (block, compiled):
        y = run(x, around)
        results.append((y, *torch.autograd.grad(y.square().sum(), x)))
    for plain, fused in zip(*results, strict=True):
        assert torch.allclose(plain, fused, atol=1e-4, rtol=1e-4)
