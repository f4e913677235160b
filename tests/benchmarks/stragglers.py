"""Is a rank named that is a tenth slower, and nobody else ever? 4 local processes, two stages of two copies.

    python -m tests.benchmarks.stragglers [rank] [link] [sleeping] [real] [--seeds 20] [--steps 1000] [--times 1]

Blocks sleep in each forward and backward, by times that vary a little from step to step, so that 4 processes fit on 2
cores; all else is what a run does in a step, the vote that carries the numbers included. A slow rank sleeps longer from
some step on, in its forwards, its backwards or both, so that its own work grows by a tenth. A slow link holds back each
message that crosses it. `sleeping` and `real` are healthy runs, with `--busy` other processes that compute all the
while; what is said in one with real blocks is reported, and no failure. `--times 10` makes all sleeps ten times as
long: on a machine that has other work for all its cores, waking up late is most of a sleep of 20 ms.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lmtrain.batch import Batch, StepBatches
from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.observe.measure.process_and_gpu_memory import Memory
from lmtrain.parallel.build_parallel_model import build_parallel
from lmtrain.parallel.device_and_precision_settings import ComputeSettings, Fp32Settings
from lmtrain.parallel.mesh import build_mesh
from lmtrain.parallel.pipeline import stage_to_stage_messages
from lmtrain.placement.parallel_settings import ParallelSettings
from lmtrain.train.in_loop.save_and_stop_requests import Requests, Vote
from lmtrain.train.step import train_step
from lmtrain.train.step_and_save_durations import Durations
from lmtrain.train.straggler_watch import StragglerWatch
from tests.layouts.workers import Pool

PROCESSES, MICROBATCHES, MOST_STEPS = 4, 2, 20
FORWARD_S, BACKWARD_S, JITTER, TENTH = 0.020, 0.040, 0.01, 0.1
LINK_S = 0.005  # that a message over the slow link takes longer
CPU = torch.device("cpu")
_BUSY = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"  # because: who ends us may leave no time
_SPANS = ("both", "forward", "backward")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.stragglers", description=__doc__)
    parser.add_argument("cases", nargs="*", default=["rank", "link", "sleeping", "real"])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--busy", type=int, default=os.cpu_count() or 1, metavar="PROCESSES")
    parser.add_argument("--times", type=float, default=1.0)
    given, failed = parser.parse_args(), 0
    healthy = [name for name in ("sleeping", "real") if name in given.cases]
    busy = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(given.busy if healthy else 0)]
    try:
        with Pool() as pool:
            for kind in (name for name in ("rank", "link") if name in given.cases):
                found = [ran(pool, slow_case(kind, seed) | {"times": given.times}) for seed in range(given.seeds)]
                named = [one["steps"] for one in found if one["right"] and not one["wrong"]]
                failed += len(found) - sum(steps <= MOST_STEPS for steps in named)
                report(f"slow {kind}", named=len(named), of=len(found), steps=named, load=os.getloadavg()[0],
                       wrong=[line for one in found for line in one["wrong"]])  # fmt: skip
            for blocks in healthy:
                case = {"seed": 0, "steps": given.steps, "sleeps": blocks == "sleeping", "times": given.times}
                found_one = ran(pool, case)
                failed += blocks == "sleeping" and len(found_one["wrong"])
                report(f"healthy, {blocks} blocks", wrong=found_one["wrong"], steps=given.steps,
                       step_ms=round(1e3 * found_one["step_s"], 1), load=os.getloadavg()[0])  # fmt: skip
    finally:
        for one in busy:
            one.kill()
            one.wait()
    return int(failed > 0)


def report(name: str, **facts: Any) -> None:
    print(json.dumps({"case": name, **facts}), flush=True)


def slow_case(kind: str, seed: int) -> dict[str, Any]:
    since = 3 + seed % 7
    case = {"seed": seed, "since": since, "steps": since + MOST_STEPS, "sleeps": True}
    return case | ({"rank": seed % PROCESSES, "span": _SPANS[seed % 3]} if kind == "rank" else {"link": seed % 2})


def ran(pool: Pool, case: dict[str, Any]) -> dict[str, Any]:
    """Whether the right one was named, after how many steps, and what else was said."""
    timeout = 60 + 2 * case["steps"] * case["times"]
    lead, *_ = pool.run("tests.benchmarks.stragglers:measure", PROCESSES, {"case": case}, timeout_s=timeout)
    wanted = None
    if "rank" in case:
        wanted = f"rank {case['rank']} on n{case['rank']}"
    elif "link" in case:
        wanted = f"the link between rank {case['link']} on n{case['link']}"
    right = [step for step, line in lead["said"] if wanted and line.startswith(wanted) and "slow" in line]
    wrong = [line for step, line in lead["said"] if not (wanted and line.startswith(wanted) and "slow" in line)]
    steps = right[0] - case["since"] + 1 if right else None
    if right and case.get("span") not in (None, "both"):
        line = next(line for step, line in lead["said"] if step == right[0] and line.startswith(str(wanted)))
        wrong += [line] * (f"most of all {case['span']}" not in line)
    return {"right": bool(right), "steps": steps, "wrong": wrong, "step_s": lead["step_s"]}


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """What rank 0 is told, with the step after which it was; the case says who is slowed, how and since when."""
    rank = dist.get_rank()
    settings = GPTSettings(num_layers=2, width=8 if case["sleeps"] else 256, num_heads=4, vocab_size=16,
                           vocab_multiple=1, seq_len=8 if case["sleeps"] else 64)  # fmt: skip
    parallel = ParallelSettings(**case.get("layout", {"pp": 2, "dp_shard": 2}))
    mesh = build_mesh(parallel.layout, CPU, 60.0)
    model = build_parallel(
        settings, Fp32Settings(), ComputeSettings(device="cpu"), CPU, seed=1, training=True, mesh=mesh,
        parallel=parallel,
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters.values(), lr=0.0)
    pause = Pause(case["seed"] * PROCESSES + rank, case.get("times", 1.0))
    if case["sleeps"]:
        for stage in model.stages.values():
            for block in stage.blocks.values():
                block.register_forward_hook(lambda module, given, out: _Pause.apply(out, pause))  # type: ignore[no-untyped-call]
    said: list[tuple[int, str]] = []
    hosts, memory = [f"n{rank}" for rank in range(PROCESSES)], Memory("cpu", rank)
    pace = StragglerWatch(mesh.layout, rank, hosts, [*range(parallel.pp)], memory, on_host=True)
    costs, now = Durations(), 0
    costs.stragglers = pace
    requests = Requests(Vote(mesh), lambda line: said.append((now, line)), stragglers=pace)
    batches = build_batches(settings.shape.seq_len)
    began = time.perf_counter()
    for now in range(1, case["steps"] + 1):  # because: the line above reads it
        if now == case.get("since"):
            pause.slow_down(case.get("span") if case.get("rank") == rank else None)
            if case.get("link") == rank % 2:
                setattr(stage_to_stage_messages, "dist", _SlowLink())  # noqa: B010  # because: to mypy a module's name is no attribute
        requests.start_vote()
        costs.begin_step()
        train_step(model, optimizer, batches, 0.0, 1.0)
        costs.end_step(0.0)
        requests.finish_vote()
    setattr(stage_to_stage_messages, "dist", dist)  # noqa: B010
    return {"said": said, "step_s": (time.perf_counter() - began) / case["steps"]}


def build_batches(length: int) -> StepBatches:
    tokens = torch.arange(length).view(1, length) % 16
    batches = [Batch(tokens, (tokens + 1) % 16)] * MICROBATCHES
    count = 2 * MICROBATCHES
    return StepBatches(0, batches, count, (length * count,), np.arange(count), length * count)


class Pause:
    """How long this rank's blocks sleep."""

    def __init__(self, seed: int, times: float) -> None:
        self.random, self.times, self.forward_s, self.backward_s = random.Random(seed), times, FORWARD_S, BACKWARD_S

    def slow_down(self, span: str | None) -> None:
        whole = FORWARD_S + BACKWARD_S
        self.forward_s += {"both": FORWARD_S, "forward": whole}.get(span or "", 0.0) * TENTH
        self.backward_s += {"both": BACKWARD_S, "backward": whole}.get(span or "", 0.0) * TENTH

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds * self.times * (1 + JITTER * self.random.gauss(0, 1)))


class _Pause(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, pause: Pause) -> Tensor:
        ctx.pause = pause
        pause.sleep(pause.forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.pause.sleep(ctx.pause.backward_s)
        return grads[0], None


class _Held:
    """A message that comes later than it does."""

    def __init__(self, work: dist.Work) -> None:
        self.work = work

    def wait(self) -> None:
        self.work.wait()
        time.sleep(LINK_S)


class _SlowLink:
    """torch.distributed, as the pipeline's messages see it, whose messages take longer."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def irecv(self, *arguments: Any, **named: Any) -> Any:
        work = dist.irecv(*arguments, **named)
        assert work is not None
        return _Held(work)


if __name__ == "__main__":
    sys.exit(main())
