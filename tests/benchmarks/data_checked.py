"""What it costs the loader to check tokens as they are read, beside an earlier checkout that checked nothing.

    python -m tests.benchmarks.data_checked --before ../before --folder beside

One process each of: the earlier checkout, this one with data.verify=read, the same over a dataset without checksums
(what is first read is noted), this one with data.verify=none, and the earlier checkout again, which tells how far equal
code differs on this machine. They read the same dataset, through Loader.read and in random order, and take turns
sixteen times in each pass; the first pass hashes every byte, later ones look up that it was done. CPU seconds are
compared, medians of the rounds; a round starts the processes anew. Ends with 1 where checking costs more than 5%.
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

from lmtrain.data.store.indexed import DatasetWriter, part
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
from lmtrain.data.batch_plan import BatchPlan
from lmtrain.data.loader import Loader
from lmtrain.data.masked_settings import MaskedSettings
from lmtrain.data.order import Order
from lmtrain.data.samples.causal import CausalDataset
from lmtrain.data.samples.masked import MaskedDataset, MaskVocabulary
from lmtrain.data.samples.megatron import MegatronDataset
from lmtrain.data.samples.packing import PackedDataset
from lmtrain.data.store.indexed import IndexedDataset
torch.set_num_threads(1)
prefix, verify, record, made, turns = sys.argv[1:]
indexed = IndexedDataset.open(Path(prefix))
if verify:
    Path(record).unlink(missing_ok=True)
    indexed.watch(verify, Path(record), print)
documents = range(indexed.num_documents)
words = MaskVocabulary(np.zeros(50257, np.uint8), {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4})
dataset = eval(made)
order = dataset.order(1) if hasattr(dataset, "order") else Order(dataset.num_samples, 1)
loader = Loader(dataset, order, BatchPlan(16), 16)
steps = np.array_split(np.arange(dataset.num_samples // 16), int(turns))
print("ready", flush=True)
for turn in sys.stdin:
    began = time.process_time()
    for step in steps[int(turn)].tolist():
        loader.read(step)
    print(time.process_time() - began, flush=True)
"""


class Reader:
    """A process that reads a share of its pass when it is asked to."""

    def __init__(self, tree: Path, prefix: Path, verify: str, kind: str) -> None:
        record = prefix.with_suffix(".seen")
        command = [sys.executable, "-c", READER, str(prefix), verify, str(record), KINDS[kind], str(TURNS)]
        env = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, cwd=tree, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._answer()

    def cpu_seconds(self, turn: int) -> float:
        assert self.process.stdin is not None
        print(turn, file=self.process.stdin, flush=True)
        return float(self._answer())

    def close(self) -> None:
        self.process.communicate()

    def _answer(self) -> str:
        assert self.process.stdout is not None
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
        os.link(part(prefix, suffix), part(prefix.with_name(f"{prefix.name}-foreign"), suffix))


def compare(kind: str, before: Path, prefix: Path, rounds: int) -> bool:
    foreign = prefix.with_name(f"{prefix.name}-foreign")
    contenders: dict[str, tuple[Path, Path, str]] = {
        "before": (before, prefix, ""), "checked": (ROOT, prefix, "read"), "noted": (ROOT, foreign, "read"),
        "unchecked": (ROOT, prefix, "none"), "before, again": (before, prefix, ""),
    }  # fmt: skip
    seconds: dict[tuple[str, bool], list[float]] = {(name, first): [] for name in contenders for first in (True, False)}
    for number in range(rounds + 1):
        readers = {name: Reader(*given, kind) for name, given in contenders.items()}
        for pass_ in range(1 + LATER):
            took = dict.fromkeys(contenders, 0.0)
            for turn in range(TURNS):
                for name in list(contenders)[turn % 2 * 4 :: 1 - turn % 2 * 2]:  # there and back
                    took[name] += readers[name].cpu_seconds(turn)
            for name in contenders if number else ():  # because: the first round brings the files into memory
                seconds[name, pass_ == 0].append(took[name])
        for reader in readers.values():
            reader.close()
    passed = True
    for first in (True, False):
        base = np.array(seconds["before", first])
        line = f"{kind:<22}{'first pass' if first else 'later passes':<13} before {np.median(base):.3f} s"
        for name in list(contenders)[1:]:
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
        passed = [
            compare(kind, given.before.resolve(), given.folder.resolve() / where, given.rounds)
            for kind in given.only or KINDS
            for where in ("sentences" if kind.startswith("masked") else "text",)
        ]
    finally:
        shutil.rmtree(given.folder)
    return int(not all(passed))


if __name__ == "__main__":
    raise SystemExit(main())
