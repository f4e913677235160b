"""Checkpoints are told by their names."""

from __future__ import annotations

from lmtrain.runfolder.file_names import step_folder_name, step_from_name


def test_names_and_steps() -> None:
    assert step_folder_name(1000) == "step_00001000"
    assert step_folder_name(123_456_789) == "step_123456789"
    assert step_from_name("step_123456789") == 123_456_789
    for wrong in ("step_1", "step_0000000a", "step_00001000.tmp-1-1", "xstep_00001000", "step_000000001", "step_"):
        assert step_from_name(wrong) is None
