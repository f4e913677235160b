"""`lmtrain reshard`, `verify` and `inspect --diff` as users type them: train, change the layout, go on with the run."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from lmtrain.checkpoint.tensor_reader import CheckpointReader
from lmtrain.observe.metrics import read_metrics
from tests.benchmarks.reshard_speed import model_of_bytes, write
from tests.cli.harness import Toy, lmtrain, start

CHECKPOINT = "checkpoints/step_00000012"
OTHER = "tp=2,pp=2,dp=2"
LONGER: dict[str, Any] = {"train__steps": 16}


@pytest.fixture(scope="module")
def run(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reshard") / "run"
    lmtrain("pretrain", *toy.settings(folder))
    return folder


@pytest.fixture(scope="module")
def other(run: Path) -> Path:
    """The run's checkpoint for eight processes."""
    output = lmtrain("reshard", run, "--to", OTHER, "--output", run.parent / "other", "--json")
    facts = json.loads(output[output.index("{") :])
    assert (facts["from"], facts["to"], facts["processes"]) == ("one process", "pp 2 x dp_shard 2 x tp 2, zero 1", 8)
    return run.parent / "other"


@pytest.fixture
def copy(other: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(other, tmp_path / "copy"))


def curve(folder: Path) -> list[tuple[float, float, str]]:
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if row["event"] == "step"]
    return [(row["loss"], row["grad_norm"], row["samples_hash"]) for row in rows]


def same_tensors(a: Path, b: Path) -> bool:
    return bool(json.loads(lmtrain("inspect", a, "--diff", b, "--json"))["same_tensors"])


def test_there_and_back_and_on_with_the_run(toy: Toy, run: Path, other: Path, tmp_path: Path) -> None:
    """A run that goes on from the resharded checkpoint is, bit for bit, the one that goes on from its own."""
    lmtrain("reshard", other, "--to", "tp=1", "--output", tmp_path / "back", "--workers", 1, "--max-memory", "256MiB")
    assert same_tensors(run / CHECKPOINT, other)
    assert same_tensors(run / CHECKPOINT, tmp_path / "back")
    curves = []
    for name, begin in (("own", run), ("other", other)):
        settings = toy.settings(tmp_path / name, **LONGER)
        lmtrain("pretrain", *settings, f"checkpoint.resume={begin}")
        curves.append(curve(tmp_path / name))
    assert len(curves[0]) == 4
    assert curves[0] == curves[1]


@pytest.mark.wide
def test_processes_of_the_new_layout_go_on_with_it(toy: Toy, run: Path, tmp_path: Path) -> None:
    lmtrain("reshard", run, "--to", "pp=2", "--output", tmp_path / "two")
    settings = toy.settings(tmp_path / "one", **LONGER)
    lmtrain("pretrain", *settings, f"checkpoint.resume={run}")
    settings = toy.settings(tmp_path / "pp", **LONGER)
    process = start(
        "pretrain",
        "--nproc",
        2,
        *settings,
        "parallel.pp=2",
        "parallel.timeout_s=60",
        f"checkpoint.resume={tmp_path}/two",
    )
    output = process.communicate(timeout=900)[0]
    assert process.returncode == 0, output
    ours, theirs = curve(tmp_path / "pp"), curve(tmp_path / "one")
    assert [row[2] for row in ours] == [row[2] for row in theirs]
    assert [row[0] for row in ours] == pytest.approx([row[0] for row in theirs], rel=1e-5)


@pytest.mark.wide
def test_a_kill_and_the_same_command_again(run: Path, other: Path, tmp_path: Path) -> None:
    fault = {"LMTRAIN_FAULT": "kill:point=reshard.publish", "LMTRAIN_ALLOW_FAULTS": "1"}
    command = ("reshard", run, "--to", OTHER, "--output", tmp_path / "again")
    process = start(*command, env=fault)
    process.communicate(timeout=600)
    assert process.returncode == -9
    assert not (tmp_path / "again").exists()
    assert "done before" in lmtrain(*command)
    for file in other.iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()
    assert "done before" in lmtrain(*command)  # a third time: it is all there
    assert sorted(os.listdir(tmp_path)) == ["again"]


