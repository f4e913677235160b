"""Pickles that ask for more than there is, spelled out instruction by instruction, for the tests that read them."""

from __future__ import annotations

import math
import struct
import zipfile
from pathlib import Path


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def state(key: str, value: bytes) -> bytes:
    """A saved dict of one entry, whose value these instructions make."""
    return b"\x80\x04}" + text(key) + value + b"s."


def tensor(key: bytes) -> bytes:
    """A tensor of one number in the storage that these instructions name."""
    storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + key + text("cpu") + b"K\x01tQ"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\x00K\x01\x85K\x01\x85\x89NtR"


# () in a pair of itself, in a pair of that, ...: 60 instructions that are 2 ** 60 tuples when written out
NESTED = b")" + b"2\x86" * 60
# {"a": x, "b": x} of such a dict, and so on: as many paths
SHARED = (
    b"}q\x000"
    + b"".join(
        b"}q" + bytes([i]) + text("a") + b"h" + bytes([i - 1]) + b"s" + text("b") + b"h" + bytes([i - 1]) + b"s0"
        for i in range(1, 60)
    )
    + b"h\x3b"
)
CYCLE = b"}q\x00" + text("a") + b"h\x00s"
COPIES = (
    b"(" + b"N" * 60_000 + b"lq\x00cbuiltins\nlist\nq\x01h\x00\x85q\x020]" + b"(" + b"h\x01h\x02R" * 10_000 + b"e"
)
DEEP = b")" + b"\x85" * 5000
GIANT = b"\x8a\xa7" + bytes(166) + b"\x01"  # a number of 400 digits
BYTES_2_40 = b"\x8e" + struct.pack("<Q", 1 << 40)
UNHASHABLE_SOON = b"}" + NESTED + b"Ns"
NUMBERS = {"inf": b"G" + struct.pack(">d", math.inf), "nan": b"G" + struct.pack(">d", math.nan),
           "negative": b"J\xff\xff\xff\xff", "huge": b"G" + struct.pack(">d", 1e300)}  # fmt: skip


def archive(path: Path, pickle: bytes, **entries: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as file:
        for name, data in {"data.pkl": pickle, "byteorder": b"little", **entries}.items():
            file.writestr(f"archive/{name}", data)


def with_a_longer_entry(path: Path, name: str, more: int) -> None:
    """The directory of an archive says that this entry has so many more bytes than the file."""
    data = bytearray(path.read_bytes())
    at = data.rindex(name.encode()) - 46
    assert data[at : at + 4] == b"PK\x01\x02"
    size = struct.unpack_from("<L", data, at + 24)[0] + more
    struct.pack_into("<LL", data, at + 20, size, size)
    path.write_bytes(data)
