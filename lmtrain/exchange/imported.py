"""Weights that no run of ours has made, as a checkpoint of ours. Called by the imports from other formats.

The checkpoint can be evaluated, generated from, resharded and exported, and a new run can begin from its weights. It
says where they come from and has no run's settings, so there is no run to go on with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmtrain.checkpoint.disk.tensor_file import RankData
from lmtrain.checkpoint.save.commit import save_checkpoint
from lmtrain.checkpoint.store import latest
from lmtrain.errors import CheckpointError, MissingInputError, OutputError
from lmtrain.exchange.streaming import Report, bytes_of, counted, spec
from lmtrain.models.model_settings import ModelSettings, true_weights
from lmtrain.runfolder.names import step_folder_name
from lmtrain.tokenizer.base import Tokenizer


def tokenizer_of(path: Path) -> Tokenizer:
    try:
        return Tokenizer.load(path)
    except MissingInputError as error:
        raise MissingInputError(f"{error} Give the model's with --tokenizer PATH.") from error


def save_foreign(
    output: Path,
    settings: ModelSettings,
    parts: Callable[[str], Iterable[Tensor]],
    tokenizer: Tokenizer,
    came_from: Mapping[str, Any],
    *,
    step: int = 0,
    report: Report | None = None,
) -> dict[str, Any]:
    """Write the weights; `parts` returns a tensor's rows in order, by its name in settings.weights()."""
    vocab = settings.shape.vocab_size
    if tokenizer.vocab_size > vocab:
        raise CheckpointError(
            f"The tokenizer has {tokenizer.vocab_size} tokens and the model knows {vocab}. Give the tokenizer that the "
            "model was trained with."
        )
    if latest(output) is not None:
        raise OutputError(f"{output} holds a checkpoint already. Choose a new --output.")
    shapes = true_weights(settings)
    specs = [spec(f"model.{name}", "F32", shape) for name, shape in shapes.items()]
    total = sum(s.num_bytes for s in specs)

    def rows() -> Iterator[memoryview]:
        for s in specs:
            expected = s.num_bytes
            for part in parts(s.name.split(".", 1)[1]):
                expected -= 4 * part.numel()
                yield bytes_of(part.to(torch.float32))
            assert expected == 0, f"{s.name} came in another size than its settings have"

    state = {
        "step": step,
        "samples": 0,
        "tokens": 0,
        "seq_len": settings.shape.seq_len,
        "model": settings.to_dict(),
        "tokenizer": {
            "fingerprint": tokenizer.fingerprint,
            "eod_id": tokenizer.eod_id,
            "vocab_size": tokenizer.vocab_size,
        },
        "imported": dict(came_from),
    }
    data = RankData(specs, counted(rows(), total, report))
    path, _ = save_checkpoint(output, step, data, state, {"tokenizer.json": tokenizer.to_bytes()})
    assert path.name == step_folder_name(step)
    return {"checkpoint": str(path), "parameters": settings.num_parameters, "bytes": total, **came_from}
