"""Which value held from which step."""

from __future__ import annotations

from typing import Any

from lmtrain.runfolder.settings_differences import changed_histories, settings_history


def _start(step: int, **settings: Any) -> dict[str, Any]:
    return {"event": "start", "step": step, "settings": {"optim": settings, "run": {"dir": str(step)}}}


def test_a_start_that_goes_back_takes_what_came_after_with_it() -> None:
    starts = [_start(0, lr=1.0), _start(10, lr=2.0), _start(20, lr=3.0), _start(10, lr=1.0), _start(30, lr=4.0)]
    assert settings_history(starts)["optim.lr"] == [(1, 1.0), (31, 4.0)]
    assert changed_histories(starts) == {"optim.lr": [(1, 1.0), (31, 4.0)]}


def test_a_setting_that_older_starts_lack_is_no_change() -> None:
    starts = [_start(0, lr=1.0), {"event": "start", "step": 5}, _start(10, lr=1.0, eps=0.5)]
    assert changed_histories(starts) == {}
    assert settings_history(starts)["optim.eps"] == [(11, 0.5)]
