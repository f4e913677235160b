"""What an average of the weights costs a step: CPU seconds of `experiment=demo` with checkpoint.ema, and without.

    python -m tests.benchmarks.average_cost                  about a minute of one core
    python -m tests.benchmarks.average_cost --steps 10       a short look

Two models train in this process, one with an average that is updated at every step. They take turns: a pair is so many
steps without and as many with it, in changing order. The median of the pairs' ratios counts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass

import numpy as np
import torch

from lmtrain.batch import Batch, StepBatches
from lmtrain.checkpoint.weight_ema_settings import WeightAverageSettings
from lmtrain.config.compose_run_settings import compose
from lmtrain.parallel.build_parallel_model import build_parallel
from lmtrain.parallel.parallel_model import ParallelModel
from lmtrain.train.exponential_weight_average import WeightAverage
from lmtrain.train.run_config import RunConfig
from lmtrain.train.set_up_run import build_optimizer
from lmtrain.train.step import train_step

PAIRS, VOCAB_SIZE, MOST_SHARE = 7, 1024, 0.02


@dataclass
class Contender:
    """A model with its optimizer, and an average that may be off."""

    config: RunConfig
    model: ParallelModel
    optimizer: torch.optim.Optimizer
    average: WeightAverage
    step: int = 0

    def cpu_seconds(self, steps: int) -> float:
        """CPU seconds of so many more steps, the average's updates among them."""
        began, optim = time.process_time(), self.config.optim
        for _ in range(steps):
            batches = random_batches(self.config, self.step)
            train_step(self.model, self.optimizer, batches, optim.lr, optim.clip_norm)
            self.step += 1
            self.average.update(self.step)
        return time.process_time() - began


def contender(decay: float | None) -> Contender:
    config = compose(RunConfig, ["experiment=demo", "data.path=x", "compute.threads=1"])
    model = build_parallel(
        config.model.with_vocab(VOCAB_SIZE), config.precision, config.compute, torch.device("cpu"),
        seed=config.train.seed, training=True,
    )  # fmt: skip
    average = WeightAverage(model.masters, WeightAverageSettings(decay=decay))
    average.begin(0)
    return Contender(config, model, build_optimizer(config.optim, model), average)


def random_batches(config: RunConfig, step: int) -> StepBatches:
    generator, train = torch.Generator().manual_seed(step), config.train
    tokens = torch.randint(VOCAB_SIZE, (train.global_batch, config.seq_len + 1), generator=generator)
    parts = torch.split(tokens, train.micro_batch)
    batches = [Batch(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in parts]
    labels = train.global_batch * config.seq_len
    return StepBatches(step, batches, train.global_batch, (labels,), np.arange(train.global_batch), labels)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.average_cost", description=__doc__)
    parser.add_argument("--steps", type=int, default=60, help="steps of each half of a pair")
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    without, with_average = contender(None), contender(0.999)
    for each in (without, with_average):
        each.cpu_seconds(5)
    ratios, update_s = [], list[float]()
    for pair in range(PAIRS):
        order = (without, with_average) if pair % 2 == 0 else (with_average, without)
        seconds = {id(each): each.cpu_seconds(steps) for each in order}
        ratios.append(seconds[id(with_average)] / seconds[id(without)] - 1)
        began = time.process_time()
        for _ in range(steps):
            with_average.average.update(with_average.step)
        update_s.append((time.process_time() - began) / steps)
        step_s = seconds[id(without)] / steps
        print(f"pair {pair + 1}: {step_s * 1e3:.2f} ms of CPU a step, {ratios[-1]:+.2%} with an average")
    share, alone = statistics.median(ratios), statistics.median(update_s)
    print(f"an update alone: {alone * 1e6:.0f} us, {alone / step_s:.2%} of a step")
    spread = f"from {min(ratios):+.2%} to {max(ratios):+.2%}"
    print(f"median of {PAIRS} pairs: {share:+.2%} (at most {MOST_SHARE:.0%}), {spread}")
    return int(share > MOST_SHARE)


if __name__ == "__main__":
    sys.exit(main())
