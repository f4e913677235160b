"""First weights as a run draws them, for a model or a stage that a test holds by itself."""

from __future__ import annotations

import torch
from torch import Tensor

from lmtrain.layout import Coordinate
from lmtrain.models.bert import Bert
from lmtrain.models.gpt import GPT
from lmtrain.models.initial_weights import draw_parameter
from lmtrain.parallel.initialize_and_save_shards import draw_initial_values
from lmtrain.parallel.weights.reduce_and_clip_gradients import tied_copies
from lmtrain.placement.layers_and_shards_of_ranks import placements_of_rank
from lmtrain.placement.parallel_settings import ParallelSettings
from lmtrain.spec import Start


def start(model: GPT | Bert, seed: int) -> None:
    held = dict(model.named_parameters())
    places = placements_of_rank(model.settings, ParallelSettings(), Coordinate(0, 0, 0, 0))
    draw_initial_values(held, places | tied_copies(model.ties(), held, places), model.starts(), seed)


def whole(name: str, shape: tuple[int, ...], how: Start, seed: int) -> Tensor:
    """A parameter without its padding."""
    return torch.cat([block for _, block in draw_parameter(name, shape, how, seed)])
