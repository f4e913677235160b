"""The tables of docs/explanation/parallelism.md as functions: what weights cost a rank, and what a step sends."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from lmtrain.layout import Coordinate
from lmtrain.placement.layers_and_shards_of_ranks import Placement, place_parameters
from lmtrain.placement.weight_and_activation_bytes import RankBytes, count_elements, rank_bytes
from lmtrain.spec import Split
from tests.layouts.cases import GLOBAL_BATCH, SEQ_LEN, Case

FP32 = 4
Sent = tuple[str, str, int]  # operator, axis, bytes of the whole tensor
REDUCE, GATHER, SCATTER = "all_reduce", "all_gather", "reduce_scatter"


def places_of(case: Case, at: Coordinate) -> dict[str, Placement]:
    model = case.model_settings
    return place_parameters(model.weights(), model.cuts(), case.parallel.layout, at, model.shape.vocab_size)


def weights(case: Case, rank: int) -> RankBytes:
    layout = case.parallel.layout
    places = places_of(case, layout.coordinate(rank)).values()
    return rank_bytes(count_elements(places, layout), layout, zero=case.zero, work_bytes=number_bytes(case))


def number_bytes(case: Case) -> int:
    return FP32 if case.precision == "fp32" else 2


def tokens(case: Case) -> int:
    return GLOBAL_BATCH * SEQ_LEN // (case.dp * case.microbatches)


def collectives(case: Case) -> Counter[Sent]:
    """Of one optimizer step on rank 0, for a GPT."""
    places = list(places_of(case, Coordinate(0, 0, 0, 0)).values())
    sent: Counter[Sent] = Counter()
    sent[REDUCE, "world", FP32] += 1  # the norm
    if case.dp > 1:
        sent[REDUCE, "dp", FP32 * case.microbatches] += 1  # the loss
        sent += _data_parallel(case, places)
    if case.tp > 1:
        sent += _tensor_parallel(case)
    if case.sequence:
        uncut = sum(math.prod(place.local_shape) for place in places if place.cut.split is Split.NONE)
        sent[REDUCE, "tp", FP32 * uncut] += 1
    return Counter({key: count_elements for key, count_elements in sent.items() if count_elements})


def _tensor_parallel(case: Case) -> Counter[Sent]:
    shape, m, n = case.model_settings.shape, case.microbatches, tokens(case)
    whole = n * shape.width * number_bytes(case)
    numbers = case.tp * n * 3 * FP32  # the loss: maximum, sum of exponentials and label of each token from every rank
    sent = Counter({(GATHER, "tp", numbers): m})
    again = {"full": shape.num_layers, "operators": shape.num_layers, "first": 1}.get(case.recompute, 0)
    sums = m * (4 * shape.num_layers + 2 + 2 * again)
    sent[SCATTER if case.sequence else REDUCE, "tp", whole] += sums
    if case.sequence:
        sent[GATHER, "tp", whole] += m * (6 * shape.num_layers + 3 + 2 * again)
    return sent


def _data_parallel(case: Case, places: Iterable[Placement]) -> Counter[Sent]:
    """Each block is a group of its own, each table of tokens too unless two are one, and the rest is the last group."""
    m, zero, shards = case.microbatches, case.zero, case.parallel.dp_shard
    sizes: Counter[str] = Counter()
    for place in places:
        words = place.name.split(".")
        group = ".".join(words[:2]) if words[0] == "blocks" else ""
        if place.cut.split is Split.VOCAB and not case.model_settings.ties():
            group = place.name
        sizes[group] += math.prod((-(-place.part_shape[0] // shards), *place.part_shape[1:]))
    sent: Counter[Sent] = Counter()
    for group, size in sizes.items():
        if shards > 1:
            gathers = 1 if zero < 3 else 2 * m if group.startswith("blocks") else m
            sent[GATHER, "dp_shard", size * shards * number_bytes(case)] += gathers
            sent[SCATTER, "dp_shard", size * shards * FP32] += 1 if zero < 2 else m
        if case.parallel.dp_replicate > 1:
            sent[REDUCE, "dp_replicate", size * FP32] += 1
    return sent
