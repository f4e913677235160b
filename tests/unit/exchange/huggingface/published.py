"""Tokenizers of the kinds that models are published with, and folders as the hub has them."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from lmtrain.exchange.huggingface.import_and_export import export_hf
from lmtrain.models.model_settings import ModelSettings
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer
from lmtrain.tokenizer.train import train_bpe
from tests.unit.exchange.models import TEXT, save

SHARED = Path(__file__).parents[4].parent / "shared" / "data"
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
CORPUS = [*TEXT, "naïve café, the größte", "мир и война", "a\tb\nc", "12345 and 3.14", "don't I'LL we've"] * 3


def shared(name: str) -> Tokenizer:
    path = SHARED / name
    if not path.exists():
        pytest.skip("shared/data is not beside the checkout")
    return Tokenizer.load(path)


def sentencepiece_like(*, metaspace: bool) -> tokenizers.Tokenizer:
    """LLaMA's and Mistral's kind: BPE over characters with ▁ for a space, and a token for each byte of the rest. The
    ▁ is added by a normalizer, as in the first conversions, or by the Metaspace of later ones.
    """
    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    made = tokenizers.Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))  # noqa: S106
    if metaspace:
        made.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    else:
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    ])  # fmt: skip
    special = ["<unk>", "<s>", "</s>", *bytes_]
    made.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False))
    tree = json.loads(made.to_str())
    # because: the trainer gives a byte a token only if it is special, and a published one is not
    tree["added_tokens"] = [token for token in tree["added_tokens"] if token["content"] not in bytes_]
    made = tokenizers.Tokenizer.from_str(json.dumps(tree))
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return made


def gemma_like() -> tokenizers.Tokenizer:
    """Gemma's kind: as LLaMA's, without a space before a text, and cut at spaces that no longer are there."""
    tree = json.loads(sentencepiece_like(metaspace=False).to_str())
    names = {"<s>": "<bos>", "</s>": "<eos>"}
    tree["model"]["vocab"] = {names.get(piece, piece): number for piece, number in tree["model"]["vocab"].items()}
    for token in tree["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    made = tokenizers.Tokenizer.from_str(json.dumps(tree | {"post_processor": None}))
    made.add_special_tokens(["<pad>", "<mask>"])
    made.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", 1)]
    )
    made.normalizer = normalizers.Replace(" ", "▁")
    made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return made


def neox_like() -> tokenizers.Tokenizer:
    """GPT-NeoX's kind: GPT-2's pattern on composed characters, and tokens for runs of spaces."""
    made = tokenizers.Tokenizer(models.BPE())
    made.normalizer, made.decoder = normalizers.NFC(), decoders.ByteLevel()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    made.train_from_iterator(CORPUS, trainers.BpeTrainer(
        vocab_size=330, special_tokens=["<|endoftext|>", "<|padding|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    ))  # fmt: skip
    made.add_tokens([tokenizers.AddedToken(" " * count, normalized=False) for count in range(24, 1, -1)])
    return made


def llama3_like() -> tokenizers.Tokenizer:
    """Llama 3's kind: byte-level BPE with a pattern of its own, and the special tokens behind the vocabulary."""
    made = tokenizers.Tokenizer(models.BPE(ignore_merges=True))
    made.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(LLAMA3_PATTERN), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=310, initial_alphabet=alphabet, show_progress=False)
    )
    made.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"])
    begin = made.token_to_id("<|begin_of_text|>")
    made.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(
            single="<|begin_of_text|> $A", pair="<|begin_of_text|> $A <|begin_of_text|> $B",
            special_tokens=[("<|begin_of_text|>", begin)],
        ),
    ])  # fmt: skip
    return made


def qwen_like() -> tokenizers.Tokenizer:
    """Qwen's kind: byte-level BPE with a pattern of its own on joined accents, and added words that are not special."""
    made = tokenizers.Tokenizer.from_str(train_bpe(CORPUS, 320, "qwen2").to_bytes().decode())
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    made.add_tokens([tokenizers.AddedToken(word, normalized=False) for word in ("<think>", "</think>")])
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    return made


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "gpt2": lambda: shared("gpt2-vocab.json"),
    "bert": lambda: shared("bert-vocab.txt"),
    "llama": lambda: Tokenizer(sentencepiece_like(metaspace=False)),
    "metaspace": lambda: Tokenizer(sentencepiece_like(metaspace=True)),
    "llama3": lambda: Tokenizer(llama3_like()),
    "gemma": lambda: Tokenizer(gemma_like()),
    "neox": lambda: Tokenizer(neox_like()),
    "qwen": lambda: Tokenizer(qwen_like()),
}


