"""The exponential average of the weights that a checkpoint may hold beside them: its names, its facts, and the view of
a manifest in which the average takes the place of the weights. Torch-free; called by whatever opens a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from lmtrain.checkpoint.disk.checkpoint_format import Manifest, is_count
from lmtrain.errors import CheckpointError, UsageError, own, way

WeightSet = Literal["model", "ema"]  # which weights of a checkpoint are read: themselves, or their average
MODEL_PREFIX, AVERAGE_PREFIX, OPTIMIZER_PREFIX = "model.", "ema.", "optim."  # of the names of tensors
AVERAGE_DTYPE = "F32"
_COUNTS = ("every_steps", "from_step", "since_step")


@dataclass(frozen=True, kw_only=True)
class AverageFacts:
    """The decay and the steps of the average in a checkpoint, as `state["ema"]` records them."""

    decay: float
    every_steps: int
    from_step: int
    since_step: int  # the step at which the average began as a copy of the weights

    def to_dict(self) -> dict[str, Any]:
        """Return the facts as JSON data, with their `summary`."""
        return asdict(self) | {"summary": self.summary}

    @property
    def summary(self) -> str:
        """The average in one clause: its decay, and from which step on and how often it was updated."""
        often = "every step" if self.every_steps == 1 else f"every {self.every_steps:,} steps"
        return f"exponential average of decay {self.decay:g}, updated {often} since step {self.since_step:,}"


def average_facts(state: Mapping[str, Any], where: object) -> AverageFacts | None:
    """Return how the exponential average of the weights in a checkpoint was made. `state` is the state in its manifest.
    Return None if the checkpoint holds no average. Raise CheckpointError, which names `where`, if the record is
    malformed.
    """
    entry = state.get("ema")
    if entry is None:
        return None
    if not is_average_entry(entry):
        raise CheckpointError(
            f"{where} does not state how its average was made: its state.ema is {str(entry)[:100]}. Restore it from a "
            "copy."
        )
    return AverageFacts(decay=float(entry["decay"]), **{key: entry[key] for key in _COUNTS})


def is_average_entry(entry: object) -> bool:
    """Return whether `entry` is a valid record of how an average of the weights was made: a dict with a decay between 0
    and 1 and the numbers of steps.
    """
    if not isinstance(entry, dict) or not all(is_count(entry.get(key)) for key in _COUNTS):
        return False
    return type(entry.get("decay")) in (int, float) and bool(0 < entry["decay"] < 1)


def holds_average(manifest: Manifest) -> bool:
    """Return True if a checkpoint holds an average of its weights, or its state says so."""
    return manifest.state.get("ema") is not None or any(name.startswith(AVERAGE_PREFIX) for name in manifest.tensors)


def view_of_average(manifest: Manifest, where: object) -> Manifest:
    """Return the manifest of a checkpoint as if its average were its weights: `model.NAME` is what `ema.NAME` was, and
    the optimizer's tensors, which belong to the weights, are gone. Raise CheckpointError, which names `where`, if the
    checkpoint holds no average.
    """
    if not holds_average(manifest):
        raise CheckpointError(
            f"{where} holds no average of its weights, and the average was asked for (weights ema). A run saves one "
            "with its checkpoints if checkpoint.ema.decay is set, as in checkpoint.ema.decay=0.999. Use weights "
            f"{way('model', instead_of='ema')}, which is the default, or give a checkpoint of such a run."
        )
    tensors = {
        MODEL_PREFIX + name.removeprefix(AVERAGE_PREFIX): entry
        for name, entry in manifest.tensors.items()
        if name.startswith(AVERAGE_PREFIX)
    }
    left_out = (MODEL_PREFIX, AVERAGE_PREFIX, OPTIMIZER_PREFIX)
    others = {name: entry for name, entry in manifest.tensors.items() if not name.startswith(left_out)}
    return replace(manifest, tensors=tensors | others)


def check_weight_set(value: object, name: str = "weights") -> WeightSet:
    """Return `value` if it is "model" (the weights themselves) or "ema" (their average). Raise UsageError for any other
    value; `name` is the name of the option in its message.
    """
    for choice in get_args(WeightSet):
        if value == choice:
            return choice  # type: ignore[no-any-return]
    raise UsageError(
        f"{name}={value} are not weights that a checkpoint holds. Use {own('model')} for the weights themselves, or "
        f"{own('ema')} for their exponential average."
    )
