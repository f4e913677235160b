"""The placement of a model on ranks: a rank's stages with their layers, and its regions of each parameter. Torch-free.

A whole parameter is divided into tensor-parallel parts, and a part into data-parallel shards. Initial values, the
gradient norm, optimizers and checkpoints read this table. Integers only, no processes. A part is cut section by section
(a rank's qkv is [q_t | k_t | v_t]) and a shard is a range of the part's rows, so a rank holds a few rectangles of the
whole: its regions. Rows that pad the vocabulary are in no region.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from lmtrain.layout import Coordinate, Layout
from lmtrain.models.model_settings import ModelSettings
from lmtrain.placement.parallel_settings import ParallelSettings
from lmtrain.spec import Cut, Cuts, ModelShape, Split

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Region:
    """A rectangle of a parameter on a rank: its slices in the rank's tensor, and its offset and shape in the whole."""

    local: tuple[slice, ...]
    offset: Shape
    shape: Shape


@dataclass(frozen=True)
class Placement:
    """The placement of a parameter on a rank: which part of the whole parameter the rank holds, and whether it saves
    it.
    """

    name: str
    global_shape: Shape  # shape of the whole parameter, without padding
    cut: Cut
    part_shape: Shape  # shape of this tensor-parallel rank's part, padding included
    rows: range  # rows of the part that this rank holds: all rows unless weights are sharded
    regions: tuple[Region, ...]
    num_holders: int  # number of ranks that hold the same elements
    is_owner: bool  # True on the single holder that saves them
    num_sharing: int = 1  # number of tp ranks that hold the same `copied_rows`, since there are fewer heads than ranks
    copied_rows: range = range(0)  # last rows of this rank's tensor, if several tp ranks hold them
    is_first_copy: bool = True  # True on the tp rank that counts and saves these rows

    @property
    def local_shape(self) -> Shape:
        return (len(self.rows), *self.part_shape[1:])

    @property
    def sections(self) -> Shape:
        """The row counts of the whole parameter's sections."""
        return self.cut.sections or self.global_shape[:1]

    @property
    def counted_rows(self) -> int:
        """The number of the tensor's first rows that this rank counts in sums over ranks, and saves."""
        return len(self.rows) if self.is_first_copy else self.copied_rows.start


def place_parameters(
    shapes: Mapping[str, Shape], cuts: Cuts, layout: Layout, coordinate: Coordinate, vocab_size: int
) -> dict[str, Placement]:
    """Return name -> placement for every parameter in `shapes`: which rows and regions of it the rank at `coordinate`
    holds, and whether that rank saves them. `cuts` tells how tensor parallelism splits each parameter; those that it
    lacks are not split. `vocab_size` is the number of tokens, without padding.

    `shapes` are the model's own, with padding; a tied weight occurs once.
    """
    uncut = {name for name in shapes if _cut_of(cuts, name).split is Split.NONE}
    num_replicas, num_copies = layout.dp_replicate, layout.dp_replicate * layout.tp
    owner_of = _assign_owners({name: math.prod(shapes[name]) for name in shapes if name not in uncut}, num_replicas)
    owner_of |= _assign_owners({name: math.prod(shapes[name]) for name in uncut}, num_copies)
    copy_index = coordinate.dp_replicate * layout.tp + coordinate.tp  # index among the copies of an uncut weight
    result = {}
    for name, shape in shapes.items():
        cut = _cut_of(cuts, name)
        part = part_shape(shape, cut, layout.tp)
        rows = shard_rows(part[0], layout.dp_shard, coordinate.dp_shard)
        true_shape = _true_shape(shape, cut, vocab_size)
        first_copied, num_sharing = copied_part(true_shape[0], cut, layout.tp)
        result[name] = Placement(
            name, true_shape, cut, part, rows, _regions(true_shape, cut, part, rows, layout.tp, coordinate.tp),
            num_holders=num_copies if name in uncut else num_replicas,
            is_owner=owner_of[name] == (copy_index if name in uncut else coordinate.dp_replicate),
            num_sharing=num_sharing,
            copied_rows=range(min(max(first_copied - rows.start, 0), len(rows)), len(rows)),
            is_first_copy=coordinate.tp % num_sharing == 0,
        )  # fmt: skip
    return result


