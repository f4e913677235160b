"""Tokenizers load from every file form, give the ids of other libraries, and have one fingerprint for all forms."""

from __future__ import annotations

import hashlib
import json
import shutil
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from lmtrain.errors import DataError, MissingInputError
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer
from lmtrain.tokenizer.train import train_bpe, train_wordpiece

TEXTS = ["The cat sat on the mat.", "The dog sat on the log; the cat's mat wasn't there.", "naïve café “quoted” 你好 1"]
SAMPLES = [*TEXTS, "", " ", "\n\n  x", "don't  stop\t\tnow", "é̀ \u2028 \x00", "a<|endoftext|>b [MASK] c"]
BPE = train_bpe(TEXTS, 300)
WORDPIECE = train_wordpiece(TEXTS, 120, lowercase=True)
BOTH = pytest.mark.parametrize("tokenizer", [BPE, WORDPIECE], ids=["bpe", "wordpiece"])


def write_gpt2(folder: Path, tokenizer: Tokenizer) -> None:
    """A tokenizer in GPT-2's two files."""
    model = json.loads(tokenizer.to_bytes())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in model["merges"]))


def write_vocab(path: Path, tokenizer: Tokenizer) -> None:
    vocab = json.loads(tokenizer.to_bytes())["model"]["vocab"]
    path.write_text("".join(f"{piece}\n" for piece in sorted(vocab, key=vocab.__getitem__)))


@BOTH
def test_bytes_are_canonical(tokenizer: Tokenizer) -> None:
    again = Tokenizer.from_bytes(tokenizer.to_bytes())
    assert again.to_bytes() == tokenizer.to_bytes()
    assert again.fingerprint == tokenizer.fingerprint
    assert again.encode_batch(SAMPLES) == tokenizer.encode_batch(SAMPLES)


