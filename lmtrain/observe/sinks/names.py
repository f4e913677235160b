"""What a row of the record is called outside: one name for each number, the same in every sink.

Called by the sinks. docs/how_to/read_a_run.md lists the names for people.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmtrain.observe.measure.measures import measures_of

_STEP = {
    "loss": "loss/train", "lr": "optim/lr", "grad_norm": "optim/grad_norm", "loss_scale": "optim/loss_scale",
    "skipped": "optim/skipped", "tokens": "progress/tokens", "samples": "progress/samples",
    "tokens_per_s": "speed/tokens_per_s", "mfu": "speed/mfu", "data_wait_s": "speed/data_wait_s",
    "memory_bytes": "memory/bytes",
}  # fmt: skip
_SAVE = {"write_s": "save/write_s", "stall_s": "save/stall_s"}
_FAMILIES = ("loss/", "straggler_")  # of keys: a term of the loss, and what is known of slow ranks

# the pages of curves that belong together, for a sink that can be told
CHARTS = {
    "loss": {"train and validation": ["loss/train", "loss/valid.*"], "terms": ["loss/(?!train|valid).*"]},
    "quality": {"validation": ["valid/.*"], "evaluation": ["eval/.*"]},
    "optimizer": {"learning rate": ["optim/lr"], "gradient norm": ["optim/grad_norm"], "scale": ["optim/loss_scale"]},
    "machine": {"tokens per second": ["speed/tokens_per_s"], "MFU": ["speed/mfu"],
                "seconds": ["speed/data_wait_s", "save/.*"], "memory": ["memory/bytes"]},
}  # fmt: skip


def scalars_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Every number of a row that makes a curve, by its name; what a row lacks, or says is unknown, is left out."""
    if row["event"] in ("valid", "eval"):
        return measures_of(row)
    names = {"step": _STEP, "save": _SAVE}.get(row["event"], {})
    found: dict[str, Any] = {name: row.get(key) for key, name in names.items()}
    if row["event"] == "step":
        found |= {key.replace("straggler_", "straggler/"): row[key] for key in row if key.startswith(_FAMILIES)}
    return {name: float(value) for name, value in found.items() if type(value) in (int, float)}
