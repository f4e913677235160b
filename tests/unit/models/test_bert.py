"""The encoder equals transformers' BERT in both heads, sees neither padding nor other documents, and can be cut."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lmtrain.batch import IGNORED, Batch
from lmtrain.errors import SettingsError
from lmtrain.models.bert import Bert, build
from lmtrain.models.bert_settings import BertSettings
from lmtrain.models.layers.block import Block, PostNormBlock
from lmtrain.models.objectives.causal_and_masked_objectives import MaskedLM
from lmtrain.spec import Split, Tie
from tests.unit.models.first_weights import start

VOCAB, LENGTH, WIDTH = 97, 24, 48
ORDERS = ("pre", "post")


def tiny(**changes: Any) -> BertSettings:
    values: dict[str, Any] = {
        "num_layers": 3, "width": WIDTH, "num_heads": 4, "seq_len": LENGTH, "vocab_size": VOCAB, "ffn_width": 80,
    }  # fmt: skip
    return BertSettings(**(values | changes))


def model_of(settings: BertSettings, seed: int = 1) -> Bert:
    """Far from its first weights, under which a wrong block would go almost unseen."""
    model = build(settings)
    start(model, seed)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
            if name in ("embedding.token.weight", "head.decoder.bias"):
                parameter[VOCAB:] = 0
    return model.eval()


def batch_of(num_samples: int = 3, seed: int = 0, **extra: Any) -> Batch:
    """Rows of different lengths in two segments, some tokens to be predicted."""
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = torch.randint(0, VOCAB, (2, num_samples, LENGTH), generator=generator)
    at = torch.arange(LENGTH)
    lengths = LENGTH - 5 * torch.arange(num_samples).unsqueeze(1)
    real = at < lengths
    values: dict[str, Any] = {
        "segments_BT": ((at >= lengths // 2) & real).long(), "not_padding_BT": real,
        "pair_labels_B": torch.arange(num_samples) % 2,
    }  # fmt: skip
    labels = labels.masked_fill((torch.rand(labels.shape, generator=generator) > 0.3) | ~real, IGNORED)
    return Batch(tokens, labels, **(values | extra))


def scores(model: Bert, batch: Batch) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        hidden = model(batch)
        return model.logits(hidden), model.pair_logits(hidden)


def copy_bert(ours: Bert, theirs: Any) -> None:
    state = dict(theirs.state_dict())
    names = {
        "attention_norm": ["attention.output.LayerNorm"],
        "attention.qkv": ["attention.self.query", "attention.self.key", "attention.self.value"],
        "attention.out": ["attention.output.dense"],
        "mlp_norm": ["output.LayerNorm"],
        "mlp.up": ["intermediate.dense"],
        "mlp.down": ["output.dense"],
    }
    outside = {
        "embedding.token": "bert.embeddings.word_embeddings",
        "embedding.position": "bert.embeddings.position_embeddings",
        "embedding.segment": "bert.embeddings.token_type_embeddings", "embedding.norm": "bert.embeddings.LayerNorm",
        "head.dense": "cls.predictions.transform.dense", "head.norm": "cls.predictions.transform.LayerNorm",
        "pair.pooler": "bert.pooler.dense", "pair.scores": "cls.seq_relationship", "head.decoder": "cls.predictions",
    }  # fmt: skip
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            part, _, leaf = name.rpartition(".")
            if part in outside:
                value = state[f"{outside[part]}.{leaf}"]
            else:
                _, layer, inner = part.split(".", 2)
                value = torch.cat([state[f"bert.encoder.layer.{layer}.{n}.{leaf}"] for n in names[inner]])
            parameter[: len(value)] = value


@pytest.mark.parametrize(("act", "ours_act"), [("gelu", "gelu"), ("gelu_new", "gelu_tanh")])
def test_equals_transformers_bert(act: str, ours_act: str) -> None:
    from transformers import BertConfig, BertForPreTraining

    activations = {"activation": ours_act, "head_activation": ours_act}
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=3, num_attention_heads=4, intermediate_size=80,
        max_position_embeddings=LENGTH, initializer_range=0.1, hidden_act=act,
    )  # fmt: skip
    theirs = BertForPreTraining(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():  # its biases start at 0
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    ours = model_of(tiny(norm_order="post", norm_eps=config.layer_norm_eps, **activations))
    copy_bert(ours, theirs)
    batch = batch_of()
    with torch.no_grad():
        expected = theirs(
            input_ids=batch.tokens_BT, attention_mask=batch.not_padding_BT.long(), token_type_ids=batch.segments_BT
        )
    logits, pair = scores(ours, batch)
    real = batch.not_padding_BT
    assert min(expected.prediction_logits.std(), expected.seq_relationship_logits.std()) > 0.1
    assert (logits[..., :VOCAB] - expected.prediction_logits)[real].abs().max() < 1e-5
    assert (pair - expected.seq_relationship_logits).abs().max() < 1e-5
    assert (logits[..., VOCAB:] == -math.inf).all()
    without = theirs(input_ids=batch.tokens_BT)
    bare = Batch(batch.tokens_BT, batch.labels_BT)
    assert (scores(ours, bare)[0][..., :VOCAB] - without.prediction_logits).abs().max() < 1e-5


def test_rows_of_positions_behind_the_sequence_change_nothing() -> None:
    """A short model with a long table is a long model on short samples; the rest of the table gets no gradient."""
    found = []
    for settings in (tiny(num_positions=2 * LENGTH), tiny(seq_len=2 * LENGTH)):
        model, batch = model_of(settings), batch_of()
        sums = MaskedLM(settings.terms).loss_sums(model, model(batch), batch)
        weights = dict(model.named_parameters())
        gradients = torch.autograd.grad(sums.sum(), list(weights.values()))
        found.append({"sums": sums} | dict(zip(weights, gradients, strict=True)))
        assert sum(p.numel() for p in model.parameters()) - 31 * (WIDTH + 1) == settings.num_parameters
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())
    assert found[0]["embedding.position.weight"][LENGTH:].eq(0).all()


@pytest.mark.parametrize("order", ORDERS)
def test_padding_is_not_seen(order: str) -> None:
    """Whatever stands behind the end of a row, the row's own scores are the same to the bit."""
    model, batch = model_of(tiny(norm_order=order)), batch_of()
    real = batch.not_padding_BT
    tokens = torch.where(real, batch.tokens_BT, (batch.tokens_BT + 1) % VOCAB)
    other = replace(batch, tokens_BT=tokens)
    (logits, pair), (changed, changed_pair) = scores(model, batch), scores(model, other)
    assert torch.equal(logits[real], changed[real])
    assert torch.equal(pair, changed_pair)
    seen = scores(model, replace(other, not_padding_BT=None))[0]
    assert not torch.allclose(seen[1, 0, :VOCAB], changed[1, 0, :VOCAB], atol=1e-3)


