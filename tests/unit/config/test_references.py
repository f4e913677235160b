"""References are replaced by the values they refer to, or refused with the reason."""

from __future__ import annotations

from typing import Any

import pytest

from lmtrain.config.setting_references import path_text, reference_problem, resolve_references

TREE: dict[str, Any] = {"a": {"b": 2, "c": {"d": [3, {"e": "x"}]}}, "n": None, "yes": True}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("${a.b}", 2), ("${ a.b }", 2), ("${a.c}", {"d": [3, {"e": "x"}]}), ("${a.c.d[1].e}", "x"), ("${a.c.d.0}", 3),
        ("runs/${a.b}-${yes}-${n}", "runs/2-true-null"), ("\\${a.b}", "${a.b}"), ("$${a.b}", "$2"),
        ("${ref.d[0]}", 3),
        ("\\${${a.b}}", "${2}"), ("$${env}", "${oc.env:HOME}"), ("${kept}", "${a.b}"), ("x${kept}", "x${a.b}"),
    ],
)  # fmt: skip
def test_a_reference_is_its_value(text: str, value: Any) -> None:
    texts = {"env": "{oc.env:HOME}", "kept": "\\${a.b}", "ref": "${a.c}", "here": text}
    plain, problems = resolve_references(TREE | texts)
    assert problems == []
    assert plain["here"] == value


def test_dots_count_from_where_the_reference_stands() -> None:
    plain, problems = resolve_references({"a": {"b": 1, "c": {"d": "${..b}", "e": "${.d}"}}})
    assert (plain["a"]["c"], problems) == ({"d": 1, "e": 1}, [])


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"a": "${b.c}"}, "a=${b.c}: The key b.c does not exist. Refer to another key, or give the value."),
        ({"a": "${b}", "b": "${a}"}, "references lead back to their start (b -> a -> b)"),
        ({"a": {"b": "${a}"}}, "references lead back to their start"),
        ({"a": "x${b}", "b": [1]}, "b is a group or a list and not a single value"),
        ({"a": "${oc.env:HOME}"}, "calls a resolver"),
        ({"a": "${${b}:HOME}", "b": "oc.env"}, "A reference may not contain another"),
        ({"a": "${${b}}", "b": "oc.env:HOME"}, "A reference may not contain another"),
        ({"a": "${x${b}.c}", "b": "y"}, "A reference may not contain another"),
        ({"a": ["${"]}, "a[0]=${: The value opens a ${ that is not closed"),
        ({"a": "${}"}, "The reference ${} does not name a key"),
        ({f"k{i}": f"${{k{i + 1}}}" for i in range(99)} | {"k99": 1}, "is 50 references away"),
        ({f"k{i}": f"${{k{i + 1}}}" * 9 for i in range(5)} | {"k5": "x" * 9}, "becomes longer than"),
        ({f"k{i}": [f"${{k{i + 1}}}"] * 9 for i in range(9)} | {"k9": 1}, "have more than 10000 references"),
        ({"a": list(range(999)), "b": ["${a}"] * 99}, "add up to more than 50000 values"),
    ],
)
def test_a_reference_that_has_no_value(tree: dict[str, Any], said: str) -> None:
    assert any(said in problem for problem in resolve_references(tree)[1])


def test_a_check_before_anything_is_composed() -> None:
    assert reference_problem("plain, ${a.b} and \\${ too") is None
    assert "Write" in (reference_problem("${a b}") or "")


def test_paths_are_shown_as_one_types_them() -> None:
    assert path_text(("data", "datasets", 0, "path")) == "data.datasets[0].path"
