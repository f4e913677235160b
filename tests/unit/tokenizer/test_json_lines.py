"""The compiled reader of JSON lines equals its twin; bad lines are reported with cause and byte."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmtrain.tokenizer.text_from_json_lines import (
    MAX_DEPTH,
    MAX_DIGITS,
    MAX_WORD_BYTES,
    JsonLines,
    Reject,
    build_rejects,
    read_jsonl,
    read_jsonl_twin,
)

GOOD = [
    b'{"text": "hello"}',
    b'{"a": [1, 2.5e-3, -0, true, false, null, {"text": "c\\u00e9"}], "text": "x\\ny\\u2028\\ud83d\\ude00z"}',
    '{"é": "ü", "text": "日本\\t語"}'.encode(),
    b'  {"text":"" , "n":-12.5E+10 }  \r',
    b'\t{ "t\\u0065xt" : "its key is escaped" , "x" : { "text" : "no" } }',
    b'{"text": "' + b"abc def " * 20 + b'"}',
    b'{"text": "\\\\\\"\\/\\b\\f\\n\\r\\t\\u0000"}',
    b'{"\\ud800": "\\udc00", "text": "lone halves elsewhere are no harm"}',
    b'{"n": ' + b"9" * MAX_DIGITS + b', "m": ' + b"9" * 6000 + b'.5, "text": "large numbers"}',
    b'{"a": ' + b"[" * (MAX_DEPTH - 1) + b"]" * (MAX_DEPTH - 1) + b', "text": "deep"}',
    '{"text": "\x7f\x80\u2028\U0010ffff\ud7ff"}'.encode(),
]
BAD = [
    (b'{"text": "a"', 12, "not valid JSON"),
    (b"nonsense", 0, "not valid JSON"),
    (b'{"text": "a"} x', 14, "not valid JSON"),
    (b'{"text": "a"}{"text": "b"}', 13, "not valid JSON"),
    ('{"é": "日本", "text": "a"} x'.encode(), 30, "not valid JSON"),
    (b'{"text": "a",}', None, "not valid JSON"),
    (b'{"n": [1,], "text": "a"}', None, "not valid JSON"),
    (b'{"n" 1, "text": "a"}', 5, "not valid JSON"),
    (b'{"n": 01, "text": "a"}', 7, "not valid JSON"),
    (b'{"n": 1., "text": "a"}', 7, "not valid JSON"),
    (b'{"n": -, "text": "a"}', 6, "not valid JSON"),
    (b'{"n": 1e, "text": "a"}', 7, "not valid JSON"),
    (b'{"n": +1, "text": "a"}', 6, "not valid JSON"),
    (b'{"n": nul, "text": "a"}', 6, "not valid JSON"),
    (b"{'text': 'a'}", 1, "not valid JSON"),
    (b'{"text": "a\tb"}', 11, "not valid JSON"),
    (b'{"text": "a\x00b"}', 11, "not valid JSON"),
    (b'{"text": "\\x41"}', 10, "not valid JSON"),
    (b'{"text": "\\u12"}', None, "not valid JSON"),
    (b'{"text": "\\ud83d\\u12g4"}', None, "not valid JSON"),
    (b'{"text": "a\\', None, "not valid JSON"),
    (b'{"text": "a\\"}', 9, "not valid JSON"),
    (b'{"text": "a"}\x0b', 13, "not valid JSON"),
    (b'\xef\xbb\xbf{"text": "a"}', 0, "not valid JSON"),
    (b'{"n": NaN, "text": "a"}', 0, "not valid JSON (NaN is not allowed in JSON)"),
    (b'{"n": -Infinity, "text": "a"}', 0, "not valid JSON (-Infinity is not allowed in JSON)"),
    (b'{"n": ' + b"9" * (MAX_DIGITS + 1) + b', "text": "a"}', 0, "not valid JSON (a number has"),
    (b'{"n": -' + b"9" * (MAX_DIGITS + 1) + b', "text": "a"}', 0, "not valid JSON (a number has"),
    (b'{"text": "a", "n": ' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}", 0, "not valid JSON (it nests deeper"),
    (b'{"n": ' + b"[" * 100_000, 0, "not valid JSON (it nests deeper"),
    (b'["text"]', 0, "not a JSON object"),
    (b'"text"', 0, "not a JSON object"),
    (b"{}", 0, "no key 'text'"),
    (b'{"body": "a"}', 0, "no key 'text'"),
    (b'{"a": {"text": "a"}}', 0, "no key 'text'"),
    (b'{"text": "a", "text": "b"}', 0, "the key 'text' appears twice"),
    (b'{"text": "a", "t\\u0065xt": "b"}', 0, "the key 'text' appears twice"),
    (b'{"text": null, "text": "b"}', 0, "the key 'text' appears twice"),
    (b'{"text": null}', 0, "the value of 'text' is not text"),
    (b'{"text": 1}', 0, "the value of 'text' is not text"),
    (b'{"text": ["a"]}', 0, "the value of 'text' is not text"),
    (b'{"text": {"text": "a"}}', 0, "the value of 'text' is not text"),
    (b'{"text": "\\ud800"}', 0, "the text holds a lone surrogate"),
    (b'{"text": "\\ude00\\ud83d"}', 0, "the text holds a lone surrogate"),
    (b'{"text": "\\ud83d\\u0041"}', 0, "the text holds a lone surrogate"),
    (b'{"text": "a\xff"}', 11, "invalid UTF-8"),
    (b'{"text": "a", "b": "\xc3"}', 20, "invalid UTF-8"),
    (b'{"text": "\xed\xa0\x80"}', 10, "invalid UTF-8"),
    (b'{"text": "\xc0\xaf"}', 10, "invalid UTF-8"),
    (b'{"text": "\xe0\x80\xaf"}', 10, "invalid UTF-8"),
    (b'{"text": "\xf0\x80\x80\x80"}', 10, "invalid UTF-8"),
    (b'{"text": "\xf4\x90\x80\x80"}', 10, "invalid UTF-8"),
    (b'{"text": "a"}\x80', 13, "invalid UTF-8"),
]
FRAGMENTS = [
    *(bytes([byte]) for byte in b'"\\{}[],:-+.eE0 \t\r\n\x0b\x00\x1f\x7f\x80\xc3\xa9\xff/'),
    b"\\u", b"\\ud800", b"\\udc00", b"\\ud83d\\ude00", b"NaN", b"Infinity", b"tru", b"null", b"1e5", b"00", b".5",
    b"true", b'"text"', b'"text":', b'"text": 1,', b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xf0\x9f\x98\x80",
    b"\xe2\x80\xa8", b"\xef\xbb\xbf", b"\n\n", b"9" * 5000, b"[" * 300, b'{"a":' * 256, b"x" * 70,
]  # fmt: skip


def both(data: bytes, key: str = "text") -> JsonLines:
    twin = read_jsonl_twin(data, key)
    assert read_jsonl(data, key) == twin
    return twin


@pytest.mark.parametrize("line", GOOD, ids=range(len(GOOD)))
def test_good_lines(line: bytes) -> None:
    expected = json.loads(line.replace(b"9" * MAX_DIGITS, b"9"))["text"].encode()
    for before in range(0, 40, 13):  # at other places within sixteen bytes
        assert both(b" " * before + line) == JsonLines([expected], [0], [])


@pytest.mark.parametrize(("line", "at", "cause"), BAD, ids=range(len(BAD)))
def test_bad_lines_are_named(line: bytes, at: int | None, cause: str) -> None:
    good = '{"text": "é"}\n'.encode()
    for tail in (b"", b"\n" + good):
        found = both(good * 2 + line + tail)
        (reject,) = found.rejects
        assert reject.item == 2 * len(good)
        assert at is None or reject.offset == 2 * len(good) + at  # else it hangs on Python's version
        assert reject.cause.startswith(cause)
        assert found.documents == ["é".encode()] * (3 if tail else 2)


def test_lines_end_at_newlines_alone_and_blank_ones_are_none() -> None:
    lines = ['{"text": "a\u2028b\x85c"}\r', "", "  \t\r", "\x0b\x0c", '{"text": "d"}']
    data = "\n".join(lines).encode()
    assert both(data) == JsonLines(["a\u2028b\x85c".encode(), b"d"], [0, data.rindex(b"{")], [])
    assert both(b"") == both(b"\n\n") == JsonLines([], [], [])


def test_any_key_can_hold_the_text() -> None:
    line = '{"": "empty", "a\\"b": "quoted", "ключ": "key", "\\ud83d\\ude00": "face", "\\ud800": "half"}'.encode()
    for key, text in {"": "empty", 'a"b': "quoted", "ключ": "key", "😀": "face", "\ud800": "half"}.items():
        assert both(line, key).documents == [text.encode()]


def test_large_lines() -> None:
    text = 'Say "é" \\ 😀\n' * 100_000
    for ascii_only in (True, False):
        line = json.dumps(
            {"before": text[:5000], "text": text, "after": [text[:100]]}, ensure_ascii=ascii_only
        ).encode()
        assert both(line).documents == [text.encode()]
        assert len(both(line[:-1]).rejects) == 1


@pytest.mark.parametrize("character", ["a", "é", " "])
def test_words_have_a_longest_size(character: str) -> None:
    most = character * (MAX_WORD_BYTES // len(character.encode()))
    other = "x" if character == " " else " "
    for ascii_only in (True, False)[: 2 - character.isascii()]:  # it is written in one way alone
        for text in (most, other + most + other):
            line = json.dumps({"text": text}, ensure_ascii=ascii_only).encode()
            assert both(line).documents == [text.encode()]
        line = json.dumps({"text": other + most + character + other}, ensure_ascii=ascii_only).encode()
        assert both(line).rejects == [Reject(0, 1, "a word longer than 4 MiB")]


def damaged(rng: random.Random) -> bytes:
    line = bytearray(rng.choice(GOOD[:8]))
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        at = rng.randrange(len(line) + 1)
        match rng.randrange(4):
            case 0:
                line[at:at] = rng.choice(FRAGMENTS)
            case 1:
                del line[at : at + rng.randrange(1, 6)]
            case 2:
                line[at : at + 1] = bytes([rng.randrange(256)])
            case 3:
                line[at:] = rng.choice(GOOD[:8])[rng.randrange(12) :]
    return bytes(line)


def test_damaged_lines_are_judged_as_the_twin_does() -> None:
    rng = random.Random(7)
    found = [both(b"\n".join(damaged(rng) for _ in range(4))) for _ in range(2500)]
    assert sum(len(lines.documents) for lines in found) > 2000
    assert sum(len(lines.rejects) for lines in found) > 2000
    assert len({reject.cause.partition(" (")[0] for lines in found for reject in lines.rejects}) >= 6


@settings(max_examples=40)
@given(st.lists(st.one_of(st.text(max_size=80), st.integers(), st.lists(st.text(max_size=5))), max_size=5))
def test_lines_written_by_json_are_read(values: list[object]) -> None:
    lines = [json.dumps({"x": values, "text": v}, ensure_ascii=bool(i % 2)).encode() for i, v in enumerate(values)]
    expected = [value.encode() for value in values if isinstance(value, str)]
    assert both(b"\n".join(lines)).documents == expected


@settings(max_examples=50)
@given(st.binary(max_size=60))
def test_bytes_of_any_kind(data: bytes) -> None:
    both(data)
    both(b'{"text": "' + data + b'"}')


def test_any_buffer_object_is_accepted() -> None:
    data = GOOD[0] + b"\n" + BAD[0][0]
    for view in (bytearray(data), memoryview(b"xx" + data)[2:]):
        assert read_jsonl(view, "text") == both(data)  # type: ignore[arg-type]


def test_a_compiled_reader_that_rejects_a_good_line_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="the Python reader accepts"):
        build_rejects(GOOD[0], "text", np.array([0, len(GOOD[0])]))
    assert build_rejects(b"[]", "text", np.array([0, 2])) == [Reject(0, 0, "not a JSON object")]