@pytest.mark.parametrize("order", ORDERS)
def test_documents_do_not_leak(order: str) -> None:
    first, model = 10, model_of(tiny(norm_order=order))
    documents = (torch.arange(LENGTH) >= first).int().expand(1, -1)
    batch = batch_of(1, documents_BT=documents)
    tokens = batch.tokens_BT.clone()
    tokens[:, :first] = (tokens[:, :first] + 1) % VOCAB
    other = replace(batch, tokens_BT=tokens)
    before, after = scores(model, batch)[0], scores(model, other)[0]
    assert torch.equal(before[:, first:], after[:, first:])
    assert not torch.equal(before[:, :first], after[:, :first])


def test_both_sides_are_seen() -> None:
    model, batch = model_of(tiny()), batch_of(1)
    tokens = batch.tokens_BT.clone()
    tokens[:, -1] = (tokens[:, -1] + 1) % VOCAB
    other = replace(batch, tokens_BT=tokens)
    assert not torch.allclose(scores(model, batch)[0][:, 0, :VOCAB], scores(model, other)[0][:, 0, :VOCAB], atol=1e-4)


def test_segments_matter_and_none_is_the_first() -> None:
    model, batch = model_of(tiny()), batch_of()
    plain = replace(batch, segments_BT=None)
    zeros = replace(batch, segments_BT=torch.zeros_like(batch.tokens_BT))
    assert torch.equal(scores(model, plain)[0], scores(model, zeros)[0])
    assert not torch.allclose(scores(model, plain)[1], scores(model, batch)[1], atol=1e-3)


def test_the_order_of_norms() -> None:
    """Post: every hidden state is normed and there is no last norm. Pre: the sum is left as it is until the last."""
    post, pre = build(tiny(norm_order="post")), build(tiny())
    assert isinstance(post.blocks["0"], PostNormBlock)
    assert type(pre.blocks["0"]) is Block
    assert post.norm is None
    assert pre.norm is not None
    assert "embedding.norm.weight" in dict(post.named_parameters())
    assert "embedding.norm.weight" not in dict(pre.named_parameters())
    start(post, 1)
    hidden = post(batch_of())
    assert torch.allclose(hidden.mean(-1), torch.zeros(()), atol=1e-5)
    assert torch.allclose(hidden.var(-1, unbiased=False), torch.ones(()), atol=1e-2)


