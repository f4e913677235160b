"""The index files that a run needs, and what each of its datasets contributes: `lmtrain data index` and `data blend`.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

from lmtrain.train.run_config import RunConfig
from lmtrain.train.startup_checks.preflight import load_data, load_stages


def build_indexes(config: RunConfig) -> dict[str, int | float]:
    """Build the index files of all stages of a run. Return how many datasets and samples they are of, and the seconds
    that it took. Stages that read the same samples count once.
    """
    began = perf_counter()
    streams = {
        key: part
        for inputs in load_stages(config, None, None)
        for key, part in zip(inputs.data.history.streams, inputs.data.parts, strict=True)
    }
    return {
        "datasets": len({part.indexed.prefix for part in streams.values()}),
        "samples": sum(part.dataset.num_samples for part in streams.values()),
        "seconds": round(perf_counter() - began, 3),
    }


def shares_of_datasets(config: RunConfig) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """Return a dict for each dataset of a run, or for each of each stage, with its share, samples and tokens; and such
    a dict for all datasets together, None if the run has stages.
    """
    if not config.stages:
        rows = load_data(config, with_validation=False)[2].contributions(config.seq_len)
        total: dict[str, Any] = {key: sum(row[key] for row in rows) for key in rows[0] if key != "dataset"}
        total |= {"dataset": f"{len(rows)} datasets", "epochs": total["run_samples"] / total["samples"]}
        return rows, total
    stages = zip(config.stage_configs, load_stages(config, None, None), strict=True)
    return [
        {"stage": stage.stage_name} | row
        for stage, inputs in stages for row in inputs.data.contributions(stage.seq_len)
    ], None  # fmt: skip
