"""Indexes, blends, packing and the loader at their full size: `python tests/benchmarks/data_index.py [--quick]`.

Prints one JSON line a measurement. Files of up to 27 GB are made in --folder and removed at the end; --quick does the
same with a thousandth of the documents. Each index is built and opened in a process of its own, so that its memory is
its own, and the page cache is told to forget the files first where that is allowed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from lmtrain.data.sample_dataset_interface import Dataset, ShuffledOrder
from lmtrain.data.samples.blend import Schedule, integer_shares
from lmtrain.data.samples.causal_language_samples import CausalDataset
from lmtrain.data.samples.packing import PackedDataset, Packing
from lmtrain.data.store.dataset_writer import DatasetWriter
from lmtrain.data.store.index_cache import IndexCache
from lmtrain.data.store.indexed_dataset import HEADER, MAGIC, IndexedDataset, dataset_file
from tests.unit.data.writing import map_of

DOCUMENTS, TOKENS = 1_200_000_000, 10**12
SEQ_LEN = 2048
MEGATRON_SAMPLES_PER_CPU_S = 28_500  # its GPTDataset, measured on two cores of a 2.6 GHz Xeon


def report(what: str, **values: Any) -> None:
    print(json.dumps({"measured": what} | values), flush=True)


def lognormal(rng: np.random.Generator, count: int, mean: float) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Lengths as web text has them: most short, a few very long, this mean."""
    sigma = 1.1
    lengths = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
    return np.maximum(lengths.astype(np.int64), 1)


