"""Tokens per second of `lmtrain pretrain` beside the same GPT in bare torch and, if a checkout is given, nanoGPT's.

    make bench                       on a GPU: the four workloads of docs/benchmarks.md
    make bench BENCH=--smoke         anywhere: a toy, to see that it runs
    make bench NANOGPT=~/nanoGPT

Every contender runs in a process of its own; rounds are interleaved (A B C A B C ...) and the medians compared.
The first steps, which compile, are left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lmtrain.config.compose import compose
from lmtrain.data.store.indexed import DatasetWriter
from lmtrain.observe.metrics import read_metrics
from lmtrain.tokenizer.train import train_bpe
from lmtrain.train.config import RunConfig
from tests.unit.data.writing import add_document

WARM_UP = 2


@dataclass(frozen=True)
class Workload:
    model: str
    micro_batch: int
    global_batch: int
    steps: int


WORKLOADS = [
    Workload("gpt2_small", 32, 512, 8),
    Workload("gpt2_small", 64, 512, 8),
    Workload("high_flyer_3_8b", 8, 128, 6),
    Workload("high_flyer_3_8b", 16, 128, 6),
]
SMOKE = [Workload("gpt_tiny", 4, 8, 5)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", help="a checkout of nanoGPT")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="workloads whose model name starts so")
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args()
    contenders = ["lmtrain", "bare", *(["nanogpt"] if arguments.nanogpt else [])]
    with tempfile.TemporaryDirectory() as folder:
        data = synthetic_data(Path(folder))
        for work in SMOKE if arguments.smoke else WORKLOADS:
            if not work.model.startswith(arguments.only):
                continue
            speeds: dict[str, list[float]] = {name: [] for name in contenders}
            for number in range(arguments.rounds):
                for name in contenders:
                    run = Path(folder) / f"{work.model}-{work.micro_batch}-{number}"
                    speeds[name].append(tokens_per_s(name, work, data, run, arguments.nanogpt))
            report(work, speeds)


def synthetic_data(folder: Path) -> Path:
    """Random tokens in one long document each, enough that no run sees a sample twice in a step."""
    prefix = folder / "random"
    rng = np.random.default_rng(0)
    with DatasetWriter(prefix, np.dtype(np.uint16)) as writer:
        for _ in range(64):
            add_document(writer, [rng.integers(0, 50000, 32768).astype(np.uint16)])
    train_bpe(["a few words are enough for a tokenizer that nobody uses"], 300).save(folder / "tokenizer.json")
    return prefix


def tokens_per_s(name: str, work: Workload, data: Path, run: Path, nanogpt: str | None) -> float:
    vocab = ["model.vocab_size=50257"] if work.model == "gpt_tiny" else []
    overrides = [
        f"model={work.model}", *vocab, f"data.path={data}", f"data.tokenizer={data.parent / 'tokenizer.json'}",
        f"run.dir={run}", f"train.steps={work.steps}", f"train.global_batch={work.global_batch}",
        f"train.micro_batch={work.micro_batch}",
        "train.valid_interval_steps=0", "schedule.warmup_steps=1", "precision=bf16", "compute.compile=true",
        "checkpoint.interval_steps=null", "observe.log_interval_steps=1",
    ]  # fmt: skip
    config = compose(RunConfig, overrides)
    shape = config.model.shape
    if name == "lmtrain":
        command = [sys.executable, "-m", "lmtrain.cli.main", "pretrain", *overrides]
        subprocess.run(command, check=True, capture_output=True)
        ends = [row["elapsed_s"] for row in read_metrics(run / "metrics.jsonl") if row["event"] == "step"]
        seconds = np.diff(ends)[WARM_UP - 1 :].tolist()
    else:
        numbers = {
            "layers": shape.num_layers, "width": shape.width, "heads": shape.num_heads,
            "vocab": config.model.padded_vocab_size, "seq_len": shape.seq_len,
            "micro_batch": work.micro_batch, "global_batch": work.global_batch, "steps": work.steps,
        }  # fmt: skip
        command = [sys.executable, str(Path(__file__).with_name("bare_gpt.py"))]
        command += [f"--{key}={value}" for key, value in numbers.items()]
        command += [f"--nanogpt={nanogpt}"] if name == "nanogpt" else []
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        seconds = json.loads(out.splitlines()[-1])[WARM_UP:]
    return float(work.global_batch * shape.seq_len / statistics.median(seconds))


def report(work: Workload, speeds: dict[str, list[float]]) -> None:
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    flops = compose(RunConfig, [f"model={work.model}", "data.path=x"]).model.with_vocab(50257).shape.flops_per_token()
    print(f"{work.model} microbatch {work.micro_batch}, global batch {work.global_batch}")
    for name, value in medians.items():
        rounds = ", ".join(f"{v:,.0f}" for v in speeds[name])
        print(f"  {name:8} {value:12,.0f} tokens/s  {value * flops / 1e12:7.2f} TFLOP/s  (rounds: {rounds})")
    for name in medians.keys() - {"lmtrain"}:
        print(f"  lmtrain is {medians['lmtrain'] / medians[name]:.3f} x {name}")


if __name__ == "__main__":
    main()