def part_shape(shape: Shape, cut: Cut, tp: int) -> Shape:
    """Return the shape of the part of a parameter that one of `tp` tensor-parallel ranks holds. `shape` is that of the
    whole parameter, and `cut` tells along which dimension it is split. A part of the vocabulary is rounded up, so that
    all parts are equal.
    """
    match cut.split:
        case Split.ROW:
            return (shape[0], shape[1] // tp)
        case Split.COLUMN:
            return (sum(rows for rows, _ in section_parts(shape[0], cut, tp)), *shape[1:])
        case Split.VOCAB:
            return (-(-shape[0] // tp), *shape[1:])
    return shape


def section_parts(num_rows: int, cut: Cut, tp: int) -> list[tuple[int, int]]:
    """Return a pair for each section (such as queries, keys, values) of a weight that tensor parallelism splits by
    output rows: how many of the section's rows each of `tp` ranks holds, and how many ranks hold the same rows. The
    latter is 1 unless the section has fewer heads than there are ranks.
    """
    parts = []
    for section in cut.sections or (num_rows,):
        units = section // cut.unit
        parts.append((cut.unit, tp // units) if tp > units and tp % max(units, 1) == 0 else (section // tp, 1))
    return parts


def copied_part(num_rows: int, cut: Cut, tp: int) -> tuple[int, int]:
    """Return (first, count) for one tensor-parallel rank's part of a weight: its rows from index `first` to the end are
    held by `count` ranks in all. If no other rank holds any of its rows, `count` is 1 and `first` is not below the
    part's number of rows.

    Sections of which ranks hold copies are the last ones: keys and values follow queries.
    """
    if cut.split is not Split.COLUMN:
        return num_rows, 1
    parts = section_parts(num_rows, cut, tp)
    return sum(rows for rows, sharing in parts if sharing == 1), max(sharing for _, sharing in parts)


def shard_rows(num_rows: int, num_shards: int, index: int) -> range:
    """Return the rows of shard number `index`. Shards are equal, but the last ones may be shorter or empty, as in FSDP.
    """
    size = -(-num_rows // num_shards)
    return range(min(index * size, num_rows), min((index + 1) * size, num_rows))


def saved_regions(shape: Shape, cut: Cut, layout: Layout, vocab_size: int) -> Iterator[Region]:
    """Yield the regions (rectangles) of a weight that a checkpoint stores as separate pieces: those of all ranks, each
    once. `shape` is that of the whole weight, `cut` tells how tensor parallelism splits it, and `vocab_size` is the
    number of tokens, without padding.
    """
    part, true_shape = part_shape(shape, cut, layout.tp), _true_shape(shape, cut, vocab_size)
    first_copied, num_sharing = copied_part(true_shape[0], cut, layout.tp)
    for tp in range(_num_parts(cut, layout)):
        for shard in range(layout.dp_shard):
            rows = shard_rows(part[0], layout.dp_shard, shard)
            for region in _regions(true_shape, cut, part, rows, layout.tp, tp):
                if tp % num_sharing == 0 or rows.start + region.local[0].start < first_copied:
                    yield region


def num_saved_regions(shape: Shape, cut: Cut, layout: Layout, vocab_size: int) -> int:
    """Return the number of regions that `saved_regions` yields for the same arguments: the pieces in which a checkpoint
    stores a weight. It is computed without building them.
    """
    part, num_rows = part_shape(shape, cut, layout.tp), _true_shape(shape, cut, vocab_size)[0]
    size = -(-part[0] // layout.dp_shard)
    first_copied, num_sharing = copied_part(num_rows, cut, layout.tp)
    return sum(
        -(-(start + rows) // size) - start // size
        for tp in range(_num_parts(cut, layout))
        for start, _, rows in _runs(num_rows, cut, part[0], layout.tp, tp)
        if rows > 0 and (tp % num_sharing == 0 or start < first_copied)
    )


def _num_parts(cut: Cut, layout: Layout) -> int:
    """Return into how many different parts tensor parallelism splits a weight with this cut: `layout.tp`, or 1 if it is
    not split.
    """
    return 1 if cut.split is Split.NONE else layout.tp


def _true_shape(shape: Shape, cut: Cut, vocab_size: int) -> Shape:
    """Return the shape without the rows that pad the vocabulary."""
    return (vocab_size, *shape[1:]) if cut.split is Split.VOCAB else shape


def _cut_of(cuts: Cuts, name: str) -> Cut:
    return cuts.get(name, Cut(Split.NONE))


def _regions(
    true_shape: Shape, cut: Cut, padded_part: Shape, rows: range, tp: int, tp_index: int
) -> tuple[Region, ...]:
    """Return the regions of a weight that one rank holds: those in `rows` of the part of tensor-parallel rank
    `tp_index` of `tp`. `true_shape` is the shape of the whole weight, `padded_part` that of the part with its padding,
    and `cut` tells how the weight is split.
    """
    column = tp_index * padded_part[1] if cut.split is Split.ROW else 0
    regions = []
    for start, offset, length in _runs(true_shape[0], cut, padded_part[0], tp, tp_index):
        first, stop = max(start, rows.start), min(start + length, rows.stop)
        if first < stop:
            local = (slice(first - rows.start, stop - rows.start), *(slice(0, size) for size in padded_part[1:]))
            column_offset = (column,) if len(padded_part) > 1 else ()
            whole_offset = (offset + first - start, *column_offset, *(0 for _ in padded_part[2:]))
            regions.append(Region(local, whole_offset, (stop - first, *padded_part[1:])))
    return tuple(regions)


def _runs(num_rows: int, cut: Cut, part_rows: int, tp: int, tp_index: int) -> list[tuple[int, int, int]]:
    """Return the rows of a weight that tensor-parallel rank `tp_index` of `tp` holds, as runs of consecutive rows:
    (first row within the rank's part, first row within the whole weight, number of rows). `num_rows` is the number of
    rows of the whole weight, `part_rows` that of the part.
    """
    if cut.split is Split.VOCAB:
        return [(0, tp_index * part_rows, min(part_rows, num_rows - tp_index * part_rows))]
    if cut.split is not Split.COLUMN:
        return [(0, 0, num_rows)]
    runs, before, held = [], 0, 0
    for section, (length, num_sharing) in zip(
        cut.sections or (num_rows,), section_parts(num_rows, cut, tp), strict=True
    ):
        runs.append((held, before + tp_index // num_sharing * length, length))
        before, held = before + section, held + length
    return runs


def _assign_owners(sizes: Mapping[str, int], num_owners: int) -> dict[str, int]:
    """Assign each name in `sizes` to an owner, a number from 0 to num_owners - 1, so that the sums of sizes are about
    equal; return name -> owner. Names are assigned from the largest to the smallest, each to the owner with the
    smallest sum so far.

    The result is equal on every rank.
    """
    loads, result = [(0, owner) for owner in range(num_owners)], {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        load, owner = loads[0]
        heapq.heapreplace(loads, (load + sizes[name], owner))
        result[name] = owner
    return result


@dataclass(frozen=True)
class Stage:
    """A pipeline stage: consecutive blocks; the first stage also has the embedding, the last the head."""

    number: int  # index among all stages, virtual stages included
    layers: range
    first: bool
    last: bool


def stages_of_rank(settings: ModelSettings, parallel: ParallelSettings, rank: int) -> list[Stage]:
    """Return the pipeline stages of a rank; `rank` is its index along pp. Without pipelines the model is a single
    stage.
    """
    return list(_stages(settings, parallel).get(rank, ()))


@lru_cache(maxsize=4)  # because: callers query all ranks of the same settings
def _stages(settings: ModelSettings, parallel: ParallelSettings) -> dict[int, list[Stage]]:
    owners = parallel.pipeline.ranks_of_stages(parallel.pp, parallel.vp) if parallel.pp > 1 else (0,)
    cost_of_head = head_cost(settings.shape) if parallel.balance == "cost" else 0.0
    layers = layers_of_stages(settings.shape.num_layers, len(owners), cost_of_head)
    last, result = len(owners) - 1, dict[int, list[Stage]]()
    for number, owner in enumerate(owners):
        result.setdefault(owner, []).append(Stage(number, layers[number], number == 0, number == last))
    return result


def parameter_names_of_stages(settings: ModelSettings, stages: list[Stage]) -> list[str]:
    """Return the names of the parameters of these pipeline stages, as checkpoints name them and in the model's order. A
    weight of the last stage that is tied to one of the first, such as a tied head, appears under the name of that one.
    """
    last = any(stage.last for stage in stages)
    layers = {layer for stage in stages for layer in stage.layers}
    layers |= {-1 for stage in stages if stage.first} | ({settings.shape.num_layers} if last else set())
    tied_firsts = {tie.first for tie in settings.ties()} if last else set()
    by_layer = _weights_of_layers(settings)
    numbered_names = {entry for layer in layers for entry in by_layer.get(layer, ())}
    if tied_firsts:
        numbered_names |= {entry for entries in by_layer.values() for entry in entries if entry[1] in tied_firsts}
    return [name for _, name in sorted(numbered_names)]


@lru_cache(maxsize=4)
def _weights_of_layers(settings: ModelSettings) -> dict[int, list[tuple[int, str]]]:
    """Return layer number -> list of (index among all of the model's parameters, name) of the layer's parameters.
    Number -1 stands for what comes before the blocks, such as the embedding, num_layers for what comes after them.
    """
    result: dict[int, list[tuple[int, str]]] = {}
    for position, name in enumerate(settings.weights()):
        result.setdefault(settings.layer_of(name), []).append((position, name))
    return result


def placements_of_rank(
    settings: ModelSettings, parallel: ParallelSettings, coordinate: Coordinate
) -> dict[str, Placement]:
    """Return name -> placement for the parameters of the rank at `coordinate`, which are those of its pipeline stages:
    which rows and regions of each the rank holds, and whether it saves them.
    """
    weights = settings.weights()
    stages = stages_of_rank(settings, parallel, coordinate.pp)
    shapes = {name: weights[name] for name in parameter_names_of_stages(settings, stages)}
    return place_parameters(shapes, settings.cuts(), parallel.layout, coordinate, settings.shape.vocab_size)


def layers_of_stages(num_layers: int, num_stages: int, cost_of_head: float = 0.0) -> list[range]:
    """Divide `num_layers` layers among the pipeline stages so that the largest load of a stage is as small as possible.
    Return each stage's range of consecutive layer numbers, from 0; it may be empty. A layer is a load of 1; the output
    head adds `cost_of_head` to the last stage.

    Each layer goes to the stage with the smallest load so far. With a head that costs 0 the lengths differ by at most
    1, and the longer ranges come first.
    """
    counts = [0] * num_stages
    # a heap, because it is in order
    heap = [(0.0, stage) for stage in range(num_stages - 1)] + [(cost_of_head, num_stages - 1)]
    for _ in range(num_layers):
        load, stage = heap[0]
        heapq.heapreplace(heap, (load + 1, stage))
        counts[stage] += 1
    return [range(first, stop) for first, stop in pairwise([0, *accumulate(counts)])]


def head_cost(shape: ModelShape) -> float:
    """Return the head's cost in layers: the FLOPs of the vocabulary product divided by those of a block's products."""
    return shape.width * shape.vocab_size / shape.block_matrix_params
