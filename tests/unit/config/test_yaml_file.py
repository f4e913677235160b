"""A YAML file is read as a config or refused with its line; tests/mistakes has a file for each fault."""

from __future__ import annotations

import os
import time
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from lmtrain.config.strict_yaml import MAX_BYTES, MAX_DEPTH, MAX_VALUES, read_yaml
from lmtrain.errors import MissingInputError, SettingsError

TEXTS = st.text("ab:#{[ '", max_size=9)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=9,
)


def _file(folder: Path, text: str) -> Path:
    (folder / "a.yaml").write_text(text, encoding="utf-8")
    return folder / "a.yaml"


def test_a_file_is_its_data_its_header_and_its_lines(tmp_path: Path) -> None:
    file = read_yaml(_file(tmp_path, "# @package _global_\n# why\na:\n  b: [1e-3, 0x10, 2020-01-01, no]\nc: .5\n"))
    assert file.data == {"a": {"b": [0.001, 16, "2020-01-01", False]}, "c": 0.5}
    assert file.header == "# @package _global_\n# why"
    assert file.location("a", "b") == f"{file.path} line 4"
    assert file.location("a", "b", 1) == f"{file.path} line 4"
    assert file.location("nowhere") == str(file.path)


def test_a_mark_of_byte_order_is_no_part_of_the_header(tmp_path: Path) -> None:
    """Editors on Windows begin files with such a mark."""
    (tmp_path / "a.yaml").write_bytes(b"\xef\xbb\xbf# @package _global_\na: 1\n")
    file = read_yaml(tmp_path / "a.yaml")
    assert (file.data, file.header) == ({"a": 1}, "# @package _global_")


@settings(max_examples=30)
@given(st.dictionaries(st.sampled_from("abc"), PLAIN, min_size=1, max_size=3))
def test_what_is_dumped_is_read_back(tmp_path_factory: pytest.TempPathFactory, data: dict[str, object]) -> None:
    path = _file(tmp_path_factory.getbasetemp(), yaml.safe_dump(data, allow_unicode=True))
    assert read_yaml(path).data == data


def test_names_for_values_are_followed_but_not_into_themselves(tmp_path: Path) -> None:
    assert read_yaml(_file(tmp_path, "a: &x {y: 1}\nb: *x\nc: {<<: *x, z: 2}\n")).data["c"] == {"y": 1, "z": 2}
    with pytest.raises(SettingsError, match="line 1 refers to a value from within that value"):
        read_yaml(_file(tmp_path, "a: &x [*x]\n"))


def test_size_and_depth_have_an_end(tmp_path: Path) -> None:
    deep = "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1)
    assert read_yaml(_file(tmp_path, f"a: {deep}\n")).data
    with pytest.raises(SettingsError, match="nests deeper"):
        read_yaml(_file(tmp_path, f"a: [{deep}]\n"))
    many = ", ".join(["1"] * (MAX_VALUES // 100))
    text = f"a: &a [{many}]\nb: [{', '.join(['*a'] * 101)}]\n"
    with pytest.raises(SettingsError, match=f"stands for more than {MAX_VALUES} values"):
        read_yaml(_file(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("b: 1\na: " + "9" * 5000, "line 2 has a number of 5000 digits; at most 100 are allowed"),
        ("a: 0x" + "f" * 5000, "line 1 has a number of 5002 digits"),
        ("a: 1" + ":59" * 3000, "line 1 has a number of 9001 digits"),
        ("a: 0x_", "line 1 has 0x_, which is not a number"),
        ('b: 1\na: "\\U00110000"', "line 2 has an escape for a character that does not exist"),
        ('b: 1\na: "\\UFFFFFFFF"', "line 2 has an escape for a character that does not exist"),
        ('a: "\\ud83d\\ude00"', r"line 1 has the escape \\ud83d, which is half a character"),
        (f"a: [{'1,' * MAX_VALUES}]", f"line 1 holds more than {MAX_VALUES} values"),
        ("a: " + "x" * MAX_BYTES, "has 262147 bytes; at most 262144 are allowed"),
        ("a: " + "[" * 9999, f"line 1 nests deeper than {MAX_DEPTH} levels"),
    ],
)
def test_what_python_chokes_on(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        read_yaml(_file(tmp_path, text))


def test_a_bomb_of_names_for_names_ends_at_once(tmp_path: Path) -> None:
    begin = time.process_time()
    rows = [f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]" for before, name in pairwise("abcdefghij")]
    with pytest.raises(SettingsError, match=f"stands for more than {MAX_VALUES} values"):
        read_yaml(_file(tmp_path, "\n".join(["a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]", *rows])))
    assert time.process_time() - begin < 1


@settings(max_examples=60)
@given(text=st.text("a:-[]{}'\"#&*!|>%@`? \t\n0.~=<,", max_size=40))
def test_whatever_is_written_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = _file(tmp_path_factory.getbasetemp(), text)
    try:
        said = f"{path} line 1 is read as {type(read_yaml(path).data)}."
    except SettingsError as error:
        said = str(error)
    assert said.startswith((f"{path} line ", f"{path} is empty."))
    assert said.endswith(".")


def test_what_is_no_plain_file(tmp_path: Path) -> None:
    with pytest.raises(MissingInputError, match="does not exist"):
        read_yaml(tmp_path / "none.yaml")
    with pytest.raises(MissingInputError, match=r"x\.yaml cannot be read: File name too long\. Make it readable"):
        read_yaml(tmp_path / f"{'x' * 300}.yaml")
    with pytest.raises(MissingInputError, match="is a folder"):
        read_yaml(tmp_path)
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(MissingInputError, match="is not a regular file"):
        read_yaml(tmp_path / "pipe.yaml")