@BOTH
def test_a_lazily_loaded_tokenizer_is_parsed_at_first_use(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """And one whose file has changed is not known: what was recorded is of another."""
    path, other = tmp_path / "tokenizer.json", train_bpe(("quite other words",), 300)
    tokenizer.save(path)
    said: dict[str, Any] = {
        "sha256": hashlib.sha256(tokenizer.to_bytes()).hexdigest(), "fingerprint": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size, "eod_id": tokenizer.eod_id,
    }  # fmt: skip
    known = Tokenizer.load_lazily(path, **said)
    assert known.to_bytes() == tokenizer.to_bytes()
    assert (known.fingerprint, known.vocab_size, known.eod_id) == tuple(said.values())[1:]
    assert "_inner" not in vars(known)
    assert known.encode("some words") == tokenizer.encode("some words")
    assert known.special == tokenizer.special
    other.save(path)
    assert Tokenizer.load_lazily(path, **said).fingerprint == other.fingerprint


def test_one_fingerprint_for_every_form(tmp_path: Path) -> None:
    write_gpt2(tmp_path, BPE)
    assert Tokenizer.load(tmp_path).fingerprint == BPE.fingerprint
    assert Tokenizer.load(tmp_path) is Tokenizer.load(tmp_path / "vocab.json")
    first, second, *rest = (tmp_path / "merges.txt").read_text().splitlines()[1:]
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", second, first, *rest]) + "\n")  # of equal size
    assert Tokenizer.load(tmp_path).fingerprint != BPE.fingerprint
    BPE.save(tmp_path / "tokenizer.json")
    assert Tokenizer.load(tmp_path).fingerprint == BPE.fingerprint
    write_vocab(tmp_path / "vocab.txt", WORDPIECE)
    assert Tokenizer.load(tmp_path / "vocab.txt").fingerprint == WORDPIECE.fingerprint


def test_fingerprint_sees_what_decides_ids(tmp_path: Path) -> None:
    tree = json.loads(BPE.to_bytes())
    prints = {BPE.fingerprint, WORDPIECE.fingerprint}
    changes: list[dict[str, object]] = [
        {"model": tree["model"] | {"merges": tree["model"]["merges"][:-1]}},
        {"pre_tokenizer": tree["pre_tokenizer"] | {"add_prefix_space": True}},
        {"normalizer": {"type": "Lowercase"}},
        {"added_tokens": []},
    ]
    for change in changes:
        prints.add(Tokenizer.from_bytes(json.dumps(tree | change).encode()).fingerprint)
    assert len(prints) == 6
    same = tree | {"decoder": None, "pre_tokenizer": tree["pre_tokenizer"] | {"trim_offsets": False}}
    assert Tokenizer.from_bytes(json.dumps(same).encode()).fingerprint == BPE.fingerprint


def test_special_tokens_in_text_are_text() -> None:
    assert BPE.eod_id == 0
    assert BPE.eod_id not in BPE.encode("a<|endoftext|>b")
    assert WORDPIECE.eod_id is None
    assert set(WORDPIECE.special) == {"pad", "unk", "cls", "sep", "mask"}
    assert WORDPIECE.special["mask"] not in WORDPIECE.encode("a [MASK] b")
    assert WORDPIECE.special["cls"] not in WORDPIECE.encode("the cat")


@settings(max_examples=25, deadline=None)
@given(st.text(max_size=60))
def test_byte_level_bpe_loses_nothing(text: str) -> None:
    assert BPE.decode(BPE.encode(text)) == text


@BOTH
def test_parts_of_a_long_text_have_its_ids(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmtrain.tokenizer.text_to_ids_and_back._PART_CHARS", 5)
    for text in [*SAMPLES, " ".join(SAMPLES) * 3, "wide   gaps \n of  space\u2028 and\u00a0more "]:
        parts = tokenizer.split_long_text(text)
        assert "".join(parts) == text
        assert list(chain.from_iterable(tokenizer.encode_batch(parts))) == tokenizer.encode(text)
    assert len(tokenizer.split_long_text("one two three four five")) > 2


ACCENTS = ["cafe\u0301 e\u0301", "\u0301x \u0301 \u1100\u1161 \u1161", "in 2024 we'LL\r\n\r\n  go .\n//", "12 345 6 "]


@pytest.mark.parametrize("pattern", ["cl100k", "qwen2"])
def test_parts_of_a_long_text_have_its_ids_with_every_pattern(
    pattern: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmtrain.tokenizer.text_to_ids_and_back._PART_CHARS", 5)
    tokenizer = train_bpe([*TEXTS, *ACCENTS], 330, pattern)
    for text in [*SAMPLES, " ".join(SAMPLES) * 3, *ACCENTS, " ".join(ACCENTS)]:
        parts = tokenizer.split_long_text(text)
        assert "".join(parts) == text
        assert list(chain.from_iterable(tokenizer.encode_batch(parts))) == tokenizer.encode(text)
    assert len(tokenizer.split_long_text("one two three four five")) > 2


@pytest.mark.parametrize(
    ("token", "num_parts"), [({}, 3), ({"rstrip": True}, 1), ({"lstrip": True}, 1), ({"content": "one  two"}, 1)]
)
def test_a_text_is_cut_where_added_words_keep_to_one_side(
    token: dict[str, Any], num_parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmtrain.tokenizer.text_to_ids_and_back._PART_CHARS", 5)
    tree = json.loads(BPE.to_bytes())
    plain = {"content": "<think>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tree["added_tokens"].append(plain | {"id": BPE.vocab_size, "special": False} | token)
    tokenizer = Tokenizer.from_bytes(json.dumps(tree).encode())
    assert len(tokenizer.split_long_text("one  two <think> four")) == num_parts


def test_a_tokenizer_that_looks_across_spaces_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmtrain.tokenizer.text_to_ids_and_back._PART_CHARS", 5)
    tree = json.loads(BPE.to_bytes())
    tree["pre_tokenizer"]["add_prefix_space"] = True
    assert len(Tokenizer.from_bytes(json.dumps(tree).encode()).split_long_text("one two three four")) == 1


def test_dropout_and_truncation_are_switched_off() -> None:
    tree = json.loads(BPE.to_bytes())
    tree["model"]["dropout"] = 0.5
    tree["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    tokenizer = Tokenizer.from_bytes(json.dumps(tree).encode())
    assert tokenizer.encode(TEXTS[1]) == BPE.encode(TEXTS[1])
    assert tokenizer.fingerprint == BPE.fingerprint


def with_template(*single: dict[str, dict[str, object]]) -> bytes:
    tree = json.loads(BPE.to_bytes())
    template = {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": {}}
    plain = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tree["post_processor"] = {"type": "Sequence", "processors": [plain, template]}
    return json.dumps(tree).encode()


def test_a_template_around_a_text_keeps_it() -> None:
    text: dict[str, dict[str, object]] = {"Sequence": {"id": "A", "type_id": 0}}
    assert Tokenizer.from_bytes(with_template(text)).encode(TEXTS[1]) == BPE.encode(TEXTS[1])
    for single in ((), (text, text)):
        with pytest.raises(DataError, match=f"template for a single text contains {len(single)} texts"):
            Tokenizer.from_bytes(with_template(*single))


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(DataError, match="lone surrogate"):
        BPE.encode("a\ud800")


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("tokenizer.json", "{", "The library tokenizers cannot read .*tokenizer.json"),
        ("tokenizer.json", "[]", "The library tokenizers cannot read .*tokenizer.json"),
        ("tokenizer.json", '{"model": {"type": "BPE", "vocab": {}, "merges": []}}', "no vocabulary"),
        ("vocab.json", "[1]", "not a JSON object"),
        ("vocab.json", '{"a": -1}', "id -1"),
        ("vocab.json", '{"a": true}', "id True"),
        ("vocab.json", '{"a": 1, "b": 1}', "it gives two pieces the same id"),
        ("vocab.json", '{"a": 1}', "byte pieces are missing"),
        ("merges.txt", "#version: 0.2\na b c\n", "merges.txt:2"),
        ("merges.txt", "T zzz\n", "merges.txt:1"),
        ("merges.txt", "#version: 0.2\n\nt h\n", "merges.txt:2"),
        ("vocab.txt", "[UNK]\na\na\n", "vocab.txt:3"),
        ("vocab.txt", "[UNK]\n\na\n", "vocab.txt:2"),
        ("vocab.txt", "[UNK]\na\x0b\n", "vocab.txt:2 .*blank"),
        ("vocab.txt", "a\nb\n", "no piece \\[UNK\\]"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, content: str, says: str) -> None:
    write_gpt2(tmp_path, BPE)
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=says):
        Tokenizer.load(tmp_path / name.replace("merges.txt", "vocab.json"))


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(MissingInputError, match="holds no tokenizer"):
        Tokenizer.load(tmp_path)
    with pytest.raises(MissingInputError, match=r"none\.model does not exist"):
        Tokenizer.load(tmp_path / "none.model")
    (tmp_path / "spiece.model").write_bytes(b"\n\x0e")
    for path in (tmp_path, tmp_path / "spiece.model"):
        with pytest.raises(DataError, match=r"spiece\.model is a SentencePiece model, .* Give the tokenizer\.json"):
            Tokenizer.load(path)
    with pytest.raises(MissingInputError, match=r"none\.json"):
        Tokenizer.load(tmp_path / "none.json")
    write_gpt2(tmp_path, BPE)
    (tmp_path / "merges.txt").unlink()
    with pytest.raises(MissingInputError, match=r"merges\.txt"):
        Tokenizer.load(tmp_path)


def test_cut_short_files_are_refused() -> None:
    whole = BPE.to_bytes()
    for end in range(0, len(whole) - 3, 97):
        with pytest.raises(DataError):
            Tokenizer.from_bytes(whole[:end])


def test_a_cased_vocabulary_keeps_case(tmp_path: Path) -> None:
    cased = train_wordpiece(TEXTS, 120, lowercase=False)
    write_vocab(tmp_path / "vocab.txt", cased)
    assert Tokenizer.load(tmp_path / "vocab.txt").fingerprint == cased.fingerprint
    assert cased.encode("The") != cased.encode("the")
    assert WORDPIECE.encode("The") == WORDPIECE.encode("the")


@pytest.mark.wide
def test_gpt2_encodes_as_transformers_does(shared_data: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ours = Tokenizer.load(shared_data / "gpt2-vocab.json")
    shutil.copy(shared_data / "gpt2-vocab.json", tmp_path / "vocab.json")
    shutil.copy(shared_data / "gpt2-merges.txt", tmp_path / "merges.txt")
    theirs = transformers.GPT2TokenizerFast.from_pretrained(tmp_path)
    texts = [*SAMPLES[:-1], *(shared_data / "wt2.valid.txt").read_text()[:60_000].split("\n")]
    assert ours.encode_batch(texts) == theirs(texts)["input_ids"]
    assert (ours.vocab_size, ours.eod_id) == (50257, 50256)
    theirs.save_pretrained(tmp_path / "saved")
    assert Tokenizer.load(tmp_path / "saved" / "tokenizer.json").fingerprint == ours.fingerprint


@pytest.mark.wide
def test_bert_encodes_as_transformers_does(shared_data: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ours = Tokenizer.load(shared_data / "bert-vocab.txt")
    shutil.copy(shared_data / "bert-vocab.txt", tmp_path / "vocab.txt")
    theirs = transformers.BertTokenizerFast.from_pretrained(tmp_path)
    texts = [*SAMPLES[:-1], *(shared_data / "wt2.valid.txt").read_text()[:60_000].split("\n")]
    assert ours.encode_batch(texts) == theirs(texts, add_special_tokens=False)["input_ids"]
    assert ours.special == {"pad": 0, "unk": 100, "cls": 101, "sep": 102, "mask": 103}


def test_the_most_common_name_of_a_role_is_used() -> None:
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"</s>": 0, "a": 1, "<|endoftext|>": 2}, unk_token="a"))  # noqa: S106
    assert Tokenizer.from_bytes(inner.to_str().encode()).eod_id == 2


def test_wraps_any_kind_of_tokenizer() -> None:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<unk>": 7}, unk_token="<unk>"))  # noqa: S106
    tokenizer = Tokenizer.from_bytes(words.to_str().encode())
    assert (tokenizer.vocab_size, tokenizer.special, tokenizer.kind) == (8, {"unk": 7}, "WordLevel")
