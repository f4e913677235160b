"""What it costs the loader to check tokens as they are read, beside an earlier checkout that checked nothing.

    python -m tests.benchmarks.checked_reads --before ../before --folder beside

One process each of: the earlier checkout, this one with data.verify=read, the same over a dataset without checksums
(what is first read is noted), this one with data.verify=none, and the earlier checkout again, which tells how far equal
code differs on this machine. They read the same dataset, through Loader.read and in random order, and take turns
sixteen times in each pass; the first pass hashes every byte, later ones look up that it was done. CPU seconds are
compared, medians of the rounds; a round opens the dataset anew. Ends with 1 where checking costs more than 5%.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np

from lmtrain.data.store.dataset_writer import DatasetWriter
from lmtrain.data.store.indexed_dataset import dataset_file
from tests.benchmarks.data_index import lognormal

ROOT = Path(__file__).resolve().parents[2]
MOST, TURNS, LATER = 1.05, 16, 2
VOCAB = 50_257
KINDS = {
    "concatenated": "CausalDataset(indexed, documents, 2048, vocab_size=50257)",
    "with document masks": "CausalDataset(indexed, documents, 2048, True, 50257)",
    "packed by best fit": "PackedDataset(indexed, documents, 2048, 'best_fit', True, 50257)",
    "Megatron-LM's order": "MegatronDataset(indexed, documents, 2048, None, 1, vocab_size=50257)",
    "masked sentence pairs": "MaskedDataset(indexed, documents, 512, words, MaskedSettings(path='.'), 1)",
}
# lines that both checkouts understand
READER = """
import sys, time
from pathlib import Path
import numpy as np
import torch
from lmtrain.data.batch_size_per_step import BatchPlan
from lmtrain.data.loader import Loader
from lmtrain.data.data_settings import MaskedSettings
from lmtrain.data.sample_dataset_interface import Order
from lmtrain.data.samples.causal_language_samples import CausalDataset
from lmtrain.data.samples.masked_language_samples import MaskedDataset, MaskVocabulary
from lmtrain.data.samples.megatron_sample_order import MegatronDataset
from lmtrain.data.samples.packing import PackedDataset
from lmtrain.data.store.indexed_dataset import IndexedDataset
torch.set_num_threads(1)
words = MaskVocabulary(np.zeros(50257, np.uint8), {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4})

def opened(prefix, verify, made, turns):
    indexed = IndexedDataset.open(Path(prefix))
    if verify:
        record = Path(prefix + ".seen")
        record.unlink(missing_ok=True)
        indexed.watch(verify, record, print)
    documents = range(indexed.num_documents)
    dataset = eval(made, {**globals(), **locals()})
    order = dataset.order(1) if hasattr(dataset, "order") else Order(dataset.num_samples, 1)
    return Loader(dataset, order, BatchPlan(16), 16), np.array_split(np.arange(dataset.num_samples // 16), int(turns))

loader = None
for line in sys.stdin:
    if "|" in line:
        loader = None
        loader, steps = opened(*line.rstrip().split("|"))
        print("ready", flush=True)
        continue
    began = time.process_time()
    for step in steps[int(line)].tolist():
        loader.read(step)
    print(time.process_time() - began, flush=True)
"""


class Reader:
    """A process that opens a dataset, and reads a share of a pass over it, when it is asked to."""

    def __init__(self, tree: Path, suffix: str, verify: str) -> None:
        self._suffix, self._verify = suffix, verify
        command = [sys.executable, "-c", READER]
        env = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, cwd=tree, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def open(self, prefix: Path, kind: str) -> None:
        self._ask(f"{prefix}{self._suffix}|{self._verify}|{KINDS[kind]}|{TURNS}")

    def cpu_seconds(self, turn: int) -> float:
        return float(self._ask(str(turn)))

    def close(self) -> None:
        self.process.communicate()

    def _ask(self, line: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(line, file=self.process.stdin, flush=True)
        if not (line := self.process.stdout.readline()):
            raise SystemExit(f"a reader ended with {self.process.wait()}")
        return line


def write(prefix: Path, num_tokens: int, sentences: int) -> None:
    """Documents of web text's lengths, or of so many sentences each; a copy without checksums beside them."""
    rng = np.random.default_rng(0)
    with DatasetWriter(prefix, np.uint16) as writer:
        for _ in range(20):
            lengths = lognormal(rng, num_tokens // 20_000, 1000)
            if sentences:
                lengths = rng.integers(5, 45, num_tokens // 500 // sentences * sentences)
            tokens = rng.integers(5, VOCAB, lengths.sum()).astype(np.uint16)
            groups = np.full(len(lengths) // (sentences or 1), sentences or 1)
            writer.add_documents(tokens, lengths, groups)
        writer.describe(tokenizer=b"{}", fingerprint="abc", vocab_size=VOCAB, eod_id=None, num_bytes=1)
    for suffix in (".bin", ".idx"):
        os.link(dataset_file(prefix, suffix), dataset_file(prefix.with_name(f"{prefix.name}-foreign"), suffix))


def compare(kind: str, readers: dict[str, Reader], prefix: Path, rounds: int) -> bool:
    seconds: dict[tuple[str, bool], list[float]] = {(name, first): [] for name in readers for first in (True, False)}
    for number in range(rounds + 1):
        for reader in readers.values():
            reader.open(prefix, kind)
        for pass_ in range(1 + LATER):
            took = dict.fromkeys(readers, 0.0)
            for turn in range(TURNS):
                for name in list(readers)[:: 1 - turn % 2 * 2]:  # there and back
                    took[name] += readers[name].cpu_seconds(turn)
            for name in readers if number else ():  # because: the first round brings the files into memory
                seconds[name, pass_ == 0].append(took[name])
    passed = True
    for first in (True, False):
        base = np.array(seconds["before", first])
        line = f"{kind:<22}{'first pass' if first else 'later passes':<13} before {np.median(base):.3f} s"
        for name in list(readers)[1:]:
            ratio = statistics.median(np.array(seconds[name, first]) / base)
            line += f"  {name} {ratio:.3f}"
            passed &= name != "checked" or ratio <= MOST
        print(line, flush=True)
    return passed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="a checkout of the earlier commit, helpers compiled")
    parser.add_argument("--folder", type=Path, required=True, help="made, filled and removed again")
    parser.add_argument("--tokens", type=int, default=100_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", action="append", choices=KINDS, help="several times for several")
    given = parser.parse_args()
    given.folder.mkdir(parents=True)
    try:
        write(given.folder / "text", given.tokens, 0)
        write(given.folder / "sentences", given.tokens // 4, 20)
        before = given.before.resolve()
        readers = {
            "before": Reader(before, "", ""), "checked": Reader(ROOT, "", "read"),
            "noted": Reader(ROOT, "-foreign", "read"), "unchecked": Reader(ROOT, "", "none"),
            "before, again": Reader(before, "", ""),
        }  # fmt: skip
        passed = []
        for kind in given.only or KINDS:
            prefix = given.folder.resolve() / ("sentences" if kind.startswith("masked") else "text")
            passed.append(compare(kind, readers, prefix, given.rounds))
        for reader in readers.values():
            reader.close()
    finally:
        shutil.rmtree(given.folder)
    return int(not all(passed))


if __name__ == "__main__":
    raise SystemExit(main())
