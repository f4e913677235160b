"""`lmtrain runs diff A B`: the first step at which two runs differ, their other differences, and the probable cause.

Reads the rows, settings and environments that both runs recorded, and the weights of checkpoints of the same step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from lmtrain.checkpoint.compare_or_verify_checkpoints import value_differences
from lmtrain.checkpoint.describe_merge import read_merge
from lmtrain.checkpoint.find_and_prune import list_checkpoints
from lmtrain.checkpoint.read_verified_contents import Contents
from lmtrain.config.build_typed_settings import build_settings
from lmtrain.config.settings_base import changes_training, facts_of, show
from lmtrain.errors import LmtrainError, join_few, shorten
from lmtrain.models.model_settings import ModelSettings, with_explicit_sizes
from lmtrain.observe.history.read_metrics_columns import (
    Record,
    RecordDifference,
    compare_records,
    pair_starts,
    read_record,
    starts_in_force,
)
from lmtrain.runfolder.file_names import CHECKPOINTS, step_from_name
from lmtrain.runfolder.folder_reader import RunFolder, read_runs
from lmtrain.runfolder.metrics_rows import Row
from lmtrain.runfolder.settings_differences import differences, flatten
from lmtrain.train.ranks.facts_equal_on_all_ranks import FILE_DIGESTS
from lmtrain.train.run_config import RunConfig

_BATCH_SHARE_KEYS = ("parallel.", "train.micro_batch", "train.global_batch")  # which part of a batch a rank reads
_MACHINE_KEYS = ("host", "num_cpus", "num_usable_cpus", "prefix", "launcher")
_MAX_CHECKPOINT_BYTES = 4 << 30  # larger checkpoints are not compared here; `inspect --diff` compares them


def diff_facts(a: Path, b: Path) -> dict[str, Any]:
    """Compare the runs in the folders A and B by their settings, programs, metrics.jsonl rows and checkpoints. Return
    as a JSON-ready dict what differs, the first step at which each recorded number differs, and the likely causes.
    """
    runs = read_runs([a, b])
    records = [read_record(run.metrics) for run in runs]
    starts = [_counted_starts(run, record) for run, record in zip(runs, records, strict=True)]
    record_difference = compare_records(records[0], records[1], _same_batch_shares(starts))
    first = [rows[0] for rows in starts]
    initial_digests = {
        key: [run.get(key) for run in first]
        for key in ("weights_digest", "data_sha256")
        if all(run.get(key) is not None for run in first) and first[0][key] != first[1][key]
    }
    problems = [
        f"{run.name}: {problem}"
        for run, record in zip(runs, records, strict=True)
        for problem in (*run.problems, *record.problems)
    ]
    facts: dict[str, Any] = {
        "a": str(a), "b": str(b), **_differing_conditions(starts, record_difference.last_shared),
        "begun": initial_digests,
        "rows": {
            "shared": record_difference.num_shared, "last_step": record_difference.last_shared,
            "steps": (record_difference.last_shared or 0) - max(rows[0].get("step", 0) for rows in starts),
        },
        "first_step": record_difference.step, "first": record_difference.first_difference,
        "equal_until": record_difference.last_equal, "loss_after": record_difference.loss_differences,
        "not_compared": [*record_difference.not_compared, *problems, *_unrecorded_starts(runs, starts)],
    }  # fmt: skip
    last = [rows[-1]["settings"] for rows in starts]
    final_settings = differences(last) if all(last) else {}
    facts["ended"] = {key: values for key, values in final_settings.items() if facts["settings"].get(key) != values}
    facts["weights"] = _first_differing_weights(runs, record_difference)
    facts["causes"] = list(_causes(facts, starts))
    return facts


def _counted_starts(run: RunFolder, record: Record) -> list[Row]:
    """Return the start rows of a run's metrics.jsonl, oldest first, without starts whose steps were all trained again
    by a later start. Each row gets the entries `settings` and `environment` of that start.

    Older versions recorded these only for the newest start; other rows then have empty ones.
    """
    rows = [dict(row) for row in starts_in_force(record)] or [{"step": 0}]
    for name, newest in (("settings", run.settings), ("environment", run.environment)):
        for row in rows:
            recorded = row.get(name, newest if row is rows[-1] else None)
            row[name] = recorded if isinstance(recorded, dict) else {}
            row[name] |= _resolved_model(row[name])
    return rows


def _resolved_model(settings: dict[str, Any]) -> dict[str, Any]:
    """Return {"model": the model's settings}, in which sizes left at null, such as the width of the MLP, have the
    values that the model uses. Return {} if these settings cannot be read.
    """
    cls: Any = ModelSettings  # because: the kind of model chooses the class that is built
    try:
        return {"model": with_explicit_sizes(build_settings(cls, settings["model"], "model"))}
    except (KeyError, LmtrainError):
        return {}


def _unrecorded_starts(runs: Sequence[RunFolder], starts: Sequence[list[Row]]) -> Iterator[str]:
    """Yield a message for each run for which the settings of a start before the last one are not recorded. `starts` has
    the start rows of each run.
    """
    for run, rows in zip(runs, starts, strict=True):
        if not all(row["settings"] for row in rows[:-1]):
            yield f"{run.name}: config.json is from the last of {len(rows)} starts; earlier settings are not known"


def _same_batch_shares(starts: Sequence[list[Row]]) -> bool:
    """Return True if rank 0 reads the same samples of each batch in every start of both runs, so that their digests of
    batches can be compared. Return False too if settings of a start are not recorded.
    """
    shares = [
        {k: v for k, v in flatten(row["settings"]) if k.startswith(_BATCH_SHARE_KEYS) and not _is_harmless(k, ())}
        | {"": row.get("world_size")}
        for rows in starts
        for row in rows
        if row["settings"]
    ]
    return len(shares) == sum(map(len, starts)) and all(share == shares[0] for share in shares)


def _differing_conditions(starts: Sequence[list[Row]], last_shared: int | None) -> dict[str, Any]:
    """Return which settings (`settings`) and facts of the environment (`environment`: programs, device) differ between
    the two runs, each as key -> [value in A, value in B], and from which step on (`after`: key -> step).

    `starts` has the start rows of A and of B. Starts after `last_shared`, the last step of which both runs have a row,
    are not compared.
    """
    differing: dict[str, Any] = {"settings": {}, "environment": {}, "after": {}}
    for step, pair in pair_starts(starts, last_shared):
        for name, row_keys in (("settings", ()), ("environment", ("device", FILE_DIGESTS))):
            if all(row[name] for row in pair):
                trees = [row[name] | {key: row.get(key) for key in row_keys} for row in pair]
                for key, values in differences(trees).items():
                    differing[name].setdefault(key, values)
                    differing["after"].setdefault(key, step)
    return differing


def _causes(facts: dict[str, Any], starts: Sequence[list[Row]]) -> Iterator[str]:
    """Yield sentences about why the runs A and B differ, the most likely cause first; nothing if they do not. `facts`
    is the result of `diff_facts` without its causes, `starts` has the start rows of each run.
    """
    first, begun, weights = facts["first"], facts["begun"], facts["weights"]
    differs_at = facts["first_step"] or (weights and weights["step"])
    if differs_at is None:
        return
    first_starts = [rows[0] for rows in starts]
    pairs = [pair for _, pair in pair_starts(starts, differs_at)]
    has_settings = all(row["settings"] for pair in pairs for row in pair)
    other_data = {"samples_hash", "batch_digest"} & first.keys()
    held_out = tuple(key for pair in pairs for key in _held_out_settings(pair)) if other_data else ()
    settings = {
        key: v
        for key, v in _differing_before(facts, "settings", differs_at)
        if not _is_harmless(key, first_starts) or key.startswith(held_out)
    }
    programs = {key: v for key, v in _differing_before(facts, "environment", differs_at) if key not in _MACHINE_KEYS}
    for key, (value_a, value_b) in (settings | programs).items():
        program = "the device" if key == "device" else key.removeprefix("packages.")
        name = f"the setting {key}" if key in settings else program
        yield f"{name} is {show(value_a)} in A and {show(value_b)} in B{after_step(facts, key)}"
    explained = bool(settings)
    if not explained and "samples_hash" in first:
        note = ", though no setting says so" * has_settings
        yield f"other samples are read, first seen at step {first['samples_hash']:,}{note}"
    elif not explained and ("batch_digest" in first or "data_sha256" in begun):
        yield _describe_other_text(facts, first_starts)
    resumed = [start.get("resumed_from") or start.get("weights_from") for start in first_starts]
    if not explained and "weights_digest" in begun:
        origin = f" (they come from {join_few(_describe_origin(start) for start in resumed if start)})"
        origin = origin if any(resumed) else ""
        yield f"the first weights are not the same{origin}"
    if not explained and weights and weights["tensors"]:
        yield weights["said"]
    if has_settings and not (settings or programs or begun or weights or other_data):
        yield (
            "neither settings, programs, data nor first weights differ: something that is not recorded, such as a bit "
            "that flipped on the way, or sums that are taken in another order (compute.deterministic=true fixes it)"
        )


def _describe_origin(checkpoint: object) -> str:
    """Return the checkpoint from which a run began, as its start row names it; of a merged one also how it was made."""
    record = read_merge(Path(str(checkpoint)))
    return f"{checkpoint}, the {record.summary}" if record is not None else str(checkpoint)


def _differing_before(facts: dict[str, Any], name: str, step: int) -> Iterator[tuple[str, list[Any]]]:
    """Return the entries of `facts[name]` (name is "settings" or "environment") that differed before `step`; later ones
    cannot be the cause of a difference at that step.
    """
    return ((key, values) for key, values in facts[name].items() if facts["after"][key] < step)


def _describe_other_text(facts: dict[str, Any], first_starts: Sequence[Row]) -> str:
    """Return a sentence for two runs that read samples with the same ids but other text: either their datasets differ,
    or one run has read damaged data.
    """
    first = facts["first"]
    at = f", first seen at step {first['batch_digest']:,}" if "batch_digest" in first else ""
    reason = ": the data is not the same"
    if all(start.get("data_sha256") for start in first_starts) and "data_sha256" not in facts["begun"]:
        reason = ", though both name the same data: one has read what is damaged (lmtrain verify tells which)"
    return f"the same samples hold other text{at}{reason}"


def after_step(facts: dict[str, Any], key: str) -> str:
    """Return " after step N" for a difference that began during training, else an empty text."""
    step = facts["after"][key]
    return f" after step {step:,}" if step else ""


def _is_harmless(key: str, starts: Sequence[dict[str, Any]]) -> bool:
    """Return True if the setting `key`, such as a path or a display setting, has no effect on any number that the
    training computes. `starts` holds the first start row of A and of B.

    A path does not matter if a digest of its content was recorded, as that is compared instead.
    """
    facts, in_stage = facts_of(RunConfig, key), key.startswith("stages.")
    if not changes_training(RunConfig, key) or (facts.get("affects") == "held_out" and not in_stage):
        return True
    if facts.get("path") == "file":
        return all(key in start.get(FILE_DIGESTS, ()) for start in starts)
    digest = "weights_digest" if facts.get("path") == "checkpoint" else "data_sha256"
    # because: a start records the digest of the data of its own stage alone
    return "path" in facts and not in_stage and all(start.get(digest) for start in starts)


def _held_out_settings(pair: Sequence[Row]) -> Iterator[str]:
    """Yield the setting "train.valid_interval_steps" or the prefix "data.valid_" if A and B differ in it, as then one
    of them may hold back training data for validation. `pair` holds a start row of A and one of B.
    """
    elsewhere, validates = [], []
    for row in pair:
        groups = [row["settings"].get(key) for key in ("data", "train")]
        data, train = (group if isinstance(group, dict) else {} for group in groups)
        elsewhere.append(any(data.get(key) for key in ("valid_path", "valid_paths", "valid_datasets")))
        validates.append(bool(train.get("valid_interval_steps")))
    if len({*elsewhere}) > 1:
        yield "data.valid_"
    if len({*validates}) > 1:
        yield "train.valid_interval_steps"


def _first_differing_weights(runs: Sequence[RunFolder], record_difference: RecordDifference) -> dict[str, Any] | None:
    """Find the first checkpoint from which on the weights of A and B differ in all checkpoints of the same step, though
    their metrics rows do not differ yet. Return what `_weight_differences` returns for it; None if there is none.

    If checkpoints cannot be read, the returned dict has `step` None and the reason.
    """
    try:
        names = [{path.name: path for path in list_checkpoints(run.path / CHECKPOINTS)} for run in runs]
        # because: once the rows differ, all weights do
        shared_names = [
            name
            for name in sorted(names[0].keys() & names[1].keys())
            if record_difference.step is None or (step_from_name(name) or 0) < record_difference.step
        ]
        comparisons = (_weight_differences(*(paths[name] for paths in names)) for name in reversed(shared_names))
        differing = [*takewhile(bool, comparisons)]
        return differing[-1] if differing else None
    except (LmtrainError, OSError, ValueError) as error:
        return {"step": None, "tensors": [], "said": f"checkpoints could not be compared: {shorten(error)}"}


def _weight_differences(a: Path, b: Path) -> dict[str, Any] | None:
    """Compare two checkpoints of the same step. Return {"step": step, "tensors": names of the differing weights,
    "said": a sentence}; None if all weights are equal or the checkpoints are too large to compare.
    """
    if sum(file.stat().st_size for file in a.iterdir()) > _MAX_CHECKPOINT_BYTES:
        return None
    checkpoints = Contents(a), Contents(b)
    tensors = [(key, value) for key, value in value_differences(*checkpoints) if key.startswith("model.")]
    if not tensors:
        return None
    (key, value), step = tensors[0], checkpoints[0].manifest.step
    others = f" and of {len(tensors) - 1} more" * (len(tensors) > 1)
    return {
        "step": step, "tensors": [name for name, _ in tensors],
        "said": f"{value.num_different:,} of {value.num_values:,} numbers of {key}{others} differ in the checkpoints "
        f"of step {step:,}",
    }  # fmt: skip
