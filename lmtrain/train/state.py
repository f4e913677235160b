"""What a run must remember to go on as if nothing had happened, and whether a checkpoint is of this run.

No random state is in it: weights, order and dropout are pure functions of the seed, the step and the microbatch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lmtrain.checkpoint.described import model_of
from lmtrain.checkpoint.reader import CheckpointReader
from lmtrain.errors import CheckpointError
from lmtrain.optim import state as optimizer_state
from lmtrain.parallel.model import ParallelModel
from lmtrain.piece import Piece
from lmtrain.train.config import RunConfig
from lmtrain.train.preflight import Inputs


@dataclass
class Progress:
    """Where a run stands. `step` is the number of updates done."""

    step: int = 0
    samples: int = 0
    tokens: int = 0
    attempt: int = 1
    skipped: int = 0


def pieces(model: ParallelModel, optimizer: torch.optim.Optimizer) -> list[Piece]:
    """All that this process holds; `model.owned` says which of it this process saves."""
    return model.pieces() + memory(model, optimizer)


def memory(model: ParallelModel, optimizer: torch.optim.Optimizer) -> list[Piece]:
    return model.place(optimizer_state.state_tensors(optimizer, model.parameters), "optim")


def facts(
    config: RunConfig, inputs: Inputs, model: ParallelModel, optimizer: torch.optim.Optimizer, progress: Progress
) -> dict[str, Any]:
    """The JSON half of a checkpoint."""
    return {
        "step": progress.step,
        "samples": progress.samples,
        "tokens": progress.tokens,
        "attempt": progress.attempt,
        "skipped": progress.skipped,
        "seq_len": config.seq_len,
        "seed": config.train.seed,
        "settings": config.to_dict(),
        "model": inputs.model.to_dict(),
        "tokenizer": {
            "fingerprint": inputs.tokenizer.fingerprint,
            "eod_id": inputs.tokenizer.eod_id,
            "vocab_size": inputs.tokenizer.vocab_size,
        },
        "data": inputs.data.identity | {"content_sha256": inputs.data.content_sha256},
        "optimizer": {"kind": config.optim.kind, "num_updates": optimizer_state.num_updates(optimizer)},
        "precision": {"kind": config.precision.kind} | model.loss_scale.state(),
    }


def restore(
    path: Path, config: RunConfig, inputs: Inputs, model: ParallelModel, optimizer: torch.optim.Optimizer
) -> Progress:
    """Fill masters and optimizer from a checkpoint of this same run at any layout, or refuse with what differs.

    Each process reads its own parts and talks to none.
    """
    reader = CheckpointReader(path)
    state = reader.state
    check_same_run(path, state, config, inputs)
    model.load(reader.load_into, also=memory(model, optimizer))
    optimizer_state.apply_num_updates(optimizer, state["optimizer"]["num_updates"])
    model.loss_scale.load(state["precision"])
    return Progress(state["step"], state["samples"], state["tokens"], state["attempt"] + 1, state["skipped"])


def check_same_run(path: Path, state: dict[str, Any], config: RunConfig, inputs: Inputs) -> None:
    """Weights of another shape, or samples in another order, would be a different run under the same name."""
    if "data" not in state or "optimizer" not in state:
        raise CheckpointError(
            f"{path} holds the weights of another program and no run to go on with. "
            f"Begin one from them: checkpoint.init_from={path}."
        )
    # because: a checkpoint may be older than some settings, which then were what is now their default
    saved = model_of(state, path)
    model, unread = saved.to_dict(), {problem.key for problem in saved.unused()}
    pairs = [(f"model.{key}", v, model.get(key)) for key, v in inputs.model.to_dict().items() if key not in unread]
    known = {"packing": "concatenate", "order": "own", "first_sample": 0, "blend": None} | state["data"]
    pairs += [(f"data: {key}", value, known.get(key)) for key, value in inputs.data.identity.items()]
    ours, theirs = inputs.data.content_sha256, state["data"].get("content_sha256")
    if ours is not None and theirs is not None:
        pairs.append(("data: content", ours[:12], theirs[:12]))
    pairs += [
        ("tokenizer", inputs.tokenizer.fingerprint[:12], state["tokenizer"]["fingerprint"][:12]),
        ("train.seed", config.train.seed, state["seed"]),
        ("optim.kind", config.optim.kind, state["optimizer"]["kind"]),
        ("samples before the next step", config.batch_plan.range_of(state["step"])[0], state["samples"]),
    ]
    wrong = [f"{name} is {ours}, there {theirs}" for name, ours, theirs in pairs if ours != theirs]
    if wrong:
        raise CheckpointError(
            f"{path} is a checkpoint of another run: {'; '.join(wrong)}. "
            "Go on with the settings it was made with, or choose a new run.dir."
        )
