"""A verdict in words, and as stop.json."""

from __future__ import annotations

import json
from pathlib import Path

from lmtrain.observe.hang_watch.heartbeat_server import verdict_text, write_stop


def test_a_verdict_says_where_to_look() -> None:
    assert verdict_text({"verdict": "x."}) == "x. Start the same command again to go on."
    assert verdict_text({"verdict": "x.", "folder": "/f"}) == (
        "x. The stacks of all processes are in /f; start the same command again to go on."
    )


def test_the_reason_of_an_end_is_written_once(tmp_path: Path) -> None:
    for name in ("step_00000004", "step_00000012", "step_00000016.tmp-1-1", "x"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    write_stop(str(tmp_path), {"verdict": "rank 1 is gone.", "ranks": [1], "kind": "lost"})
    write_stop(str(tmp_path), {"verdict": "rank 2 is gone.", "ranks": [2], "kind": "lost"})
    found = json.loads((tmp_path / "stop.json").read_text())
    assert found == {
        "cause": "rank 1 is gone. Start the same command again to go on.", "exit_code": 76, "requeue": True, "rank": 1,
        "lost": 1, "resume": str(tmp_path / "checkpoints" / "step_00000012"),
    }  # fmt: skip


def test_a_folder_that_is_not_there_is_no_trouble(tmp_path: Path) -> None:
    write_stop(str(tmp_path / "none"), {"verdict": "rank 1 hangs.", "ranks": [1], "folder": "hangs/a"})
    assert not list(tmp_path.iterdir())
