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
from lmtrain.config.compose_run_settings import STAGE_CHOICES, compose
from lmtrain.config.settings_base import Choice, add_plugin, facts_of, plugins
from lmtrain.errors import SettingsError
from lmtrain.exchange.huggingface.model_card import model_card
from lmtrain.models.model_settings import differing_keys
from lmtrain.runfolder.file_names import METRICS
from lmtrain.runfolder.lineage import file_sha256
from lmtrain.runfolder.metrics_rows import read_metrics
from lmtrain.runfolder.run_facts import facts_of_checkpoint
from lmtrain.runfolder.settings_differences import flatten
from lmtrain.runtime.processes.process_environment import ProcessEnv
from lmtrain.start.facts_of_outputs.compare_runs import diff_facts
from lmtrain.train.ranks.facts_equal_on_all_ranks import FILE_DIGESTS, file_digests, rank_facts
from lmtrain.train.run_config import RunConfig, with_resolved_paths
from lmtrain.train.run_stage_settings import GROUPS, stage_may_set
from lmtrain.train.startup_checks.preflight import preflight
from lmtrain.train.startup_checks.resume_checks import check_same_run
from tests.apart import World, make_world
from tests.cli.harness import lmtrain
from tests.promise.keys import every_key

PLUGIN = "package_with_paths"
MODEL = '''
from dataclasses import dataclass
from typing import ClassVar

from lmtrain.config.settings_base import Facts, Settings, setting
from lmtrain.models.gpt_settings import GPTSettings


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
    parts: tuple[Part, ...] = ()
'''
OPTIMIZER = '''
from dataclasses import dataclass
from typing import ClassVar

from lmtrain.config.settings_base import setting
from lmtrain.optim.adamw_settings import AdamWSettings


@dataclass(frozen=True, kw_only=True)
class ForgetfulSettings(AdamWSettings):
    kind: ClassVar[str] = "forgetful"

    by_name: dict[str, str] = setting(default_factory=dict, path="file")
    memory: float = setting(default=0.5, per_stage=True)
    wobble: float = 0.5
'''
SOURCES = {
    "__init__": "", "table_settings": MODEL, "table": "from lmtrain.models.gpt import build as build",
    "forgetful_settings": OPTIMIZER, "forgetful": "from lmtrain.optim.adamw import build as build",
}  # fmt: skip
FILES = ("model.table", "model.tables", "model.parts[0].file", "optim.by_name.wiki")


@pytest.fixture(scope="module", autouse=True)
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("package")
    (folder / PLUGIN).mkdir()
    for name, text in SOURCES.items():
        (folder / PLUGIN / f"{name}.py").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        add_plugin(PLUGIN)
        yield
        del plugins[PLUGIN]
        for name in [name for name in sys.modules if name.partition(".")[0] == PLUGIN]:
            del sys.modules[name]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


def words_of(world: World, place: str) -> list[str]:
    """The settings of a run of the new model, whose files are in the folder `place`."""
    files = [f"model.table={place}/a", f"model.tables=[{place}/a,{place}/b]", f"optim.by_name={{wiki: {place}/b}}"]
    return [*world.settings, "model.kind=table", "optim.kind=forgetful", *files]


def run_of(world: World, place: str, *words: str) -> RunConfig:
    return compose(RunConfig, [*words_of(world, place), *words])


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
    assert changed.keys() == {*FILES}
    assert moved["model.tables"] == [f"{world.folder}/files/a", f"{world.folder}/files/b"]
    assert moved["optim.by_name.wiki"] == f"{world.folder}/files/b"


def test_ranks_compare_what_is_in_the_file_and_not_where_it_is(world: World, tmp_path: Path) -> None:
    found = []
    for name, text in (("here", "a"), ("there", "a"), ("other", "another")):
        place = str(write_files(tmp_path / name, text))
        config = run_of(world, place, part_of(place))
        facts = rank_facts(config, preflight(config, ProcessEnv(), starts_run=False))
        found.append({key: fact.value for key, fact in facts.items()})
    here, there, other = found
    assert here == there
    assert {key for key in here if here[key] != other[key]} == {*FILES[:3]}
    assert {*FILES, "model.parts[0].label"} <= here.keys()


