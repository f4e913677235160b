"""A setting says itself what holds of it: paths in a class of a new file are treated as paths, and no list is edited.

The package is written here, so that none of its names can stand in lmtrain; each shape that a path can have is there.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmtrain.checkpoint.disk.checkpoint_format import Manifest
from lmtrain.cli.runs.diff_command import diff_facts
from lmtrain.config.compose_run_settings import STAGE_CHOICES, compose
from lmtrain.config.settings_base import Choice, add_plugin, facts_of, plugins
from lmtrain.errors import SettingsError
from lmtrain.models.model_settings import differing_keys
from lmtrain.runfolder.settings_differences import flatten
from lmtrain.runtime.processes.process_environment import ProcessEnv
from lmtrain.train.ranks.facts_equal_on_all_ranks import file_digests, rank_facts
from lmtrain.train.run_config import RunConfig, with_resolved_paths
from lmtrain.train.run_stage_settings import GROUPS, stage_may_set
from lmtrain.train.startup_checks.preflight import preflight
from lmtrain.train.startup_checks.resume_checks import check_same_run
from tests.apart import World, make_world
from tests.promise.keys import every_key

PLUGIN = "package_with_paths"
SOURCE = '''
from dataclasses import dataclass
from typing import ClassVar

from lmtrain.config.settings_base import Facts, Settings, setting
from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.optim.optim_settings import OptimSettings


@dataclass(frozen=True, kw_only=True)
class Part(Settings):
    field_facts: ClassVar[Facts] = Facts(affects="nothing")

    file: str = setting(path="file", affects="numbers")
    label: str = "none"


@dataclass(frozen=True, kw_only=True)
class TableSettings(GPTSettings):
    kind: ClassVar[str] = "table"

    table: str | None = setting(default=None, path="file")
    tables: tuple[str, ...] = setting(default=(), path="file")
    by_name: dict[str, str] = setting(default_factory=dict, path="file")
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ForgetfulSettings(OptimSettings):
    kind: ClassVar[str] = "forgetful"

    memory: float = setting(default=0.5, per_stage=True)
    wobble: float = 0.5
'''
FILES = ("table", "tables", "by_name.wiki", "parts[0].file")


@pytest.fixture(scope="module", autouse=True)
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("package")
    (folder / PLUGIN).mkdir()
    (folder / PLUGIN / "__init__.py").touch()
    (folder / PLUGIN / "table_settings.py").write_text(SOURCE)
    (folder / "conf" / "optim").mkdir(parents=True)
    (folder / "conf" / "optim" / "forgetful.yaml").write_text("kind: forgetful\nlr: 1.0e-3\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        add_plugin(PLUGIN)
        yield folder
        del plugins[PLUGIN]
        for name in [name for name in sys.modules if name.partition(".")[0] == PLUGIN]:
            del sys.modules[name]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


def run_of(world: World, place: str, *words: str) -> RunConfig:
    """A run of the new model, whose files are in the folder `place`."""
    files = [f"model.table={place}/a", f"model.tables=[{place}/a,{place}/b]", f"model.by_name={{wiki: {place}/b}}"]
    return compose(RunConfig, [*world.settings, "model.kind=table", *files, *words])


def part_of(place: str) -> str:
    return f"model.parts=[{{file: {place}/a, label: one}}]"


def write_files(folder: Path, a: str = "a") -> Path:
    folder.mkdir()
    for name, text in (("a", a), ("b", "b")):
        (folder / name).write_text(text)
    return folder


def test_a_new_path_is_found_from_another_folder(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = run_of(world, "files", part_of("files")).to_dict() | {"run": {"dir": "runs/new"}}
    moved = dict(flatten(with_resolved_paths(settings, world.folder / "runs" / "new")))
    changed = {key: value for key, value in dict(flatten(settings)).items() if moved[key] != value}
    assert {key.removeprefix("model.") for key in changed} == {*FILES}
    assert moved["model.tables"] == [f"{world.folder}/files/a", f"{world.folder}/files/b"]
    assert moved["model.by_name.wiki"] == f"{world.folder}/files/b"


def test_ranks_compare_what_is_in_the_file_and_not_where_it_is(world: World, tmp_path: Path) -> None:
    found = []
    for name, text in (("here", "a"), ("there", "a"), ("other", "another")):
        place = str(write_files(tmp_path / name, text))
        config = run_of(world, place, part_of(place))
        facts = rank_facts(config, preflight(config, ProcessEnv(), starts_run=False))
        found.append({key: fact.value for key, fact in facts.items()})
    here, there, other = found
    assert here == there
    assert {key for key in here if here[key] != other[key]} == {f"model.{key}" for key in FILES if key[0] != "b"}
    assert {f"model.{key}" for key in FILES} | {"model.parts[0].label"} <= here.keys()


def test_other_places_are_not_why_two_runs_differ(world: World, tmp_path: Path) -> None:
    runs = []
    for name, text in (("here", "a"), ("there", "a"), ("other", "another")):
        place = str(write_files(tmp_path / f"files_{name}", text))
        config = run_of(world, place, part_of(place))
        start = {"event": "start", "step": 0, "attempt": 1, "world_size": 1, "settings": config.to_dict(),
                 "environment": {"python": "3"}, "weights_digest": "w", "data_sha256": "d",
                 "files_sha256": file_digests(config)}  # fmt: skip
        runs.append(tmp_path / name)
        runs[-1].mkdir()
        rows = [start, {"event": "step", "step": 1, "attempt": 1, "loss": float(len(runs)), "samples_hash": "s"}]
        (runs[-1] / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (runs[-1] / "config.json").write_text(json.dumps(config.to_dict()))
    same, other = (diff_facts(runs[0], run) for run in runs[1:])
    assert {key for key in same["settings"] if key.startswith("model.")} == {f"model.{key}" for key in FILES}
    assert [cause[:30] for cause in same["causes"]] == ["neither settings, programs, da"]
    assert {cause.split(" is ")[0] for cause in other["causes"]} == {
        f"files_sha256.model.{key}" for key in FILES if key[0] != "b"
    }


def test_a_file_at_another_place_is_no_other_model(world: World) -> None:
    here, there, other = (run_of(world, *words).model for words in (["a"], ["b"], ["b", "model.bias=none"]))
    assert here != there
    assert differing_keys(here, there) == []
    assert differing_keys(here, other) == ["bias"]


def test_a_run_goes_on_where_its_files_are_at_another_place(world: World) -> None:
    config = run_of(world, "there")
    inputs = preflight(config, ProcessEnv(), starts_run=False)
    state = {
        "model": run_of(world, "here").model.with_vocab(inputs.model.shape.vocab_size).to_dict(), "seed": 1234,
        "data": inputs.data.sample_identity, "tokenizer": {"fingerprint": inputs.tokenizer.fingerprint}, "step": 0,
        "samples": 0, "tokens": 0, "attempt": 1, "skipped": 0, "optimizer": {"kind": "adamw", "num_updates": 0},
        "precision": {"kind": "fp32"},
    }  # fmt: skip
    check_same_run(Path("here"), Manifest(0, {}, {}, state), config, inputs.model, inputs.tokenizer, inputs.data)


def test_a_stage_may_set_what_says_so(package: Path) -> None:
    def of_stage(*words: str) -> RunConfig:
        words = ("data.path=x", "optim=forgetful", "stages.a.steps=200", *words)
        return compose(RunConfig, words, config_dir=package / "conf").stage_configs[0]

    assert of_stage("stages.a.optim.memory=0.25").optim.to_dict()["memory"] == 0.25
    with pytest.raises(SettingsError, match=r"optim\.wobble=0\.25 cannot differ .* a stage may set .*optim\.memory"):
        of_stage("stages.a.optim.wobble=0.25")


def test_stages_take_by_name_the_choices_that_they_may_set_as_a_whole() -> None:
    assert {*STAGE_CHOICES} == {name for name, cls in GROUPS.items() if issubclass(cls, Choice) and stage_may_set(name)}


def test_what_is_called_a_path_is_one() -> None:
    called = {key.name for key in every_key() if re.search(r"(^|[._])(paths?|files?|dir|folder)$", key.name)}
    assert {"data.datasets.path", "data.valid_paths", "data.index_dir"} <= called
    assert {name for name in called if "path" not in facts_of(RunConfig, name)} == {"run.dir"}
