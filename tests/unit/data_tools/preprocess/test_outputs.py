"""A killed preprocessing run resumes and writes the same files; a run with other inputs or settings is refused, unless
--overwrite was given.
"""

from __future__ import annotations

import errno
import gzip
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from data_tools.preprocess.length_and_script_filters import Filters
from data_tools.preprocess.preprocess_pipeline import Options, Summary, preprocess
from data_tools.preprocess.resumable_dataset_writer import Outputs
from data_tools.read.cut_files_into_chunks import SizeLimits
from data_tools.read.parse_chunks_and_bad_lines import OnError
from lmtrain.errors import DataError, OutputError, StorageError
from lmtrain.runtime.processes.fault_injection import Fault, arm
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer
from lmtrain.tokenizer.train import train_bpe
from tests.marks import wide

TEXTS = [f"document {i} says: the cat's {i % 5} mats — naïve\n" * (i % 7) for i in range(60)]
OPTIONS: dict[str, Any] = {"limits": SizeLimits(slice_bytes=300), "on_error": OnError.QUARANTINE, "workers": 2}
SHARDED: dict[str, Any] = {"shard_tokens": 600}
SCRIPT = """
import sys
from pathlib import Path
from tests.unit.data_tools.preprocess.test_outputs import SHARDED, run
run(Path(sys.argv[1]), Path(sys.argv[2]), **(SHARDED if sys.argv[3] == "sharded" else {}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("in")
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in TEXTS]
    lines[25] = lines[41] = '{"text": nonsense}'
    (folder / "a.jsonl").write_text("\n".join(lines[:30]))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress("\n".join(lines[30:50]).encode()))
    for number in range(50, 60):
        (folder / f"c{number}.txt").write_text(TEXTS[number])
    train_bpe(TEXTS, 300).save(folder / "tokenizer" / "tokenizer.json")
    return folder


@pytest.fixture(autouse=True)
def _no_fault_is_left() -> Iterator[None]:
    arm()
    yield
    arm()


def run(folder: Path, output: Path, *, said: list[str] | None = None, **more: Any) -> Summary:
    tokenizer = Tokenizer.load(folder / "tokenizer")
    inputs = sorted(path for path in folder.iterdir() if path.is_file())
    say = (said if said is not None else []).append
    return preprocess(inputs, tokenizer, output, Options(**OPTIONS | more), notify=say)


def interrupted(folder: Path, output: Path, point: str, count: int, **more: Any) -> None:
    """A run that ends in the middle, as by Ctrl-C."""
    arm(Fault("exc", point, count))
    with pytest.raises(RuntimeError, match=f"fault at {point}"):
        run(folder, output, **more)
    assert not output.with_name(output.name + ".idx").exists()


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("kind", wide("sharded", "whole"))
def test_a_run_killed_many_times_gives_the_same_files(folder: Path, tmp_path: Path, kind: str) -> None:
    """By SIGKILL, at points drawn at random and at all the last ones, until there is no kill left."""
    more = SHARDED if kind == "sharded" else {}
    run(folder, tmp_path / "unbroken" / "data", **more)
    chance = random.Random(kind)
    kills = [(chance.choice(["data.slice", "data.journal"]), chance.randint(1, 4)) for _ in range(4)]
    kills += [("data.finish", 1), ("data.publish", 1), ("data.publish", 3)]
    command = [sys.executable, "-c", SCRIPT, str(folder), str(tmp_path / "killed" / "data"), kind]
    for point, count in kills:
        fault = {"LMTRAIN_FAULT": f"kill:point={point}:count={count}", "LMTRAIN_ALLOW_FAULTS": "1"}
        done = subprocess.run(command, env=os.environ | fault, capture_output=True, text=True)
        assert done.returncode == -signal.SIGKILL, done.stderr
    said: list[str] = []
    summary = run(folder, tmp_path / "killed" / "data", said=said, **more)
    assert files(tmp_path / "killed") == files(tmp_path / "unbroken")
    assert said == ["resuming after the 58 documents of an interrupted run"]
    assert (summary.num_documents, summary.rejects) == (58, {"not valid JSON": 2})


@pytest.mark.parametrize("count", [2, 5, 9, 14])
def test_an_interrupted_run_resumes(folder: Path, tmp_path: Path, count: int) -> None:
    whole = run(folder, tmp_path / "unbroken" / "data")
    interrupted(folder, tmp_path / "cut" / "data", "data.slice", count)
    summary = run(folder, tmp_path / "cut" / "data", workers=1)  # how many work does not matter
    assert 0 < summary.resumed_documents < whole.num_documents
    assert files(tmp_path / "cut") == files(tmp_path / "unbroken")
    assert (summary.lengths, summary.rejects, summary.num_bytes) == (whole.lengths, whole.rejects, whole.num_bytes)


@pytest.mark.parametrize("name", ["journal.jsonl", "0-00000.bin", "0-00000.lengths", "0-00000.counts", "rejects"])
@pytest.mark.parametrize("damage", ["cut", "flip", "gone"])
def test_data_lost_in_a_power_cut_is_written_again(folder: Path, tmp_path: Path, name: str, damage: str) -> None:
    run(folder, tmp_path / "unbroken" / "data")
    interrupted(folder, tmp_path / "cut" / "data", "data.slice", 15)
    path = tmp_path / "cut" / ".data.tmp" / name
    data = bytearray(path.read_bytes())
    assert len(data) > 20
    if damage == "gone":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(data[:-9])
    else:
        data[len(data) // 2] ^= 0xFF
        path.write_bytes(data)
    said: list[str] = []
    summary = run(folder, tmp_path / "cut" / "data", said=said)
    assert files(tmp_path / "cut") == files(tmp_path / "unbroken")
    assert summary.num_documents == 58
    if (name, damage) != ("journal.jsonl", "gone"):
        assert ("is damaged and is done again" in said[0]) == ((name, damage) != ("journal.jsonl", "cut"))


def test_bad_rows_behind_the_place_where_work_goes_on_keep_their_numbers(folder: Path, tmp_path: Path) -> None:
    path, tokenizer = tmp_path / "in.parquet", Tokenizer.load(folder / "tokenizer")
    texts = [*TEXTS[:50], None, *TEXTS[51:]]
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=5)
    options = Options(limits=SizeLimits(slice_bytes=300), on_error=OnError.SKIP)
    arm(Fault("exc", "data.slice", 8))
    with pytest.raises(RuntimeError, match="fault at"):
        preprocess([path], tokenizer, tmp_path / "out" / "d", options)
    assert 0 < preprocess([path], tokenizer, tmp_path / "out" / "d", options).resumed_documents < 50
    assert json.loads((tmp_path / "out" / "d.rejects.jsonl").read_text())["row"] == 51


@pytest.mark.parametrize("name", ["0-00000.bin", "1-00000.bin"])
def test_all_keys_resume_at_the_last_state_that_all_files_match(folder: Path, tmp_path: Path, name: str) -> None:
    path, tokenizer = tmp_path / "in.jsonl", Tokenizer.load(folder / "tokenizer")
    path.write_text("".join(json.dumps({"text": text, "title": f"title {i}"}) + "\n" for i, text in enumerate(TEXTS)))
    options = Options(keys=("text", "title"), limits=SizeLimits(slice_bytes=300))
    preprocess([path], tokenizer, tmp_path / "whole" / "d", options)
    arm(Fault("exc", "data.slice", 20))
    with pytest.raises(RuntimeError, match="fault at"):
        preprocess([path], tokenizer, tmp_path / "out" / "d", options)
    damaged = tmp_path / "out" / ".d.tmp" / name
    damaged.write_bytes(damaged.read_bytes()[: damaged.stat().st_size // 2])
    summary = preprocess([path], tokenizer, tmp_path / "out" / "d", options)
    assert 0 < summary.resumed_documents < 30
    assert files(tmp_path / "out") == files(tmp_path / "whole")


@pytest.mark.parametrize(("point", "count"), wide(("data.slice", 20), ("data.publish", 1), ("data.publish", 9)))
def test_any_changed_bit_of_an_interrupted_run_is_found(folder: Path, tmp_path: Path, point: str, count: int) -> None:
    """In shards that are done, in the one that grows, in the journal: the result of an unbroken run, or none."""
    run(folder, tmp_path / "unbroken" / "data", **SHARDED)
    wanted, chance, refused = files(tmp_path / "unbroken"), random.Random(0), 0
    arm(Fault("exc", point, count))
    with pytest.raises(RuntimeError, match="fault at"):
        run(folder, tmp_path / "killed" / "data", **SHARDED)
    left = sorted(path for path in (tmp_path / "killed").rglob("*") if path.is_file() and path.stat().st_size)
    tried = [path for path in left if path.name not in (".lock",)]
    assert any(path.name.endswith("-00000.blocks") for path in tried)
    for number, path in enumerate(tried):
        shutil.copytree(tmp_path / "killed", tmp_path / f"cut{number}")
        damaged = tmp_path / f"cut{number}" / path.relative_to(tmp_path / "killed")
        data = bytearray(damaged.read_bytes())
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        damaged.write_bytes(data)
        try:
            run(folder, tmp_path / f"cut{number}" / "data", **SHARDED)
        except (DataError, OutputError) as error:
            assert re.search("were damaged before all were renamed|is there already", str(error))  # noqa: PT017
            refused += 1
        else:
            assert files(tmp_path / f"cut{number}") == wanted, path
        shutil.rmtree(tmp_path / f"cut{number}")
    assert (refused > 0) == (count == 9)


@pytest.mark.parametrize("name", ["0-00000.bin", "journal.new", "rejects"])
def test_a_link_in_the_place_of_a_left_file_is_not_written_through(folder: Path, tmp_path: Path, name: str) -> None:
    interrupted(folder, tmp_path / "cut" / "data", "data.slice", 5)
    (tmp_path / "mine").write_text("mine")
    path = tmp_path / "cut" / ".data.tmp" / name
    path.unlink(missing_ok=True)
    path.symlink_to(tmp_path / "mine")
    with suppress(OutputError):
        run(folder, tmp_path / "cut" / "data")
    assert (tmp_path / "mine").read_text() == "mine"


@pytest.mark.parametrize("suffix", [".tokenizer.json", ".blocks", ".json", ".idx"])
def test_files_in_the_place_of_a_finished_shard_are_replaced(folder: Path, tmp_path: Path, suffix: str) -> None:
    run(folder, tmp_path / "whole" / "d", **SHARDED)
    (tmp_path / "other").write_text("mine")
    for make in (os.mkfifo, lambda path: path.symlink_to(tmp_path / "other")):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        interrupted(folder, tmp_path / "out" / "d", "data.slice", 2, **SHARDED)
        make(tmp_path / "out" / ".d.tmp" / f"0-00000{suffix}")
        run(folder, tmp_path / "out" / "d", **SHARDED)
        assert files(tmp_path / "out") == files(tmp_path / "whole")
        assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())
    assert (tmp_path / "other").read_text() == "mine"


def test_a_missing_later_shard_starts_over(folder: Path, tmp_path: Path) -> None:
    run(folder, tmp_path / "whole" / "d", **SHARDED)
    interrupted(folder, tmp_path / "out" / "d", "data.slice", 20, **SHARDED)
    left = tmp_path / "out" / ".d.tmp"
    last = max(path.name for path in left.glob("0-*.lengths"))
    assert last > "0-00000.lengths"
    (left / last).unlink()
    run(folder, tmp_path / "out" / "d", **SHARDED)
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def everything(folder: Path) -> dict[str, tuple[bytes, int]]:
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}


CHANGES: list[tuple[dict[str, Any], str, tuple[str, ...]]] = [
    ({"append_eod": False}, "with --append-eod, and this one has no --append-eod", ("--append-eod",)),
    ({"on_error": OnError.SKIP}, "with --on-error quarantine", ("--on-error", "quarantine")),
    ({"shard_tokens": 10_000}, "with no --shard-tokens, and this one has --shard-tokens 10000", ()),
    ({"filters": Filters(min_chars=2, scripts=(("latin", 0.5),))}, "this one has --min-chars 2 --script latin:0.5", ()),
]


@pytest.mark.parametrize("number", range(len(CHANGES)))
def test_a_run_with_other_settings_is_refused_and_loses_nothing(folder: Path, tmp_path: Path, number: int) -> None:
    change, difference, words = CHANGES[number]
    interrupted(folder, tmp_path / "out/data", "data.slice", 8)
    before = everything(tmp_path)
    with pytest.raises(OutputError, match=re.escape(difference)) as refused:
        run(folder, tmp_path / "out/data", **change)
    assert everything(tmp_path) == before
    (ways,) = refused.value.ways
    assert ways[0].new == words
    assert ways[-1].new == ("--overwrite",)
    said: list[str] = []
    summary = run(folder, tmp_path / "out/data", said=said, overwrite=True, **change)
    assert said[0].startswith("starting over: --overwrite was given")
    run(folder, tmp_path / "fresh/data", **change)
    assert (summary.resumed_documents, files(tmp_path / "out")) == (0, files(tmp_path / "fresh"))


def test_a_run_with_the_old_settings_goes_on_after_a_refusal(folder: Path, tmp_path: Path) -> None:
    interrupted(folder, tmp_path / "data", "data.slice", 8)
    with pytest.raises(OutputError):
        run(folder, tmp_path / "data", append_eod=False)
    assert run(folder, tmp_path / "data").resumed_documents > 0


def test_a_changed_input_is_refused_and_named(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "in"
    shutil.copytree(folder, copy)
    interrupted(copy, tmp_path / "data", "data.slice", 8)
    for change, said in (
        (lambda: os.utime(copy / "c59.txt"), "c59.txt has changed since"),
        (lambda: (copy / "c60.txt").touch(), "c60.txt was not among its input files"),
        (lambda: (copy / "c59.txt").rename(copy / "c60.txt"), "c59.txt was among its input files"),
        (lambda: copy.rename(tmp_path / "moved"), "and 11 more were among its input files|were among its input files"),
    ):
        change()
        before = everything(tmp_path)
        with pytest.raises(OutputError, match=said):
            run(tmp_path / "moved" if (tmp_path / "moved").exists() else copy, tmp_path / "data")
        assert everything(tmp_path) == before


@pytest.mark.parametrize("more", [{}, SHARDED, {"keys": ("text", "title")}])
def test_the_same_run_again_finds_its_dataset(folder: Path, tmp_path: Path, more: dict[str, Any]) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": text, "title": f"title {i}"}) + "\n" for i, text in enumerate(TEXTS)))
    tokenizer, options = Tokenizer.load(folder / "tokenizer"), Options(**OPTIONS | more)
    first = preprocess([path], tokenizer, tmp_path / "d", options)
    before = everything(tmp_path)
    again = preprocess([path], tokenizer, tmp_path / "d", options)
    assert (again.is_new, everything(tmp_path)) == (False, before)
    for name in ("num_documents", "num_tokens", "num_bytes", "num_shards", "files"):
        assert set(getattr(again, name)) == set(first.files) if name == "files" else getattr(again, name) == getattr(
            first, name
        )
    with pytest.raises(OutputError, match="is there already"):
        preprocess([path], tokenizer, tmp_path / "d", replace(options, append_eod=False))
    os.utime(path)
    with pytest.raises(OutputError, match="is there already"):
        preprocess([path], tokenizer, tmp_path / "d", options)
    assert {name: facts for name, facts in everything(tmp_path).items() if name != str(path)} == {
        name: facts for name, facts in before.items() if name != str(path)
    }


@pytest.mark.parametrize("suffix", [".bin", ".idx", ".json", ".tokenizer.json", ".blocks", ".rejects.jsonl"])
def test_a_file_that_is_no_part_of_a_dataset_stays(folder: Path, tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"data{suffix}").write_text('{"notes": "mine"}')
    before = everything(tmp_path)
    for overwrite in (False, True):
        with pytest.raises(OutputError, match=f"data{suffix} is not (a|the) .*, so it is not replaced"):
            run(folder, tmp_path / "data", overwrite=overwrite)
    assert everything(tmp_path) == before
    assert not (tmp_path / ".data.tmp").exists()


def test_a_full_disk_keeps_what_was_done(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where files that are closed find the disk full once more."""
    arm(Fault("enospc", "data.journal", 6))
    told = r"the disk is full .*/\.data\.tmp holds the work done so far \([1-9].*B\)\. The same command resumes"
    close = Outputs._close

    def refused(self: Outputs) -> None:
        close(self)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Outputs, "_close", refused)
        with pytest.raises(StorageError, match=told):
            run(folder, tmp_path / "data")
    assert run(folder, tmp_path / "data").resumed_documents > 0
    assert not (tmp_path / ".data.tmp").exists()


