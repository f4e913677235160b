"""`pretrain --from-run`: a run's settings in place of conf/, to go on with it or to branch off."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lmtrain.config.compose_run_settings import compose
from lmtrain.errors import SettingsError, UsageError
from lmtrain.runfolder.metrics_rows import read_metrics
from lmtrain.start.settings_from_earlier_run import RunRequest, compose_run
from lmtrain.train.run_config import RunConfig
from tests.cli.harness import Toy, lmtrain, outcome


@pytest.fixture(scope="module")
def trained(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("from") / "run"
    lmtrain("pretrain", *toy.settings(folder, train__steps=6, checkpoint__interval_steps=2, schedule="wsd"))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that has begun and saved nothing; its config.json is all that settings need."""
    folder = tmp_path / "run"
    folder.mkdir()
    overrides = ["data.path=x", "model.vocab_size=400", "schedule=wsd", "run.dir=where/it/was"]
    (folder / "config.json").write_text(json.dumps(compose(RunConfig, overrides).to_dict()))
    return folder


def test_a_value_of_an_earlier_run_is_explained_by_the_line_of_its_config_json(trained: Path, tmp_path: Path) -> None:
    def origin(key: str, *words: object) -> tuple[object, str]:
        facts = json.loads(lmtrain("config", "explain", key, *words, "--from-run", trained, "--json"))
        return facts["run"]["value"], facts["run"]["from"]

    file = trained / "config.json"
    [line] = [n for n, text in enumerate(file.read_text().splitlines(), 1) if '"global_batch"' in text]
    recorded = json.loads(file.read_text())["train"]["global_batch"]
    assert origin("train.global_batch") == (recorded, f"{file}, line {line}")
    assert origin("train.steps", "train.steps=9") == (9, "the command line: train.steps=9")
    assert origin("checkpoint.resume")[0] == "auto"
    branch = "checkpoint.resume", f"run.dir={tmp_path}/branch"
    assert origin(*branch) == (str(trained), f"the command line: --from-run={trained}")
    refused = lmtrain("config", "explain", "optim.lr", "--run", trained, "--from-run", trained, code=2)
    assert "which --from-run cannot change" in refused


