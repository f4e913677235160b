"""Write the tokenizer files of an exported folder, with which transformers' AutoTokenizer gives our ids. Torch-free.

A tokenizer that was imported gets its own files back. Around any other tokenizer.json come the files that users of
transformers expect: the names of special tokens, the longest text, and an encoder's [CLS] and [SEP].
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmtrain.exchange.huggingface.original_files import (
    MODEL_FILES,
    SPECIAL_TOKENS_MAP,
    TOKENIZER_CONFIG,
    parse_original,
)
from lmtrain.runtime.files.safe_files import parse_json
from lmtrain.tokenizer.base import Tokenizer

# Hugging Face's special tokens and the roles of ours. A decoder's end-of-document token may also begin a document.
_DECODER = {"bos_token": ("bos", "eod"), "eos_token": ("eod",), "unk_token": ("unk",), "pad_token": ("pad",)}
_ENCODER = {
    "cls_token": ("cls",), "sep_token": ("sep",), "mask_token": ("mask",), "unk_token": ("unk",), "pad_token": ("pad",)
}  # fmt: skip


def special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the ids of a tokenizer's special tokens by role, "bos" among them if it has a token of that kind."""
    return tokenizer.special | ({} if tokenizer.bos_id is None else {"bos": tokenizer.bos_id})


def tokenizer_files(data: bytes, seq_len: int, *, causal: bool, original: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the tokenizer files of an exported folder, as name -> content. `data` is the checkpoint's tokenizer.json,
    `seq_len` the longest text in tokens. `original` are the files of an imported folder; its tokenizer files, if it has
    any, are returned as they came.
    """
    tokenizer = Tokenizer.from_bytes(data)
    special = _special_tokens(tokenizer, causal=causal)
    files = {name: content for name, content in original.items() if name not in MODEL_FILES}
    files["tokenizer.json"] = data if causal else _with_encoder_template(data, tokenizer, special)
    if TOKENIZER_CONFIG in original:
        return files | _readable_by_both(files[TOKENIZER_CONFIG])
    config = {
        # because: their classes by model build tokenizers by rules of their own; this one takes tokenizer.json as is
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": seq_len,
        "model_input_names": ["input_ids", *([] if causal else ["token_type_ids"]), "attention_mask"],
        "clean_up_tokenization_spaces": False,
        **special,
    }
    return {TOKENIZER_CONFIG: json_bytes(config), SPECIAL_TOKENS_MAP: json_bytes(special)} | files


def _special_tokens(tokenizer: Tokenizer, *, causal: bool) -> dict[str, str]:
    ids = special_ids(tokenizer)
    tokens = {}
    for hf_role, roles in (_DECODER if causal else _ENCODER).items():
        if role := next((role for role in roles if role in ids), None):
            tokens[hf_role] = tokenizer.piece(ids[role])
    return tokens


def _with_encoder_template(data: bytes, tokenizer: Tokenizer, special: Mapping[str, str]) -> bytes:
    """Return an encoder's tokenizer.json with the template [CLS] text [SEP], or [CLS] first [SEP] second [SEP], unless
    it has one or has no such tokens.
    """
    tree = parse_json(data, Path("tokenizer.json"))
    if not {"cls_token", "sep_token"} <= special.keys() or tree.get("post_processor") is not None:
        return data
    cls, sep = ([special[f"{role}_token"], tokenizer.special[role]] for role in ("cls", "sep"))
    tree["post_processor"] = {"type": "BertProcessing", "sep": sep, "cls": cls}
    return json.dumps(tree, ensure_ascii=False, indent=1).encode()


def _readable_by_both(data: bytes) -> dict[str, bytes]:
    """Return an original tokenizer_config.json, changed only if transformers 5 wrote it in words that 4 cannot read: by
    name -> content.
    """
    config = parse_original({TOKENIZER_CONFIG: data}, TOKENIZER_CONFIG)
    changed: dict[str, Any] = {}
    if config.get("tokenizer_class") == "TokenizersBackend":
        changed["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(tokens := config.get("extra_special_tokens"), list):
        changed["additional_special_tokens"] = tokens
        del config["extra_special_tokens"]
    return {TOKENIZER_CONFIG: json_bytes(config | changed) if changed else data}


def json_bytes(value: object) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