def test_an_old_dataset_stays_until_the_new_one_is_whole(folder: Path, tmp_path: Path) -> None:
    run(folder, tmp_path / "data", append_eod=False)
    old = files(tmp_path)
    arm(Fault("exc", "data.finish"))
    with pytest.raises(RuntimeError):
        run(folder, tmp_path / "data", overwrite=True)
    assert {name: data for name, data in old.items() if (tmp_path / name).read_bytes() == data} == old
    run(folder, tmp_path / "data", overwrite=True)
    assert (tmp_path / "data.bin").read_bytes() != old["data.bin"]


def test_a_file_that_can_only_be_read_from_its_start_is_named(folder: Path, tmp_path: Path) -> None:
    """After a kill in its middle it is decompressed again, which can take long."""
    inputs, said, chance = tmp_path / "in", list[str](), random.Random(0)
    shutil.copytree(folder / "tokenizer", inputs / "tokenizer")
    rows = [json.dumps({"text": chance.randbytes(1000).hex()}) for _ in range(300)]
    (inputs / "a.jsonl.gz").write_bytes(gzip.compress("\n".join(rows).encode()))
    interrupted(inputs, tmp_path / "out" / "d", "data.slice", 3)
    run(inputs, tmp_path / "out" / "d", said=said)
    told = rf"{inputs}/a\.jsonl\.gz can only be read from its start: [\d.]+ .iB of its text are read again, and not "
    assert re.match(told, said[1])