def settled(*words: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(lmtrain("pretrain", *words, "--print-config", "--json"))
    return found


def plan(*words: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(lmtrain("pretrain", *words, "--dry-run", "--json"))
    return found


def test_learned_positions_cannot_grow_in_a_branch(trained: Path, tmp_path: Path) -> None:
    words = ["pretrain", "--from-run", trained, "model.seq_len=64", "train.steps=9", f"run.dir={tmp_path}/longer"]
    code, text = outcome(*words)
    assert code == 2
    assert "Use 32 or less; model.num_positions=64 or model.positions=rotary are for a new run" in text
    code, grown = outcome(*words, "model.num_positions=64")
    assert code == 65
    assert "has 32 learned positions, and the run has 64. Such a table cannot grow in a run." in " ".join(grown.split())
    assert "Type" not in text + grown
    assert not (tmp_path / "longer").exists()


def test_from_another_folder_its_paths_lead_to_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "began" / "runs" / "a"
    run.mkdir(parents=True)
    (tmp_path / "other").mkdir()
    blend = "data.datasets=[{path: out/a, weight: 1}, {path: /b, weight: 1}]"
    tasks = "eval.tasks=[{task: perplexity, data: held.txt}]"
    words = ["data=blend", blend, "data.valid_paths={x: v}", tasks, "run.dir=runs/a", "model.vocab_size=400"]
    (run / "config.json").write_text(json.dumps(compose(RunConfig, words).to_dict()))
    monkeypatch.chdir(tmp_path / "began")
    assert [part["path"] for part in settled("--from-run", "runs/a")["data"]["datasets"]] == ["out/a", "/b"]
    monkeypatch.chdir(tmp_path / "other")
    found = settled("--from-run", "../began/runs/a")
    assert [part["path"] for part in found["data"]["datasets"]] == [f"{tmp_path}/began/out/a", "/b"]
    assert found["data"]["valid_paths"] == {"x": f"{tmp_path}/began/v"}
    assert found["eval"]["tasks"][0]["data"] == f"{tmp_path}/began/held.txt"
    assert (found["run"]["dir"], found["checkpoint"]["resume"]) == ("../began/runs/a", "auto")
    words[-2] = f"run.dir={run}"
    (run / "config.json").write_text(json.dumps(compose(RunConfig, words).to_dict()))
    (run / "environment.json").write_text(json.dumps({"folder": str(tmp_path / "began")}))
    assert settled("--from-run", run)["data"]["valid_paths"] == {"x": f"{tmp_path}/began/v"}


def test_more_steps_than_it_has_are_not_typed_with_a_plus(run: Path) -> None:
    says = "train.steps=+2k is not 2k more, since .* Write train.steps=3000 for 2k more than the 1000 that it has."
    with pytest.raises(SettingsError, match=re.escape(says).replace(re.escape(".*"), ".*")):
        compose_run(RunRequest(["train.steps=+2k"], from_run=run))


def begin_again(run: Path, *words: str) -> RunConfig:
    return compose_run(RunRequest(words, from_run=run, from_beginning=True))


def write_starts(run: Path, *starts: tuple[int, dict[str, Any]]) -> None:
    rows = [{"event": "start", "step": step, "settings": settings} for step, settings in starts]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def test_from_the_beginning_are_the_settings_of_its_first_start(run: Path, tmp_path: Path) -> None:
    now = json.loads((run / "config.json").read_text())
    first = now | {"checkpoint": now["checkpoint"] | {"resume": "none", "init_from": "/b/step_00000002"}}
    lost, later = (first | {"train": first["train"] | {"steps": steps}} for steps in (7, 2000))
    write_starts(run, (0, lost), (0, first), (500, later))
    config = begin_again(run, f"run.dir={tmp_path / 'new'}", "data.path=moved")
    assert (config.train.steps, config.checkpoint.resume, config.checkpoint.init_from) == (
        1000, "auto", "/b/step_00000002"
    )  # fmt: skip
    wanted = first | {"checkpoint": first["checkpoint"] | {"resume": "auto"}, "data": first["data"] | {"path": "moved"}}
    assert config.to_dict() | {"run": {}} == wanted | {"run": {}}
    (run / "metrics.jsonl").unlink()
    assert begin_again(run, f"run.dir={tmp_path / 'new'}").train.steps == now["train"]["steps"]


def test_from_the_beginning_of_a_run_on_text_is_its_dataset(run: Path, tmp_path: Path) -> None:
    now = json.loads((run / "config.json").read_text())
    now["data"] |= {"path": "where/it/was/data/text", "text": "notes.txt"}
    write_starts(run, (0, now))
    words = (run, f"run.dir={tmp_path / 'new'}")
    data: Any = begin_again(*words).data
    # it has ended before the dataset was made
    assert (data.text, data.path) == ("notes.txt", str(tmp_path / "new/data/text"))
    data = begin_again(*words, "data.path=there").data
    assert (data.text, data.path) == (None, "there")
    (run / "data").mkdir()
    (run / "data/text.idx").touch()
    data = begin_again(*words).data
    assert (data.text, data.path) == (None, str(run / "data/text"))


def test_from_the_beginning_in_a_folder_of_its_own(run: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    for words, says in (
        ([], f"run.dir={run} is that run's own folder, which is kept. Add run.dir=DIR, a new folder."),
        ([f"run.dir={run}/../run"], "is that run's own folder"),
        ([f"run.dir={new}", "checkpoint.resume=a"], "checkpoint.resume=a goes on from a checkpoint"),
    ):
        with pytest.raises(UsageError) as caught:
            begin_again(run, *words)
        assert says in str(caught.value)
    begun = begin_again(run, f"run.dir={new}", "train.seed=3").to_dict()
    new.mkdir()
    # its layout and the size of its vocabulary were chosen when it began
    chosen = {"parallel": begun["parallel"] | {"dp_shard": 2}, "model": begun["model"] | {"vocab_size": 500}}
    (new / "config.json").write_text(json.dumps(begun | chosen))
    assert begin_again(run, f"run.dir={new}", "train.seed=3").train.seed == 3
    with pytest.raises(UsageError, match=r"began with train.seed=3, and this one begins with train.seed=1234. Choose"):
        begin_again(run, f"run.dir={new}")


def test_from_the_beginning_of_what_is_no_run_folder(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"is a checkpoint, and --from-beginning .* Give the run's folder, {trained}"):
        begin_again(trained / "checkpoints/step_00000006", f"run.dir={tmp_path}")
    assert "no run was given. Give --from-run RUN" in lmtrain("pretrain", "--from-beginning", "run.dir=x", code=2)


def test_from_the_beginning_it_learns_the_same_again(trained: Path, tmp_path: Path) -> None:
    new, branch = tmp_path / "again", tmp_path / "branch"
    lmtrain("pretrain", "--from-run", trained, f"run.dir={branch}", "train.steps=7", "optim.lr=1e-4")
    for run in (trained, branch):
        lmtrain("pretrain", "--from-run", run, "--from-beginning", f"run.dir={new / run.name}")
        losses = [
            {row["step"]: row["loss"] for row in rows if row["event"] == "step"}
            for rows in (read_metrics(folder / "metrics.jsonl") for folder in (run, new / run.name))
        ]
        assert losses[0] == losses[1] != {}


@pytest.mark.wide
def test_it_goes_on_or_branches_off(trained: Path, tmp_path: Path) -> None:
    assert settled("--from-run", trained) == json.loads((trained / "config.json").read_text())
    longer = plan("--from-run", trained, "train.steps=9")
    assert longer["resume_from"] == str(trained / "checkpoints/step_00000006")
    assert longer["steps"] == 9
    assert longer["run_folder"] == str(trained)
    refused = lmtrain("pretrain", "--from-run", trained, f"run.dir={tmp_path / 'same'}", code=2)
    assert "no step is left for it. Give the length of the whole run, as in train.steps=1006;" in refused
    assert not (tmp_path / "same").exists()
    words = ["--from-run", trained, f"run.dir={tmp_path / 'branch'}", "data.document_mask=true"]
    assert "no step is left for the branch" in lmtrain("pretrain", *words, "optim.lrr=1", code=2)
    assert "is left for the branch" not in lmtrain("pretrain", *words, "train.steps=8,9", code=2)
    words = ["--from-run", trained, f"run.dir={tmp_path / 'branch'}", "train.steps=8", "optim.lr=1e-4"]
    assert f"continuing from {trained}" in lmtrain("pretrain", *words)
    made = json.loads((tmp_path / "branch/config.json").read_text())
    assert made["checkpoint"]["resume"] == str(trained)
    assert made["optim"]["lr"] == 1e-4
    assert made["schedule"]["kind"] == "wsd"
    assert plan("--from-run", tmp_path / "branch")["resume_from"] == str(tmp_path / "branch/checkpoints/step_00000008")


@pytest.mark.parametrize("length", ["train.steps=6", "train.steps=9"])
def test_with_other_data_every_way_out_goes_on(toy: Toy, trained: Path, tmp_path: Path, length: str) -> None:
    """The ways: a branch, a run that begins with the same settings or those of the first start, or with the weights."""
    other = tmp_path / "other"
    outputs = ("--output", other, "--output", tmp_path / "rest")
    lmtrain("data", "split", toy.data, "--shares", "1,1", *outputs)
    words = ["--from-run", trained, f"data.path={other}", length]
    said = lmtrain("pretrain", *words, code=65)
    ways = re.findall(r": (run\.dir=.+?)(?=, or |, begin|\. |\.$|$)|or (run\.dir=.+?) for all", said.partition("\n")[0])
    assert len(ways) == 4
    plans = [
        lmtrain("pretrain", *replaced(words, (first or second).split()), "--dry-run", "--json").partition("{")[2]
        for first, second in ways
    ]
    begins = [json.loads(f"{{{text}")["resume_from"] for text in plans]
    assert begins[0] == str(trained / "checkpoints/step_00000006")
    assert {str(begin).partition(":")[0] for begin in begins[1:]} == {"nothing"}


def replaced(words: list[object], others: list[str]) -> list[object]:
    """The words of a command line with those that a way out names, in place of a setting of the same name."""
    keys = {word.partition("=")[0] for word in others if "=" in word}
    return [*(word for word in words if str(word).partition("=")[0] not in keys), *others]


@pytest.mark.wide
def test_from_a_checkpoint_of_a_run(trained: Path, tmp_path: Path) -> None:
    earlier, new = trained / "checkpoints/step_00000004", f"run.dir={tmp_path / 'new'}"
    assert plan("--from-run", earlier, new)["resume_from"] == str(earlier)
    assert "is not the newest checkpoint of run.dir=" in lmtrain("pretrain", "--from-run", earlier, code=73)
    assert plan("--from-run", trained, new, "checkpoint.resume=none")["resume_from"] == "nothing: a new run"
    weights = plan("--from-run", trained, new, f"checkpoint.init_from={trained}", "optim=lamb")
    assert weights["weights_from"] == str(trained / "checkpoints/step_00000006")


@pytest.mark.wide
def test_groups_and_recipes_change_it_as_they_change_conf(run: Path, tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /schedule: constant\nrun:\n  dir: new\noptim:\n  clip_norm: 0.5\n"
    )
    before = json.loads((run / "config.json").read_text())
    words = ["experiment=mine", "optim=lamb", "checkpoint.resume=none"]
    made = settled("--from-run", run, "--config-dir", tmp_path, *words)
    assert made["schedule"]["kind"] == "constant"
    assert made["optim"]["kind"] == "lamb"
    assert made["optim"]["lr"] == 1e-2
    assert made["optim"]["clip_norm"] == 0.5
    assert made["model"] == before["model"]
    assert made["run"]["dir"] == "new"


def test_a_run_of_an_earlier_version(run: Path, tmp_path: Path) -> None:
    """Its config.json lacks what has come since; a `$` in a value is a letter."""
    old = json.loads((run / "config.json").read_text())
    del old["recompute"], old["compute"]["deterministic"], old["checkpoint"]["init_from"]
    old["checkpoint"]["resume"] = "none"
    old["data"]["index_dir"] = "a${b}"
    (tmp_path / "old").mkdir()
    (tmp_path / "old/config.json").write_text(json.dumps(old))
    made = settled("--from-run", tmp_path / "old")
    assert made["run"]["dir"] == str(tmp_path / "old")
    assert made["data"]["index_dir"] == "a${b}"
    assert made["recompute"] == {"kind": "none"}
    assert made["checkpoint"]["resume"] == "auto"
    assert settled("--from-run", tmp_path / "old", "recompute=full")["recompute"]["kind"] == "full"
    assert "Add --from-beginning" in lmtrain("pretrain", "--from-run", tmp_path / "old", "run.dir=x", code=66)


def test_refusals(run: Path, tmp_path: Path) -> None:
    assert f"--from-run={tmp_path / 'no'} does not exist" in lmtrain("pretrain", "--from-run", tmp_path / "no", code=66)
    assert "is neither a run folder, which has a config.json" in lmtrain("pretrain", "--from-run", tmp_path, code=66)
    assert "is not a folder. Give the folder of" in lmtrain("pretrain", "--from-run", run / "config.json", code=66)
    (tmp_path / "config.json").write_text("{")
    assert "config.json is not valid JSON" in lmtrain("pretrain", "--from-run", tmp_path, code=65)
    (tmp_path / "config.json").write_text("[]")
    assert "does not hold the settings of a run" in lmtrain("pretrain", "--from-run", tmp_path, code=65)
    assert "Leave --config-name out" in lmtrain("pretrain", "--from-run", run, "--config-name", "other", code=2)


@pytest.mark.wide
@pytest.mark.parametrize("value", ["a", "[1]", "{a: 1}"])
@pytest.mark.parametrize("key", ["train.steps", "train.tokens", "data.kind", "model.seq_len", "train.global_batch"])
def test_a_branch_refuses_a_value_of_another_type(trained: Path, tmp_path: Path, key: str, value: str) -> None:
    length = [] if key in ("train.steps", "train.tokens") else ["train.steps=9"]
    words = [f"run.dir={tmp_path}", "data.document_mask=true", *length, f"{key}={value}"]
    with pytest.raises(SettingsError, match=rf"(?s){key.rpartition('.')[2]}\b"):
        compose_run(RunRequest(words, from_run=trained))


def test_refusals_of_overrides(run: Path) -> None:
    assert "optim.lrr=1 is not a setting" in lmtrain("pretrain", "--from-run", run, "optim.lrr=1", code=2)
    assert "Give run.dir=DIR" in lmtrain("pretrain", "-m", "--from-run", run, "optim.lr=1,2", code=2)


def test_a_folder_with_a_run_is_named_where_no_data_is_given(run: Path) -> None:
    text = lmtrain("pretrain", f"run.dir={run}", "train.steps=9", code=2)
    assert f"{run} holds a run: add --from-run {run} to go on with its settings" in text
    assert text.split()[-2:] == ["\\", str(run)]