@pytest.mark.parametrize("order", ORDERS)
def test_every_weight_gets_a_gradient_and_padding_gets_none(order: str) -> None:
    model, batch = model_of(tiny(norm_order=order)), batch_of()
    objective = MaskedLM(model.settings.terms)
    torch.autograd.backward(objective.loss_sums(model, model(batch), batch).sum())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name
    for name in ("embedding.token.weight", "head.decoder.bias"):
        gradient = model.get_parameter(name).grad
        assert gradient is not None
        assert (gradient[VOCAB:] == 0).all()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("pair", [False, True])
def test_settings_say_which_weights_there_are(order: str, pair: bool) -> None:
    settings = tiny(norm_order=order, pair_head=pair)
    found = {name: tuple(parameter.shape) for name, parameter in build(settings).named_parameters()}
    assert list(found.items()) == list(settings.weights().items())
    assert settings.cuts() == {name: cut for name, cut in build(settings).cuts().items() if name in found}


def test_what_is_cut() -> None:
    cuts = build(tiny()).cuts()
    assert build(tiny()).ties() == (Tie("embedding.token.weight", "head.decoder.weight"),)
    split = {name: cut.split for name, cut in cuts.items() if not name.startswith("blocks.")}
    vocab = {"embedding.token.weight", "head.decoder.weight", "head.decoder.bias"}
    assert {name for name, kind in split.items() if kind is Split.VOCAB} == vocab
    assert {kind for name, kind in split.items() if name not in vocab} == {Split.NONE}
    assert cuts["blocks.0.attention.qkv.bias"].sections == (WIDTH,) * 3


@pytest.mark.parametrize("order", ORDERS)
def test_stages_make_the_whole(order: str) -> None:
    """Parts of the model in a row, each without what the others hold, give what the model gives."""
    batch, whole = batch_of(), model_of(tiny(norm_order=order))
    first, last = model_of(tiny(norm_order=order)), model_of(tiny(norm_order=order))
    first.norm = first.head = first.pair = last.embedding = None
    for layer in ("1", "2"):
        del first.blocks[layer]
    del last.blocks["0"]
    with torch.no_grad():
        hidden = first(batch)
        assert torch.equal(first.logits(hidden), hidden)
        assert torch.equal(first.pair_logits(hidden), hidden)
        hidden = last(batch, hidden)
        assert torch.equal(last.logits(hidden), scores(whole, batch)[0])
        assert torch.equal(last.pair_logits(hidden), scores(whole, batch)[1])


def test_first_weights() -> None:
    """Branches that add up in an untouched residual stream start smaller; with norms behind sums they need not."""
    pre, post = build(tiny()).starts(), build(tiny(norm_order="post")).starts()
    assert pre["blocks.0.mlp.down.weight"].std == pytest.approx(0.02 / math.sqrt(6))
    assert post["blocks.0.mlp.down.weight"].std == 0.02
    assert pre["head.norm.weight"].mean == 1.0
    assert pre["head.decoder.weight"] == pre["embedding.token.weight"]
    assert pre["pair.scores.weight"].std == 0.02


def test_vocabulary_must_be_known() -> None:
    with pytest.raises(SettingsError, match="vocab_size=null"):
        build(tiny(vocab_size=None))
    assert tiny(vocab_size=None).with_vocab(50).padded_vocab_size == 128
    with pytest.raises(SettingsError, match=r"model\.vocab_size=97 is smaller than the tokenizer's 98 tokens"):
        tiny().with_vocab(98)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_heads": 5}, ["num_heads=5 does not divide width=48", "16, 24 or 48"]),
        ({"num_layers": 0, "seq_len": 0}, ["num_layers=0", "seq_len=0"]),
        ({"ffn_width": 0}, ["ffn_width=0 must be at least 1", "null"]),
        ({"dropout": 1.0}, ["dropout=1.0"]),
        ({"norm_eps": 0.0, "init_std": -1.0}, ["norm_eps=0.0", "init_std=-1.0"]),
    ],
)
def test_wrong_values_are_refused(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(SettingsError) as caught:
        tiny(**changes)
    for word in words:
        assert word in str(caught.value)
