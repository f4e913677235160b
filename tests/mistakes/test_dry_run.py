"""A dry run finds what the run would, without torch and with the same exit code: device, folder, room, ports."""

from __future__ import annotations

import fcntl
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.harness import Preset, typed
from tests.mistakes.runner import Runner
from tests.toytext import write_toy_texts

pytestmark = pytest.mark.wide
TINY = ("model.num_layers=1", "model.width=16", "model.num_heads=2", "model.seq_len=16", "schedule.warmup_steps=0",
        "train.valid_interval_steps=0", "train.steps=4")  # fmt: skip


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner() as made:
        yield made


@pytest.fixture(scope="module")
def data(runner: Runner, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dry")
    write_toy_texts(folder)
    text = folder / "page_000.txt"
    for words in (
        ("tokenizer", "train", text, "--output", folder / "tokenizer", "--vocab-size", 300),
        ("preprocess", text, "--tokenizer", folder / "tokenizer", "--output", folder / "data"),
    ):
        said = runner(list(map(str, words)))
        assert said.code == 0, said.text
    return folder / "data"


def _torchrun(world_size: int, port: int) -> dict[str, str]:
    names = {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size, "RANK": 0, "LOCAL_RANK": 0, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1"} | {name: str(value) for name, value in names.items()}


def test_what_the_machine_lacks_and_no_task_is_called(runner: Runner, data: Path, tmp_path: Path) -> None:
    def dry(*words: str, env: dict[str, str] | None = None) -> tuple[int, str]:
        usual = [Preset(word) for word in (f"data.path={data}", f"run.dir={tmp_path / 'run'}", *TINY)]
        said = runner(["pretrain", "--dry-run", *typed([*usual, *words])], env)
        assert not said.torch
        assert not (tmp_path / "run" / "config.json").exists()
        return said.code, said.text

    code, text = dry()
    assert code == 0, text
    code, text = dry("eval.tasks=[{task: perplexty, data: x}]", "eval.interval_steps=2")
    assert (code, "Did you mean perplexity?" in text) == (2, True), text
    (tmp_path / "file").write_text("x")
    code, text = dry(f"run.dir={tmp_path / 'file' / 'run'}")
    assert (code, "is a file. Choose another folder." in text) == (73, True), text
    (tmp_path / "run").mkdir()
    with open(tmp_path / "run" / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        code, text = dry()
        assert (code, "is in use by" in text) == (73, True), text
    code, text = dry("model.width=1000000", "model.ffn_width=1000000")
    assert (code, "is too full" in text) == (74, True), text
    assert dry("model.width=1000000", "model.ffn_width=1000000", "checkpoint.interval_steps=null")[0] == 0
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code, text = dry("parallel.dp_shard=2", env=_torchrun(2, port))
        assert (code, f"Port {port} cannot be opened: it is in use" in text) == (2, True), text
    assert dry("parallel.dp_shard=2", env=_torchrun(2, port))[0] == 0
    assert dry("parallel.dp_shard=2", "--nproc", "2")[0] == 0


def test_a_device_that_is_not_there(runner: Runner, data: Path, tmp_path: Path) -> None:
    from lmtrain.runtime.machine.visible_gpus_without_torch import Gpus

    count = Gpus.detect().count
    if count is None:
        return
    word = "compute.device=cuda" if count == 0 else "compute.device=auto"
    nproc = str(count + 1)
    given = ["pretrain", "--dry-run", f"data.path={data}", f"run.dir={tmp_path / 'run'}", *TINY, word]
    said = runner([*given, "--nproc", nproc, f"parallel.dp_shard={nproc}", f"train.global_batch={8 * (count + 1)}"])
    assert said.code == 2
    assert "Use auto or cpu" in said.text or f"Start at most {count} processes" in said.text


def test_a_run_of_many_can_be_planned_by_one(runner: Runner, data: Path, tmp_path: Path) -> None:
    """Its device, folder and disk are elsewhere."""
    given = ["parallel.dp_shard=8", "train.global_batch=64", "compute.device=cuda", f"run.dir={tmp_path / 'run'}"]
    said = runner(["pretrain", "--dry-run", f"data.path={data}", *TINY, *given])
    assert (said.code, said.torch) == (0, False), said.text
