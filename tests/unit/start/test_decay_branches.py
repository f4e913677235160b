"""What a decay branch takes over from its run is said in overrides that come back as the same values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import QuotedString
from hypothesis import given
from hypothesis import strategies as st

from lmtrain.start import decay_branches
from tests.promise.bench import BASE, config_of

TEXTS = st.text("aZ09_-/.:,=[]{}'\"\\ $", min_size=1, max_size=6)
STAGED = {key: value for key, value in BASE.items() if key != "train.steps"} | {
    "stages": {
        "first": {"steps": 4, "optim": {"clip_norm": 3.0}, "recompute": {"kind": "full"}},
        "last": {"steps": 4, "optim": {"clip_norm": 7.0}},
    }
}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.sampled_from([0.5, 1e-4, 1e20]) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b"]), inner, max_size=2),
    max_leaves=4,
)


@given(VALUES)
def test_a_value_comes_back_from_its_override(value: Any) -> None:
    said = f"key={decay_branches._literal(value)}"
    found = OverridesParser.create().parse_override(said).value()
    assert _plain(found) == value, said


def _plain(value: Any) -> Any:
    """Return what hydra has read without its marks of quotes."""
    if isinstance(value, QuotedString):
        return value.text
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def test_steps_are_short_in_names() -> None:
    steps = (7, 999, 1000, 20_000, 25_500, 1_000_000, 1_500_000)
    assert [*map(decay_branches._short, steps)] == ["7", "999", "1k", "20k", "25500", "1M", "1500k"]


def test_a_branch_has_the_settings_of_the_stage_that_its_checkpoint_is_in() -> None:
    run = config_of(STAGED)
    now = config_of(BASE | {"optim.clip_norm": 1.0})
    for step, clip_norm, recompute in ((4, 3, True), (5, 7, False)):
        said = [*decay_branches._settings_there(run, now, step, "decay")]
        assert f"stages.decay.optim.clip_norm={clip_norm:.1f}" in said
        assert ("stages.decay.recompute={kind: full}" in said) == recompute
        rate = run.stage_at(step - 1).learning_rate(step - 1)
        assert f"stages.decay.optim.lr={rate:.6g}" in said


@pytest.mark.parametrize(
    ("keep", "at", "removed"),
    [
        ({}, "2", "that of step 2,"), ({}, "1,2", "those of steps 1, 2,"), ({"keep_every_steps": 2}, "2", ""),
        ({"keep_every_steps": 2}, "2,3", "that of step 3,"), ({"keep_last": "all"}, "1,2", ""),
    ],
)  # fmt: skip
def test_a_run_that_goes_on_and_removes_its_checkpoints_is_warned_of(
    tmp_path: Path, keep: dict[str, Any], at: str, removed: str
) -> None:
    saved = {"checkpoint.interval_steps": 1} | {f"checkpoint.{key}": value for key, value in keep.items()}
    (tmp_path / "config.json").write_text(json.dumps(config_of(BASE | saved).to_dict()))
    (tmp_path / "metrics.jsonl").touch()
    said = decay_branches.pruning_warning(tmp_path, at)
    assert (f"will remove {removed}" in said) if removed else said == ""
