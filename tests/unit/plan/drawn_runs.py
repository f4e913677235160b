"""Runs with drawn models and layouts, and what a rank of one holds, counted on the modules of its stages."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lmtrain.errors import SettingsError
from lmtrain.models.bert_settings import BertSettings
from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.models.model_settings import ModelSettings
from lmtrain.optim.adamw_settings import AdamWSettings
from lmtrain.optim.lamb_settings import LAMBSettings
from lmtrain.optim.muon_settings import MuonSettings
from lmtrain.parallel.device_and_precision_settings import Bf16Settings, Fp32Settings, NoRecomputeSettings
from lmtrain.placement.layers_and_shards_of_ranks import Stage
from lmtrain.plan.run_estimates.workload_from_settings import PlannedRun
from lmtrain.schedules.pipeline_schedule import schedule_named
from lmtrain.schedules.table import Kind
from lmtrain.spec import Split
from tests.unit.plan.planned_runs import planned

SCHEDULES = (("1f1b", 1), ("gpipe", 1), ("zb_h1", 1), ("interleaved", 2), ("interleaved", 3), ("zb_v", 2))
Part = tuple[str, torch.Size]  # the name of a weight, its shape on a tp rank


def drawn_model(rng: random.Random, num_layers: int, tp: int) -> ModelSettings:
    """Return an encoder or a decoder that `tp` ranks can share, with odd sizes wherever they may be."""
    heads, head_width = tp * rng.choice([1, 3]), rng.choice([6, 8, 10])
    values: dict[str, Any] = {
        "num_layers": num_layers, "num_heads": heads, "ffn_width": tp * rng.randint(3, 40), "seq_len": 16,
        "vocab_size": rng.choice([67, 331, 5003]), "vocab_multiple": rng.choice([1, 8, 128]) * tp,
        "num_positions": rng.choice([None, 19]),
    }  # fmt: skip
    if rng.random() < 0.25:
        return BertSettings(
            **values, width=heads * head_width, norm_order=rng.choice(["pre", "post"]), pair_head=rng.random() < 0.5
        )
    return GPTSettings(
        **values, width=heads * rng.choice([7, 9]), head_width=head_width,
        num_kv_heads=rng.choice([n for n in range(1, heads + 1) if heads % n == 0 and (n % tp == 0 or tp % n == 0)]),
        gated=rng.random() < 0.5, tied=rng.random() < 0.5, norm_order=rng.choice(["pre", "sandwich"]),
        bias=rng.choice(["all", "none", "qkv"]), qk_norm=rng.choice(["none", "head"]), head_bias=rng.random() < 0.3,
    )  # fmt: skip


def drawn_runs(count: int, seed: int = 0) -> Iterator[PlannedRun]:
    """Yield `count` runs of every kind of model, optimizer, precision, pipeline schedule, cut and ZeRO level."""
    rng, num_found = random.Random(seed), 0
    while num_found < count:
        pp, tp, (schedule, vp) = rng.choice([1, 2, 3, 4]), rng.choice([1, 2, 4]), rng.choice(SCHEDULES)
        schedule, vp = ("1f1b", 1) if pp == 1 else (schedule, vp)
        shard, copies, num_microbatches = rng.choice([1, 2, 3, 5]), rng.choice([1, 2]), rng.choice([1, pp, 4 * pp])
        try:
            yield planned(
                drawn_model(rng, rng.randint(pp * vp, pp * vp + 3), tp),
                pp=pp, vp=vp, schedule=schedule, tp=tp, dp_shard=shard, dp_replicate=copies, zero=rng.randint(0, 3),
                optim=rng.choice([AdamWSettings, LAMBSettings, MuonSettings])(lr=1e-3), recompute=NoRecomputeSettings(),
                precision=rng.choice([Bf16Settings, Fp32Settings])(), global_batch=num_microbatches * shard * copies,
                average_every_steps=rng.choice([0, 3]),
            )  # fmt: skip
            num_found += 1
        except SettingsError:
            continue


def parts_of(run: PlannedRun, stage: Stage) -> list[Part]:
    """Return the part of each weight of a stage's real modules that a tp rank holds, with the vocabulary's padding."""
    with torch.device("meta"):
        model = run.model.build()
    cuts, shape, tp = model.cuts(), run.model.shape, run.parallel.tp
    model.cut(stage.layers, first=stage.first, last=stage.last)

    def part(name: str, weight: Tensor) -> Part:
        rows, *columns = weight.shape
        split = cuts[name].split
        if split is Split.ROW:
            columns = [columns[0] // tp]
        elif split is Split.COLUMN and "qkv" in name:  # ranks hold copies if heads of keys are fewer than ranks
            rows = shape.head_width * (shape.num_heads // tp + 2 * -(-shape.num_kv_heads // tp))
        elif split is not Split.NONE:
            rows //= tp
        return name, torch.Size([rows, *columns])

    return [part(name, weight) for name, weight in model.named_parameters()]


def lasting_bytes(run: PlannedRun, rank: int) -> dict[str, int]:
    """Return purpose -> bytes of all that lasts on a rank, counted on its stages' modules: what the ZeRO paper has of
    each number, with fp32 masters, gradients and optimizer state.
    """
    parallel, layout = run.parallel, run.parallel.layout
    place, work, shards = layout.coordinate(rank), run.number_bytes, layout.dp_shard
    by_stage = [parts_of(run, stage) for stage in run.stages[place.pp]]
    whole = padded = own = moments = 0
    for name, shape in (part for parts in by_stage for part in parts):
        rows, row = -(-shape[0] // shards), shape[1:].numel()  # FSDP's shards are as long as the first
        num_own = max(0, min(rows, shape[0] - place.dp_shard * rows)) * row
        slots = 1 if run.optim.kind == "muon" and len(shape) == 2 and name.startswith("blocks.") else 2
        whole, padded, own = whole + shape.numel(), padded + rows * row, own + num_own
        moments += slots * num_own
    is_reduced_at_once = layout.dp > 1 and (run.num_microbatches == 1 or parallel.zero >= 2)
    gradients = padded if is_reduced_at_once else whole
    if is_reduced_at_once and parallel.zero == 2 and parallel.splits_backward and run.num_microbatches > 1:
        gradients += _waiting_gradients(run, place.pp, by_stage)
    has_copy = parallel.zero < 3 if layout.dp > 1 else work < 4  # of the weights, to compute with
    return {
        "weights": work * (padded * shards if layout.dp > 1 else whole) * has_copy,
        "gradients": 4 * gradients, "masters": 4 * (padded if layout.dp > 1 else whole), "moments": 4 * moments,
        "average": 4 * own * (run.average_every_steps > 0),
    }  # fmt: skip


def _waiting_gradients(run: PlannedRun, pp: int, by_stage: list[list[Part]]) -> int:
    """Return the most gradients that wait for the second halves of their stages' backward: of all weights that are no
    factors of products, which the first half computes, but for the table of tokens, which is reduced by itself.
    """
    early = [
        sum(
            shape.numel() for name, shape in parts
            if (len(shape) == 1 or name.startswith("embedding.")) and name != "embedding.token.weight"
        )
        for parts in by_stage
    ]  # fmt: skip
    numbers, waiting, most = [stage.number for stage in run.stages[pp]], [0] * len(early), 0
    p = run.parallel
    for kind, stage, _ in schedule_named(p.schedule).row(pp, p.pp, p.vp, run.num_microbatches):
        waiting[numbers.index(stage)] += {Kind.INPUT: 1, Kind.WEIGHT: -1}.get(kind, 0)
        most = max(most, sum(n for n, count in zip(early, waiting, strict=True) if count))
    return most
