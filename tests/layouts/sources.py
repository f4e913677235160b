"""What a worker does for test_sources.py: steps on a blend, with the loss of each sample beside that of the step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from lmtrain.batch import IGNORED
from lmtrain.data.batch_size_per_step import BatchPlan
from lmtrain.data.loader import Loader
from lmtrain.data.sample_dataset_interface import ShuffledOrder
from lmtrain.data.samples.blend import BlendedDataset, BlendOrder, blend_seeds
from lmtrain.parallel.parallel_model import ParallelModel
from lmtrain.train.in_loop.validate_and_evaluate import sums_of_samples, valid_batches
from lmtrain.train.set_up_run import build_optimizer
from lmtrain.train.step import train_step
from tests.layouts.cases import Case
from tests.layouts.pipelines import digest
from tests.layouts.toy_data import NUM_SAMPLES, data_of
from tests.layouts.training import OPTIM, build, dp_index

VALID_SAMPLES, VALID_BATCH = 21, 4  # because: 21 are five batches and a smaller one, which no dp of 2 or 4 divides


def loader_of(case: Case) -> Loader:
    datasets = [data_of(case), data_of(case), data_of(case)]
    orders = [ShuffledOrder(NUM_SAMPLES, seed) for seed in blend_seeds(1, 3)]
    order = BlendOrder([5, 2, 1], [NUM_SAMPLES] * 3, orders)
    return Loader(
        BlendedDataset(datasets), order, BatchPlan(case.global_batch), case.train.micro_batch,
        dp_index=dp_index(case), dp_size=case.dp, prefetch_steps=0,
    )  # fmt: skip


def gradients(model: ParallelModel) -> dict[str, str]:
    return {name: digest(p.grad) for name, p in model.parameters.items() if p.grad is not None}


def train(name: str, steps: int) -> dict[str, Any]:
    """Return the loss and z-loss of each step with the losses and sources of its samples; for the first step also
    whether the gradients and shares are the same bits without losses by sample, and the plain loss of each sample (None
    for several ranks).
    """
    case = Case.named(name)
    model, loader = build(case), loader_of(case)
    optimizer = build_optimizer(OPTIM, model)
    first = loader.read(0)
    plain = None
    if case.num_processes == 1:
        plain = [
            F.cross_entropy(logits.double(), labels, ignore_index=IGNORED, reduction="sum").item()
            for batch in first.microbatches
            for logits, labels in zip(model.logits(batch), batch.labels_BT, strict=True)
        ]
    passes = []
    for batches in (first, replace(first, by_source=())):
        shares = model.forward_backward(batches)
        model.finish_gradients(None)
        passes.append((gradients(model), shares[:, : len(model.terms)]))
    done = []
    for step in range(steps):
        batches = loader.read(step)
        result = train_step(model, optimizer, batches, OPTIM.lr, OPTIM.clip_norm)
        sources = [0] * batches.num_samples
        for counts in batches.by_source:
            for row in counts.rows_S.tolist():
                sources[row] = counts.number
        labels = [counts.labels for counts in batches.by_source]
        done.append({
            "loss": result.loss, "z_loss": result.z_loss, "samples": list(result.sample_losses), "sources": sources,
            "labels": sum(labels),
        })  # fmt: skip
    ids = np.arange(VALID_SAMPLES)
    batches_of_rank = valid_batches(loader.dataset, ids, VALID_BATCH, loader.dp_index, loader.dp_size)
    sums = torch.stack(list(model.validation_sums(batches_of_rank, VALID_BATCH)))
    return {
        "steps": done, "plain": plain, "total": sums[..., : len(model.terms)].sum(0).flatten().tolist(),
        "valid": sums_of_samples(sums[..., len(model.terms) :], VALID_SAMPLES),
        "same_bits": passes[0][0] == passes[1][0] and torch.equal(passes[0][1], passes[1][1]),
    }  # fmt: skip
