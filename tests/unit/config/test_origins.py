"""Finding who set a value last: a file with its line, or an override, in the order in which Hydra merges them."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmtrain.config.compose_run_settings import Sources, compose_tree, conf_dir
from lmtrain.config.setting_origins import Origin, origins_in_file
from lmtrain.config.strict_yaml import read_yaml


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A user's folder with a recipe that changes a group, and a group of its own."""
    files = {
        "experiment/mine.yaml": "# @package _global_\ndefaults:\n  - override /optim: lamb\n\noptim:\n  lr: 7e-3\n"
        "train:\n  rampup: {start: 8, increment: 8,\n    samples: 1k}\n",
        "optim/lamb.yaml": "kind: lamb\nlr: 1\n\nweight_decay: 0.5  # a lot\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def place(origin: Origin | None) -> tuple[str, int] | None:
    return (origin.file.name, origin.line) if origin and origin.file else None


def test_the_last_file_or_override_counts(mine: Path) -> None:
    overrides = [
        "experiment=mine",
        "train.seed=3",
        "++optim.betas=[0.8,0.9]",
        "train.rampup.start=16",
        "model.norm=rmsnorm",
    ]
    found = compose_tree(overrides, Sources(mine)).origins
    assert found.nearest("optim.lr") == Origin("0.007", mine / "experiment/mine.yaml", 6)
    assert place(found.nearest("optim.weight_decay")) == ("lamb.yaml", 4)
    assert found.nearest("train.seed") == Origin("train.seed=3")
    assert found.nearest("optim.betas") == Origin("++optim.betas=[0.8,0.9]")
    assert place(found.nearest("train.rampup.samples")) == ("mine.yaml", 9)
    assert found.nearest("train.rampup.start") == Origin("train.rampup.start=16")
    assert place(found.nearest("model.width")) == ("gpt_tiny.yaml", 4)
    assert place(found.nearest("model.norm_eps")) == ("gpt_tiny.yaml", 16)
    assert place(found.nearest("train.steps"))[0] == "pretrain.yaml"  # type: ignore[index]


@pytest.mark.wide
def test_every_composed_value_has_an_origin_that_says_it(mine: Path) -> None:
    """But for a group that an override sets as a whole, what is written there is what is composed."""
    overrides = ["experiment=mine", "model=llama_tiny", "data.path=x"]
    composed = compose_tree(overrides, Sources(mine))
    tree, found = composed.tree, composed.origins
    for part, values in tree.items():
        for key, value in values.items():
            origin = found.nearest(f"{part}.{key}")
            if isinstance(value, dict):
                continue
            assert origin is not None, f"{part}.{key}"
            if isinstance(value, (str, int)) and not isinstance(value, bool):
                assert origin.text.rpartition("=")[2] == str(value)


@pytest.mark.wide
def test_a_group_that_is_set_or_removed_takes_its_keys_along(mine: Path) -> None:
    found = compose_tree(["experiment=mine", "train.rampup=null"], Sources(mine)).origins
    null = Origin("train.rampup=null")
    assert found.nearest("train.rampup.start") == found.nearest("train.rampup") == null
    found = compose_tree(["~optim.betas", "train.rampup={start: 4, samples: 9}"], Sources(mine)).origins
    assert found.nearest("optim.betas") is None
    assert found.nearest("train.rampup.start") == Origin("train.rampup={start: 4, samples: 9}")


def test_a_users_root_config_is_read_first(tmp_path: Path) -> None:
    (tmp_path / "root.yaml").write_text("defaults:\n  - model: gpt_tiny\n  - _self_\nmodel:\n  width: 64\n")
    found = compose_tree([], Sources(tmp_path, "root")).origins
    assert place(found.nearest("model.width")) == ("root.yaml", 5)
    assert place(found.nearest("model.seq_len"))[0] == "gpt_tiny.yaml"  # type: ignore[index]


def test_lines_of_a_shipped_file() -> None:
    path = conf_dir() / "schedule/wsd.yaml"
    lines = path.read_text(encoding="utf-8").splitlines()
    found = origins_in_file(read_yaml(path))
    assert {"kind", "warmup_steps", "decay", "min_ratio"} <= found.keys()
    for key, origin in found.items():
        assert lines[origin.line - 1].startswith(f"{key}: ")
