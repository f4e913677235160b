"""First weights as a run draws them, for a model or a stage that a test holds by itself."""

from __future__ import annotations

from lmtrain.layout import Coordinate
from lmtrain.models.bert import Bert
from lmtrain.models.gpt import GPT
from lmtrain.parallel.shards import fill
from lmtrain.parallel.tied import copies
from lmtrain.placement.parallel_settings import ParallelSettings
from lmtrain.placement.stages import places_of_rank


def start(model: GPT | Bert, seed: int) -> None:
    held = dict(model.named_parameters())
    places = places_of_rank(model.settings, ParallelSettings(), Coordinate(0, 0, 0, 0))
    fill(held, places | copies(model.ties(), held, places), model.starts(), seed)
