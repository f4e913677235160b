"""How far `lmtrain eval` and the harness's `lmtrain` model are from lm-evaluation-harness's `hf` model of the export.

    python -m tests.benchmarks.harness_agreement --data FOLDER

Three models of random weights, one with GPT-2's vocabulary: all pages of WikiText's test, 500 lines of both LAMBADAs,
multiple choice with and without shots, RACE by article and by question. FOLDER holds gpt2-vocab.json, gpt2-merges.txt,
wiki.test.raw, wt2.valid.txt, lambada_test.jsonl and lambada_test_plain_text.txt. It needs `pip install
'lmtrain[harness]'`.

The harness takes logarithms of probabilities in the model's type unless softmax_dtype says otherwise, and in float32
over a large vocabulary that rounds by more than the limit: `--softmax float32` shows it.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import torch

from tests.unit.eval.harness_cases import MODELS, NUM_LINES, Compared, compare

MOST_NATS = 2e-5  # per 1,000 tokens, and of one example


def report(name: str, by: str, task: str, one: Compared) -> bool:
    targets = f"{sum(one.targets):,}" if by == "lmtrain eval" else ""
    alike = one.greedy[0] == one.greedy[1] and all(ours == theirs for ours, theirs in one.accuracies)
    print(
        f"{name:16} {by:13} {task:27} {len(one.ours):4} examples {targets:>8} targets "
        f"{abs(math.fsum(one.theirs)):15.6f} nats; apart {one.apart:.1e}, worst example {one.worst:.1e}; "
        f"accuracies {'alike' if alike else 'DIFFER'}",
        flush=True,
    )
    return alike and max(one.apart, one.worst) <= MOST_NATS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder with the texts and GPT-2's vocabulary")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--lines", type=int, default=NUM_LINES)
    parser.add_argument("--softmax", choices=["float32", "float64"], default="float64", help="of the harness's hf")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(", ".join(f"{name} {version(name)}" for name in ("lm_eval", "transformers", "torch")))
    agreed = []
    for name in given.models:
        began_s = time.monotonic()
        with tempfile.TemporaryDirectory() as scratch:
            found = compare(name, given.data, Path(scratch), given.lines, given.softmax)
        agreed += [report(name, "lmtrain eval", task, one) for task, one in found.own.items()]
        agreed += [report(name, "model lmtrain", task, one) for task, one in found.through.items()]
        print(f"{name}: {time.monotonic() - began_s:.0f} s", flush=True)
    return int(not all(agreed))


if __name__ == "__main__":
    sys.exit(main())
