"""A run in stages that cannot go on, or whose data does not fit together, is refused with a way out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from lmtrain.checkpoint.disk.checkpoint_format import digest_of
from tests.cli.harness import Toy, lmtrain, outcome

pytestmark = pytest.mark.wide
Words = Callable[..., list[str]]


@pytest.fixture(scope="module")
def folder(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Datasets: half of the texts each, one half under another path, and one of another tokenizer."""
    folder, pages = tmp_path_factory.mktemp("refused"), sorted(toy.text.iterdir())
    for name, chosen in (("a", pages[::2]), ("b", pages[1::2])):
        (folder / name).mkdir()
        for page in chosen:
            shutil.copy(page, folder / name)
        lmtrain("preprocess", folder / name, "--tokenizer", toy.tokenizer, "--output", folder / "data" / name)
    for file in (folder / "data").glob("a.*"):
        shutil.copy(file, folder / "data" / f"again{file.name[1:]}")
    lmtrain("tokenizer", "train", toy.text, "--output", folder / "tokenizer", "--vocab-size", 300)
    lmtrain("preprocess", folder / "a", "--tokenizer", folder / "tokenizer", "--output", folder / "data" / "other")
    return folder


@pytest.fixture(scope="module")
def words(toy: Toy, folder: Path) -> Words:
    def given(run: Path, *more: str) -> list[str]:
        base = [word for word in toy.settings(run) if not word.startswith("train.steps=")]
        fixed = [
            *base, f"data.path={folder}/data/a", "stages.one.steps=4", "stages.two.steps=6",
            f"stages.two.data.path={folder}/data/b", "stages.two.optim.lr=1e-3", "model.positions=rotary",
            "schedule=constant", "schedule.warmup_steps=0", "checkpoint.interval_steps=2",
            "stages.one.schedule=constant",
        ]  # fmt: skip
        # because: stages run in the order in which they are named, so that a change stands where the word stood
        found = {word.partition("=")[0]: word for word in fixed}
        return list((found | {word.partition("=")[0]: word for word in more}).values())

    return given


@pytest.fixture(scope="module")
def runs(words: Words, folder: Path) -> Path:
    """A run that stands at the border between its stages, and one within the second stage."""
    lmtrain("pretrain", *words(folder / "border", "stages.one.stop_after=true"), code=75)
    shutil.copytree(folder / "border", folder / "within")
    lmtrain("pretrain", *words(folder / "within", "stages.two.steps=2"))
    return folder


def refused(given: Sequence[str]) -> str:
    code, output = outcome("pretrain", *given, "--dry-run")
    assert code not in (0, 1), output
    return " ".join(output.split())


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["stages.one.steps=3"], "the last step of the stage one is 3, and was 4"),
        (["stages.one.optim.lr=1"], "optim.lr of the stage one is 1.0, and was 0.003"),
        (["stages.one.optim.weight_decay=0"], "optim.weight_decay of the stage one is 0.0, and was 0.1"),
        (["stages.one.model.seq_len=16"], "model.seq_len of the stage one is 16, and was 32"),
        (["stages.one.train.global_batch=8"], "train.global_batch of the stage one is 8, and was 4"),
        (["stages.one.schedule=linear"], "schedule of the stage one is {'kind': 'linear'"),
        (["stages.one.data.split=[0.5,0.5]"], "data.split of the stage one is [0.5, 0.5], and was [0.98, 0.02,"),
        (["stages.one.schedule={}"], "schedule of the stage one is that of the run, and was {'kind': 'constant'"),
        (["train.seed=5"], "train.seed is 5, and was 1234"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("where", ["border", "within"])
def test_the_past_does_not_change(words: Words, runs: Path, where: str, more: Sequence[str], said: str) -> None:
    output = refused(words(runs / where, *more))
    assert said in output
    assert "Go on with its settings" in output


def test_the_past_has_the_content_that_it_had_under_any_path(words: Words, runs: Path) -> None:
    output = refused(words(runs / "border", f"stages.one.data.path={runs}/data/b"))
    assert f"data.path of the stage one is {runs}/data/b with content" in output
    assert f", and was {runs}/data/a with content" in output
    lmtrain("pretrain", *words(runs / "border", f"stages.one.data.path={runs}/data/again"), "--dry-run")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["stages.two.model.seq_len=16"], "model.seq_len is 16, and was 32"),
        (["stages.two.data.path=DATA/a"], "data.path=DATA/a is a dataset of"),
        (["stages.two.data.restart=true"], "data: restart is [True], and was None"),
        (["stages.two.train.global_batch=8"], "as samples up to step 6, is 32, and was 24"),
        (["stages.two.data.packing=document"], "data: packing is document, and was concatenate"),
    ],
)
def test_a_stage_that_has_begun_keeps_its_data(words: Words, runs: Path, more: Sequence[str], said: str) -> None:
    given = [word.replace("DATA", f"{runs}/data") for word in more]
    assert said.replace("DATA", f"{runs}/data") in refused(words(runs / "within", *given))
    lmtrain("pretrain", *words(runs / "border", *given), "--dry-run")  # before it has begun, it may be another


def test_what_is_ahead_may_change(words: Words, runs: Path, tmp_path: Path) -> None:
    for more in (
        ["stages.two.steps=9"], ["stages.two.optim.lr=1"], ["stages.two.schedule=linear"], ["stages.two.steps=2"],
        ["stages.three.steps=1", f"stages.three.data.path={runs}/data/again"], ["schedule=cosine"],
        ["stages.two.train.micro_batch=4"], ["stages.two.recompute=full"],
    ):  # fmt: skip
        lmtrain("pretrain", *words(runs / "within", *more), "--dry-run")
    lmtrain("pretrain", *words(runs / "border", "stages.one.steps=9"), "--dry-run")  # the stage behind goes on
    shutil.copytree(runs / "within", tmp_path / "run")
    longer = words(tmp_path / "run", "stages.two.steps=2", "stages.more.samples=1")
    assert "done: 7 steps" in lmtrain("pretrain", *longer)


