"""What a pickle may make is bounded before it is made, and what it nests is never written out."""

from __future__ import annotations

import io
import pickle
import struct
import time
import zipfile
from pathlib import Path

import pytest
import torch

from lmtrain.errors import CheckpointError, DataError
from lmtrain.exchange.torch_files.read_pickle_as_data import (
    MAX_PICKLE_BYTES,
    BoundedFile,
    CallRecord,
    Global,
    PersistentId,
    read_pickle,
)
from lmtrain.exchange.torch_files.read_pt_files_without_torch import StoredTensor, TorchFile
from tests.unit.exchange.torch_files import hostile

ORDERED = b"ccollections\nOrderedDict\n"
CALLED = Global("a", "b")


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"K\x01(NN1", 1),
        (ORDERED + b"}N\x88s\x85R", {None: True}), (ORDERED + b"](N\x88\x86e\x85R", {None: True}),
        (b"ca\nb\nK\x01\x85}\x8c\x01kK\x02s\x92", CallRecord(CALLED, (1,), items={"k": 2})),
        (b"(K\x01ia\nb\n", CallRecord(CALLED, (1,))),
        (b"(ca\nb\nK\x01o", CallRecord(CALLED, (1,))),
        (b"Pname\n", PersistentId("name")),
    ],
)  # fmt: skip
def test_calls_and_names_become_records(data: bytes, value: object) -> None:
    found = read_pickle(io.BytesIO(data + b"."), "a.pt")
    assert str(found) == str(value)  # because: each record is equal to itself alone
    with pytest.raises(DataError, match=r"a\.pt holds a (pickle that is cut short|damaged pickle)"):
        read_pickle(io.BytesIO(data), "a.pt")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (hostile.NESTED + b"2\x93", "is a tuple, but must be a text"),
        (hostile.UNHASHABLE_SOON, "a key in the pickle is neither"),
        (hostile.COPIES, "makes more than 256 MiB"),
        (hostile.GIANT, "a number has 1329 bits"),
        (hostile.BYTES_2_40, "but only"),
        (b"}" + b"\x8a\x09" + bytes(8) + b"\x01" + b"Ns", "a key in the pickle is a number beyond"),
        (b"}(" + b"K\x01" * 20 + b"tNs", "a key in the pickle has 20 parts"),
        (b"]cbuiltins\nlist\nK\x01\x85R", "from a value that is not a list"),
        (b"N" + b"p" + b"9" * 30 + b"\n", "a key in the pickle is a number beyond"),
        (ORDERED + b"](" + b"(" + b"K\x01" * 20 + b"tN\x86e\x85R", "a key in the pickle has 20 parts"),
        (b"Nt", "finds no mark"), (b"(0N(s", "finds a mark"), (b"N\x94i", "damaged pickle"),
        pytest.param(b"N" * 5_600_000, "makes more than", marks=pytest.mark.wide),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)  # fmt: skip
def test_what_it_asks_for_is_refused(data: bytes, says: str) -> None:
    began = time.process_time()
    with pytest.raises(DataError, match=says) as caught:
        read_pickle(io.BytesIO(b"\x80\x04" + data + b"."), "a.pt")
    assert len(str(caught.value)) < 400
    assert time.process_time() - began < 20


def test_a_length_is_compared_with_what_may_be_read() -> None:
    with pytest.raises(DataError, match=f"the pickle asks for .* at most {MAX_PICKLE_BYTES} are allowed"):
        read_pickle(BoundedFile(io.BufferedReader(_Given(b"\x8e" + struct.pack("<Q", 1 << 40)))), "a.pt")


def test_honest_values_are_what_they_were() -> None:
    value = {"a": [1, 2.5, None, True, "x" * 300], "b": (1, (2, "c")), ("k", 1): {"n": 2**200}, 0.5: {}}
    for protocol in range(6):
        assert read_pickle(io.BytesIO(pickle.dumps(value, protocol)), "a.pt") == value


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (hostile.tensor(hostile.NESTED), "a storage's key is a tuple"),
        (hostile.DEEP, "nests its values deeper"),
        (b"ctorch._utils\n_rebuild_parameter\n)R", "a parameter without its tensor"),
        (b"ctorch._utils\n_rebuild_tensor_v2\nNR", "a tensor that cannot be read"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_what_cannot_be_a_tensor_is_refused(data: bytes, says: str, tmp_path: Path) -> None:
    hostile.archive(tmp_path / "a.pt", hostile.state("model", data), **{"data/0": bytes(4)})
    with pytest.raises(DataError, match=says):
        TorchFile(tmp_path / "a.pt")


def test_an_archive_that_means_something_else_is_refused(tmp_path: Path) -> None:
    one = hostile.state("model", hostile.tensor(hostile.text("0")))
    hostile.archive(tmp_path / "big.pt", one, byteorder=b"big", **{"data/0": bytes(4)})
    hostile.archive(tmp_path / "view.pt", one.replace(b"K\x01tQ", b"K\x01)tQ"), **{"data/0": bytes(4)})
    hostile.archive(tmp_path / "twice.pt", one, **{"data/0": bytes(4)})
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(tmp_path / "twice.pt", "a") as file:
        file.writestr("archive/data/0", bytes(4))
    for name, says in (("big", "big-endian"), ("view", "a view of another"), ("twice", "two entries of the same name")):
        with pytest.raises(DataError, match=says):
            TorchFile(tmp_path / f"{name}.pt")


def test_an_entry_longer_than_its_file_is_refused(tmp_path: Path) -> None:
    for name in ("data.pkl", "byteorder", "data/0"):
        hostile.archive(tmp_path / "a.pt", hostile.state("model", b"N"), **{"data/0": bytes(4)})
        hostile.with_a_longer_entry(tmp_path / "a.pt", f"archive/{name}", 1 << 24)
        with pytest.raises(CheckpointError, match=f"{name} does not lie within the file"):
            TorchFile(tmp_path / "a.pt")


def test_numbers_that_changed_since_they_were_saved_are_refused(tmp_path: Path) -> None:
    """Also where several tensors share a storage, and each of them is a part of it."""
    whole = torch.arange(10.0, 16.0)
    torch.save({"whole": torch.arange(5.0), "parts": [whole[:2], whole[2:]]}, tmp_path / "a.pt")
    data = bytearray((tmp_path / "a.pt").read_bytes())
    for number in (4, 15):  # the last of one storage, and of the other
        changed = data.copy()
        changed[changed.rindex(struct.pack("<f", number))] ^= 1
        (tmp_path / "b.pt").write_bytes(changed)
        value = TorchFile(tmp_path / "b.pt").value
        found: list[StoredTensor] = [value["whole"]] if number == 4 else value["parts"]
        for stored in found:
            with pytest.raises(CheckpointError, match="does not have the CRC-32"):
                stored.read()
    value = TorchFile(tmp_path / "a.pt").value
    assert torch.equal(value["parts"][1].read(), whole[2:])


def test_an_archive_without_sums_is_read(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.arange(5.0)}, tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    stored = TorchFile(tmp_path / "a.pt").value["a"]
    assert torch.equal(stored.read(), torch.arange(5.0))
    (tmp_path / "a.pt").write_bytes((tmp_path / "a.pt").read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"a\.pt is cut short"):
        stored.read()


class _Given(io.RawIOBase):
    """These bytes, then zeros without an end."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = len(buffer)
        data = self._data[:count].ljust(count, b"\0")
        self._data = self._data[count:]
        buffer[:] = data
        return count
