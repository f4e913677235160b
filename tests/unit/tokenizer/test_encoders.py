"""The compiled encoder gives the ids of the `tokenizers` library, for every document and input type."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from lmtrain.runtime import compiled_helpers
from lmtrain.tokenizer.bulk_encoding import CompiledEncoder, EncodedDocuments, Encoder, TwinEncoder, build_encoder
from lmtrain.tokenizer.text_from_json_lines import MAX_WORD_BYTES, Reject
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer
from lmtrain.tokenizer.train import train_bpe, train_wordpiece
from tests.marks import wide
from tests.unit.tokenizer.adversarial import PIECES, documents

SOURCES = [*documents(1500, seed=0), " ".join(PIECES) * 3]
ADVERSARIAL = list(documents(1500, seed=1))
built = pytest.mark.skipif(compiled_helpers.lib is None, reason="the compiled helper is not built")


def changed(tokenizer: Tokenizer, **parts: dict[str, Any]) -> Tokenizer:
    """The same tokenizer with other values in some parts of its tokenizer.json."""
    tree = json.loads(tokenizer.to_bytes())
    tree = {**tree, **{name: {**(tree[name] or {}), **values} for name, values in parts.items()}}
    return Tokenizer.from_bytes(json.dumps(tree).encode())


def shuffled(tokenizer: Tokenizer) -> Tokenizer:
    """The same merges in any order: later ones may make pieces that earlier ones need, and a piece come about twice."""
    merges = json.loads(tokenizer.to_bytes())["model"]["merges"]
    random.Random(5).shuffle(merges)
    return changed(tokenizer, model={"merges": merges})


def missing_letters(tokenizer: Tokenizer) -> Tokenizer:
    """WordPiece that knows only some letters, so that [UNK] is common."""
    vocab = json.loads(tokenizer.to_bytes())["model"]["vocab"]
    kept = {p: i for p, i in vocab.items() if p.startswith("[") or (len(p) > 1 and ord(p[-1]) % 5)}
    return changed(tokenizer, model={"vocab": kept, "max_input_chars_per_word": 7})


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    return KINDS[kind]()


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "gpt2": lambda: train_bpe(SOURCES, 1500),
    "gpt2 shuffled": lambda: shuffled(tokenizer_of("gpt2")),
    "llama": lambda: changed(train_bpe(SOURCES, 1500, "cl100k"), model={"ignore_merges": True}),
    "llama merging": lambda: changed(tokenizer_of("llama"), model={"ignore_merges": False}),
    "llama shuffled": lambda: shuffled(tokenizer_of("llama")),
    "uncased": lambda: train_wordpiece(SOURCES, 1500, lowercase=True),
    "cased": lambda: train_wordpiece(SOURCES, 1500, lowercase=False),
    "uncased, few letters": lambda: missing_letters(tokenizer_of("uncased")),
    "lower case with accents": lambda: changed(tokenizer_of("uncased"), normalizer={"strip_accents": False}),
    "cased without accents": lambda: changed(tokenizer_of("cased"), normalizer={"strip_accents": True}),
    "not cleaned": lambda: changed(
        tokenizer_of("uncased"), normalizer={"clean_text": False, "handle_chinese_chars": False}
    ),
}


@cache
def pair(kind: str, dtype: Any = np.uint16) -> tuple[Encoder, Encoder]:
    encoder = build_encoder(tokenizer_of(kind), dtype)
    assert isinstance(encoder, CompiledEncoder) or compiled_helpers.lib is None
    return encoder, TwinEncoder(tokenizer_of(kind), np.dtype(dtype))


def assert_same(one: EncodedDocuments, other: EncodedDocuments) -> None:
    assert one.tokens.dtype == other.tokens.dtype
    assert one.lengths.tolist() == other.lengths.tolist()
    assert np.array_equal(one.tokens, other.tokens)
    assert (one.num_text_bytes, one.rejects) == (other.num_text_bytes, other.rejects)


each_kind = pytest.mark.parametrize("kind", KINDS)


@each_kind
def test_adversarial_documents(kind: str) -> None:
    expected = [tokenizer_of(kind).encode(text) for text in ADVERSARIAL]
    for encoder in pair(kind):
        found = encoder.encode_documents(ADVERSARIAL)
        ends = np.cumsum(found.lengths).tolist()
        for text, ids, start, stop in zip(ADVERSARIAL, expected, [0, *ends], ends, strict=False):
            assert found.tokens[start:stop].tolist() == ids, repr(text)


@each_kind
@settings(max_examples=40, deadline=None)
@given(texts=st.lists(st.text(max_size=40) | st.sampled_from(PIECES), max_size=6))
def test_any_text_is_encoded_as_by_the_library(kind: str, texts: list[str]) -> None:
    encoder, twin = pair(kind)
    assert_same(encoder.encode_documents(["".join(texts), *texts]), twin.encode_documents(["".join(texts), *texts]))


@pytest.mark.parametrize("kind", ["gpt2", "llama", "uncased", "cased"])
def test_every_character_of_the_first_planes(kind: str) -> None:
    encoder, twin = pair(kind)
    codes = [*range(0x3400), *range(0x3400, 0x30000, 97), *range(0xF900, 0x10000), *range(0x1D100, 0x1D800)]
    texts = ["".join(f"a{chr(code)}b {chr(code)}1" for code in codes[i : i + 64] if not 0xD800 <= code < 0xE000)
             for i in range(0, len(codes), 64)]  # fmt: skip
    assert_same(encoder.encode_documents(texts), twin.encode_documents(texts))


def test_a_number_ends_where_letters_begin_wherever_blocks_end() -> None:
    """Text is cut 64 bytes at a time, and numbers into three digits from their own beginning."""
    encoder, twin = pair("llama")
    texts = [
        "a" * (64 - before) + "123"[:before] + "b" * 64 * blocks + "45678"[:behind] + "c 9"
        for before in range(4) for blocks in range(3) for behind in range(6)
    ]  # fmt: skip
    assert_same(encoder.encode_documents(texts), twin.encode_documents(texts))


@pytest.mark.parametrize(
    ("kind", "dtype"),
    wide(*((kind, dtype) for kind in ("gpt2", "llama", "uncased") for dtype in (np.uint16, np.int32))),
)
def test_documents_longer_than_what_is_cut_at_a_time(kind: str, dtype: Any) -> None:
    encoder, twin = pair(kind, dtype)
    rng = random.Random(3)
    texts = ["".join(documents(4000, seed=9)), "word " * 30_000, "é" * 50_000, " " * 70_000 + "x", "\n \t" * 30_000]
    texts += ["a1" * 600 + rng.choice(PIECES) * rng.randrange(64_000, 68_000) + "'s" for _ in range(3)]
    lines = [json.dumps({"text": text}, ensure_ascii=bool(i % 2)) for i, text in enumerate(texts)]
    data = "\n".join([*lines, json.dumps({"text": "".join(texts)[:1_500_000]})]).encode()
    assert_same(encoder.encode_documents(texts), twin.encode_documents(texts))
    assert_same(encoder.encode_jsonl(data, "text"), twin.encode_jsonl(data, "text"))


@pytest.mark.parametrize("kind", ["gpt2", *wide("uncased")])
def test_more_words_than_are_remembered(kind: str) -> None:
    encoder, twin = pair(kind)
    rng = random.Random(4)
    words = ["".join(rng.choices("abcdefgh", k=rng.choice((9, 16, 40)))) for _ in range(45_000)]
    texts = [" ".join(words[i : i + 500]) for i in range(0, len(words), 500)]
    expected = twin.encode_documents(texts)
    assert_same(encoder.encode_documents(texts), expected)
    assert_same(encoder.encode_documents(texts), expected)  # now that some are remembered


@pytest.mark.parametrize("kind", ["gpt2", "llama", "uncased"])
def test_documents_may_be_str_or_bytes(kind: str) -> None:
    encoder, twin = pair(kind)
    given: list[bytes | str] = ["one", b"two", b"bad \xff", "", "\ud800", b"", "naïve", "x" * (MAX_WORD_BYTES + 1)]
    found = encoder.encode_documents(given)
    assert_same(found, twin.encode_documents(given))
    assert found.rejects == [
        Reject(2, 4, "invalid UTF-8"),
        Reject(4, 0, "the text holds a lone surrogate, which is no character"),
        Reject(7, 0, "a word longer than 4 MiB"),
    ]
    assert (len(found.lengths), found.num_text_bytes) == (5, 12)
    assert_same(encoder.encode_documents([]), twin.encode_documents([]))
    data = b'{"text": "one"}\n[]\n\n{"text": ""}\n{"text": "two"}'
    for view in (data, bytearray(data), memoryview(data)):
        assert_same(encoder.encode_jsonl(view, "text"), twin.encode_jsonl(data, "text"))  # type: ignore[arg-type]
    assert encoder.encode_jsonl(data, "text").rejects == [Reject(16, 16, "not a JSON object")]


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_ends_of_documents(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    texts = ["one", "", "two", "[a\n"]
    data = "\n".join(json.dumps({"text": text}) for text in texts).encode()
    for encoder in pair(kind):
        for found in (
            encoder.encode_documents(texts, append_eod=True),
            encoder.encode_jsonl(data, "text", append_eod=True),
        ):
            expected = [[*tokenizer.encode(text), *[tokenizer.eod_id] * bool(text)] for text in texts]
            assert found.tokens.tolist() == [token for ids in expected for token in ids]
            assert found.lengths.tolist() == [len(ids) for ids in expected]


def test_ids_beyond_sixteen_bits() -> None:
    tree = json.loads(tokenizer_of("llama").to_bytes())
    vocab = {piece: i * 37 + 66_000 for piece, i in tree["model"]["vocab"].items()}
    tokenizer = changed(tokenizer_of("llama"), model={"vocab": vocab})
    texts = list(documents(300, seed=2))
    encoder = build_encoder(tokenizer)
    assert_same(encoder.encode_documents(texts), TwinEncoder(tokenizer, np.dtype(np.int32)).encode_documents(texts))


def test_threads_share_an_encoder() -> None:
    encoder, twin = pair("gpt2")
    portions = [list(documents(150, seed=seed)) for seed in range(12)]
    with ThreadPoolExecutor(4) as pool:
        for found, texts in zip(pool.map(encoder.encode_documents, portions), portions, strict=True):
            assert_same(found, twin.encode_documents(texts))


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("gpt2", {"pre_tokenizer": {"add_prefix_space": True}}),
    ("gpt2", {"normalizer": {"type": "Lowercase"}}),
    ("gpt2", {"pre_tokenizer": {"use_regex": False}}),
    ("gpt2", {"model": {"byte_fallback": True}}),
    ("gpt2", {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Whitespace"}, BYTE_LEVEL]}}),
    ("uncased", {"normalizer": {"type": "Lowercase"}}),
    ("uncased", {"pre_tokenizer": {"type": "Whitespace"}}),
]


@pytest.mark.parametrize(("kind", "parts"), OTHERS)
def test_unsupported_tokenizers_use_the_library(kind: str, parts: dict[str, Any]) -> None:
    tokenizer = changed(tokenizer_of(kind), **parts)
    encoder = build_encoder(tokenizer)
    assert isinstance(encoder, TwinEncoder)
    assert encoder.encode_documents(["The cat's"]).tokens.tolist() == tokenizer.encode("The cat's")


def test_added_tokens_that_match_in_text_use_the_library() -> None:
    inner = tokenizers.Tokenizer.from_str(tokenizer_of("gpt2").to_bytes().decode())
    inner.add_tokens(["the cat"])
    assert isinstance(build_encoder(Tokenizer(inner)), TwinEncoder)


IDS, MERGES = np.arange(256), np.array([[1, 2, 3]])


@built
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("gpt3", IDS, MERGES, {}), "patterns"),
        (("gpt2", IDS[:9], MERGES, {}), "256 byte ids"),
        (("gpt2", IDS, MERGES[:, :2], {}), "merges of three"),
        (("gpt2", IDS - 1, MERGES, {}), "out of range"),
        (("gpt2", IDS, MERGES + (1 << 21), {}), "out of range"),
    ],
)
def test_wrong_tables_are_refused(arguments: tuple[Any, ...], says: str) -> None:
    assert compiled_helpers.lib is not None
    with pytest.raises(ValueError, match=says):
        compiled_helpers.lib.Encoder16.bpe(*arguments)
    with pytest.raises(ValueError, match="unknown piece"):
        compiled_helpers.lib.Encoder16.wordpiece({"a": 1}, "[UNK]", "##", 100, True, True, True, True)


def test_pieces_of_any_length(tmp_path: Path) -> None:
    """A word is cut up to 100 characters, so that pieces around that length matter, and the longest must not harm."""
    lines = ["[UNK]", "a", "##a", "é", "##é", "a" * 150_000, "##" + "é" * 150_000]
    lines += [start + letter * n for n in (98, 99, 100, 101) for start in ("", "##") for letter in "aé"]
    (tmp_path / "vocab.txt").write_text("".join(f"{line}\n" for line in lines))
    tokenizer = Tokenizer.load(tmp_path / "vocab.txt")
    encoder = build_encoder(changed(tokenizer, normalizer={"strip_accents": False}), np.uint16)
    assert isinstance(encoder, CompiledEncoder) or compiled_helpers.lib is None
    twin = TwinEncoder(changed(tokenizer, normalizer={"strip_accents": False}), np.dtype(np.uint16))
    texts = [letters * n for letters in ("a", "é", "aé") for n in (1, 49, 50, 51, 98, 99, 100, 101, 150_000)]
    assert_same(encoder.encode_documents(texts), twin.encode_documents(texts))


@pytest.mark.parametrize("name", ["gpt2-vocab.json", "bert-vocab.txt"])
def test_real_text(shared_data: Path, name: str) -> None:
    tokenizer = Tokenizer.load(shared_data / name)
    files = ("wt2.valid.txt", "wt103.wiki.test.tokens", "lambada_test_plain_text.txt", "tinyshakespeare.txt")
    texts = [text for file in files for text in (shared_data / file).read_text()[:100_000].split("\n = ")]
    assert_same(
        build_encoder(tokenizer).encode_documents(texts),
        TwinEncoder(tokenizer, np.dtype(np.uint16)).encode_documents(texts),
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "llama", "uncased", "cased"])
def test_every_character(kind: str) -> None:
    encoder, twin = pair(kind)
    for first in range(0, 0x110000, 0x1000):
        characters = [chr(code) for code in range(first, first + 0x1000) if not 0xD800 <= code < 0xE000]
        texts = [
            "".join(f"{c}a{c}'{c}1 {c}\n{c}" for c in characters[i : i + 64]) for i in range(0, len(characters), 64)
        ]
        assert_same(encoder.encode_documents(texts), twin.encode_documents(texts))