def test_the_end_is_not_behind_the_step_reached(words: Words, runs: Path) -> None:
    output = refused(words(runs / "within", "stages.two.steps=1"))
    assert "The stages one, two end after step 5, before step 6" in output
    assert "Make the stage two longer, or choose another run.dir" in output


def test_data_that_is_gone_is_needed_by_stages_ahead_alone(words: Words, runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "within", tmp_path / "run")
    gone = [f"data.path={runs}/data/gone", f"stages.two.data.path={runs}/data/b"]
    assert "done: 10 steps" in lmtrain("pretrain", *words(tmp_path / "run", *gone))
    output = refused(words(runs / "within", f"stages.three.data.path={runs}/data/gone", "stages.three.steps=4"))
    assert "data/gone" in output


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["stages.two.data.path=DATA/other"], "has another tokenizer than that of the stage one"),
        (["stages.one.data.valid_path=DATA/b", "train.valid_interval_steps=2"],
         "b was validated on in an earlier stage of this run"),
        (["stages.two.data={kind: blend, datasets: [{path: DATA/a, weight: 1}, "
          "{path: DATA/again, weight: 1, restart: true}]}", "stages.two.data.path=null"],
         "lists datasets of equal content, one of them with restart=true"),
    ],
)  # fmt: skip
def test_data_that_does_not_fit_together_is_refused(
    words: Words, runs: Path, tmp_path: Path, more: Sequence[str], said: str
) -> None:
    given = [word.replace("DATA", f"{runs}/data") for word in more]
    found = words(tmp_path / "run", *given)
    if any(word.startswith("stages.two.data={") for word in found):
        found = [word for word in found if not word.startswith("stages.two.data.path")]
    output = refused(found)
    assert said in output
    assert any(way in output for way in ("Preprocess all", "train_on_held_out=true", "Give each content once"))


def test_a_run_needs_data(words: Words, tmp_path: Path) -> None:
    given = [word for word in words(tmp_path / "run") if not word.startswith(("data.path", "stages.two.data.path"))]
    output = refused(given)
    assert "data.path" in output


def reseal(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Edit a manifest, and let its digest fit."""
    manifest = json.loads((path / "manifest.json").read_text())
    edit(manifest)
    manifest["digest"] = digest_of(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))


def damage(**changes: Any) -> Callable[[dict[str, Any]], None]:
    def edit(manifest: dict[str, Any]) -> None:
        manifest["state"]["history"] |= changes

    return edit


@pytest.mark.parametrize("changes", [
    {"origin": -1}, {"streams": ["x"]}, {"states": {}}, {"shares": [1, 2]}, {"held_out": [1]}, {"states": [1]},
    {"skipped": "many"}, {"validated": 5},
])  # fmt: skip
def test_a_damaged_history_is_refused(words: Words, runs: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    shutil.copytree(runs / "within", tmp_path / "run")
    newest = tmp_path / "run/checkpoints/step_00000006"
    reseal(newest, damage(**changes))
    output = refused(words(tmp_path / "run"))
    assert "does not hold what the run had read of its data" in output
    assert "Restore it from a copy" in output


def test_an_edited_history_is_noticed_by_the_manifests_digest(words: Words, runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "within", tmp_path / "run")
    file = tmp_path / "run/checkpoints/step_00000006/manifest.json"
    file.write_text(file.read_text().replace('"history":', '"history ":'))
    output = refused(words(tmp_path / "run"))
    assert "manifest.json" in output
    assert "checkpoint.fallback=true" in output


def test_a_damaged_checkpoint_at_a_border_leads_back_into_the_stage_before(
    words: Words, runs: Path, tmp_path: Path
) -> None:
    shutil.copytree(runs / "border", tmp_path / "run")
    (file, *_) = (tmp_path / "run/checkpoints/step_00000004").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    again = words(tmp_path / "run", "checkpoint.fallback=true")
    said = " ".join(lmtrain("pretrain", *again, code=75).split())
    assert "step_00000004 is damaged and set aside" in said
    assert "step_00000002, the newest before it, belongs to a stage before two. Run the same command again" in said
    stop = json.loads((tmp_path / "run/stop.json").read_text())
    assert (stop["requeue"], stop["step"]) == (True, 2)
    assert "done: 10 steps" in lmtrain("pretrain", *again)


def test_a_checkpoint_from_before_stages_goes_on(words: Words, runs: Path, tmp_path: Path) -> None:
    """A checkpoint without a history is completed from the stages behind, which need their data."""

    def forget(manifest: dict[str, Any]) -> None:
        del manifest["state"]["history"]

    for where, step in (("border", 4), ("within", 6)):
        shutil.copytree(runs / where, tmp_path / where)
        reseal(tmp_path / where / f"checkpoints/step_{step:08d}", forget)
        assert "done: 10 steps" in lmtrain("pretrain", *words(tmp_path / where))
    lmtrain("pretrain", *words(tmp_path / "whole"))
    states = [
        json.loads((tmp_path / name / "checkpoints/step_00000010/manifest.json").read_text())
        for name in ("whole", "border", "within")
    ]
    assert states[0]["state"]["history"] == states[1]["state"]["history"] == states[2]["state"]["history"]
    roots = [{k: v["root"] for k, v in s["files"].items() if k.endswith(".safetensors")} for s in states]
    assert roots[0] == roots[1] == roots[2]
