"""Everything that commits files is on the disk before it has its name: writers one by one, at what they ask of the
system. A power cut then leaves the old output or the new one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest

from data_tools.corpora.download import fetch
from data_tools.preprocess.preprocess_pipeline import Options, preprocess
from data_tools.read.parse_chunks_and_bad_lines import OnError
from lmtrain.checkpoint.find_and_prune import prune_checkpoints
from lmtrain.checkpoint.save.commit import save_checkpoint
from lmtrain.data.store.dataset_writer import DatasetWriter
from lmtrain.data.store.index_cache import IndexBuild, IndexCache
from lmtrain.layout import Piece
from lmtrain.runfolder.read_and_record_run_end import write_stop
from lmtrain.runtime.files import atomic_files
from lmtrain.runtime.files.atomic_files import fsync_dir, new_folder, write_json
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer
from lmtrain.tokenizer.train import train_bpe
from tests.disk_record import DiskRecord, renaming_functions
from tests.unit.checkpoint.arrays import rank_data
from tests.unit.checkpoint.layouts import MODELS, draw, reshard_to, write
from tests.unit.data.writing import add_document
from tests.unit.data_tools.corpora.serving import Behaviour, serving

# functions that rename, and no writer below reaches -> why what they rename need not be on the disk
NOT_REACHED = {
    ("lmtrain/observe/hang_watch/heartbeat_server.py", "Hub.save_times"):
        "nobody waits for the disk to keep measured times: a start that cannot read them measures anew",
    ("lmtrain/train/record/trace_and_profile_steps.py", "ProfileWindow._write"):
        "training does not wait for a profile, of which another can be asked for",
    ("lmtrain/checkpoint/find_and_prune.py", "clear_leftovers"):
        "gives a checkpoint, which is on the disk, its old name back; if that is lost the next start does it again",
    ("lmtrain/checkpoint/reshard/write_target_files.py", "WorkFolder.restore_replaced"):
        "gives a checkpoint, which is on the disk, its old name back; if that is lost the next call does it again",
}  # fmt: skip


def json_files(root: Path) -> None:
    for value in (1, 2):
        write_json(root / "file.json", value)


def folders(root: Path) -> None:
    for text in ("old", "new"):
        with new_folder(root / "folder", replaces=True) as folder:
            (folder / "inner").mkdir()
            (folder / "inner" / "file").write_text(text)


def checkpoints(root: Path) -> None:
    for step in (1, 1, 2):
        data = rank_data([Piece("w", (3, 2), (0, 0), np.full((3, 2), step, np.float32))])
        save_checkpoint(root, step, data, {}, {"tokenizer.json": b"{}"})
    (root / "step_00000002" / "manifest.json").unlink()
    fsync_dir(root / "step_00000002")
    save_checkpoint(root, 2, data, {}, {})
    assert prune_checkpoints(root, 1) == ["step_00000001"]


def resharded(root: Path) -> None:
    arrays = draw(MODELS["tied"])
    source = write(root / "run", MODELS["tied"], "tp=1", arrays)
    for layout in ("tp=2", "pp=2"):
        reshard_to(source, root / "out", layout, overwrite=True)


def datasets(root: Path) -> None:
    for _ in range(2):
        with DatasetWriter(root / "data", np.uint16, overwrite=True) as writer:
            add_document(writer, [np.array([1, 2])])
            writer.describe(tokenizer=b"{}", fingerprint="abc", vocab_size=100, eod_id=None, num_bytes=42)


def indexes(root: Path) -> None:
    def build(index: IndexBuild) -> dict[str, int]:
        index.create("made", "<i8", 5)[:] = np.arange(5)
        index.append("grown", "<i4", np.arange(3))
        return {"answer": 42}

    for _ in range(2):
        folder = IndexCache(root).get("kind", dict, build).folder
        assert folder is not None
        (folder / "made").unlink()  # such an index is built again
    IndexCache(root).get("kind", dict, build)


def preprocessed(root: Path) -> None:
    text = root / "text.jsonl"
    for texts in (["one text"], ["one text", "and another"]):
        text.write_text("".join(json.dumps({"text": each}) + "\n" for each in texts) + "no JSON\n")
        options = Options(on_error=OnError.QUARANTINE, workers=1, shard_tokens=1, overwrite=True)
        preprocess([text], Tokenizer.load(root / "tokenizer.json"), root / "data", options)
    assert (root / "data.rejects.jsonl").exists()


def fetched(root: Path) -> None:
    content = b"a corpus"
    with serving(Behaviour(content)) as url:
        fetch([url], root / "file", sha256=hashlib.sha256(content).hexdigest())


def ends_of_a_run(root: Path) -> None:
    for replaces in (False, False, True):
        assert write_stop(root, "why", 76, replace=replaces) is None


WRITERS: list[Callable[[Path], None]] = [
    json_files, folders, checkpoints, resharded, datasets, indexes, preprocessed, fetched, ends_of_a_run,
]  # fmt: skip


@contextmanager
def recorded(root: Path, *, exchanges: bool = True) -> Iterator[DiskRecord]:
    with pytest.MonkeyPatch.context() as patch:
        if not exchanges:  # as on some network file systems
            patch.setattr(atomic_files, "exchange", lambda *_: False)
        train_bpe(["one text"] * 3, 260).save(root / "tokenizer.json")
        with closing(DiskRecord(patch, root)) as record:
            yield record


@pytest.mark.parametrize("exchanges", [True, False])
@pytest.mark.parametrize("writer", WRITERS)
def test_what_has_its_name_is_on_the_disk(tmp_path: Path, writer: Callable[[Path], None], exchanges: bool) -> None:
    with recorded(tmp_path, exchanges=exchanges) as disk:
        writer(tmp_path)
        assert disk.problems("text.jsonl") == []


def test_every_function_that_renames_is_run_here_or_listed_with_a_reason(tmp_path: Path) -> None:
    reached = set[tuple[str, str]]()
    for writer in set(WRITERS) - {resharded}:  # which takes long, and renames by functions that others call too
        (tmp_path / writer.__name__).mkdir()
        with recorded(tmp_path / writer.__name__, exchanges=False) as disk:
            writer(disk.root)
            reached |= disk.callers
    assert renaming_functions() - reached == NOT_REACHED.keys()