def test_other_places_are_not_why_two_runs_differ(world: World, tmp_path: Path) -> None:
    runs = []
    for name, text in (("here", "a"), ("there", "a"), ("other", "another")):
        place = str(write_files(tmp_path / f"files_{name}", text))
        config = run_of(world, place, part_of(place))
        start = {"event": "start", "step": 0, "attempt": 1, "world_size": 1, "settings": config.to_dict(),
                 "environment": {"python": "3"}, "weights_digest": "w", "data_sha256": "d",
                 FILE_DIGESTS: file_digests(config)}  # fmt: skip
        runs.append(tmp_path / name)
        runs[-1].mkdir()
        rows = [start, {"event": "step", "step": 1, "attempt": 1, "loss": float(len(runs)), "samples_hash": "s"}]
        (runs[-1] / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (runs[-1] / "config.json").write_text(json.dumps(config.to_dict()))
    same, other = (diff_facts(runs[0], run) for run in runs[1:])
    assert same["settings"].keys() == {*FILES}
    assert [cause[:30] for cause in same["causes"]] == ["neither settings, programs, da"]
    assert {cause.split(" is ")[0] for cause in other["causes"]} == {f"{FILE_DIGESTS}.{key}" for key in FILES[:3]}


def test_a_start_records_what_is_in_the_files(world: World, tmp_path: Path) -> None:
    place = str(write_files(tmp_path / "files"))
    lmtrain("pretrain", "--plugin", PLUGIN, *words_of(world, place), part_of(place))
    [start] = [row for row in read_metrics(world.folder / "run" / METRICS) if row["event"] == "start"]
    a, b = (file_sha256(Path(place) / name) for name in ("a", "b"))
    assert start[FILE_DIGESTS] == dict(zip(FILES, (a, f"{a} {b}", a, b), strict=True))


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
        "samples": 0, "tokens": 0, "attempt": 1, "skipped": 0, "optimizer": {"kind": "forgetful", "num_updates": 0},
        "precision": {"kind": "fp32"},
    }  # fmt: skip
    check_same_run(Path("here"), Manifest(0, {}, {}, state), config, inputs.model, inputs.tokenizer, inputs.data)


def test_a_model_card_says_nothing_of_places(world: World) -> None:
    config = run_of(world, "/a/secret/place", part_of("/a/secret/place"))
    state = {"settings": config.to_dict(), "step": 4, "samples": 8, "tokens": 64, "data": {}}
    exported = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "dtype": "float32"}
    run = facts_of_checkpoint(None, state)
    card = model_card(
        "mine", world.folder, state, config.model.with_vocab(300), exported, {}, run=run,
        is_path=lambda key: "path" in facts_of(RunConfig, key),
    )  # fmt: skip
    assert '"memory": 0.5' in card
    assert "secret" not in card


def test_a_stage_may_set_what_says_so() -> None:
    words = ["data.path=x", "optim.kind=forgetful", "stages.a.steps=200"]
    [stage] = compose(RunConfig, [*words, "stages.a.optim.memory=0.25"]).stage_configs
    assert stage.optim.to_dict()["memory"] == 0.25
    with pytest.raises(SettingsError, match=r"optim\.wobble=0\.25 cannot differ .* a stage may set .*optim\.memory"):
        compose(RunConfig, [*words, "stages.a.optim.wobble=0.25"])


def test_stages_take_by_name_the_choices_that_they_may_set_as_a_whole() -> None:
    assert {*STAGE_CHOICES} == {name for name, cls in GROUPS.items() if issubclass(cls, Choice) and stage_may_set(name)}


def test_what_is_called_a_path_is_one() -> None:
    called = {key.name for key in every_key() if re.search(r"(^|[._])(paths?|files?|dir|folder)$", key.name)}
    assert {"data.datasets.path", "data.valid_paths", "data.index_dir"} <= called
    assert {name for name in called if "path" not in facts_of(RunConfig, name)} == {"run.dir"}
