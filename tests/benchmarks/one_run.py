"""One contender, one workload, one process: trains some steps and prints a JSON line with what that took.

    python -m tests.benchmarks.one_run lmtrain high_flyer_16 --data FOLDER --run FOLDER [KEY=VALUE ...]

`lmtrain` is the whole command `lmtrain pretrain` with its real loader, logs and clipping; --without and --attention
change it in this process alone (switches.py). `bare` is bare_torch.py's twin, which takes one batch over and over;
`nanogpt` and `titan` are models of checkouts, given by --path. --toy: small enough for a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from lmtrain.cli.main import main as lmtrain
from lmtrain.observe.measure.throughput import peak_flops
from lmtrain.observe.metrics import read_metrics
from lmtrain.observe.profile.kernel_times import read_tables
from lmtrain.plan.run_estimates.rank_memory_by_purpose import NEED_A_GPU, count_rank_bytes
from lmtrain.train.layouts.dry_run_speed_and_memory import planned_run
from lmtrain.train.run_config import RunConfig
from lmtrain.train.startup_checks.preflight import load_data
from tests.benchmarks.switches import ATTENTION, only_attention, turn_off
from tests.benchmarks.workloads import WORKLOADS, Workload

if TYPE_CHECKING:
    from tests.benchmarks.bare_torch import Shape

WARM_UP = 1  # after the first step, which compiles
KERNELS = 25  # of a profile


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contender", choices=("lmtrain", "bare", "nanogpt", "titan"))
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--path", default="", help="the checkout of nanogpt or titan")
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--without", action="append", default=[])
    parser.add_argument("--attention", choices=ATTENTION)
    asked, more = parser.parse_known_args(arguments)
    work = WORKLOADS[asked.workload].toy() if asked.toy else WORKLOADS[asked.workload]
    turn_off(asked.without)
    if asked.attention:
        only_attention(asked.attention)
    config = work.config(asked.data, asked.run, tuple(more))
    if asked.contender == "lmtrain":
        found = whole_command(work.settings(asked.data, asked.run, tuple(more)), config)
    else:
        found = {"step_s": beside(asked.contender, shape_of(config, work), asked.path)}
    print(json.dumps(found | rates(found["step_s"], config)))


def whole_command(settings: list[str], config: RunConfig) -> dict[str, Any]:
    """Seconds of each step, the most memory beside what is predicted, and a profile's table where one was asked for."""
    lmtrain(["pretrain", *settings])
    import torch  # because: the command says how memory is to be had before torch is imported

    run = Path(config.run.dir)
    rows = [row for row in read_metrics(run / "metrics.jsonl") if row["event"] == "step"]
    _, model, _ = load_data(config)
    held = count_rank_bytes(planned_run(config, model), 0)
    on_gpu = torch.cuda.is_available()
    free, whole = torch.cuda.mem_get_info() if on_gpu else (0, 0)
    return {
        "step_s": np.diff([row["elapsed_s"] for row in rows]).tolist(), "losses": [row["loss"] for row in rows],
        "data_wait_s": rows[-1]["data_wait_s"], "predicted": held,
        "predicted_bytes": sum(held.values()), "device_bytes": whole - free,  # with what is no tensor's
        "predicted_tensor_bytes": sum(size for name, size in held.items() if name not in NEED_A_GPU),
        "allocated_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        "reserved_bytes": torch.cuda.max_memory_reserved() if on_gpu else None,
        "profile": [
            {"window_s": table.window_s, "classes": table.classes,
             "kernels": [[one.name, one.kind, one.seconds, one.calls] for one in table.kernels[:KERNELS]]}
            for table in (read_tables(run / "profile") if (run / "profile").is_dir() else ())
        ],
    }  # fmt: skip


def beside(contender: str, shape: Shape, path: str) -> list[float]:
    """Seconds of each step but the first, as a run's rows tell them."""
    import torch  # because: not before the command has begun

    from tests.benchmarks.bare_torch import bare, nanogpt, timed, titan

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    if contender == "bare":
        step = bare(shape, device, torch.bfloat16)
    else:
        step = {"nanogpt": nanogpt, "titan": titan}[contender](shape, device, torch.bfloat16, path)
    return timed(step, shape.steps, device)[1:]


def shape_of(config: RunConfig, work: Workload) -> Shape:
    """What a twin needs to know of a run's model."""
    from tests.benchmarks.bare_torch import Shape  # because: it imports torch

    model: Any = config.model
    s = config.model.with_vocab(model.vocab_size).shape
    positions = getattr(model, "positions", "learned")
    return Shape(
        layers=s.num_layers, width=s.width, heads=s.num_heads, kv_heads=s.num_kv_heads, ffn_width=s.ffn_width,
        vocab=model.padded_vocab_size, seq_len=s.seq_len, causal=s.causal, rotary=positions == "rotary",
        rms=getattr(model, "norm", "layernorm") == "rmsnorm", gated=s.gated,
        bias=getattr(model, "bias", "all") == "all", tied=getattr(model, "tied", True),
        post_norm=getattr(model, "norm_order", "pre") == "post",
        dropout=model.dropout, micro_batch=work.micro_batch, global_batch=work.global_batch, steps=work.steps,
        compiled=not work.is_toy,
    )  # fmt: skip


def rates(step_s: list[float], config: RunConfig) -> dict[str, Any]:
    import torch  # because: not before the command has begun

    seconds = median(step_s[WARM_UP:])
    tokens_per_s = config.train.global_batch * config.seq_len / seconds
    flops_per_s = tokens_per_s * config.model.shape.flops_per_token()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    peak = peak_flops(device, "bf16")
    return {
        "device": device, "tokens_per_s": tokens_per_s, "flops_per_s": flops_per_s,
        "mfu": flops_per_s / peak if peak else None,
    }  # fmt: skip


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # as the command does; because: torch 2.11 crashed on an H200, on its way out after a profile
