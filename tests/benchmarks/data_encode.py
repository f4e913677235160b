"""JSON lines to ids in one process: MB of text per CPU-second, ours beside `tokenizers` and gigatoken.

    python -m tests.benchmarks.data_encode --vocab gpt2-vocab.json --bert-vocab vocab.txt --books books.jsonl.xz
    python -m tests.benchmarks.data_encode --smoke       anywhere: a small corpus and vocabularies of our own

Every run is a process of its own, reads the file and makes arrays of ids; runs are interleaved and medians compared.
`tokenizers` gets the first `--slow-mb` of the corpus, its cost a byte being the same throughout. gigatoken takes part
if it can be imported (`--pythonpath` adds a folder). The ids of all are compared by their sha256.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from lmtrain.tokenizer.bulk_encoding import CompiledEncoder, build_encoder
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer
from lmtrain.tokenizer.train import train_bpe, train_wordpiece
from tests.benchmarks.data_preprocess import build_corpus, head_of

SLICE_BYTES = 8 << 20


# ---- the contenders: a tokenizer.json and a file of JSON lines to arrays of ids


def lmtrain(tokenizer: Path, corpus: Path) -> Callable[[], Any]:
    encoder = build_encoder(Tokenizer.load(tokenizer))
    assert isinstance(encoder, CompiledEncoder), "the compiled helpers are missing: run `make native`"
    return lambda: [encoder.encode_jsonl(data, "text").tokens for data in slices(corpus)]


def library(tokenizer: Path, corpus: Path) -> Callable[[], Any]:
    inner = tokenizers.Tokenizer.from_file(str(tokenizer))
    inner.encode_special_tokens = True

    def run() -> list[NDArray[np.uint16]]:
        arrays: list[NDArray[np.uint16]] = []
        for data in slices(corpus):
            texts = [json.loads(line)["text"] for line in data.splitlines()]
            for at in range(0, len(texts), 256):
                encodings = inner.encode_batch_fast(texts[at : at + 256], add_special_tokens=False)
                arrays.extend(np.array(encoding.ids, np.uint16) for encoding in encodings)
        return arrays

    return run


def gigatoken(tokenizer: Path, corpus: Path) -> Callable[[], Any]:
    import gigatoken as module  # type: ignore[import-not-found,unused-ignore]

    encoder = module.Tokenizer(str(tokenizer))
    source = module.JsonlFileSource([str(corpus)], field="text")
    return lambda: encoder.encode_files(source)


CONTENDERS = {"lmtrain": lmtrain, "tokenizers": library, "gigatoken": gigatoken}


def slices(path: Path) -> Iterator[bytes]:
    """Whole lines, some megabytes at a time."""
    with path.open("rb") as file:
        size, at = path.stat().st_size, 0
        while at < size:
            data = os.pread(file.fileno(), SLICE_BYTES, at)
            if at + len(data) < size:
                data = data[: data.rindex(b"\n") + 1]
            at += len(data)
            yield data


def one_run(name: str, tokenizer: Path, corpus: Path) -> None:
    run = CONTENDERS[name](tokenizer, corpus)
    began = time.process_time()
    found = run()
    cpu = time.process_time() - began
    digest = hashlib.sha256()
    for array in found if isinstance(found, list) else [np.asarray(document) for document in found]:
        digest.update(array.astype(np.uint16).tobytes())
    print(json.dumps({"cpu": cpu, "sha256": digest.hexdigest()}))


# ---- side by side


@dataclass(frozen=True)
class Text:
    path: Path
    num_bytes: int


def measure(name: str, tokenizer: Path, text: Text, pythonpath: str) -> dict[str, float | str]:
    environment = {**os.environ, "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": pythonpath}
    command = [sys.executable, "-m", __spec__.name, "--run", name, str(tokenizer), str(text.path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, float | str] = json.loads(done.stdout)
    return found


def compare(title: str, tokenizer: Path, entries: dict[str, list[Text]], rounds: int, pythonpath: str) -> None:
    """Every contender on its texts, in turn; then medians, and the ids of those that had the same text."""
    runs = [(name, text) for name, texts in entries.items() for text in texts]
    found: dict[tuple[str, Text], list[dict[str, float | str]]] = {run: [] for run in runs}
    for _ in range(rounds):
        for name, text in runs:
            found[name, text].append(measure(name, tokenizer, text, pythonpath))
    print(title)
    speeds: dict[str, float] = {}
    for (name, text), results in found.items():
        values = [text.num_bytes / 1e6 / float(result["cpu"]) for result in results]
        if name not in speeds:  # what a contender does with the head alone is only for the ids
            speeds[name] = statistics.median(values)
            shown = ", ".join(f"{value:.1f}" for value in values)
            print(f"  {name:10} {speeds[name]:8.1f} MB/cpu-s on {text.num_bytes / 1e6:.1f} MB (rounds: {shown})")
    for name in speeds.keys() - {"lmtrain"}:
        print(f"  lmtrain is {speeds['lmtrain'] / speeds[name]:.2f} x {name}")
    for text in {text for _, text in runs}:
        digests = {result["sha256"] for (_, t), results in found.items() if t == text for result in results}
        print(f"  ids of {text.num_bytes / 1e6:.1f} MB: {'the same' if len(digests) == 1 else 'DIFFERENT'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=Path, help="GPT-2's vocab.json, or any tokenizer of its kind")
    parser.add_argument("--bert-vocab", type=Path, help="BERT's vocab.txt")
    parser.add_argument("--books", type=Path, help="a .jsonl or .jsonl.xz of books to begin with")
    parser.add_argument("--corpus-mb", type=int, default=350)
    parser.add_argument("--slow-mb", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pythonpath", default="", help="where gigatoken is, if not in this Python")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--run", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        one_run(arguments.run[0], Path(arguments.run[1]), Path(arguments.run[2]))
        return
    if arguments.smoke:
        arguments.corpus_mb, arguments.slow_mb, arguments.rounds = 20, 2, 2
    sys.path[:0] = [arguments.pythonpath] * bool(arguments.pythonpath)
    with tempfile.TemporaryDirectory() as folder:
        side_by_side(arguments, Path(folder))


def side_by_side(arguments: argparse.Namespace, folder: Path) -> None:
    corpus, head = folder / "corpus.jsonl", folder / "head.jsonl"
    size, _ = build_corpus(corpus, arguments.corpus_mb * 10**6, arguments.books)
    whole, part = Text(corpus, size), Text(head, head_of(corpus, head, arguments.slow_mb * 10**6))
    texts = [json.loads(line)["text"] for line in head.read_text("utf-8").split("\n") if line]
    bpe = Tokenizer.load(arguments.vocab) if arguments.vocab else train_bpe(texts, 30_000)
    words = Tokenizer.load(arguments.bert_vocab) if arguments.bert_vocab else train_wordpiece(texts, 20_000, True)
    bpe.save(folder / "bpe.json")
    words.save(folder / "words.json")
    entries = {"lmtrain": [whole, part], "tokenizers": [part]}
    both = entries | ({"gigatoken": [whole]} if importlib.util.find_spec("gigatoken") else {})
    compare("byte-level BPE", folder / "bpe.json", both, arguments.rounds, arguments.pythonpath)
    compare("WordPiece", folder / "words.json", entries, arguments.rounds, arguments.pythonpath)


if __name__ == "__main__":
    main()
