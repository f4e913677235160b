"""Where two records part: by key, by step, and only in what both have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lmtrain.observe.history.read_metrics_columns import Record, compare_records, read_record, starts_in_force


def record(folder: Path, name: str, **changed: Any) -> Record:
    path = folder / name
    with open(path, "w", encoding="utf-8") as file:
        for step in range(2, 42, 2):
            row = {"event": "step", "step": step, "attempt": 1, "loss": 1 / step, "grad_norm": 1.0, "samples_hash": "a"}
            if step >= 20:
                row |= changed
            file.write(json.dumps(row) + "\n")
    return read_record(path)


def test_equal_records_part_nowhere(tmp_path: Path) -> None:
    found = compare_records(record(tmp_path, "a"), record(tmp_path, "b"))
    assert (found.step, found.num_shared, found.last_shared, found.loss_differences) == (None, 20, 40, [])
    assert found.not_compared[0].startswith("batch_digest")


def test_the_first_step_of_each_key(tmp_path: Path) -> None:
    found = compare_records(record(tmp_path, "a"), record(tmp_path, "b", loss=1 / 7 + 1e-16, samples_hash="b"))
    assert found.first_difference == {"samples_hash": 20, "loss": 20}
    assert found.last_equal == {"samples_hash": 18, "loss": 18}
    assert [at["step"] for at in found.loss_differences] == [20, 22, 40]


def test_one_bit_is_a_difference(tmp_path: Path) -> None:
    pair = record(tmp_path, "a", loss=0.1), record(tmp_path, "b", loss=0.1 + 2**-56)
    assert compare_records(*pair).first_difference == {"loss": 20}


def test_a_start_counts_while_steps_of_it_are_left(tmp_path: Path) -> None:
    path = tmp_path / "a"
    starts = [(0, "killed before its first save"), (0, "first"), (8, "undone"), (4, "second")]
    rows = [{"event": "start", "step": step, "attempt": 1 + n, "is": name} for n, (step, name) in enumerate(starts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [row["is"] for row in starts_in_force(read_record(path))] == ["first", "second"]
