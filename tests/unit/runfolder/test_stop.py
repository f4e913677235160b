"""One rule for stop.json, whoever writes it: whole or not there, and of several the first or the last word."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any, NoReturn

import pytest

from lmtrain.runfolder import stop_json_writer
from lmtrain.runfolder.file_names import STOP
from lmtrain.runtime.files.atomic_files import read_json


def written(folder: Path) -> Any:
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []
    return read_json(folder / STOP)


def test_the_first_stays_and_who_speaks_for_all_replaces_it(tmp_path: Path) -> None:
    for rank in (1, 2):
        stop_json_writer.write(tmp_path, f"rank {rank}", 76, replace=False, fsync=False, rank=rank, lost=rank)
    facts = {"cause": "rank 1", "exit_code": 76, "requeue": True, "rank": 1, "lost": 1, "resume": None}
    assert written(tmp_path) == facts
    stop_json_writer.write(tmp_path, "done", 0, replace=True, step=7)
    assert written(tmp_path) == {"cause": "done", "exit_code": 0, "requeue": False, "step": 7, "resume": None}


def test_what_a_scheduler_starts_again(tmp_path: Path) -> None:
    """A run that was stopped to go on later, or lost a process: not one that is done, or that nobody wants to go on."""
    for code in (0, 65, 70, 75, 76, 79, 86, 93):
        stop_json_writer.write(tmp_path, "why", code, replace=True)
        assert written(tmp_path)["requeue"] is (code in (75, 76))


def test_of_many_that_write_at_once_one_is_whole(tmp_path: Path) -> None:
    begin, causes = threading.Barrier(8), [str(number) * 100_000 for number in range(8)]

    def write(cause: str) -> None:
        begin.wait()
        stop_json_writer.write(tmp_path, cause, 76, replace=False)

    threads = [threading.Thread(target=write, args=(cause,)) for cause in causes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first = written(tmp_path)["cause"]
    assert first in causes
    stop_json_writer.write(tmp_path, "late", 76, replace=False)
    assert written(tmp_path)["cause"] == first


def test_who_comes_between_is_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else writes after this process has looked, also where the file system has no links."""
    sync = os.fsync

    def other_first(number: int) -> None:
        sync(number)
        (tmp_path / STOP).write_text('{"cause": "other"}')

    def no_link(one: str, other: str) -> NoReturn:
        raise OSError(errno.EPERM, "no links here")

    for has_links in (True, False):
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", other_first)
            if not has_links:
                patch.setattr(os, "link", no_link)
            stop_json_writer.write(tmp_path, "mine", 76, replace=False)
        assert written(tmp_path) == {"cause": "other"}
        (tmp_path / STOP).unlink()
    monkeypatch.setattr(os, "link", no_link)
    stop_json_writer.write(tmp_path, "mine", 76, replace=False)
    assert written(tmp_path)["cause"] == "mine"


def test_a_disk_that_fails_leaves_what_there_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_json_writer.write(tmp_path, "before", 75, replace=True)

    def full(number: int) -> NoReturn:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        stop_json_writer.write(tmp_path, "after", 75, replace=True)
    assert written(tmp_path)["cause"] == "before"


def test_where_there_is_no_folder_nothing_is_made(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        stop_json_writer.write(tmp_path / "none", "done", 0, replace=True)
    assert not list(tmp_path.iterdir())


def test_the_newest_checkpoint_is_the_one_of_the_highest_step(tmp_path: Path) -> None:
    names = ("step_99999999", "step_100000000", "step_100000001.tmp-1-1", "step_200000000x", "x")
    for name in names:
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    stop_json_writer.write(str(tmp_path), "SIGTERM", 75, replace=True)
    assert written(tmp_path)["resume"] == str(tmp_path / "checkpoints" / "step_100000000")


def test_any_text_is_a_cause(tmp_path: Path) -> None:
    cause = "naïve \udce4 \\udce4"  # a file's name may hold bytes that are no letters
    stop_json_writer.write(tmp_path, cause, 70, replace=True)
    assert written(tmp_path)["cause"] == cause
    assert "naïve" in (tmp_path / STOP).read_text()
