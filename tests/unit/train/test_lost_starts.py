"""Which starts count as lost at a step, and the cause that is recorded for each."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmtrain.config import settings_base
from lmtrain.data.store.dataset_writer import DatasetWriter
from lmtrain.data.store.indexed_dataset import IndexedDataset
from lmtrain.data.training_data_by_source import TrainingPart
from lmtrain.errors import DataError, OutOfMemoryError, PeerLostError
from lmtrain.optim.adamw_settings import AdamWSettings
from lmtrain.runfolder.file_names import FAILED_STARTS
from lmtrain.runtime.files.atomic_files import write_json
from lmtrain.runtime.processes.process_environment import ProcessEnv, process_identity
from lmtrain.tokenizer.train import train_wordpiece
from lmtrain.train.in_loop.failed_start_counter import LostStarts, counting_start
from lmtrain.train.run_config import RunConfig
from tests import plugin_example
from tests.unit.data.writing import add_document
from tests.unit.train.tiny_runs import CONFIG, inputs_of

HERE = ProcessEnv(host="here", job_id="7", num_restarts=1)


def starts(folder: Path, step: int = 4, of: str = "settings") -> LostStarts:
    return LostStarts(folder, step, of).load()


def begun(folder: Path, num: int = 1) -> LostStarts:
    """After so many starts, of which the last one is under way."""
    for _ in range(num):
        found = starts(folder)
        found.add_start(HERE)
    return found


def ends(folder: Path, exit_code: int, cause: str = "why") -> None:
    write_json(folder / "stop.json", {"cause": cause, "exit_code": exit_code})


def test_a_start_names_the_process_that_may_restart_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMTRAIN_COMMAND", "7.8")
    for env in (HERE, replace(HERE, is_child=True)):
        starts(tmp_path).add_start(env)
    own, launched = starts(tmp_path).lost
    assert (own["command"], own["is_launched"]) == (process_identity(os.getpid()), False)
    assert (launched["command"], launched["is_launched"]) == ("7.8", True)


def test_a_start_that_says_nothing_was_killed(tmp_path: Path) -> None:
    begun(tmp_path, 2)
    assert ["how" in one for one in starts(tmp_path).lost] == [False, False]
    (one, _) = json.loads((tmp_path / FAILED_STARTS).read_text())["lost"]
    assert (one["host"], one["job"], one["restart"], one["processes"]) == ("here", "7", 1, 1)


@pytest.mark.parametrize("other", [{"step": 8}, {"of": "other settings"}])
def test_another_step_or_other_settings_begin_a_new_count(tmp_path: Path, other: dict[str, Any]) -> None:
    begun(tmp_path, 2)
    assert starts(tmp_path, **other).lost == []


def test_what_may_have_caused_a_loss_begins_a_new_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def of(config: RunConfig = CONFIG, **changes: Any) -> str:
        return LostStarts.for_run(config, replace(inputs, **changes), None).digest

    def source(text: str) -> TrainingPart:
        with DatasetWriter(tmp_path / text, np.uint16) as writer:
            add_document(writer, [np.frombuffer(text.encode(), np.uint8).astype(np.uint16)])
            writer.describe(tokenizer=b"", fingerprint="a", vocab_size=999, eod_id=None, num_bytes=1)
        indexed = IndexedDataset.open(tmp_path / text)
        return TrainingPart(indexed, range(1), None, inputs.data.train, Fraction(1), "a", 1)

    inputs = inputs_of(tmp_path)
    digests = {of(), of(replace(CONFIG, optim=AdamWSettings(lr=1.0)))}
    digests.add(of(data=replace(inputs.data, sample_identity={"blend": 1})))
    digests |= {of(data=replace(inputs.data, parts=[source(text)])) for text in "ab"}
    digests.add(of(tokenizer=train_wordpiece(["a dog"], 40, lowercase=True)))
    monkeypatch.setitem(settings_base.plugins, "plugin", [plugin_example])
    assert len(digests | {of()}) == 7


@pytest.mark.parametrize("text", ["", "[]", '{"step": 4, "of": "settings", "lost": 3}', '{"step": 4, "lost": [1]}'])
def test_a_damaged_count_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / FAILED_STARTS).write_text(text)
    assert starts(tmp_path).lost == []


@pytest.mark.parametrize("code", [1, 70, 76])
def test_what_others_say_of_a_lost_start(tmp_path: Path, code: int) -> None:
    """The launcher, another rank: whoever wrote stop.json after it began."""
    begun(tmp_path)
    ends(tmp_path, code, "rank 3 was killed")
    assert [one["how"] for one in starts(tmp_path).lost] == ["rank 3 was killed"]


@pytest.mark.parametrize("code", [0, 2, 65, 66, 73, 74, 75, 78, 79, 86])
def test_an_orderly_end_does_not_count(tmp_path: Path, code: int) -> None:
    begun(tmp_path, 2)
    ends(tmp_path, code)
    assert len(starts(tmp_path).lost) == 1


def test_what_was_said_of_an_earlier_start_is_not_of_this_one(tmp_path: Path) -> None:
    ends(tmp_path, 75)
    begun(tmp_path)
    assert len(starts(tmp_path).lost) == 1


def test_what_said_that_there_is_no_progress_changes_nothing(tmp_path: Path) -> None:
    begun(tmp_path, 3)
    ends(tmp_path, 93)
    assert len(starts(tmp_path).lost) == 3


@pytest.mark.parametrize("error", [RuntimeError("x"), OutOfMemoryError("x"), PeerLostError("x")])
def test_a_loss_that_is_noticed_stays_counted(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(type(error)), counting_start(begun(tmp_path)):
        raise error
    (one,) = starts(tmp_path).lost
    assert one["how"].endswith("x")


@pytest.mark.parametrize("error", [DataError("x"), KeyboardInterrupt()])
def test_a_refusal_is_not_counted(tmp_path: Path, error: BaseException) -> None:
    folder = tmp_path / "run"
    with pytest.raises(type(error)), counting_start(begun(folder)):
        raise error
    assert not [*folder.iterdir()]


def test_a_start_that_comes_to_its_end_clears_the_count(tmp_path: Path) -> None:
    with counting_start(begun(tmp_path, 3)):
        pass
    assert not (tmp_path / FAILED_STARTS).exists()


def test_a_count_that_cannot_be_written_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / FAILED_STARTS).mkdir()
    begun(tmp_path)
    assert "This start cannot be counted in starts.json: " in capsys.readouterr().err
