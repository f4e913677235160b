"""Which layers each pipeline stage holds. Integers alone; called by parallel, the preview of a run and the planner."""

from __future__ import annotations

from itertools import accumulate, pairwise

from lmtrain.spec import ModelShape


def layers_of_stages(num_layers: int, num_stages: int, before: float = 0.0, after: float = 0.0) -> list[range]:
    """Runs of layers; a stage may have none. A layer costs 1; embedding and head cost `before` and `after` layers.

    Layer after layer goes to the stage that has least so far, which makes the dearest stage as cheap as can be. With
    costs of 0 lengths differ by one at most, and the longer ones come first.
    """
    loads = [0.0] * num_stages
    loads[0] += before
    loads[-1] += after
    counts = [0] * num_stages
    for _ in range(num_layers):
        stage = loads.index(min(loads))
        loads[stage] += 1
        counts[stage] += 1
    return [range(first, stop) for first, stop in pairwise([0, *accumulate(counts)])]


def head_cost(shape: ModelShape) -> float:
    """What the head costs, in layers: its product with the vocabulary beside the products of a block."""
    return shape.width * shape.vocab_size / shape.block_matrix_params