SCRIPTS = (
    "abcdefghij XYZ", "\xe4\xf6\xfc\xdf\xe9\xe8\xf1\xe7\xf8\xe5", "абвгдежз ЖЮЯ", "βγδεζ", "אבגדה", "ابتثج", "हिन्दी",
    "ไทยภาษา", "日本語漢字かなカナ", "한국어",
    "\U0001f600\U0001f468\u200d\U0001f469\U0001f3f3\ufe0f\U0001f1e9\U0001f1ea\U0001f3fd",
    "\x00\x01\x07\x1b\x7f\x85\u200b\u200d\u202e\ufeff\ufffd", " \t\n\r\xa0\u2003\u3000", "0123456789.,:;!?",
    "()[]{}<>|/\\@#$%^&*_-+=~`'\"", "\u2581\u0120\u010a\xc2<0x41>##", "e\u0301a\u0308\ufb01\ufdfa\u2460\u212b",
)  # fmt: skip
SPECIAL = (
    "<s>", "</s>", "<unk>", "<|endoftext|>", "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "[CLS]", "[SEP]",
    "[MASK]", "[PAD]", "[UNK]",
)  # fmt: skip
WORDS = (
    "the", "The", "cat", "don't", "I'LL", "naïve", "<think>", "2024", "x=1;", "...", "über", "мир", "日本", "e.g.",
    "https://a.b/c?d=1",
)  # fmt: skip


def mixed_texts(count: int, seed: int = 5) -> Iterator[str]:
    """Texts of mixed scripts, spaces, emoji, control characters and spellings of special tokens."""
    draw = random.Random(seed)
    yield from ("", " ", "  ", "\n", *SPECIAL, " ".join(SPECIAL), "".join(SPECIAL))
    for _ in range(count):
        parts = []
        for _ in range(draw.randint(1, 12)):
            kind = draw.random()
            if kind < 0.45:
                parts.append(draw.choice(WORDS))
            elif kind < 0.85:
                parts.append("".join(draw.choices(draw.choice(SCRIPTS), k=draw.randint(1, 6))))
            elif kind < 0.95:
                parts.append(" " * draw.randint(1, 5))
            else:
                parts.append(draw.choice(SPECIAL))
            parts.append(draw.choice(("", " ", " ", "\n")))
        yield "".join(parts)


def exported(folder: Path, settings: ModelSettings, tokenizer: Tokenizer | None = None, **options: Any) -> Path:
    """A folder that lmtrain exports."""
    export_hf(save(folder / "run", settings, tokenizer=tokenizer), folder / "hf", check=False, **options)
    return folder / "hf"


# What the hub's folders hold besides: lists of ids, templates, names of tokens in several forms.
CHAT_TEMPLATE = "{% for m in messages %}{{ '<s>' + m['role'] + ': ' + m['content'] }}{% endfor %}\n"
GENERATION = {"bos_token_id": 1, "do_sample": True, "eos_token_id": [2, 7], "pad_token_id": 0, "temperature": 0.6}
EXTRA_CONFIG = {"bos_token_id": 1, "eos_token_id": [2, 7], "pad_token_id": 0, "use_cache": True, "pretraining_tp": 1}


def publish(folder: Path, config: dict[str, Any] | None = None) -> dict[str, bytes]:
    """Change an exported folder to what a hub has of a chat model. Return its small files."""
    old = json.loads((folder / "config.json").read_text())
    for name in ("README.md", "special_tokens_map.json"):
        os.unlink(folder / name)
    new = {key: value for key, value in old.items() if key != "transformers_version"} | EXTRA_CONFIG | (config or {})
    added = {"bos_token": {"content": "<s>", "lstrip": False, "normalized": False, "rstrip": False,
                           "single_word": False}, "eos_token": "</s>", "unk_token": "<unk>"}  # fmt: skip
    tokenizer_config = {
        "add_bos_token": True, "bos_token": "<s>", "clean_up_tokenization_spaces": False, "eos_token": "</s>",
        "legacy": False, "model_max_length": 1000000000000000019884624838656, "padding_side": "left",
        "tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "chat_template": CHAT_TEMPLATE,
    }  # fmt: skip
    files = {
        "config.json": new, "generation_config.json": GENERATION, "special_tokens_map.json": added,
        "tokenizer_config.json": tokenizer_config,
    }  # fmt: skip
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value, indent=3))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools: " + CHAT_TEMPLATE)
    (folder / "tokenizer.model").write_bytes(bytes(range(256)))
    return small_files(folder)


def small_files(folder: Path) -> dict[str, bytes]:
    """The files of a folder, but for weights and the model card, by their paths in it."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".safetensors" not in path.name and path.name != "README.md"
    }