@pytest.mark.slow
def test_killed_twenty_times_anywhere(tmp_path: Path) -> None:
    """The same command again and again: the source stays, and the output is what an unbroken one gives."""
    source = write(tmp_path, model_of_bytes(300 << 20), "dp=2,tp=2")
    before = bytes_of(source)
    command = ("reshard", source, "--to", "tp=4,pp=2", "--workers", 2, "--output")
    lmtrain(*command, tmp_path / "unbroken")
    chance, kills = random.Random(6), 0
    for attempt in range(20):
        if attempt % 5 == 0 and (tmp_path / "out").exists():
            shutil.rmtree(tmp_path / "out")
        kills += killed(chance, *command, tmp_path / "out")
    assert kills >= 12
    lmtrain(*command, tmp_path / "out")
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "unbroken")
    assert bytes_of(source) == before
    assert sorted(os.listdir(tmp_path)) == ["out", source.name, "unbroken"]


def killed(chance: random.Random, *command: object) -> bool:
    """Run until a chance instant: a point in the code, or a line of progress. Whether it was still running."""
    if chance.random() < 0.5:
        point, count = chance.choice(["segment", "journal", "journal", "finish", "publish", "cleanup"]), 1
        count = chance.randrange(1, 4) if point in ("segment", "journal") else 1
        fault = {"LMTRAIN_FAULT": f"kill:point=reshard.{point}:count={count}", "LMTRAIN_ALLOW_FAULTS": "1"}
        process = start(*command, env=fault)
    else:
        process, line = start(*command), chance.randrange(1, 5)
        assert process.stdout is not None
        for _ in range(line):
            process.stdout.readline()
        process.kill()
    process.communicate(timeout=900)
    return process.returncode == -9


