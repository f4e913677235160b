"""`build_parallel`, which turns a model without any notion of processes into a parallel model that trains.

Called by train and eval. On meta, where tensors take no memory: cut into pipeline stages, shard over tp, recompute,
compile, shard over dp. Then allocate memory, tie weights, and draw initial weights, the same values for any layout.
"""

from __future__ import annotations

from functools import partial
from itertools import chain

import torch
from torch import nn

from lmtrain.kernels.triton_availability import uses_fused_kernels
from lmtrain.layout import Layout
from lmtrain.models.block_stack import Stack
from lmtrain.models.initial_weights import allocate_memory, apply_ties
from lmtrain.models.model_settings import ModelSettings
from lmtrain.models.objectives.causal_and_masked_objectives import CausalLM, MaskedLM, build_objective
from lmtrain.parallel.blocks.dropout_random_numbers import DropoutSeeds, apply_rank_dropout
from lmtrain.parallel.blocks.recompute_and_compile import apply_compile, apply_recompute, compile_loss
from lmtrain.parallel.device_and_precision_settings import (
    ComputeSettings,
    NoRecomputeSettings,
    PrecisionSettings,
    RecomputeSettings,
    SomeRecomputeSettings,
)
from lmtrain.parallel.initialize_and_save_shards import draw_initial_values
from lmtrain.parallel.linear_forward_backward_products import apply_summing_linears, can_sum_products, summing_modules
from lmtrain.parallel.mesh import Mesh, build_mesh
from lmtrain.parallel.parallel_model import ParallelModel
from lmtrain.parallel.pipeline.execute_schedule import Pipeline, SingleStage
from lmtrain.parallel.tensor_parallel import apply_tensor_parallel, count_hits, cross_entropy_sum
from lmtrain.parallel.weights.master_weights import WORK_DTYPE, LossScale, MasterWeights, to_work_dtype
from lmtrain.parallel.weights.reduce_and_clip_gradients import TiedSums, tied_copies
from lmtrain.placement.attention_activation_bytes import uses_block_masks
from lmtrain.placement.layers_and_shards_of_ranks import Stage, placements_of_rank, stages_of_rank
from lmtrain.placement.parallel_settings import ParallelSettings
from lmtrain.runtime.machine.visible_gpus_without_torch import has_kernel_compiler
from lmtrain.spec import LanguageModel, Start


