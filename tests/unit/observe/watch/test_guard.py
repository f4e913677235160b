"""A rank's side: one process alone is not watched, and a stop before the first step is no loss."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmtrain.errors import PeerLostError, StoppedEarly
from lmtrain.observe import phases
from lmtrain.observe.watch.guard import Watch, watched
from lmtrain.runtime.process import ProcessEnv
from lmtrain.runtime.process_group import Peers

VERDICT = {"verdict": "rank 1 on n1 is gone.", "kind": "lost", "ranks": [1]}


def watch() -> Watch:
    return Watch(ProcessEnv(0, 2, host="n1"), lambda name: None, lambda error: None)


def test_a_process_alone_has_nobody_to_watch(tmp_path: Path) -> None:
    with watched(ProcessEnv(host="n1"), Peers(("n1",)), tmp_path, 60.0) as alone:
        alone.tell_stop("SIGTERM")
    assert list(tmp_path.iterdir()) == []


def test_its_errors_stay_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(KeyError), watched(ProcessEnv(host="n1"), Peers(("n1",)), tmp_path, 60.0):
        raise KeyError("x")


def test_a_peer_that_was_told_to_stop_before_the_first_step_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "main", phases.Place(0))
    one = watch()
    lost = one.error_of(VERDICT)
    assert isinstance(lost, PeerLostError)
    assert (str(lost), lost.rank) == ("rank 1 on n1 is gone. Start the same command again to go on.", 1)
    one.told_stop = "SIGTERM"
    phases.main.enter("data", 1)
    assert isinstance(one.error_of(VERDICT), StoppedEarly)
    phases.main.enter("data", 2)
    assert isinstance(one.error_of(VERDICT), PeerLostError)