def bytes_of(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


def test_verify(run: Path, other: Path, copy: Path) -> None:
    assert "all is well: step 12" in lmtrain("verify", other)
    assert lmtrain("verify", run).count("all is well") == 2  # both that the run has kept
    file = copy / "rank_00003.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 16
    file.write_bytes(data)
    said = lmtrain("verify", copy, code=65)
    assert file.name in said
    assert lmtrain("inspect", copy, "--verify", code=65) == said
    output = lmtrain("verify", copy, "--json", code=65)
    assert file.name in json.loads(output[: output.rindex("]") + 1])[0]["problems"][0]
    assert "does not exist" in lmtrain("verify", copy.parent / "nowhere", code=66)


def test_a_damaged_checkpoint_is_not_resharded(copy: Path, tmp_path: Path) -> None:
    file = copy / "rank_00002.safetensors"
    os.truncate(file, file.stat().st_size - 4)
    output = lmtrain("reshard", copy, "--to", "tp=1", "--output", tmp_path / "out", code=65)
    assert file.name in output
    assert "Traceback" not in output
    assert sorted(os.listdir(tmp_path)) == ["copy"]


def test_inspect_tells_what_is_in_a_checkpoint(other: Path, run: Path) -> None:
    facts = json.loads(lmtrain("inspect", other, "--json"))
    assert facts["layout"] == "pp 2 x dp_shard 2 x tp 2, zero 1"
    assert facts["digest"] == json.loads((other / "manifest.json").read_text())["digest"]
    assert (facts["step"], facts["samples"], facts["tokens"]) == (12, 48, 1536)
    assert facts["settings"]["train"]["seed"] == 1234
    reader = CheckpointReader(other)
    qkv = facts["tensors"]["optim.exp_avg.blocks.1.attention.qkv.weight"]
    assert qkv["shape"] == list(reader.shape("optim.exp_avg.blocks.1.attention.qkv.weight")) == [96, 32]
    assert (qkv["dtype"], qkv["bytes"], len(qkv["files"])) == ("F32", 96 * 32 * 4, 4)
    assert len(lmtrain("inspect", other).splitlines()) < 17
    shown = lmtrain("inspect", other, "--all")
    for word in ("digest", "layout          pp 2", "blocks  ", "seed: 1234", "rank_00000.safetensors"):
        assert word in shown


def test_inspect_tells_what_differs_and_by_how_much(run: Path) -> None:
    before, after = run / "checkpoints/step_00000008", run / CHECKPOINT
    facts = json.loads(lmtrain("inspect", after, "--diff", before, "--json"))
    assert facts["state"]["step"] == [12, 8]
    assert facts["only_in_checkpoint"] == facts["only_in_other"] == []
    a, b = (CheckpointReader(path).read("model.norm.weight") for path in (after, before))
    found = facts["values"]["model.norm.weight"]
    assert found["largest"] == pytest.approx(float((a - b).abs().max()))
    assert found["num_different"] == int((a != b).sum())
    shown = lmtrain("inspect", after, "--diff", before)
    assert "step: 12 -> 8" in shown
    assert "model.norm.weight: " in shown
    assert shown.splitlines()[-1].startswith(f"0 tensors equal, {facts['summary']['different']} different, 0 only in")
    assert facts["summary"]["largest"] == max(each["largest"] for each in facts["values"].values())
    said = lmtrain("inspect", after, "--diff", before, "--verify", code=2)
    assert "--verify has no effect with --diff, which checks the hashes of all that it compares" in said


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--to", "tp=3"), 78, "does not divide model.num_heads=2"),
        (("--to", "pp=5"), 78, "5 stages, more than model.num_layers=2"),
        (("--to", "tensor=2"), 2, "is not an axis and size"),
        ((), 2, "--to is missing"),
        (("--to", "tp=2", "--max-memory", "10MiB"), 2, "is too little"),
        (("--to", "tp=2", "--max-memory", "much"), 2, "is not a size"),
        (("--to", "tp=2", "--dtype", "bf16"), 2, "keeps every number as it is. Leave it out"),
    ],
)
def test_refusals(run: Path, tmp_path: Path, arguments: tuple[str, ...], code: int, said: str) -> None:
    output = lmtrain("reshard", run, "--output", tmp_path / "out", *arguments, code=code)
    assert said in output
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "commands"),
    [
        (("--to", "hf"), ["export in --to hf --output out"]),
        (("--to", "megatron,tp=2,pp=4", "--dtype", "bf16"),
         ["export in --to megatron --layout tp=2,pp=4 --output out --dtype bf16"]),
        (("--from", "hf"), ["import in --output out"]),
        (("--from", "megatron", "--tokenizer", "my words", "--set", "num_heads=16", "--set", "activation=gelu"),
         ['import in --output out --tokenizer "my words" --set num_heads=16 --set activation=gelu']),
        (("--from", "hf", "--to", "tp=2"),
         ["import in --output out_imported", "reshard out_imported --to tp=2 --output out"]),
        (("--from", "hf", "--to", "megatron,tp=2", "--dtype", "fp16"),
         ["import in --output out_imported",
          "export out_imported --to megatron --layout tp=2 --output out --dtype fp16"]),
        (("--tokenizer", "words"), ["import in --output out --tokenizer words"]),
    ],
)  # fmt: skip
def test_other_programs_formats_have_commands_of_their_own(arguments: tuple[str, ...], commands: list[str]) -> None:
    said = lmtrain("reshard", "in", "--output", "out", *arguments, code=2)
    assert [line.strip() for line in said.splitlines()[1:]] == [f"lmtrain {command}" for command in commands]
    assert said.splitlines()[0].endswith("Type, one after the other:" if len(commands) > 1 else "Type:")


def test_outputs_that_are_refused(run: Path, other: Path, tmp_path: Path) -> None:
    assert "is there already" in lmtrain("reshard", run, "--to", "pp=2", "--output", other, code=73)
    assert "must not change" in lmtrain(
        "reshard", run, "--to", "pp=2", "--output", run / CHECKPOINT, "--overwrite", code=2
    )
    assert "does not exist" in lmtrain(
        "reshard", tmp_path / "none", "--to", "pp=2", "--output", tmp_path / "o", code=66
    )
