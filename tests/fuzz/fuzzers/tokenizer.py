"""Tokenizer files in every form: what is changed in them is refused, or gives the ids that the library gives for it."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from lmtrain.data.store.indexed_dataset import IndexedDataset
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer
from lmtrain.tokenizer.train import train_bpe, train_wordpiece
from lmtrain.tokenizer.vocabulary_files import CL100K
from tests.fuzz.fuzzer import Case, Ran, Runner, honest
from tests.fuzz.mutate import EDGES, as_json, change_any, change_json, some_json
from tests.unit.tokenizer.adversarial import documents

TEXTS = [
    "The cat sat on the mat.", "the dog's log wasn't there; naïve café “quoted” 你好 12 345", "a  b\t\nMASK [MASK] ."
]  # fmt: skip
SHOWN = "the cat's naïve  dog 12"
# Parts that a tokenizer may have, to stand where another one stood.
_REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
PARTS: dict[str, tuple[Any, ...]] = {
    "normalizer": (
        None, {"type": "Lowercase"}, {"type": "NFD"}, {"type": "StripAccents"}, {"type": "Prepend", "prepend": "▁"},
        {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None,
         "lowercase": False}, {"type": "ByteLevel"}, {"type": "Strip", "strip_left": True, "strip_right": True},
        _REPLACE, {"type": "Sequence", "normalizers": [_REPLACE] * 40}, {"type": "Sequence", "normalizers": []},
        {"type": "Sequence", "normalizers": [{"type": "NFKC"}] * 5000}, {"type": "Nmt"},
        {"type": "Replace", "pattern": {"Regex": "(a|a)*$"}, "content": ""},
        {"type": "Replace", "pattern": {"Regex": "("}, "content": ""},
        {"type": "Precompiled", "precompiled_charsmap": "AAAAAAAA"},
    ),
    "pre_tokenizer": (
        None, {"type": "Whitespace"}, {"type": "WhitespaceSplit"}, {"type": "BertPreTokenizer"},
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
        {"type": "Digits", "individual_digits": True}, {"type": "Punctuation", "behavior": "Isolated"},
        {"type": "Split", "pattern": {"Regex": CL100K}, "behavior": "Removed", "invert": True},
        {"type": "Split", "pattern": {"String": ""}, "behavior": "Isolated", "invert": False},
        {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": CL100K}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]},
    ),
    "decoder": (
        None, {"type": "ByteLevel"}, {"type": "ByteFallback"}, {"type": "Fuse"},
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "Strip", "content": "a", "start": 9, "stop": 9},
        {"type": "Sequence", "decoders": [_REPLACE] * 40}, {"type": "BPEDecoder", "suffix": ""},
    ),
    "post_processor": (
        None, {"type": "BertProcessing", "sep": ["x", 10**6], "cls": ["y", 2**31]},
        {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "z", "type_id": 0}}], "pair": [],
         "special_tokens": {}},
    ),
    "added_tokens": (
        [], [{"id": 2**31, "content": "the", "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False, "special": False}],
        [{"id": 5, "content": "", "single_word": True, "lstrip": True, "rstrip": True, "normalized": True,
          "special": True}],
    ),
    "truncation": ({"direction": "Left", "max_length": 1, "strategy": "LongestFirst", "stride": 0},),
    "padding": ({"strategy": {"Fixed": 2**40}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
                 "pad_type_id": 0, "pad_token": "x"},),
}  # fmt: skip


class Fuzz:
    def __init__(self, folder: Path, run: Runner) -> None:
        bpe, pieces = train_bpe(TEXTS, 300), train_wordpiece(TEXTS, 120, lowercase=True)
        bpe.save(folder / "bpe" / "tokenizer.json")
        pieces.save(folder / "wordpiece" / "tokenizer.json")
        model = bpe.tree["model"]
        (folder / "gpt2").mkdir()
        (folder / "gpt2" / "vocab.json").write_text(json.dumps(model["vocab"], ensure_ascii=False))
        merges = "".join(f"{left} {right}\n" for left, right in model["merges"])
        (folder / "gpt2" / "merges.txt").write_text(f"#version: 0.2\n{merges}")
        (folder / "bert").mkdir()
        vocab = pieces.tree["model"]["vocab"]
        (folder / "bert" / "vocab.txt").write_text("".join(f"{piece}\n" for piece in sorted(vocab, key=vocab.get)))
        for kind, made in (("unigram", _unigram()), ("words", _words())):
            (folder / kind).mkdir()
            (folder / kind / "tokenizer.json").write_text(json.dumps(made, ensure_ascii=False))
        self.texts = [*TEXTS, *documents(24, seed=7)]
        (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in self.texts))
        self.folder = folder
        self.forms = ("bpe", "wordpiece", "gpt2", "bert", "unigram", "words")
        self.honest: dict[tuple[str, str], Ran] = {}
        for form in self.forms:
            for verb, arguments in self._verbs(folder / form, folder / f"{form}-data").items():
                if form in ("bpe", "bert"):  # because: calls of one verb take the same, and a start takes a second
                    self.honest[form, verb] = honest(run, *arguments, folder=folder)
            shutil.rmtree(folder / f"{form}-data", ignore_errors=True)
        (folder / "plain.txt").write_text("\n".join(TEXTS))
        arguments = ("preprocess", folder / "plain.txt", "--tokenizer", folder / "bpe", "--output", folder / "shown")
        honest(run, *arguments, folder=folder)
        honest(run, "data", "show", folder / "shown", "--random", 3, folder=folder)

    def _verbs(self, tokenizer: Path, output: Path) -> dict[str, tuple[object, ...]]:
        return {
            "show": ("tokenizer", "show", tokenizer, SHOWN),
            "preprocess": ("preprocess", self.folder / "text.jsonl", "--tokenizer", tokenizer, "--output", output,
                           "--no-append-eod", "--workers", 1),
        }  # fmt: skip

    def case(self, rng: random.Random, folder: Path) -> Case:
        form, verb = rng.choice(self.forms), rng.choice(("show", "show", "preprocess", "documents"))
        if verb == "documents":
            return self._documents(rng, folder)
        shutil.copytree(self.folder / form, folder / "tokenizer")
        path = rng.choice(sorted((folder / "tokenizer").iterdir()))
        what = change(path, rng)
        # because: for a folder the file is looked for, and one that is there is opened whatever it is now
        given = folder / "tokenizer" / ("vocab.json" if path.name == "merges.txt" else path.name)
        arguments = self._verbs(given, folder / "data")[verb]
        found = {"show": self._shown, "preprocess": self._written}[verb]
        return Case(f"{form} {what}", arguments, self.honest["bpe", verb], self._judge(given, found, folder))

    def _documents(self, rng: random.Random, folder: Path) -> Case:
        """A dataset's own tokenizer, which makes text of ids again."""
        for path in self.folder.glob("shown.*"):
            shutil.copy(path, folder / path.name)
        what = change(folder / "shown.tokenizer.json", rng)
        arguments = ("data", "show", folder / "shown", "--random", 3)
        return Case(what, arguments, self.honest["bpe", "show"])

    def _judge(self, path: Path, found: Callable[[Ran, Path], list[list[int]]], folder: Path) -> Callable[[Ran], str]:
        def wrong(ran: Ran) -> str:
            try:
                theirs = _library(path)
            except Exception as error:  # the library has no other
                return f"the library refuses it: {error}"
            ids = found(ran, folder)
            texts = [SHOWN] if found == self._shown else self.texts
            expected = [theirs.encode(text, add_special_tokens=False).ids for text in texts]
            return "" if ids == expected else "ids that are not the library's"

        return wrong

    def _shown(self, ran: Ran, folder: Path) -> list[list[int]]:
        return [[int(number) for number in re.findall(r"^│ +(\d+) +│", ran.output, re.M)]]

    def _written(self, ran: Ran, folder: Path) -> list[list[int]]:
        data = IndexedDataset.open(folder / "data")
        return [np.asarray(data.document(i)).tolist() for i in range(data.num_documents)]


