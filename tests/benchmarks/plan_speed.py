"""How long a full search takes, and in how much memory: GPT-3 175B on 1,024 H100, as `lmtrain plan` asks for it.

python -m tests.benchmarks.plan_speed [--gpus 1024]
"""

from __future__ import annotations

import argparse
import resource
import sys
import time

from lmtrain.plan.search.legal_layouts import legal_layouts
from lmtrain.plan.search.order_layouts_by_speed import CostModel, LayoutLimits, rank_layouts
from lmtrain.start.plans.plan_question_and_search import read_question


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=1024)
    gpus = parser.parse_args().gpus
    began, busy = time.perf_counter(), time.process_time()
    words = ["model=gpt3_175b", "hardware=h100", f"gpus={gpus}", "train.global_batch=1536"]
    question = read_question(words, None, None, "pretrain")
    composed = time.perf_counter()
    space = legal_layouts(question.run, gpus, question.hardware)
    searched = time.perf_counter()
    ranked = rank_layouts(space, question.hardware, LayoutLimits(), CostModel())
    done, used = time.perf_counter(), time.process_time() - busy
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{len(space):,} legal, {len(ranked.rows):,} priced, {ranked.num_fitting:,} fit")
    print(f"settings {composed - began:.2f} s, search {searched - composed:.2f} s, prices {done - searched:.2f} s")
    print(f"together {done - began:.2f} s, of a core {used:.2f} s, {memory:.0f} MiB, torch {'torch' in sys.modules}")


if __name__ == "__main__":
    main()
