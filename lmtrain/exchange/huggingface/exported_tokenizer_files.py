"""Write the tokenizer files of an exported folder, with which transformers' AutoTokenizer gives our ids. Torch-free.

A tokenizer that was imported gets its own files back. Around any other tokenizer.json come the files that users of
transformers expect: the names of special tokens, the longest text, and an encoder's [CLS] and [SEP]. transformers
takes some settings from tokenizer_config.json, and builds some tokenizers by the name of a class; the ids of ours are
those of tokenizer.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmtrain.config.settings_base import show
from lmtrain.errors import CheckpointError
from lmtrain.exchange.huggingface.model_family_base import families
from lmtrain.exchange.huggingface.preserved_source_files import (
    CONFIG,
    MODEL_FILES,
    SPECIAL_TOKENS_MAP,
    TOKENIZER_CONFIG,
    parse_original,
)
from lmtrain.runtime.files.atomic_files import parse_json
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer
from lmtrain.tokenizer.vocabulary_files import bpe_pattern

# Hugging Face's special tokens and the roles of ours. A decoder's end-of-document token may also begin a document.
_DECODER = {"bos_token": ("bos", "eod"), "eos_token": ("eod",), "unk_token": ("unk",), "pad_token": ("pad",)}
_ENCODER = {
    "cls_token": ("cls",), "sep_token": ("sep",), "mask_token": ("mask",), "unk_token": ("unk",), "pad_token": ("pad",)
}  # fmt: skip

_PLAIN_CLASS = "PreTrainedTokenizerFast"  # transformers 5 has it as another name of TokenizersBackend
# Keys of BERT's tokenizer_config.json, of its normalizer in tokenizer.json, and the defaults of the former.
_BERT_SETTINGS = (
    ("do_lower_case", "lowercase", True), ("strip_accents", "strip_accents", None),
    ("tokenize_chinese_chars", "handle_chinese_chars", True),
)  # fmt: skip
_GEMMA_NORMALIZER = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
_GEMMA_SPLITTER = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
# The special tokens that a class of transformers adds where tokenizer_config.json names none, by role.
_ADDED_TOKENS = {
    "GemmaTokenizer": {
        "unk_token": "<unk>", "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "mask_token": "<mask>"
    },
    "Qwen2Tokenizer": dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>"),
    "GPTNeoXTokenizer": {
        **dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>"), "pad_token": "<|padding|>"
    },
}  # fmt: skip
_LLAMA_SPLITTER = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}


def special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the ids of a tokenizer's special tokens by role, "bos" among them if it has a token of that kind."""
    return tokenizer.special | ({} if tokenizer.bos_id is None else {"bos": tokenizer.bos_id})


def tokenizer_files(
    data: bytes, seq_len: int, family: str, *, causal: bool, original: Mapping[str, bytes]
) -> dict[str, bytes]:
    """Return the tokenizer files of an exported folder, name -> content. `data` is the checkpoint's tokenizer.json,
    `seq_len` the longest text in tokens, `family` the model_type. `original` has the files kept from an imported folder
    ({} if there was none); its tokenizer files are returned unchanged, except for a tokenizer_config.json from which
    transformers would give other ids.
    """
    tokenizer = Tokenizer.from_bytes(data)
    special = _special_tokens(tokenizer, causal=causal)
    files = {name: content for name, content in original.items() if name not in MODEL_FILES}
    # because: a folder without vocab.txt came with the tokenizer.json that is in the checkpoint
    is_as_came = causal or (TOKENIZER_CONFIG in original and "vocab.txt" not in original)
    files["tokenizer.json"] = data if is_as_came else _with_encoder_template(data, tokenizer, special)
    # because: their classes by model build tokenizers by rules of their own; this one takes tokenizer.json as is
    plain: dict[str, Any] = {
        "tokenizer_class": _PLAIN_CLASS,
        "model_input_names": ["input_ids", *([] if causal else ["token_type_ids"]), "attention_mask"],
        **_prefix_space(tokenizer.tree),
    }
    if TOKENIZER_CONFIG in original:
        unnamed = special.keys() - parse_original(original, SPECIAL_TOKENS_MAP).keys()
        tokens = {role: special[role] for role in sorted(unnamed)}
        return files | _restored_config(original, family, tokenizer.tree, plain | tokens)
    config = plain | {"model_max_length": seq_len, "clean_up_tokenization_spaces": False, **special}
    return {TOKENIZER_CONFIG: json_bytes(config), SPECIAL_TOKENS_MAP: json_bytes(special)} | files