def make_sizes(prefix: Path, num: int) -> None:
    """A dataset of sizes only: a whole .idx and a .bin that takes no room, being all hole."""
    rng, step = np.random.default_rng(0), 1 << 22
    pool = lognormal(rng, step, TOKENS / DOCUMENTS).astype("<i4")
    with open(dataset_file(prefix, ".idx"), "wb") as file:
        file.write(HEADER.pack(MAGIC, 1, 8, num, num + 1))
        for first in range(0, num, step):
            file.write(np.roll(pool, first // step)[: min(step, num - first)].data)
        at = 0
        for first in range(0, num, step):
            lengths = np.roll(pool, first // step)[: min(step, num - first)]
            ends = at + np.cumsum(lengths, dtype=np.int64) * 2
            file.write(np.append(np.int64(at), ends[:-1]).data)
            at = int(ends[-1])
        for first in range(0, num + 1, step):
            file.write(np.arange(first, min(first + step, num + 1), dtype="<i8").data)
        file.flush()
        os.fsync(file.fileno())
    with open(dataset_file(prefix, ".bin"), "wb") as file:
        file.truncate(at)


def forget(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def rss_anon_mb() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) / 1024


class Peak(threading.Thread):
    """Looks at this process's anonymous memory ten times a second."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.mb, self.ended = 0.0, threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.1):
            self.mb = max(self.mb, rss_anon_mb())


def open_sizes(prefix: Path) -> None:
    """The child: build or load the index, read a first sample, say what it took."""
    peak, began = Peak(), time.perf_counter()
    peak.start()
    dataset = IndexedDataset.open(prefix)
    cache = IndexCache(prefix.parent / "cache")
    made = CausalDataset(dataset, range(dataset.num_documents), SEQ_LEN, cache=cache)
    order = ShuffledOrder(made.num_samples, 1)
    ready = time.perf_counter()
    made.batch(order.ids(0, 1))
    plain = time.perf_counter()
    made = CausalDataset(dataset, range(dataset.num_documents), SEQ_LEN, True, cache=cache)
    again = time.perf_counter()
    made.batch(order.ids(0, 1))
    first = time.perf_counter()
    many = order.ids(1, 1000)
    for sample in many:
        made.batch(np.array([sample]))
    done = time.perf_counter()
    print(json.dumps({
        "tokens": dataset.num_tokens, "documents": dataset.num_documents, "samples": made.num_samples,
        "ready_s": ready - began, "cpu_s": time.process_time(), "first_sample_ms": (plain - ready) * 1e3,
        "first_sample_with_document_mask_ms": (first - again) * 1e3, "next_samples_ms": done - first,
        "peak_rss_anon_mb": max(peak.mb, rss_anon_mb()),
    }))  # fmt: skip


def measure_sizes(folder: Path, num: int) -> None:
    prefix = folder / "sizes"
    make_sizes(prefix, num)
    for what in ("index built, cold", "index loaded", "index loaded, cold"):
        if what.endswith("cold"):
            forget(dataset_file(prefix, ".idx"))
        child = [sys.executable, __file__, "--open-sizes", str(prefix)]
        answer = subprocess.run(child, check=True, capture_output=True, text=True).stdout
        report(what, **json.loads(answer))
    dataset_file(prefix, ".idx").unlink()


def cpu_seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def measure_loader(folder: Path) -> None:
    import torch

    torch.set_num_threads(1)
    rng, prefix = np.random.default_rng(0), folder / "text"
    with DatasetWriter(prefix, np.uint16) as writer:
        for _ in range(20):
            lengths = lognormal(rng, 5_000, 1000)
            writer.add_documents(rng.integers(0, 50_257, lengths.sum()), lengths, np.ones(len(lengths), np.int64))
    dataset = IndexedDataset.open(prefix)
    everything = range(dataset.num_documents)
    kinds: dict[str, Dataset] = {
        "concatenate": CausalDataset(dataset, everything, SEQ_LEN, vocab_size=50_257),
        "concatenate, document mask": CausalDataset(dataset, everything, SEQ_LEN, True, 50_257),
        "best fit": PackedDataset(dataset, everything, SEQ_LEN, "best_fit", True, 50_257),
    }
    for name, made in kinds.items():
        ids = ShuffledOrder(made.num_samples, 1).ids(0, made.num_samples // 16 * 16).reshape(-1, 16)

        def read(made: Any = made, ids: Any = ids) -> None:
            for row in ids:
                made.batch(row).map(torch.from_numpy)

        rates = [ids.size / cpu_seconds(read) for _ in range(5)]
        rate = statistics.median(rates)
        report(f"loader, {name}", samples_per_cpu_s=round(rate), times_megatron=rate / MEGATRON_SAMPLES_PER_CPU_S)


def measure_packing() -> None:
    rng = np.random.default_rng(0)
    for seq_len in (1024, 2048, 8192):
        lengths = lognormal(rng, 1_000_000, 1000)
        map_ = map_of(lengths)
        began = time.perf_counter()
        packing = Packing.of(map_, range(len(lengths)), seq_len, "best_fit")
        seconds = time.perf_counter() - began
        report(
            "best fit", seq_len=seq_len, documents=len(lengths), seconds=seconds, rows=packing.num_rows,
            wasted=1 - packing.count_filled(np.arange(packing.num_rows)) / (packing.num_rows * seq_len),
        )  # fmt: skip


def measure_blend(num_datasets: int, num_samples: int) -> None:
    rng = np.random.default_rng(0)
    shares = integer_shares([int(share) for share in lognormal(rng, num_datasets, 1e9)])
    schedule = Schedule(shares)
    began, cpu = time.perf_counter(), time.process_time()
    counts = schedule.samples_before(num_samples)
    seconds = time.perf_counter() - began
    worst = max(abs(count * sum(shares) - num_samples * share) for count, share in zip(counts, shares, strict=True))
    report(
        "blend, every position decided", datasets=num_datasets, samples=num_samples, seconds=seconds,
        cpu_s=time.process_time() - cpu, worst_deviation=worst / sum(shares),
    )  # fmt: skip
    fresh = Schedule(shares)
    began = time.perf_counter()
    for first in range(0, 100 * 1024, 1024):
        fresh.assign(first, 1024)
    report("blend, a step of 1024", datasets=num_datasets, step_ms=(time.perf_counter() - began) * 10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=None, help="where the big files go; they are removed at the end")
    parser.add_argument("--quick", action="store_true", help="a thousandth of everything: does it work at all?")
    parser.add_argument("--open-sizes", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.open_sizes:
        open_sizes(options.open_sizes)
        return
    scale = 1000 if options.quick else 1
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        measure_loader(Path(folder))
        measure_packing()
        measure_blend(1000, 250_000_000 // scale)
        measure_sizes(Path(folder), DOCUMENTS // scale)


if __name__ == "__main__":
    main()
