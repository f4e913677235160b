"""Files of torch.save stay data, and damage to them is an error."""

from __future__ import annotations

import os
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from lmtrain.errors import CheckpointError, LmtrainError
from lmtrain.exchange.megatron.read_arguments_and_weights import open_megatron
from lmtrain.exchange.torch_files.read_pickle_as_data import CallRecord
from lmtrain.exchange.torch_files.read_pt_files_without_torch import StoredTensor, TorchFile


class Danger:
    """What a pickle of an attacker holds: a call that is made on reading."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("legacy", [False, True])
def test_nothing_in_a_file_is_called(legacy: bool, tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    torch.save(
        {"args": Danger(trap), "model": {"a": torch.ones(3)}}, tmp_path / "a.pt",
        _use_new_zipfile_serialization=not legacy,
    )  # fmt: skip
    value = TorchFile(tmp_path / "a.pt").value
    assert isinstance(value["args"], CallRecord)
    assert value["args"].path in ("posix.mkdir", "nt.mkdir")
    assert isinstance(value["model"]["a"], StoredTensor)
    assert torch.equal(value["model"]["a"].read(), torch.ones(3))
    assert not trap.exists()
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / ".metadata").write_bytes(pickle.dumps(Danger(trap)))
    with pytest.raises(CheckpointError, match="not a valid list of tensors"):
        open_megatron(tmp_path / "dist")
    assert not trap.exists()


@pytest.mark.parametrize("legacy", [False, True])
def test_damaged_files_are_errors_and_never_tensors_of_another_size(legacy: bool, tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"a": torch.randn(40, 3), "b": [torch.ones(5).bfloat16(), None, 2.5]}, path,
               _use_new_zipfile_serialization=not legacy)  # fmt: skip
    whole, chance = path.read_bytes(), random.Random(3)
    said: list[str] = []
    for _ in range(150):
        data = bytearray(whole)
        if chance.random() < 0.3:
            del data[chance.randrange(len(data)) :]
        else:
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        path.write_bytes(data)
        try:
            value = TorchFile(path).value
            tensors = [v for v in value.values() if isinstance(v, StoredTensor)] if isinstance(value, dict) else []
            assert sum(tensor.read().nbytes for tensor in tensors) <= len(whole)
        except LmtrainError as error:
            said.append(str(error))
    assert len(said) > 20
    assert all("a.pt" in text for text in said)
