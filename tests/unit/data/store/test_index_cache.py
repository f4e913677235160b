"""An index is built once, used only for the inputs it was built from, and never read half built."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmtrain.data.store import index_cache
from lmtrain.data.store.index_cache import Index, IndexBuild, IndexCache, all_within, is_ascending
from lmtrain.errors import LmtrainError, StorageError


class Builder:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self, build: IndexBuild) -> dict[str, Any]:
        self.times += 1
        build.create("made", "<i8", 5)[:] = np.arange(5)
        build.create("none", "<i4", 0)
        build.append("grown", "<i4", np.arange(3))
        build.append("grown", "<i4", np.arange(2))
        return {"answer": 42}


def check(index: Index) -> None:
    assert index.facts == {"answer": 42}
    assert index.arrays["made"].tolist() == [0, 1, 2, 3, 4]
    assert index.arrays["grown"].tolist() == [0, 1, 2, 0, 1]
    assert index.arrays["none"].tolist() == []
    assert [index.arrays[name].dtype.str for name in ("made", "grown", "none")] == ["<i8", "<i4", "<i4"]


def test_an_index_is_built_once_and_then_read(tmp_path: Path) -> None:
    builder = Builder()
    for _ in range(3):
        check(IndexCache(tmp_path / "new" / "cache").get("k", lambda: {"a": [1, None]}, builder))
    assert builder.times == 1
    assert [path.name[:2] for path in (tmp_path / "new" / "cache").iterdir() if path.is_dir()] == ["k-"]


def test_in_memory(tmp_path: Path) -> None:
    builder = Builder()
    index = IndexCache(None).get("k", dict, builder)
    check(index)
    assert index.folder is None


@pytest.mark.parametrize("other", [("k", {"a": 2}), ("k", {"a": 1, "b": 1}), ("j", {"a": 1}), ("k", {"a": "1"})])
def test_other_inputs_make_another_index(tmp_path: Path, other: tuple[str, dict[str, Any]]) -> None:
    builder = Builder()
    IndexCache(tmp_path).get("k", lambda: {"a": 1}, builder)
    kind, about = other
    check(IndexCache(tmp_path).get(kind, lambda: about, builder))
    assert builder.times == 2


def test_a_stale_index_under_the_right_name_is_built_again(tmp_path: Path) -> None:
    builder = Builder()
    [folder] = [IndexCache(tmp_path).get("k", lambda: {"a": 1}, builder).folder]
    assert folder is not None
    facts = json.loads((folder / "facts.json").read_text())
    (folder / "facts.json").write_text(json.dumps(facts | {"about": {"a": 2}}))
    check(IndexCache(tmp_path).get("k", lambda: {"a": 1}, builder))
    assert builder.times == 2


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "facts", "json", "name", "dtype"])
def test_a_damaged_index_is_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    monkeypatch.setattr(index_cache, "_CRC_BYTES", 16)  # so that the damage is not in the last stretch that is summed
    builder = Builder()
    folder = IndexCache(tmp_path).get("k", dict, builder).folder
    assert folder is not None
    made, facts = folder / "made", json.loads((folder / "facts.json").read_text())
    if damage == "flip":
        made.write_bytes(b"\x01" + made.read_bytes()[1:])
    elif damage == "cut":
        made.write_bytes(made.read_bytes()[:-8])
    elif damage == "remove":
        made.unlink()
    elif damage == "facts":
        (folder / "facts.json").unlink()
    elif damage == "json":
        (folder / "facts.json").write_text("{")
    elif damage == "name":
        facts["arrays"]["../made"] = facts["arrays"].pop("made")
        (folder / "facts.json").write_text(json.dumps(facts))
    else:
        facts["arrays"]["made"]["dtype"] = "|O8"
        (folder / "facts.json").write_text(json.dumps(facts))
    check(IndexCache(tmp_path).get("k", dict, builder))
    check(IndexCache(tmp_path).get("k", dict, builder))
    assert builder.times == 2


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def fail(build: IndexBuild) -> dict[str, Any]:
        Builder()(build)
        raise OSError(28, "No space left on device")

    with pytest.raises(StorageError, match="disk is full"):
        IndexCache(tmp_path).get("k", dict, fail)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []


def test_files_of_a_killed_build_are_removed(tmp_path: Path) -> None:
    builder = Builder()
    folder = IndexCache(tmp_path).get("k", dict, builder).folder
    assert folder is not None
    left = tmp_path / f".{folder.name}.abc"
    folder.rename(left)
    check(IndexCache(tmp_path).get("k", dict, builder))
    assert not left.exists()


SCRIPT = """
import sys
from pathlib import Path
import numpy as np
from lmtrain.data.store.index_cache import IndexCache

def build(made):
    with open(sys.argv[2], "a") as file:
        file.write("built\\n")
    made.create("numbers", "<i8", 300_000)[:] = np.arange(300_000)
    return {}

index = IndexCache(Path(sys.argv[1])).get("k", lambda: {}, build)
assert index.arrays["numbers"].sum() == 300_000 * 299_999 // 2
"""


def test_processes_that_need_an_index_at_once_build_it_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "cache"), str(tmp_path / "log")]
    running = [subprocess.Popen(command) for _ in range(2)]
    assert [process.wait(timeout=120) for process in running] == [0] * 2
    assert (tmp_path / "log").read_text() == "built\n"


def test_a_folder_that_cannot_be_written() -> None:
    nobodys = Path("/sys/lmtrain.index")  # not even root makes folders there
    index = IndexCache(nobodys).get("k", dict, Builder())
    check(index)
    assert (index.folder, nobodys.exists()) == (None, False)


def test_any_bit_of_an_index_that_changes_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One bit at any place of any of its files: never used, built again, and said."""
    builder, chance = Builder(), random.Random(0)
    folder = IndexCache(tmp_path).get("k", lambda: {"a": 1}, builder).folder
    assert folder is not None
    for times in range(1, 16):
        file = chance.choice([path for path in sorted(folder.iterdir()) if path.stat().st_size])
        data = bytearray(file.read_bytes())
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        file.write_bytes(data)
        check(IndexCache(tmp_path).get("k", lambda: {"a": 1}, builder))
        assert builder.times == times + 1
        assert f"warning: the index {folder} is damaged" in capsys.readouterr().err


def test_entries_out_of_range_are_not_used_whatever_their_checksums_say(tmp_path: Path) -> None:
    builder = Builder()
    for largest, times in ((4, 1), (4, 1), (3, 2)):
        if largest == 3:  # of what was built, which is then not what is asked for
            with pytest.raises(LmtrainError, match="was just built, but cannot be read"):
                IndexCache(tmp_path).get("k", dict, builder, lambda index: all_within(index.arrays["made"], 0, 3))
        else:
            IndexCache(tmp_path).get("k", dict, builder, lambda index: all_within(index.arrays["made"], 0, 4))
        assert builder.times == times


def test_ranges() -> None:
    numbers = np.arange(3_000_000)
    for some in (numbers, numbers[:0]):
        assert is_ascending(some)
        assert all_within(some, 0, 2_999_999)
    for at in (1 << 20, (1 << 20) - 1, 2_999_999):
        numbers[at] -= 2
        assert not is_ascending(numbers)
        numbers[at] += 2
    assert not all_within(numbers, 0, 2_999_998)
    assert not all_within(numbers, 1, 2_999_999)