def build_parallel(
    settings: ModelSettings,
    precision: PrecisionSettings,
    compute: ComputeSettings,
    device: torch.device,
    *,
    seed: int | None,
    training: bool,
    mesh: Mesh | None = None,
    parallel: ParallelSettings = ParallelSettings(),
    recompute: RecomputeSettings = NoRecomputeSettings(),
    always_shard: bool = False,
) -> ParallelModel:
    """Build this rank's share of the model of `settings`; every rank of `mesh` calls this (no mesh: a single process).
    `seed` draws the initial weights (None: they stay 0, to be loaded). With `training` false the weights exist once, in
    the compute dtype. `always_shard` uses FSDP even on a single data-parallel rank, to measure its cost.
    """
    mesh = mesh or build_mesh(Layout(), device)
    shards = (mesh.dp if training else mesh.dp_shard).size > 1 or always_shard
    if shards:
        from lmtrain.parallel.weights import fsdp_sharding  # because: importing FSDP takes half a CPU second
    dtype = WORK_DTYPE[precision.kind]
    sequence_parallel = parallel.sequence_parallel and mesh.tp.size > 1
    on_gpu = device.type == "cuda" and has_kernel_compiler()
    uses_dropout = settings.uses_dropout
    compiled = compute.compiles(parallel, uses_dropout=uses_dropout, on_gpu=on_gpu)
    sums = training and can_sum_products(device, dtype)
    seeds = DropoutSeeds(seed or 0, mesh.tp, mesh.dp, sequence_parallel=sequence_parallel, uses_dropout=uses_dropout)
    objective = _objective(settings, mesh, sequence_parallel=sequence_parallel)

    stages: dict[int, LanguageModel] = {}
    starts: dict[str, Start] = {}
    applied: list[str] = []
    for stage in stages_of_rank(settings, parallel, mesh.pp.index):
        with torch.device("meta"):
            model = settings.build()
        assert isinstance(model, nn.Module)
        starts = model.starts()
        model.cut(stage.layers, first=stage.first, last=stage.last)
        if not training:
            to_work_dtype(model.parameters(), dtype)
        done = [apply_tensor_parallel(model, mesh.tp, sequence_parallel=sequence_parallel)]
        done += [apply_summing_linears(model)] if parallel.splits_backward or sums else []
        done += [apply_rank_dropout(model, seeds)]
        if isinstance(recompute, SomeRecomputeSettings):
            done += [apply_recompute(model, recompute, seeds, compiled=compiled)]
        done += [apply_block_masks(model, on_gpu=on_gpu)] if training else []
        done += [apply_compile(model, deterministic=compute.deterministic)] if compiled else []
        # applied last, so that FSDP's hooks wrap whole blocks
        done += [fsdp_sharding.apply_data_parallel(model, mesh, parallel.zero, dtype)] if shards else []
        model.to_empty(device=device) if shards else allocate_memory(model, device)
        apply_ties(model)  # because: leaving meta allocates two tensors for a tied weight
        model.train(training)
        stages[stage.number] = model
        applied += _log_lines(stage, mesh.layout.pp * mesh.layout.vp, done)
    if uses_fused_kernels(device):
        applied.append("kernels: the loss, and biases of MLPs with their activations")
    elif compiled:
        applied.append(compile_loss(objective, deterministic=compute.deterministic))

    parameters = {name: p for model in stages.values() for name, p in model.named_parameters()}
    products = {number: summing_modules(model) if sums else [] for number, model in stages.items()}
    weights = (
        fsdp_sharding.ShardedWeights(stages, parameters, parallel.zero, products)
        if shards
        else MasterWeights(parameters, dtype, chain.from_iterable(products.values()))
    )
    placements = placements_of_rank(settings, parallel, mesh.coordinate)
    placements |= tied_copies(settings.ties(), weights.master, placements)
    placements = {name: placements[name] for name in weights.master}
    draw_initial_values(weights.master, placements, starts if seed is not None else None, seed or 0)
    weights.publish()
    applied.append(f"weights: {len(placements)} tensors, computed in {precision.kind}, master weights in fp32")
    split_over_tp = mesh.tp.size > 1 and not sequence_parallel
    runner: SingleStage | Pipeline = SingleStage()
    if mesh.pp.size > 1:
        runner = Pipeline(parallel.pipeline, mesh, dtype, device, split_over_tp=split_over_tp)
    tied_sums = TiedSums(settings.ties() if training else (), mesh, runner.end_ranks, weights, device)
    return ParallelModel(
        stages, runner, settings, device, mesh,
        sequence_parallel=seeds.varies_by_rank, objective=objective, masters=weights, tied_sums=tied_sums,
        loss_scale=LossScale(precision), placements=placements, dropout_seeds=seeds, applied=applied, compiled=compiled,
    )  # fmt: skip


def _objective(settings: ModelSettings, mesh: Mesh, *, sequence_parallel: bool) -> CausalLM:
    objective = build_objective(settings.terms, settings.z_loss)
    if mesh.tp.size > 1:
        objective.cross_entropy = partial(cross_entropy_sum, axis=mesh.tp)
        objective.hits = partial(count_hits, axis=mesh.tp)
    if isinstance(objective, MaskedLM) and sequence_parallel:
        objective.num_shards, objective.shard_index = mesh.tp.size, mesh.tp.index
    return objective


def apply_block_masks(model: LanguageModel, *, on_gpu: bool) -> str | None:
    """Make the model build block masks for flex_attention instead of dense masks, in place. Return a line for the log,
    or None if the model keeps dense masks: without a GPU, with dropout, or with very narrow heads.

    A model that is no Stack builds its own masks. `on_gpu` means a GPU with a compiler for its kernels.
    """
    if not (isinstance(model, Stack) and uses_block_masks(model.settings, on_gpu=on_gpu)):
        return None
    # because: the import takes a second, and a CPU has no kernel for flex_attention's backward
    from lmtrain.models.layers.flex_attention_block_masks import build_block_mask

    model.build_mask = build_block_mask
    return "masks: block masks for flex_attention, if masks are needed"


def _log_lines(stage: Stage, num_stages: int, lines: list[str | None]) -> list[str]:
    """Return lines for the log on a pipeline stage: one on the layers that it holds, and whether it has the embedding
    or the head, then `lines`, each with the stage's number. If there is one stage, return `lines` alone. Leave out
    lines of None.
    """
    if num_stages == 1:
        return [line for line in lines if line]
    ends = ["embedding"] * stage.first + ["head"] * stage.last
    layers = f"layers {stage.layers[0]}-{stage.layers[-1]}" if stage.layers else "no layer"
    cut = f"cut: stage {stage.number} of {num_stages}, {', '.join([layers, *ends])}"
    return [cut, *(f"stage {stage.number}: {line}" for line in lines if line)]