def tokenizer_class_to_load(family: str, tokenizer: Tokenizer) -> str:
    """Return the name of the transformers class whose from_pretrained gives the right ids for an exported `tokenizer`:
    "AutoTokenizer", or "PreTrainedTokenizerFast" if in folders of the model_type `family` transformers 5 builds a
    tokenizer by rules of its own that gives others.
    """
    kind = families()[family]
    if not kind.has_own_tokenizer or _takes_tokenizer_json(kind.tokenizer_class, {}, tokenizer.tree):
        return "AutoTokenizer"
    return _PLAIN_CLASS


def _restored_config(
    original: Mapping[str, bytes], family: str, tree: Mapping[str, Any], plain: Mapping[str, Any]
) -> dict[str, bytes]:
    """Return {"tokenizer_config.json": content} for the export of an imported folder with the files `original`. It is
    unchanged if transformers then gives the ids of `tree`, the parsed tokenizer.json; otherwise its class becomes that
    of `plain`, and the entries of `plain` that it lacks are added.
    """
    came = parse_original(original, TOKENIZER_CONFIG)
    config = dict(came)
    if not _takes_tokenizer_json(_class_name(came, original, family), came, tree):
        config = {**plain, **came, "tokenizer_class": plain["tokenizer_class"], **_prefix_space(tree)}
    if isinstance(tokens := config.get("extra_special_tokens"), list):  # because: transformers 4 wants a table there
        del config["extra_special_tokens"]
        config["additional_special_tokens"] = tokens
    return {TOKENIZER_CONFIG: original[TOKENIZER_CONFIG] if config == came else json_bytes(config)}


def check_one_tokenizer(folder: Path, tokenizer: Tokenizer, original: Mapping[str, bytes], family: str) -> None:
    """Raise CheckpointError if the folder's tokenizer_config.json contradicts its tokenizer.json, so that transformers
    would read another tokenizer from it than `tokenizer`. `original` has the folder's small files, name -> content, and
    `family` is its model_type.
    """
    config = parse_original(original, TOKENIZER_CONFIG)
    problems = _contradictions(_class_name(config, original, family), config, tokenizer.tree)
    if problems:
        raise CheckpointError(
            f"{folder} describes two tokenizers: {'; '.join(problems)}. transformers takes the first. Make both equal, "
            f"or choose that file with --tokenizer {tokenizer.source}."
        )


def _class_name(config: Mapping[str, Any], original: Mapping[str, bytes], family: str) -> str:
    """Return the class that transformers takes for a tokenizer, without the ending Fast. `config` is its
    tokenizer_config.json.
    """
    name = config.get("tokenizer_class") or parse_original(original, CONFIG).get("tokenizer_class")
    return str(name or families()[family].tokenizer_class).removesuffix("Fast")


def _contradictions(class_name: str, config: Mapping[str, Any], tree: Mapping[str, Any]) -> list[str]:
    """Return a message for each setting, such as lower-casing, that has one value in `config`, a tokenizer_config.json,
    and another in `tree`, the parsed tokenizer.json. Only settings that the transformers class `class_name` takes from
    the first are compared.
    """
    normalizer, splitter = tree["normalizer"] or {}, tree["pre_tokenizer"] or {}
    triples = [(key, default, normalizer.get(inner, default)) for key, inner, default in _BERT_SETTINGS]
    if class_name != "BertTokenizer":
        triples = [("add_prefix_space", False, splitter["add_prefix_space"])] if "add_prefix_space" in splitter else []
    return [
        f"{key} is {show(said)} {'in tokenizer_config.json' if key in config else 'by default'}, "
        f"and {show(actual)} in the file of the vocabulary"
        for key, default, actual in triples
        if (said := config.get(key, default)) != actual
    ]


