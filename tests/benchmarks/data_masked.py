"""Masked samples a CPU-second, the whole way through MaskedDataset.batch, beside Megatron-LM's masked dataset.

    python tests/benchmarks/data_masked.py                                     synthetic sentences
    python tests/benchmarks/data_masked.py --text BOOKS.jsonl --vocab vocab.txt   real ones
    python tests/benchmarks/data_masked.py --megatron CHECKOUT                 Megatron-LM in the same run
    python tests/benchmarks/data_masked.py --quick                             a short look

Rounds are interleaved and medians compared. Without a checkout the ratio is to what Megatron-LM did on one core of a
2.6 GHz Xeon: 197 samples a CPU-second at 512 tokens, 665 at 128 (of its commit d98e8a64).
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import types
import typing
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data_tools.preprocess.encode_documents import split_sentences
from lmtrain.data.data_settings import MaskedSettings
from lmtrain.data.samples.masked_language_samples import ContinuingOrder, MaskedDataset, MaskVocabulary
from lmtrain.data.samples.masked_samples_python_fallback import BEGINS, CONTINUES, SPECIAL
from lmtrain.data.store.dataset_writer import DatasetWriter
from lmtrain.data.store.indexed_dataset import IndexedDataset
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer
from tests.unit.data.writing import add_document

CASES = [(512, 1), (512, 3), (128, 1), (128, 3)]  # tokens, longest n-gram
BATCH = 32
MEGATRON_SAMPLES_PER_CPU_S = {512: 197, 128: 665}
BAR = 100
TEXT_BYTES = 25_000_000
ROLES = {"pad": 0, "unk": 100, "cls": 101, "sep": 102, "mask": 103}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="a .jsonl file with the key text")
    parser.add_argument("--vocab", type=Path, help="BERT's vocab.txt")
    parser.add_argument("--megatron", type=Path, help="a checkout of Megatron-LM")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peer:
        print(run_megatron(arguments.megatron, **json.loads(arguments.peer)))
        return
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "sentences"
        vocabulary = real(prefix, arguments) if arguments.text else synthetic(prefix, 100 if arguments.quick else 1500)
        indexed = IndexedDataset.open(prefix)
        print(f"{indexed.num_sequences:,} sentences of {indexed.num_tokens:,} tokens")
        compare(indexed, vocabulary, 1 if arguments.quick else arguments.rounds, arguments)


def compare(indexed: IndexedDataset, vocabulary: MaskVocabulary, rounds: int, arguments: argparse.Namespace) -> None:
    speeds: dict[tuple[str, int, int], list[float]] = {}
    for _ in range(rounds):
        for seq_len, max_ngram in CASES:
            speeds.setdefault(("lmtrain", seq_len, max_ngram), []).append(run(indexed, vocabulary, seq_len, max_ngram))
            if arguments.megatron:
                peer = ask_megatron(arguments.megatron, indexed, vocabulary, seq_len, max_ngram)
                speeds.setdefault(("megatron", seq_len, max_ngram), []).append(peer)
    for seq_len, max_ngram in CASES:
        ours = statistics.median(speeds["lmtrain", seq_len, max_ngram])
        here = speeds.get(("megatron", seq_len, max_ngram))
        theirs = statistics.median(here) if here else MEGATRON_SAMPLES_PER_CPU_S[seq_len]
        print(
            f"{seq_len} tokens, n-grams to {max_ngram}: {ours:,.0f} samples a CPU-second, Megatron-LM {theirs:,.0f}"
            f"{'' if here else ' (elsewhere)'}: {ours / theirs:,.0f} times (bar {BAR})"
        )


def run(indexed: IndexedDataset, vocabulary: MaskVocabulary, seq_len: int, max_ngram: int) -> float:
    settings = MaskedSettings(path=str(indexed.prefix), max_ngram=max_ngram)
    dataset = MaskedDataset(indexed, range(indexed.num_documents), seq_len, vocabulary, settings, 1234)
    ids = ContinuingOrder(dataset.num_samples, 1234).ids(0, BATCH * 300)
    began = time.process_time()
    for first in range(0, len(ids), BATCH):
        dataset.batch(ids[first : first + BATCH])
    return len(ids) / (time.process_time() - began)


def real(prefix: Path, arguments: argparse.Namespace) -> MaskVocabulary:
    tokenizer, num_bytes = Tokenizer.load(arguments.vocab), 0
    limit = TEXT_BYTES // 20 if arguments.quick else TEXT_BYTES
    with DatasetWriter(prefix, np.uint16) as writer, arguments.text.open(encoding="utf-8") as lines:
        for line in lines:
            text = json.loads(line)["text"]
            add_document(writer, [np.array(ids, np.uint16) for ids in tokenizer.encode_batch(split_sentences(text))])
            num_bytes += len(text)
            if num_bytes > limit:
                break
    return MaskVocabulary.of(tokenizer)


def synthetic(prefix: Path, num_documents: int) -> MaskVocabulary:
    """Sentences of the lengths, and words of the pieces, that English novels have."""
    random = np.random.default_rng(0)
    kinds = np.full(30522, BEGINS, np.uint8)
    kinds[24694:] = CONTINUES
    kinds[list(ROLES.values())] = SPECIAL
    with DatasetWriter(prefix, np.uint16) as writer:
        for _ in range(num_documents):
            lengths = np.minimum(random.lognormal(2.9, 0.7, random.integers(50, 300)).astype(int) + 1, 400)
            begins = 1000 + np.minimum(random.zipf(1.3, lengths.sum()), 23_000)
            tokens = np.where(random.random(lengths.sum()) < 0.06, random.integers(24694, 30522, lengths.sum()), begins)
            add_document(writer, np.split(tokens, np.cumsum(lengths)[:-1]))
    return MaskVocabulary(kinds, ROLES)


# ---- Megatron-LM, in a process of its own


def ask_megatron(
    checkout: Path, indexed: IndexedDataset, vocabulary: MaskVocabulary, seq_len: int, max_ngram: int
) -> float:
    continues = np.flatnonzero(vocabulary.kinds == CONTINUES).tolist()
    work = {
        "prefix": str(indexed.prefix), "seq_len": seq_len, "max_ngram": max_ngram, "roles": vocabulary.special,
        "vocab_size": len(vocabulary.kinds), "continues": [continues[0], continues[-1]],
        "num_documents": indexed.num_documents,
    }  # fmt: skip
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # for pybind11's headers
    make = ["make", "-s", "-C", str(checkout / "megatron/core/datasets")]
    subprocess.run(make, check=True, stdout=sys.stderr, env=os.environ | {"PATH": path})
    command = [sys.executable, "-W", "ignore", __file__, "--megatron", str(checkout), "--peer", json.dumps(work)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return float(done.stdout.split()[-1])


class Vocabulary:
    """What Megatron-LM asks of a tokenizer."""

    unique_identifiers: dict[str, str] = {}  # noqa: RUF012 - read only

    def __init__(self, roles: dict[str, int], vocab_size: int, continues: list[int]) -> None:
        self.cls, self.sep, self.mask, self.pad = (roles[name] for name in ("cls", "sep", "mask", "pad"))
        first, last = continues
        self.inv_vocab = {i: "##x" if first <= i <= last else "x" for i in range(vocab_size)}


def run_megatron(
    checkout: Path, prefix: str, seq_len: int, max_ngram: int, num_documents: int, **vocabulary: Any
) -> float:
    if not hasattr(typing, "override"):  # because: it is written for Python 3.12
        vars(typing)["override"] = lambda function: function
    for name in ("megatron", "megatron.core"):  # because: their __init__ import all of training, and triton with it
        package = sys.modules[name] = types.ModuleType(name)
        package.__path__ = [str(checkout.joinpath(*name.split(".")))]
    importlib.import_module("megatron.core.parallel_state")  # because: the ring of imports it is in starts here alone
    bert, indexed, utils = (
        importlib.import_module(f"megatron.core.datasets.{name}")
        for name in ("bert_dataset", "indexed_dataset", "utils")
    )
    with tempfile.TemporaryDirectory() as cache:
        torch.distributed.init_process_group("gloo", init_method=f"file://{cache}/store", rank=0, world_size=1)
        config = bert.BERTMaskedWordPieceDatasetConfig(
            random_seed=1234, sequence_length=seq_len, split="1,0,0", blend=([prefix], None), path_to_cache=cache,
            tokenizer=Vocabulary(**vocabulary), masking_probability=0.15, short_sequence_probability=0.1,
            masking_max_ngram=max_ngram, masking_do_full_word=True, masking_do_permutation=False,
            masking_use_longer_ngrams=False, masking_use_geometric_distribution=False, classification_head=True,
            mid_level_dataset_surplus=0.005,
        )  # fmt: skip
        dataset = bert.BERTMaskedWordPieceDataset(
            indexed.IndexedDataset(prefix), prefix, np.arange(num_documents), 1000, utils.Split.train, config
        )
        for i in range(5):
            dataset[i]
        began = time.process_time()
        for i in range(200):
            dataset[i]
        seconds = time.process_time() - began
        torch.distributed.destroy_process_group()
    return 200 / seconds


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
