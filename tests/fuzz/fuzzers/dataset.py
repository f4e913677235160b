"""Datasets, changed, through the verbs that open them: refused in words, or their numbers are right.

Some changes are signed: whoever made them computed the checksums and hashes anew. Then other numbers are no fault, but
a crash, a hang or eaten memory still are.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from data_tools.preprocess.preprocess_pipeline import Options, preprocess
from lmtrain.data.store.block_checksums import BlockSums, build_block_file
from lmtrain.data.store.indexed_dataset import SUFFIXES, dataset_file, hash_without
from lmtrain.runtime.files.crc32c import crc32c
from lmtrain.tokenizer.train import train_bpe
from tests.fuzz.fuzzer import Case, Ran, Runner, honest
from tests.fuzz.mutate import as_json, change_any, change_bytes, some_json

RUN = (
    "train.steps=3", "train.global_batch=8", "train.micro_batch=4", "train.valid_interval_steps=0",
    "model.seq_len=64", "model.num_layers=1", "model.width=16", "model.num_heads=2", "model.vocab_multiple=8",
    "compute.threads=1", "compute.device=cpu", "observe.tensorboard=false", "schedule.warmup_steps=1",
    "checkpoint.interval_steps=null",
)  # fmt: skip
SETTINGS = (
    (), ("data.document_mask=true",), ("data.packing=best_fit", "data.document_mask=true"), ("data.packing=document",),
    ("data.order=megatron",), ("data.verify=full",),
)  # fmt: skip


class Fuzz:
    def __init__(self, folder: Path, run: Runner) -> None:
        """A dataset of ours, the same as another tool leaves it with what was read of it, and one beside."""
        self.folder, self.run = folder, run
        rng = random.Random(0)
        words = [f"word{i}" for i in range(90)]
        self.tokenizer = folder / "tokenizer.json"
        tokenizer = train_bpe([" ".join(words)], 300)
        tokenizer.save(self.tokenizer)
        for name, num in (("data", 2500), ("beside", 50)):
            text = folder / f"{name}.jsonl"
            lines = (" ".join(rng.choices(words, k=rng.randrange(1, 90))) for _ in range(num))
            text.write_text("\n".join(json.dumps({"text": line}) for line in lines))
            preprocess([text], tokenizer, folder / name, Options(workers=1))
        self.prefix, self.beside = folder / "data", folder / "beside"
        assert dataset_file(self.prefix, ".bin").stat().st_size > 2 << 16
        self._settings = (
            f"data.tokenizer={self.tokenizer}", "model.seq_len=64", "train.steps=9", "schedule.warmup_steps=0"
        )  # fmt: skip
        self.known: dict[tuple[object, ...], tuple[Ran, object]] = {}
        lay_out(self.prefix, folder / "read" / "data", foreign=True)
        honest(run, "pretrain", f"data.path={folder / 'read' / 'data'}", f"data.tokenizer={self.tokenizer}",
               "data.verify=full", *RUN, f"run.dir={folder / 'read' / 'run'}", folder=folder / "read")  # fmt: skip
        shutil.rmtree(folder / "read" / "run")

    def _show(self, prefix: Path, *more: str) -> tuple[object, ...]:
        return ("data", "show", prefix, "--sample", 1, "--sample", 40, "--json", *self._settings, *more)

    def _verbs(self, rng: random.Random) -> tuple[str, Callable[[Path], tuple[object, ...]]]:
        """A verb in words, and its call on the dataset of a folder."""
        extra = rng.choice(SETTINGS)
        verbs: list[tuple[str, Callable[[Path], tuple[object, ...]]]] = [
            ("inspect", lambda at: ("data", "inspect", at / "data", "--json")),
            ("inspect words", lambda at: ("inspect", at / "data", "--all")),
            ("verify", lambda at: ("data", "verify", at / "data", "--json")),
            ("stats", lambda at: ("data", "stats", at / "data", "--json")),
            ("documents", lambda at: ("data", "show", at / "data", "--random", 4, "--ids", "--json")),
            ("merge", lambda at: ("data", "merge", at / "data", at / "data", "--output", at / "out")),
            ("split", lambda at: ("data", "split", at / "data", "--shares", "1,1", "--seed", 1,
                                  "--output", at / "out", "--output", at / "other")),
            (f"samples {extra}", lambda at: self._show(at / "data", *extra)),
            (f"blend {extra}", lambda at: ("data", "index", "data=blend", *self._settings, *extra, "--json",
                f"data.datasets=[{{path: '{at / 'data'}', weight: 2}}, {{path: '{self.beside}', weight: 1}}]")),
        ]  # fmt: skip
        if rng.random() < 0.15:
            call = ("pretrain", f"data.tokenizer={self.tokenizer}", *RUN, *extra)
            return f"pretrain {extra}", lambda at: (*call, f"data.path={at / 'data'}", f"run.dir={at / 'run'}")
        return rng.choice(verbs)

    def case(self, rng: random.Random, folder: Path) -> Case:
        foreign = rng.random() < 0.25
        lay_out(self.folder / "read" / "data" if foreign else self.prefix, folder / "data", foreign)
        verb, call = self._verbs(rng)
        if foreign and verb == "documents":
            verb, call = "stats", lambda at: ("data", "stats", at / "data", "--json")
        key = (verb, foreign)
        if key not in self.known:
            at = self.folder / f"honest{len(self.known)}"
            lay_out(self.folder / "read" / "data" if foreign else self.prefix, at / "data", foreign)
            ran = honest(self.run, *call(at), folder=at, writes=(self.folder,))
            self.known[key] = ran, numbers(verb, ran, at)
        before, expected = self.known[key]
        files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
        signed = not foreign and rng.random() < 0.4
        path = rng.choice(files)
        change = change_bytes if rng.random() < 0.6 else change_any
        what = change_signed(folder / "data", rng) if signed else change(path, rng)

        def wrong(ran: Ran) -> str:
            found = numbers(verb, ran, folder)
            # because: nobody saw what it was before, and its structure is whole
            unseen = foreign and path.suffix == ".idx"
            return "" if signed or unseen or found == expected else f"other numbers: {found} for {expected}"[:600]

        return Case(f"{'foreign ' * foreign}{verb}: {what}", call(folder), before, wrong, writes=(self.folder,))


def lay_out(source: Path, target: Path, foreign: bool) -> None:
    """A copy, with the times of its files; of a foreign dataset the two files and what was noted of them."""
    target.parent.mkdir(parents=True, exist_ok=True)
    for suffix in (".bin", ".idx") if foreign else SUFFIXES:
        shutil.copy2(dataset_file(source, suffix), dataset_file(target, suffix))
    if dataset_file(source, ".index").exists():
        shutil.copytree(dataset_file(source, ".index"), dataset_file(target, ".index"))


def change_signed(prefix: Path, rng: random.Random) -> str:
    """A change whose checksums and hashes are right."""
    suffix = rng.choice((".bin", ".idx", ".idx", ".json", ".json", ".blocks"))
    path, sidecar = dataset_file(prefix, suffix), dataset_file(prefix, ".json")
    if suffix == ".json":
        what, tree = some_json(json.loads(path.read_bytes()), rng)
    else:
        what, tree = change_bytes(path, rng), json.loads(sidecar.read_bytes())
    data, index = dataset_file(prefix, ".bin").read_bytes(), dataset_file(prefix, ".idx").read_bytes()
    if suffix in (".bin", ".idx"):
        sums = BlockSums()
        sums.add(memoryview(data))
        dataset_file(prefix, ".blocks").write_bytes(build_block_file(sums.sums(), len(data), crc32c(index)))
    if isinstance(tree, dict):
        if suffix != ".json":
            tree["content_sha256"] = hashlib.sha256(data + index).hexdigest()
            tree["blocks_sha256"] = hashlib.sha256(dataset_file(prefix, ".blocks").read_bytes()).hexdigest()
        tree["sidecar_sha256"] = hash_without(tree)
    sidecar.write_bytes(as_json(tree))
    return f"signed: {path.name}: {what}"


def numbers(verb: str, ran: Ran, folder: Path) -> object:
    """What a call found, as far as it is of the data."""
    if verb in ("merge", "split"):
        return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
                for name in ("out.bin", "out.idx", "other.bin") if (folder / name).exists()}  # fmt: skip
    if verb.startswith("pretrain"):
        rows = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
        return [(row["loss"], row["samples_hash"]) for row in rows if row["event"] == "step"]
    if verb == "inspect words":
        return None
    lines = ran.output.splitlines()
    first = next(i for i, line in enumerate(lines) if line in ("{", "["))
    found = json.loads("\n".join(lines[first:]))
    if verb == "inspect":
        return {name: found[name] for name in ("documents", "sequences", "tokens", "dtype", "bytes")}
    if verb == "verify":
        return [one["content_sha256"] for one in found]
    for one in found if isinstance(found, list) else [found]:
        for name in ("dataset", "seconds"):
            one.pop(name, None)
    return found
