"""What the words of a command line set: alone and within braces it is the same."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from lmtrain.config.compose_run_settings import compose
from lmtrain.config.parse_and_apply_overrides import override_text
from lmtrain.config.typed_words import is_typed, typed_value, typed_words, without_settings
from lmtrain.train.run_config import RunConfig

NAMES = st.sampled_from(["steps", "seed", "rampup", "a", "b_c"])
VALUES = st.one_of(st.none(), st.booleans(), st.integers(-9, 99), st.sampled_from([0.5, "x", "a b", "a/b", [1, 2]]))
TREES = st.recursive(VALUES, lambda inner: st.dictionaries(NAMES, inner, min_size=1, max_size=3), max_leaves=6)


def leaves(node: Any, key: str) -> list[tuple[str, Any]]:
    if isinstance(node, dict):
        return [leaf for name, inner in node.items() for leaf in leaves(inner, f"{key}.{name}")]
    return [(key, node)]


@settings(max_examples=25, deadline=None)
@given(st.dictionaries(NAMES, TREES, min_size=1, max_size=3), st.data())
def test_a_value_within_braces_is_typed_as_one_alone(tree: dict[str, Any], data: st.DataObject) -> None:
    word, others = f"train={override_text(tree)}", ["optim.lr=3", "~model.norm"]
    each = leaves(tree, "train")
    alone = [f"{key}={override_text(value)}" for key, value in each]
    for words in ([word, *others], [*alone, *others]):
        assert all(is_typed(words, key) and typed_value(words, key) == value for key, value in each)
        assert not is_typed(words, "train.other")
        assert typed_value(words, "train.other") is None
        key = data.draw(st.sampled_from([key for key, _ in each]))
        left = [word for word in alone if not word.startswith(f"{key}=")]
        assert without_settings(words, [key]) == [*left, *others]
    assert not is_typed(others, "model.norm")
    assert typed_value(others, "model.norm") is None


def test_keys_within_braces_are_typed_and_no_others() -> None:
    typed = typed_words(["train={valid_interval_steps: 100, rampup: {start: 8}}", "optim.lr=3", "a={b: [{c: 1}]}"])
    assert typed | {"train": "", "a": ""} == {
        "train": "", "train.valid_interval_steps": "100", "train.rampup": "{start: 8}", "train.rampup.start": "8",
        "optim.lr": "3", "a": "", "a.b": "[{c: 1}]",
    }  # fmt: skip
    config = compose(RunConfig, ["train={valid_interval_steps: 100}", "train.tokens=10k", "data.path=x"])
    assert (config.train.steps, config.train.tokens) == (None, 10_000)
    config = compose(RunConfig, ["train={tokens: 10k}", "data.path=x"])
    assert (config.train.steps, config.train.tokens) == (None, 10_000)


def test_the_last_word_counts_and_several_values_are_none() -> None:
    words = ["checkpoint={init_from: a, resume: none}", "checkpoint.init_from=b", "optim.lr=1,2"]
    assert typed_value(words, "checkpoint.init_from") == "b"
    assert typed_value(words[::-1], "checkpoint.init_from") == "a"
    assert typed_value(words, "optim.lr") is None
