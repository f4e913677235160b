"""Our tokenizer as the files from which AutoTokenizer makes one. Torch-free; called by export.

The ids of a text are those of our tokenizer; what is added is what their users expect around it: an encoder's [CLS] and
[SEP], the names of special tokens, the longest text.
"""

from __future__ import annotations

import json
from pathlib import Path

from lmtrain.runtime.files.files import parse_json
from lmtrain.tokenizer.base import Tokenizer

# Which of our roles is which of theirs. A decoder's end of document also begins one.
_DECODER = {"bos_token": "eod", "eos_token": "eod", "unk_token": "unk", "pad_token": "pad"}
_ENCODER = {"cls_token": "cls", "sep_token": "sep", "mask_token": "mask", "unk_token": "unk", "pad_token": "pad"}


def tokenizer_files(data: bytes, seq_len: int, *, causal: bool) -> dict[str, bytes]:
    tokenizer = Tokenizer.from_bytes(data)
    roles = _DECODER if causal else _ENCODER
    special = {
        theirs: tokenizer.piece(tokenizer.special[role]) for theirs, role in roles.items() if role in tokenizer.special
    }
    config = {
        # because: their classes by model build tokenizers by rules of their own; this one takes tokenizer.json as is
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": seq_len,
        "model_input_names": ["input_ids", *([] if causal else ["token_type_ids"]), "attention_mask"],
        "clean_up_tokenization_spaces": False,
        **special,
    }
    tree = parse_json(data, Path("tokenizer.json"))
    if not causal and {"cls_token", "sep_token"} <= special.keys() and tree.get("post_processor") is None:
        cls, sep = ([special[f"{role}_token"], tokenizer.special[role]] for role in ("cls", "sep"))
        # [CLS] text [SEP], or [CLS] first [SEP] second [SEP]
        tree["post_processor"] = {"type": "BertProcessing", "sep": sep, "cls": cls}
        data = json.dumps(tree, ensure_ascii=False, indent=1).encode()
    return {
        "tokenizer.json": data,
        "tokenizer_config.json": json_bytes(config),
        "special_tokens_map.json": json_bytes(special),
    }


def json_bytes(value: object) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