def change(path: Path, rng: random.Random) -> str:
    """One change; of a whole tokenizer.json often to what stands around its vocabulary."""
    if path.name != "tokenizer.json" or rng.random() < 0.4:
        return change_any(path, rng) if rng.random() < 0.7 or path.suffix != ".json" else change_json(path, rng)
    tree = json.loads(path.read_bytes())
    kind = rng.random()
    if kind < 0.45:
        part = rng.choice(sorted(PARTS))
        new = rng.choice(PARTS[part])
        tree[part] = new
        what = f"{part} is now {json.dumps(new)[:100]}"
    elif kind < 0.6:
        names = ("unk_token", "dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback",
                 "ignore_merges", "fuse_unk", "max_input_chars_per_word", "unk_id", "type")  # fmt: skip
        name = rng.choice(names)
        new = rng.choice(("##", "", "a", "[UNK]", True, False, None, 0.5, "BPE", "WordPiece", "WordLevel", *EDGES))
        tree["model"][name] = new
        what = f"model.{name} is now {new}"
    else:
        held = {key: tree["model"].pop(key) for key in ("vocab", "merges") if key in tree["model"]}
        what, tree = some_json(tree, rng)
        if isinstance(tree, dict) and isinstance(tree.get("model"), dict):
            tree["model"] = tree["model"] | held
    path.write_bytes(as_json(tree))
    return f"tokenizer.json: {what}"


def _library(path: Path) -> tokenizers.Tokenizer:
    """What the library makes of the file, told as little as it can be."""
    if path.name == "vocab.json":
        vocab, merges = tokenizers.models.BPE.read_file(str(path), str(path.with_name("merges.txt")))
        inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges))
        inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        return inner
    if path.suffix == ".txt":
        vocab = tokenizers.models.WordPiece.read_file(str(path))
        lowercase = not any(piece != piece.lower() for piece in vocab if piece[:1] + piece[-1:] != "[]")
        inner = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab, unk_token="[UNK]"))  # noqa: S106
        inner.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=lowercase)
        inner.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
        return inner
    inner = tokenizers.Tokenizer.from_str(path.read_text())
    inner.no_truncation()
    inner.no_padding()
    inner.encode_special_tokens = True
    if getattr(inner.model, "dropout", None):
        inner.model.dropout = None
    return inner


def _unigram() -> dict[str, Any]:
    pieces = ["<unk>", "▁", "▁the", "▁cat", "at", *"thecasodgmnrwv'.12", "▁a", "s"]
    made = Tokenizer(tokenizers.Tokenizer(tokenizers.models.Unigram([(p, -i - 1.0) for i, p in enumerate(pieces)], 0)))
    split = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    return made.tree | {"pre_tokenizer": split, "decoder": split}


def _words() -> dict[str, Any]:
    vocab = {word: number for number, word in enumerate(["[UNK]", "the", "cat", "dog", "sat", "on", ".", "a"])}
    made = Tokenizer(tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]")))  # noqa: S106
    return made.tree | {"pre_tokenizer": {"type": "Whitespace"}}
