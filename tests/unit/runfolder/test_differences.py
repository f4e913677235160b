"""Nested settings as keys, and where several differ."""

from __future__ import annotations

from typing import Any

from lmtrain.runfolder.settings_differences import differences, flatten


def test_parts_of_a_list_have_numbers_and_what_is_empty_is_a_value() -> None:
    tree = {"a": {"b": 1, "c": {}}, "d": [{"e": 2}, 3], "f": [4, 5], "g": []}
    assert dict(flatten(tree)) == {"a.b": 1, "a.c": {}, "d[0].e": 2, "d[1]": 3, "f": [4, 5], "g": []}
    assert dict(flatten({})) == {}


def test_of_several_the_keys_that_are_not_alike_in_all() -> None:
    trees: list[dict[str, Any]] = [{"a": {"b": 1, "c": 2}}, {"a": {"b": 1}, "d": 3}, {"a": {"b": 1, "c": 2}}]
    assert differences(trees) == {"a.c": [2, None, 2], "d": [None, 3, None]}
    assert differences(trees[:1]) == {}