def _takes_tokenizer_json(class_name: str, config: Mapping[str, Any], tree: Mapping[str, Any]) -> bool:
    """Return whether the transformers class `class_name` gives the ids of `tree`, a parsed tokenizer.json. Version 4
    reads that file, but most classes of version 5 build a tokenizer anew from its vocabulary, by fixed rules. `config`
    is the tokenizer_config.json. Unknown classes give False.
    """
    normalizer, splitter = tree["normalizer"] or {}, tree["pre_tokenizer"] or {}
    if _contradictions(class_name, config, tree) or not _has_tokens(class_name, config, tree):
        return False
    adds_nothing = (tree.get("post_processor") or {}).get("type") in (None, "ByteLevel")
    is_byte_level = splitter.get("type") == "ByteLevel" and splitter["use_regex"]
    match class_name:
        case "PreTrainedTokenizer":
            return True
        case "LlamaTokenizer":
            return not normalizer and splitter == _LLAMA_SPLITTER and config.get("add_prefix_space") is None
        case "GPT2Tokenizer":
            return not normalizer and is_byte_level
        case "Qwen2Tokenizer":
            return adds_nothing and _is_qwen_tokenizer(tree) and not config.get("add_prefix_space")
        case "BertTokenizer":
            is_clean = normalizer.get("type") == "BertNormalizer" and normalizer["clean_text"]
            return is_clean and splitter.get("type") == "BertPreTokenizer"
        case "GemmaTokenizer":
            return normalizer == _GEMMA_NORMALIZER and splitter == _GEMMA_SPLITTER
        case "GPTNeoXTokenizer":
            return normalizer == {"type": "NFC"} and is_byte_level and adds_nothing
    return False


def _has_tokens(class_name: str, config: Mapping[str, Any], tree: Mapping[str, Any]) -> bool:
    """Return whether the tokenizer.json `tree` has the special tokens that a class of transformers adds. A missing one
    would become an id beyond the model's vocabulary.
    """
    added, usual = {token["content"] for token in tree["added_tokens"]}, _ADDED_TOKENS.get(class_name, {})
    return all(token in added for role, token in usual.items() if config.get(role) is None)


def _is_qwen_tokenizer(tree: Mapping[str, Any]) -> bool:
    """Return whether `tree`, a parsed tokenizer.json, works as the tokenizer of Qwen 2 to 3 does: NFC normalization,
    their pattern for splitting text, and byte-level BPE without further options.
    """
    switches = ("ignore_merges", "byte_fallback", "continuing_subword_prefix", "end_of_word_suffix", "unk_token")
    model = tree["model"]
    is_plain = model["type"] == "BPE" and not any(model.get(switch) for switch in switches)
    return is_plain and tree["normalizer"] == {"type": "NFC"} and bpe_pattern(tree["pre_tokenizer"]) == "qwen2"


def _prefix_space(tree: Mapping[str, Any]) -> dict[str, bool]:
    """Return add_prefix_space of a tokenizer.json that has it; transformers takes it from tokenizer_config.json, and
    false if that leaves it out.
    """
    splitter = tree["pre_tokenizer"] or {}
    return {"add_prefix_space": splitter["add_prefix_space"]} if "add_prefix_space" in splitter else {}


def _special_tokens(tokenizer: Tokenizer, *, causal: bool) -> dict[str, str]:
    ids = special_ids(tokenizer)
    tokens = {}
    for hf_role, roles in (_DECODER if causal else _ENCODER).items():
        if role := next((role for role in roles if role in ids), None):
            tokens[hf_role] = tokenizer.piece(ids[role])
    return tokens


def _with_encoder_template(data: bytes, tokenizer: Tokenizer, special: Mapping[str, str]) -> bytes:
    """Return `data`, an encoder's tokenizer.json, with a post-processor added that makes [CLS] text [SEP], or [CLS]
    first [SEP] second [SEP]. Return it unchanged if it has a post-processor, or if `special` (role -> token) lacks one
    of the two.
    """
    tree = parse_json(data, Path("tokenizer.json"))
    if not {"cls_token", "sep_token"} <= special.keys() or tree.get("post_processor") is not None:
        return data
    cls, sep = ([special[f"{role}_token"], tokenizer.special[role]] for role in ("cls", "sep"))
    tree["post_processor"] = {"type": "BertProcessing", "sep": sep, "cls": cls}
    return json.dumps(tree, ensure_ascii=False, indent=1).encode()


def json_bytes(value: object) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
