"""What a save costs: how long training stands still for it, and how fast it goes to disk.

    python -m tests.benchmarks.save_speed --folder /tmp/saves

A GPT's weights and AdamW's two moments are saved as a run saves them. The pause is compared with a plain copy of the
same tensors into memory that has been touched before, and the time until the checkpoint is committed, hashes and fsync
included, with `dd conv=fsync` of as many bytes to the same disk. Pairs alternate and medians are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmtrain.checkpoint.save.background_writer import CheckpointWriter
from lmtrain.layout import Piece
from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.optim.adamw_settings import AdamWSettings
from lmtrain.parallel.build_parallel_model import build_parallel
from lmtrain.parallel.device_and_precision_settings import ComputeSettings, Fp32Settings
from lmtrain.parallel.parallel_model import ParallelModel
from lmtrain.runtime.files.atomic_files import drop_from_page_cache
from lmtrain.train import run_objects_and_resume
from lmtrain.train.set_up_run import build_optimizer

MOST_PAUSE, LEAST_SPEED = 1.3, 0.7
_DD_BYTES = 4 << 20


class State:
    """A model and its optimizer after one update with made-up gradients, so that no byte is a zero page."""

    def __init__(self, num_layers: int) -> None:
        settings = GPTSettings(num_layers=num_layers, width=1024, num_heads=16, vocab_size=50_257, seq_len=1024)
        self.model: ParallelModel = build_parallel(
            settings, Fp32Settings(), ComputeSettings(), torch.device("cpu"), seed=1, training=True
        )
        self.optimizer = build_optimizer(AdamWSettings(lr=1e-3), self.model)
        for parameter in self.model.parameters.values():
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def pieces(self) -> list[Piece]:
        return self.model.owned_pieces(run_objects_and_resume.held_pieces(self.model, self.optimizer))


def settle() -> None:
    """The same beginning for each: nothing waits to be written back."""
    os.sync()


def plain_copy(tensors: list[Tensor], into: list[Tensor]) -> float:
    began = time.perf_counter()
    for target, source in zip(into, tensors, strict=True):
        target.copy_(source)
    return time.perf_counter() - began


def dd(output: Path, num_bytes: int, source: str) -> float:
    """Seconds of dd itself with the fsync at its end, the last block being as long as the rest needs."""
    command = ["dd", f"if={source}", f"of={output}", f"bs={_DD_BYTES}", "iflag=fullblock,count_bytes"]
    began = time.perf_counter()
    subprocess.run([*command, f"count={num_bytes}", "conv=fsync"], check=True, capture_output=True)
    seconds = time.perf_counter() - began
    drop_from_page_cache(output)
    output.unlink()
    return seconds


def save(writer: CheckpointWriter, made: State, step: int) -> tuple[float, float]:
    """Seconds for which a loop stands still, and then until the checkpoint is committed."""
    began = time.perf_counter()
    writer.save(step, made.pieces(), {"step": step}, {})
    pause = time.perf_counter() - began
    writer.wait()
    assert writer.last is not None
    for file in writer.last.path.iterdir():
        drop_from_page_cache(file)
    return pause, writer.last.write_s


def measure(made: State, folder: Path, pairs: int, source: str) -> dict[str, Any]:
    tensors = [piece.block for piece in made.pieces()]
    assert all(isinstance(tensor, Tensor) for tensor in tensors)
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    into = [torch.zeros_like(tensor).fill_(1) for tensor in tensors]
    copies, pauses, dds, saves = [], [], [], []
    with CheckpointWriter(folder / "checkpoints", keep_last=1, asynchronous=True) as writer:
        writer.reserve(made.pieces())  # as a run does when it begins
        writer.wait()
        for pair in range(pairs):
            settle()
            copies.append(plain_copy(tensors, into))
            dds.append(dd(folder / "dd", num_bytes, source))
            settle()
            pause, seconds = save(writer, made, pair + 1)
            pauses.append(pause)
            saves.append(seconds)
            print(
                f"copy {copies[-1]:.3f} s, pause {pause:.3f} s; dd {dds[-1]:.2f} s, write {seconds:.2f} s",
                flush=True,
            )
    return {
        "parameters": made.model.settings.num_parameters, "bytes": num_bytes, "threads": torch.get_num_threads(),
        "copy_s": copies, "pause_s": pauses,
        "pause_over_copy": statistics.median(pauses) / statistics.median(copies),
        "dd_s": dds, "write_s": saves, "speed_over_dd": statistics.median(dds) / statistics.median(saves),
        "bytes_per_s": num_bytes / statistics.median(saves),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16, help="of a GPT 1,024 wide; 16 make 0.25B parameters")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--dd-from", default="/dev/zero", metavar="FILE", help="what dd reads, of at least that size")
    parser.add_argument("--folder", type=Path, required=True, help="made, filled and removed again")
    given = parser.parse_args()
    given.folder.mkdir(parents=True)
    try:
        found = measure(State(given.layers), given.folder, given.pairs, given.dd_from)
    finally:
        shutil.rmtree(given.folder)
    print(json.dumps(found, indent=1))
    return int(found["pause_over_copy"] > MOST_PAUSE or found["speed_over_dd"] < LEAST_SPEED)


if __name__ == "__main__":
    raise SystemExit(main())
