"""Datasets that are not what was written, through every verb that opens them: refused in words, never trained on."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lmtrain.data.store.indexed_dataset import dataset_file
from tests.cli.harness import Toy, lmtrain, start
from tests.marks import wide

Copy = Callable[..., Path]


@pytest.fixture
def copy(toy: Toy, tmp_path: Path) -> Copy:
    """A dataset to damage; `foreign`: as another tool leaves it."""

    def made(name: str = "copy", foreign: bool = False) -> Path:
        for suffix in (".bin", ".idx") if foreign else (".bin", ".idx", ".json", ".tokenizer.json", ".blocks"):
            dataset_file(tmp_path / name, suffix).write_bytes(dataset_file(toy.data, suffix).read_bytes())
        return tmp_path / name

    return made


def flip(path: Path, at: int) -> None:
    times = path.stat()
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def settings(toy: Toy, prefix: Path, run: Path, *more: str) -> list[str]:
    return [*toy.settings(run, data__path=prefix, train__steps=2, schedule__warmup_steps=1), *more]


def test_a_run_ends_where_it_meets_a_flipped_bit(toy: Toy, copy: Copy, tmp_path: Path) -> None:
    prefix, run = copy(), tmp_path / "run"
    for block in range(dataset_file(prefix, ".bin").stat().st_size // 65536 + 1):
        flip(dataset_file(prefix, ".bin"), 65536 * block)  # whichever a sample is read from
    said = lmtrain("pretrain", *settings(toy, prefix, run), code=65)
    for word in (f"{prefix}.bin is damaged: bytes ", "(block ", f"lmtrain data verify {prefix}", "data.verify=none"):
        assert word in said
    assert json.loads((run / "stop.json").read_text())["exit_code"] == 65
    for verb in (("data", "verify", prefix), ("data", "show", prefix, "--random", "1")):
        assert f"{prefix}.bin is damaged: bytes " in lmtrain(*verb, code=65)


@pytest.mark.wide
def test_ways_to_check_and_verbs_that_copy(toy: Toy, copy: Copy, tmp_path: Path) -> None:
    prefix = copy()
    for block in range(dataset_file(prefix, ".bin").stat().st_size // 65536 + 1):
        flip(dataset_file(prefix, ".bin"), 65536 * block)
    before = lmtrain("pretrain", *settings(toy, prefix, tmp_path / "full", "data.verify=full"), code=65)
    assert "(block 0)" in before
    assert not (tmp_path / "full").exists()
    lmtrain("pretrain", *settings(toy, prefix, tmp_path / "none", "data.verify=none"))
    for verb in (
        ("data", "merge", prefix, "--output", tmp_path / "a"),
        ("data", "split", prefix, "--shares", "1,1", "--output", tmp_path / "a", "--output", tmp_path / "b"),
    ):  # fmt: skip
        assert f"{prefix}.bin is damaged: bytes " in lmtrain(*verb, code=65)
    assert not dataset_file(tmp_path / "a", ".idx").exists()


@pytest.mark.wide
def test_what_a_run_has_read_of_a_foreign_dataset_is_compared_by_the_next(
    toy: Toy, copy: Copy, tmp_path: Path
) -> None:
    prefix = copy("foreign", foreign=True)
    given = [f"data.tokenizer={toy.tokenizer}", "data.verify=full"]
    lmtrain("pretrain", *settings(toy, prefix, tmp_path / "one", *given))
    assert "all that a run has read of it is as it was then" in lmtrain("data", "verify", prefix)
    flip(dataset_file(prefix, ".bin"), 10)
    said = lmtrain("pretrain", *settings(toy, prefix, tmp_path / "two", *given), code=65)
    assert "are not what was first read" in said
    assert "(block 0)" in lmtrain("data", "verify", prefix, code=65)


@pytest.mark.parametrize(
    "key", ["num_bytes", *wide("num_documents", "max_id", "vocab_size", "eod_id", "content_sha256")]
)
def test_a_sidecar_that_was_changed_by_hand(copy: Copy, key: str) -> None:
    prefix = copy()
    tree = json.loads(dataset_file(prefix, ".json").read_text())
    changed = tree | {key: "0" * 64 if key == "content_sha256" else tree[key] // 2 or 1}
    dataset_file(prefix, ".json").write_text(json.dumps(changed))
    for verb in ("inspect", "verify", "stats"):
        assert f"{prefix}.json is damaged: it does not match its own hash" in lmtrain("data", verb, prefix, code=65)
    newer = ("blocks_sha256", "tokenizer_sha256", "made_from", "sidecar_sha256")
    old = {name: value for name, value in tree.items() if name not in newer}
    dataset_file(prefix, ".json").write_text(json.dumps(old))
    assert "by an older lmtrain and has no hash of itself" in lmtrain("data", "verify", prefix)
    assert "has no hash of itself" in lmtrain("data", "inspect", prefix)
    del old[key]
    dataset_file(prefix, ".json").write_text(json.dumps(old))
    assert f"{prefix}.json" in lmtrain("data", "inspect", prefix, code=65)


@pytest.mark.parametrize("suffix", [".idx", *wide(".bin", ".json", ".blocks")])
def test_a_pipe_in_the_place_of_a_file(copy: Copy, suffix: str) -> None:
    prefix = copy()
    dataset_file(prefix, suffix).unlink()
    os.mkfifo(dataset_file(prefix, suffix))
    assert f"{prefix}{suffix}" in lmtrain("data", "show", prefix, "--document", "0", code=65)


def test_another_tokenizer_beside_a_dataset(copy: Copy) -> None:
    prefix = copy()
    path = dataset_file(prefix, ".tokenizer.json")
    tree = json.loads(path.read_text())
    tree["model"]["merges"] = tree["model"]["merges"][:-1]
    path.write_text(json.dumps(tree))
    assert "has the fingerprint" in lmtrain("data", "show", prefix, "--document", "0", code=65)


@pytest.mark.wide
def test_a_bin_that_is_cut_short_under_a_run(toy: Toy, copy: Copy, tmp_path: Path) -> None:
    prefix, run = copy(), tmp_path / "run"
    # because: what is in the system's cache is gone with the file's end, whoever has it mapped
    job = start("pretrain", *toy.settings(run, data__path=prefix, train__steps=100_000))
    until = time.monotonic() + 120
    while not (run / "metrics.jsonl").exists() or (run / "metrics.jsonl").read_text().count('"step"') < 5:
        assert job.poll() is None, job.communicate()[0]
        assert time.monotonic() < until
        time.sleep(0.05)
    os.truncate(dataset_file(prefix, ".bin"), 1000)
    said = job.communicate(timeout=120)[0]
    assert job.returncode == 65, said
    assert f"{prefix}.bin has become shorter while it was in use: 1000 of its" in said
    assert "Traceback" not in said
    assert json.loads((run / "stop.json").read_text())["exit_code"] == 65


@pytest.mark.wide
@pytest.mark.parametrize(("limit", "code"), [(64, 0), (40, 74)])
def test_a_low_limit_on_open_files_is_named_as_that(toy: Toy, tmp_path: Path, limit: int, code: int) -> None:
    verb = shlex.join(["lmtrain", "data", "index", *toy.settings(tmp_path / "run")]).removeprefix("lmtrain ")
    shell = f"ulimit -Sn {limit}; ulimit -Hn {limit}; {sys.executable} -m lmtrain.cli.main {verb}"
    ran = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=120)
    assert ran.returncode == code, ran.stderr
    assert ("A process may open 40 files here" in ran.stderr) == (code == 74)
