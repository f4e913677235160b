"""Files of text in every wrapping, damaged, through the verbs that read them: words, or documents that add up."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow
import zstandard
from pyarrow import parquet

from tests.fuzz.fuzzer import Case, Ran, Runner, honest
from tests.fuzz.mutate import HOSTILE, change_any, change_file, some_bytes

PACK: dict[str, Callable[[bytes], bytes]] = {
    "": bytes, ".gz": gzip.compress, ".zst": zstandard.compress, ".bz2": bz2.compress, ".xz": lzma.compress
}  # fmt: skip
STEPS = (
    ("clean", "--rule", "none"), ("clean", "--rule", "c4_lines"), ("dedupe",), ("split",), ("sample", "--count", 7),
    ("shuffle",),
)  # fmt: skip
DOCUMENTS = [
    {"id": number, "text": f"Document {number} is of some words, and says them. " * 9, "more": [number]}
    for number in range(40)
]
LINES = "".join(json.dumps(document) + "\n" for document in DOCUMENTS).encode()


class Fuzz:
    def __init__(self, folder: Path, run: Runner) -> None:
        self.folder = folder
        for suffix, pack in PACK.items():
            (folder / f"lines.jsonl{suffix}").write_bytes(pack(LINES))
            (folder / f"one.txt{suffix}").write_bytes(pack(LINES))
        texts = [document["text"] for document in DOCUMENTS]
        parquet.write_table(pyarrow.table({"text": texts}), folder / "rows.parquet")
        self.names = sorted(path.name for path in folder.iterdir())
        made = partial(honest, run, folder=folder)
        self.honest = {step: made(*_call(step, folder / "lines.jsonl", folder, ())) for step in STEPS}
        self.learned = made(*_train(folder / "lines.jsonl", folder))

    def case(self, rng: random.Random, folder: Path) -> Case:
        path = folder / rng.choice(self.names)
        shutil.copyfile(self.folder / path.name, path)
        skips: tuple[str, ...] = rng.choice(((), ("--on-error", "skip")))
        kind = rng.random()
        if kind < 0.15:
            what, skips = change_file(path, rng), ()  # because: a terabyte may well take an hour to be passed over
        elif kind < 0.5 and (pack := _pack_of(path)) is not None:
            inner, changed = _some_text(rng)
            path.write_bytes(pack(changed))
            what = f"{path.name}: in what is packed, {inner}"
        else:
            what, skips = change_any(path, rng), ()
        if rng.random() < 0.15:
            return Case(what, _train(path, folder), self.learned)
        step = rng.choice(STEPS)
        return Case(what, _call(step, path, folder, skips), self.honest[step], partial(_adds_up, folder / "out"))


def _pack_of(path: Path) -> Callable[[bytes], bytes] | None:
    return None if path.suffix == ".parquet" else PACK.get(path.suffix, bytes)


def _some_text(rng: random.Random) -> tuple[str, bytes]:
    if rng.random() < 0.5:
        return some_bytes(LINES, rng)
    lines, at, value = LINES.splitlines(), rng.randrange(len(DOCUMENTS)), rng.choice(HOSTILE)
    lines[at] = json.dumps(DOCUMENTS[at] | {rng.choice(("text", "id", "extra")): value}).encode()
    return f"{ascii(value)[:40]} in line {at + 1}", b"\n".join(lines)


def _call(step: tuple[object, ...], path: Path, folder: Path, more: tuple[str, ...]) -> tuple[object, ...]:
    workers = () if step[0] == "shuffle" else ("--workers", 1)
    name = "out" if step[0] == "split" else "out/documents.jsonl"
    return "corpus", step[0], path, "--output", folder / name, *step[1:], *workers, *more, "--overwrite"


def _train(path: Path, folder: Path) -> tuple[object, ...]:
    return "tokenizer", "train", path, "--output", folder / "tokenizer", "--vocab-size", 300


def _adds_up(output: Path, ran: Ran) -> str:
    """What the report says is what is there, and there is something."""
    [path] = output.glob("*.report.json")
    report = json.loads(path.read_bytes())
    lines = [json.loads(line) for file in output.glob("*.jsonl") for line in file.read_bytes().splitlines()]
    if len(lines) != report["num_out"] or not lines:
        return f"{len(lines)} documents where the report says {report['num_out']}"
    if report["num_in"] != report["num_out"] + sum(report["dropped"].values()):
        return f"the report does not add up: {report}"
    return ""
