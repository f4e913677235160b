"""Hugging Face's BERT and Megatron-LM's, whose norms are before attention and MLP. Found by ../model_family_base.py."""

from __future__ import annotations

from typing import ClassVar

from lmtrain.exchange.huggingface.model_family_base import NOT_READ, Config, Family, Rule
from lmtrain.exchange.huggingface.shared_by_decoder_families import ACTIVATION_NAMES, GELUS, activation_setting
from lmtrain.exchange.huggingface.weight_names import FamilyNames
from lmtrain.models.bert_settings import NUM_SEGMENTS, BertSettings


class Bert(Family[BertSettings]):
    """BERT, with the norms after attention and MLP."""

    model_type = "bert"
    architecture = "BertForPreTraining"
    settings_class = BertSettings
    rank = 10
    norm_order: ClassVar[str] = "post"
    defaults = {
        "vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
        "intermediate_size": 3072, "hidden_act": "gelu", "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1, "max_position_embeddings": 512, "type_vocab_size": 2,
        "initializer_range": 0.02, "layer_norm_eps": 1e-12, "is_decoder": False, "add_cross_attention": False,
        "position_embedding_type": "absolute", "tie_word_embeddings": True,
    }  # fmt: skip
    required = {
        "type_vocab_size": NUM_SEGMENTS, "is_decoder": False, "add_cross_attention": False,
        "position_embedding_type": "absolute", "tie_word_embeddings": True,
    }  # fmt: skip
    inert = {
        "classifier_dropout": "it is for other heads", "is_causal": NOT_READ,
        **dict.fromkeys(("directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers",
                         "pooler_size_per_head", "pooler_type"), NOT_READ),
    }  # fmt: skip
    dropouts = ("hidden_dropout_prob", "attention_probs_dropout_prob")
    prefix = "bert."
    heads = ("cls.",)
    tied_names = ("cls.predictions.decoder.weight",)
    tables = (".position_ids",)
    tokenizer_class = "BertTokenizer"
    names = FamilyNames(
        "bert.encoder.layer.",
        {
            "attention_norm": ("attention.output.LayerNorm",),
            "attention.qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
            "attention.out": ("attention.output.dense",), "mlp_norm": ("output.LayerNorm",),
            "mlp.up": ("intermediate.dense",), "mlp.down": ("output.dense",),
        },
        {
            "embedding.token": ("bert.embeddings.word_embeddings",),
            "embedding.position": ("bert.embeddings.position_embeddings",),
            "embedding.segment": ("bert.embeddings.token_type_embeddings",),
            "embedding.norm": ("bert.embeddings.LayerNorm",), "norm": ("bert.encoder.ln",),
            "head.dense": ("cls.predictions.transform.dense",), "head.norm": ("cls.predictions.transform.LayerNorm",),
            "head.decoder": ("cls.predictions",), "pair.pooler": ("bert.pooler.dense",),
            "pair.scores": ("cls.seq_relationship",),
        },
    )  # fmt: skip

    def rules(self, s: BertSettings) -> list[Rule]:
        head, body, order = s.head_activation, s.activation, s.norm_order
        return [
            (head == body, f"model.head_activation={head} would have to be model.activation={body}"),
            (order == self.norm_order, f"model.norm_order={order} would have to be {self.norm_order}"),
        ]

    def architecture_of(self, s: BertSettings) -> str:
        return self.architecture if s.pair_head else self.architecture.replace("ForPreTraining", "ForMaskedLM")

    def config(self, s: BertSettings) -> Config:
        return {
            "vocab_size": s.vocab_size, "hidden_size": s.width, "num_hidden_layers": s.num_layers,
            "num_attention_heads": s.num_heads, "intermediate_size": s.ffn,
            "hidden_act": ACTIVATION_NAMES[s.activation], "hidden_dropout_prob": s.dropout,
            "attention_probs_dropout_prob": s.dropout, "max_position_embeddings": s.position_rows,
            "type_vocab_size": NUM_SEGMENTS, "initializer_range": s.init_std, "layer_norm_eps": s.norm_eps,
            "tie_word_embeddings": True,
        }  # fmt: skip

    def settings(self, c: Config, problems: list[str]) -> Config:
        activation = activation_setting(c, "hidden_act", problems, GELUS)
        return {
            "kind": "bert", "num_layers": c["num_hidden_layers"], "width": c["hidden_size"],
            "num_heads": c["num_attention_heads"], "ffn_width": c["intermediate_size"], "vocab_size": c["vocab_size"],
            "seq_len": c["max_position_embeddings"], "norm_eps": c["layer_norm_eps"], "norm_order": self.norm_order,
            "activation": activation, "head_activation": activation, "init_std": c["initializer_range"],
        }  # fmt: skip


class MegatronBert(Bert):
    """Megatron-LM's BERT, with the norms before attention and MLP."""

    model_type = "megatron-bert"
    architecture = "MegatronBertForPreTraining"
    rank = 11
    norm_order = "pre"
    defaults = Bert.defaults | {
        "vocab_size": 29056, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
        "intermediate_size": 4096,
    }  # fmt: skip
    names = FamilyNames(
        Bert.names.blocks, {**Bert.names.block_parts, "attention_norm": ("attention.ln",), "mlp_norm": ("ln",)},
        Bert.names.other_parts,
    )  # fmt: skip
