"""How long `lmtrain reshard` takes beside `cp -r` and `sync` of the same files, and the anonymous memory it takes.

    python -m tests.benchmarks.reshard_speed --gigabytes 12 --from tp=2,dp=2 --to tp=4,pp=2 --folder /tmp/reshard

Pairs alternate, the source is dropped from the system's cache before each of the two, and the medians are compared.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lmtrain.checkpoint.disk.safetensors_file import PieceSpec, RankData
from lmtrain.checkpoint.read_verified_contents import Contents, layout_of
from lmtrain.checkpoint.reshard.write_target_files import files_of_layout
from lmtrain.checkpoint.save.commit import RankRecord, commit_checkpoint, write_rank
from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.placement.attention_activation_bytes import FP32_BYTES
from lmtrain.placement.parallel_settings import parse_layout
from lmtrain.runtime.files.atomic_files import drop_from_page_cache
from tests.unit.checkpoint.layouts import SLOTS

WIDTH, VOCAB = 2048, 50_257  # of a model of 1.0B parameters with 17 layers
_NOISE_BYTES = 64 << 20


def model_of_bytes(num_bytes: int) -> GPTSettings:
    """As many layers as make a checkpoint of about this size, weights and two slots."""
    model = GPTSettings(num_layers=1, width=WIDTH, num_heads=16, vocab_size=VOCAB, seq_len=1024)
    wanted, first = num_bytes // (FP32_BYTES * len(SLOTS)), model.num_parameters
    if wanted < 2 * first:
        model = replace(model, width=WIDTH // 4, vocab_size=VOCAB // 4)
        first = model.num_parameters
    a_layer = replace(model, num_layers=2).num_parameters - first
    return replace(model, num_layers=max(1, 1 + (wanted - first) // a_layer))


def write(folder: Path, model: GPTSettings, layout: str, step: int = 1000) -> Path:
    """Noise at this layout, made a file at a time."""
    parallel = parse_layout(layout)
    attempt = folder / f"step_{step:08d}.tmp-{os.getpid()}-0"
    attempt.mkdir(parents=True)
    records: list[RankRecord] = []
    noise = np.random.default_rng(step).integers(0, 256, _NOISE_BYTES, dtype=np.uint8).data
    for rank, specs in enumerate(_specs(model, layout)):
        num_bytes = sum(spec.num_bytes for spec in specs)
        starts = range(0, num_bytes, _NOISE_BYTES)
        parts = (noise[: min(_NOISE_BYTES, num_bytes - start)] for start in starts)
        records.append(write_rank(attempt, rank, RankData(specs, parts)))
    state = {"step": step, "model": model.to_dict(), "settings": {"parallel": parallel.to_dict()}}
    return commit_checkpoint(attempt, step, records, state, {})[0]


def _specs(model: GPTSettings, layout: str) -> list[list[PieceSpec]]:
    from lmtrain.checkpoint.disk.checkpoint_format import Manifest, TensorEntry
    from lmtrain.models.model_settings import unpadded_shapes

    shapes = {f"{slot}.{name}": shape for slot in SLOTS for name, shape in unpadded_shapes(model).items()}
    tensors = {name: TensorEntry("F32", shape, ()) for name, shape in shapes.items()}
    return list(files_of_layout(Manifest(1000, {}, tensors, {}), model, parse_layout(layout)).values())


class Watch(threading.Thread):
    """The most anonymous memory of a process, looked at over and over until it ends."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        super().__init__(daemon=True)
        self.process, self.peak_bytes = process, 0

    def run(self) -> None:
        while self.process.poll() is None:
            try:
                text = Path(f"/proc/{self.process.pid}/status").read_text()
            except OSError:
                return
            found = re.search(r"RssAnon:\s+(\d+)", text)
            self.peak_bytes = max(self.peak_bytes, int(found[1]) * 1024 if found else 0)
            time.sleep(0.01)


def copy(source: Path, output: Path) -> float:
    began = time.perf_counter()
    subprocess.run(["cp", "-r", str(source), str(output)], check=True)
    os.sync()
    return time.perf_counter() - began


def reshard(source: Path, output: Path, to: str, options: list[str]) -> tuple[float, int]:
    return timed("reshard", str(source), "--to", to, "--output", str(output), *options)


def timed(*words: str) -> tuple[float, int]:
    """Run a command of lmtrain and sync. Return its seconds and the most anonymous memory that it had."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "lmtrain.cli.main", *words], text=True, stdout=subprocess.DEVNULL
    )
    watch = Watch(process)
    watch.start()
    assert process.wait() == 0
    os.sync()
    seconds = time.perf_counter() - began
    watch.join()
    return seconds, watch.peak_bytes


def settle(source: Path, output: Path) -> None:
    """The same beginning for each: nothing to write back, nothing of the source in memory."""
    shutil.rmtree(output, ignore_errors=True)
    os.sync()
    for file in source.iterdir():
        drop_from_page_cache(file)


def measure(source: Path, to: str, pairs: int, options: list[str]) -> dict[str, Any]:
    output = source.parents[1] / "output"
    copies, reshards, peaks = [], [], []
    for _ in range(pairs):
        settle(source, output)
        copies.append(copy(source, output))
        settle(source, output)
        seconds, peak = reshard(source, output, to, options)
        reshards.append(seconds)
        peaks.append(peak)
        print(f"copy {copies[-1]:.2f} s, reshard {seconds:.2f} s, anonymous memory {peak / 2**20:.0f} MiB", flush=True)
    manifest = Contents(source).manifest
    before = layout_of(manifest.state)
    return {
        "bytes": sum(entry.size for entry in manifest.files.values()),
        "parameters": sum(math.prod(t.shape) for n, t in manifest.tensors.items() if n.startswith("model.")),
        "from": before.to_dict() if before else None, "to": to, "copy_s": copies, "reshard_s": reshards,
        "ratio_of_medians": statistics.median(reshards) / statistics.median(copies), "peak_anonymous_bytes": max(peaks),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=3.0)
    parser.add_argument("--from", dest="before", default="tp=2,dp=2")
    parser.add_argument("--to", default="tp=4,pp=2")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--folder", type=Path, required=True, help="made, filled and removed again")
    parser.add_argument("options", nargs="*", help="after --, for reshard: --workers 1")
    given = parser.parse_args()
    given.folder.mkdir(parents=True)
    try:
        source = write(given.folder / "source", model_of_bytes(int(given.gigabytes * 1e9)), given.before)
        print(json.dumps(measure(source, given.to, given.pairs, given.options), indent=1))
    finally:
        shutil.rmtree(given.folder)


if __name__ == "__main__":
    main()
