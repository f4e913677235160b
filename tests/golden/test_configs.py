"""Settings of runs of the release before still compose, or the message says which key became which.

`configs/` holds what `lmtrain pretrain --print-config` wrote then, as YAML and as the config.json of a run's folder.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from lmtrain.config.build_typed_settings import build_settings
from lmtrain.config.compose_run_settings import Sources, compose
from lmtrain.train.run_config import RunConfig

CONFIGS = Path(__file__).parent / "configs"
# what is read of an old file today, key by key, where it is not what stands there
_WORDS: dict[str, object] = {"model.bias": "all", "model.parallel_block": "no"}
_LLAMA = _WORDS | {"model.bias": "none", "model.activation": "silu", "model.gated": True}
CHANGED: dict[str, dict[str, object]] = {"blend": _WORDS, "default": _WORDS, "cut": _LLAMA, "demo": _LLAMA}


def _flat(tree: object, path: str = "") -> dict[str, object]:
    if not isinstance(tree, dict | list):
        return {path: tree}
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree)
    return {key: value for name, one in entries for key, value in _flat(one, f"{path}.{name}".lstrip(".")).items()}


@pytest.mark.parametrize("file", sorted(CONFIGS.iterdir()), ids=lambda path: path.name)
def test_an_old_config_means_what_it_meant(file: Path, tmp_path: Path) -> None:
    if file.suffix == ".json":
        old = json.loads(file.read_text(encoding="utf-8"))
        new = build_settings(RunConfig, old)
    else:
        shutil.copy(file, tmp_path / "old.yaml")
        new = compose(RunConfig, [], Sources(tmp_path, "old"))
        old = json.loads((file.with_suffix(".json")).read_text(encoding="utf-8"))
    found, wanted = _flat(new.to_dict()), _flat(old) | CHANGED.get(file.stem, {})
    assert {key: found.get(key) for key in wanted} == wanted


def test_there_are_configs_of_every_group() -> None:
    kinds = {
        f"{group}.{part['kind']}"
        for file in CONFIGS.glob("*.json")
        for group, part in json.loads(file.read_text(encoding="utf-8")).items()
        if "kind" in part
    }
    assert {"model.gpt", "model.bert", "data.blend", "data.masked", "optim.lamb", "optim.muon", "schedule.wsd"} <= kinds
