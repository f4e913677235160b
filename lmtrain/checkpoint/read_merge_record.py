"""What a merged checkpoint records of its making: how its parents were averaged, and which they were. Torch-free.

Read by the commands that show checkpoints and runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lmtrain.checkpoint.disk.checkpoint_format import is_count
from lmtrain.errors import CheckpointError
from lmtrain.units import plural

_MEANS = {
    "uniform": "uniform mean", "linear": "mean that weighs checkpoint j by j + 1",
    "decay:linear": "mean that emulates a linear decay", "decay:sqrt": "mean that emulates a 1-sqrt decay",
}  # fmt: skip
_MAX_PARENTS = 100_000


@dataclass(frozen=True, kw_only=True)
class MergeParent:
    """A checkpoint that was averaged into a merged one."""

    run: str  # the folder of its run, absolute; its own path if it is in no run's folder
    checkpoint: str  # its path, absolute
    step: int
    manifest_sha256: str
    weight: float


@dataclass(frozen=True, kw_only=True)
class MergeRecord:
    """The mean, the moments and the parents of a merged checkpoint, as `state["merged"]` records them."""

    mean: str
    moments: str  # newest: the optimizer's state of the newest parent was kept; none: it was left out
    parents: tuple[MergeParent, ...]  # oldest first

    def to_dict(self) -> dict[str, Any]:
        """Return the record as JSON data, with its `summary`."""
        return asdict(self) | {"summary": self.summary}

    @property
    def mean_words(self) -> str:
        """The kind of mean as words, such as "uniform mean"."""
        kind, _, value = self.mean.partition(":")
        return f"exponential mean of decay {value}" if kind == "ema" else _MEANS.get(self.mean, self.mean)

    @property
    def summary(self) -> str:
        """The merge in one clause: the kind of mean, the number of merged checkpoints and their first and last step."""
        steps = [parent.step for parent in self.parents]
        first, last = min(steps), max(steps)
        at = f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"
        return f"{self.mean_words} of {plural(len(steps), 'checkpoint')} of {at}"


def merge_record(state: Mapping[str, Any], where: object) -> MergeRecord | None:
    """Return the record of how a merged checkpoint was made; None for a checkpoint that no merge has made. `state` is
    the state in its manifest. Raise CheckpointError, which names `where`, if the record is malformed.
    """
    entry = state.get("merged")
    if entry is None:
        return None
    try:
        parents = tuple(map(_parse_parent, entry["parents"]))
        mean, moments = entry["mean"], entry["moments"]
        if not (parents and len(parents) <= _MAX_PARENTS and isinstance(mean, str) and isinstance(moments, str)):
            raise ValueError("it names no parents, no mean or no moments")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{where} does not state how it was merged: its state.merged is wrong ({str(error)[:200]}). Restore it "
            "from a copy."
        ) from error
    return MergeRecord(mean=mean[:100], moments=moments[:100], parents=parents)


def _parse_parent(entry: Any) -> MergeParent:
    """Return the parent of a merged checkpoint that `entry`, from the list of parents in its manifest's state,
    describes. Raise KeyError, TypeError or ValueError if the entry is malformed.
    """
    run, checkpoint, digest = entry["run"], entry["checkpoint"], entry["manifest_sha256"]
    is_named = isinstance(checkpoint, str) and isinstance(digest, str) and isinstance(run, str)
    if not is_named or not is_count(entry["step"]) or type(entry["weight"]) not in (int, float):
        raise ValueError(f"{str(entry)[:100]} is not a checkpoint with its weight")
    return MergeParent(
        run=run, checkpoint=checkpoint, step=entry["step"], manifest_sha256=digest, weight=float(entry["weight"])
    )
