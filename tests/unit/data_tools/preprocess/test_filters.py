"""Filters drop what they should, in any script; only installed filters can be named."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from data_tools.preprocess.length_and_script_filters import GROUP, Filters, parse_script
from lmtrain.errors import DataError, UsageError


def kept(filters: Filters, text: str) -> str | None:
    """The name of the first filter that says no."""
    return next((name for name, keep in filters.build_text_filters() if not keep(text)), None)


def test_the_first_rejecting_filter_is_counted() -> None:
    filters = Filters(min_chars=2, max_chars=9, scripts=(("latin", 0.6), ("greek", 0.1)))
    texts = ["x", "x" * 10, "ab вгд", "words", "words ω", "ωω"]
    assert [kept(filters, text) for text in texts] == [
        "min_chars", "max_chars", "script latin", "script greek", None, "script latin"
    ]  # fmt: skip


def test_lengths_in_tokens() -> None:
    verdict = Filters(min_tokens=2, max_tokens=4).classify_lengths(np.array([0, 1, 2, 4, 5]))
    assert verdict.tolist() == [1, 1, 0, 0, 2]
    assert Filters(min_tokens=0).needs_token_counts is False
    assert (Filters().needs_text, Filters().needs_token_counts) == (False, False)
    assert Filters(max_tokens=0).needs_token_counts is True


@pytest.mark.parametrize(("text", "found"), [("latin", ("latin", 0.9)), ("Greek:0.25", ("greek", 0.25))])
def test_a_script_on_the_command_line(text: str, found: tuple[str, float]) -> None:
    assert parse_script(text) == found


@pytest.mark.parametrize("text", ["latin:0", "latin:1.1", "latin:x", "latin:nan"])
def test_a_wrong_share(text: str) -> None:
    with pytest.raises(UsageError, match="a share above 0 and at most 1"):
        parse_script(text)


@pytest.mark.parametrize(
    ("filters", "said"),
    [
        ({"scripts": (("latvian", 0.9),)}, "Did you mean latin"),
        ({"min_chars": 9, "max_chars": 8}, "--min-chars=9 is more than --max-chars=8"),
        ({"min_tokens": 9, "max_tokens": 8}, "--min-tokens=9"),
    ],
)
def test_what_makes_no_sense(filters: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Filters(**filters)


def even(text: str) -> bool:
    return len(text) % 2 == 0


def broken(text: str) -> bool:
    return bool(1 / (len(text) - 3))


def wordy(text: str) -> str:
    return text


NOT_A_FUNCTION = 7


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a package that brings filters would have it."""
    names = ("even", "broken", "wordy", "NOT_A_FUNCTION")
    points = [importlib.metadata.EntryPoint(name, f"{__name__}:{name}", GROUP) for name in names]
    found: Callable[..., Any] = lambda group: importlib.metadata.EntryPoints(p for p in points if p.group == group)  # noqa: E731
    monkeypatch.setattr(importlib.metadata, "entry_points", found)


@pytest.mark.usefixtures("installed")
def test_an_installed_filter() -> None:
    filters = Filters(entry_points=("even",))
    assert (kept(filters, "ab"), kept(filters, "abc")) == (None, "filter even")
    assert filters.needs_text
    assert filters.identity()["installed filters"] == [("even", f"{__name__}:even", "")]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("broken", DataError, r"--filter broken failed \(ZeroDivisionError"),
        ("wordy", DataError, "returned 'abc'"),
        ("NOT_A_FUNCTION", UsageError, "int, which cannot be called"),
        ("evn", UsageError, "Did you mean even"),
    ],
)
def test_a_filter_that_is_wrong(name: str, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        kept(Filters(entry_points=(name,)), "abc")


def test_no_file_can_name_code() -> None:
    with pytest.raises(UsageError, match="is not installed"):
        list(Filters(entry_points=("os:remove",)).build_text_filters())
