"""`lmtrain runs diff A B`: what sets two runs apart, where it first shows, and which difference explains that.

Called by runs. It reads what both have recorded, and of checkpoints of the same step the weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from lmtrain.checkpoint.contents import Contents
from lmtrain.checkpoint.diff import value_differences
from lmtrain.checkpoint.store import list_checkpoints
from lmtrain.config.base import show
from lmtrain.config.build import build_settings
from lmtrain.errors import LmtrainError, join_few, shorten
from lmtrain.models.model_settings import ModelSettings
from lmtrain.observe.history.record import (
    Record,
    RecordDifference,
    compare_records,
    pair_starts,
    read_record,
    starts_in_force,
)
from lmtrain.runfolder.differences import differences, flatten
from lmtrain.runfolder.folder import RunFolder, read_runs
from lmtrain.runfolder.names import CHECKPOINTS, step_from_name
from lmtrain.runfolder.rows import Row
from lmtrain.train.before.preflight import with_explicit_sizes
from lmtrain.units import plural

# settings that say where something lies or what is shown: no number depends on them
_NO_CAUSE = (
    "run.", "observe.", "checkpoint.", "data.prefetch_steps", "data.verify", "data.index_dir", "data.valid_", "eval.",
    "train.valid_", "hardware", "parallel.timeout_s",
)  # fmt: skip
_TEXT = re.compile(r"data\.(path|tokenizer|datasets\[\d+\]\.path)")  # of which the content counts
_SHARES = ("parallel.", "train.micro_batch", "train.global_batch")  # which part of a batch a rank reads
_MACHINE = ("host", "num_cpus", "num_usable_cpus", "prefix", "launcher")
_LARGEST = 4 << 30  # bytes of a checkpoint that is read; `inspect --diff` takes larger ones


def diff_facts(a: Path, b: Path) -> dict[str, Any]:
    seen = read_runs([a, b])
    records = [read_record(one.metrics) for one in seen]
    starts = [_starts(one, record) for one, record in zip(seen, records, strict=True)]
    found = compare_records(records[0], records[1], _cut_alike(starts))
    first = [rows[0] for rows in starts]
    begun = {
        key: [one.get(key) for one in first]
        for key in ("weights_digest", "data_sha256")
        if all(one.get(key) is not None for one in first) and first[0][key] != first[1][key]
    }
    problems = [
        f"{one.name}: {problem}"
        for one, record in zip(seen, records, strict=True)
        for problem in (*one.problems, *record.problems)
    ]
    facts: dict[str, Any] = {
        "a": str(a), "b": str(b), **_ran_with(starts, found.last_shared), "begun": begun,
        "rows": {"shared": found.num_shared, "last_step": found.last_shared},
        "first_step": found.step, "first": found.first_difference, "equal_until": found.last_equal,
        "loss_after": found.loss_differences,
        "not_compared": [*found.not_compared, *problems, *_untold_starts(seen, starts)],
    }  # fmt: skip
    last = [rows[-1]["settings"] for rows in starts]
    ended = differences(last) if all(last) else {}
    facts["ended"] = {key: values for key, values in ended.items() if facts["settings"].get(key) != values}
    facts["weights"] = _weights(seen, found)
    facts["causes"] = list(_causes(facts, starts))
    return facts


def _starts(seen: RunFolder, record: Record) -> list[Row]:
    """Return the starts that count, each with its settings and environment; older runs recorded only the last one's."""
    rows = [dict(row) for row in starts_in_force(record)] or [{"step": 0}]
    for name, written in (("settings", seen.settings), ("environment", seen.environment)):
        for row in rows:
            own = row.get(name, written if row is rows[-1] else None)
            row[name] = own if isinstance(own, dict) else {}
            row[name] |= _model_written_out(row[name])
    return rows


def _model_written_out(settings: dict[str, Any]) -> dict[str, Any]:
    """Return a model's settings with the sizes that null stands for; nothing where there are none that are known."""
    cls: Any = ModelSettings  # because: the kind of model chooses the class that is built
    try:
        return {"model": with_explicit_sizes(build_settings(cls, settings["model"], "model"))}
    except (KeyError, LmtrainError):
        return {}


def _untold_starts(seen: Sequence[RunFolder], starts: Sequence[list[Row]]) -> Iterator[str]:
    for one, rows in zip(seen, starts, strict=True):
        if not all(row["settings"] for row in rows[:-1]):
            yield f"{one.name}: config.json is of the last of {len(rows)} starts; what those before it had is not known"


def _cut_alike(starts: Sequence[list[Row]]) -> bool:
    """Return whether rank 0 of both runs is known to read the same part of a batch in every start."""
    shares = [
        {k: v for k, v in flatten(row["settings"]) if k.startswith(_SHARES) and not k.startswith(_NO_CAUSE)}
        | {"": row.get("world_size")}
        for rows in starts
        for row in rows
        if row["settings"]
    ]
    return len(shares) == sum(map(len, starts)) and all(one == shares[0] for one in shares)


def _ran_with(starts: Sequence[list[Row]], end: int | None) -> dict[str, Any]:
    """Return the settings, programs and devices that differ at steps of both runs, and after which step."""
    found: dict[str, Any] = {"settings": {}, "environment": {}, "after": {}}
    for step, pair in pair_starts(starts, end):
        for name, more in (("settings", ()), ("environment", ("device",))):
            if all(row[name] for row in pair):
                trees = [row[name] | {key: row.get(key) for key in more} for row in pair]
                for key, values in differences(trees).items():
                    found[name].setdefault(key, values)
                    found["after"].setdefault(key, step)
    return found


def _causes(facts: dict[str, Any], starts: Sequence[list[Row]]) -> Iterator[str]:
    """Yield what explains the difference, its root first."""
    first, begun, weights = facts["first"], facts["begun"], facts["weights"]
    differs_at = facts["first_step"] or (weights and weights["step"])
    if differs_at is None:
        return
    begin = [rows[0] for rows in starts]
    pairs = [pair for _, pair in pair_starts(starts, differs_at)]
    known = all(row["settings"] for pair in pairs for row in pair)
    other_data = {"samples_hash", "batch_digest"} & first.keys()
    held_out = tuple(key for pair in pairs for key in _held_out(pair)) if other_data else ()
    settings = {
        key: v
        for key, v in _before(facts, "settings", differs_at)
        if not _is_idle(key, begin) or key.startswith(held_out)
    }
    programs = {key: v for key, v in _before(facts, "environment", differs_at) if key not in _MACHINE}
    for key, (ours, theirs) in (settings | programs).items():
        program = "the device" if key == "device" else key.removeprefix("packages.")
        name = f"the setting {key}" if key in settings else program
        yield f"{name} is {show(ours)} in A and {show(theirs)} in B{_after(facts, key)}"
    explained = bool(settings)
    if not explained and "samples_hash" in first:
        though = ", though no setting says so" * known
        yield f"other samples are read, first seen at step {first['samples_hash']:,}{though}"
    elif not explained and ("batch_digest" in first or "data_sha256" in begun):
        yield _other_text(facts, begin)
    resumed = [one.get("resumed_from") or one.get("weights_from") for one in begin]
    if not explained and "weights_digest" in begun:
        of = f" (they come from {join_few(str(one) for one in resumed if one)})" if any(resumed) else ""
        yield f"the first weights are not the same{of}"
    if not explained and weights and weights["tensors"]:
        yield weights["said"]
    if known and not (settings or programs or begun or weights or {"samples_hash", "batch_digest"} & first.keys()):
        yield (
            "neither settings, programs, data nor first weights differ: something that is not recorded, such as a bit "
            "that flipped on the way, or sums that are taken in another order (compute.deterministic=true fixes it)"
        )


def _before(facts: dict[str, Any], name: str, step: int) -> Iterator[tuple[str, list[Any]]]:
    """Return what differs in settings or environment before a step; later changes explain nothing."""
    return ((key, values) for key, values in facts[name].items() if facts["after"][key] < step)


def _other_text(facts: dict[str, Any], begin: Sequence[Row]) -> str:
    first = facts["first"]
    at = f", first seen at step {first['batch_digest']:,}" if "batch_digest" in first else ""
    why = ": the data is not the same"
    if begin[0].get("data_sha256") and "data_sha256" not in facts["begun"] and begin[1].get("data_sha256"):
        why = ", though both name the same data: one has read what is damaged (lmtrain verify tells which)"
    return f"the same samples hold other text{at}{why}"


def _after(facts: dict[str, Any], key: str) -> str:
    step = facts["after"][key]
    return f" after step {step:,}" if step else ""


def _is_idle(key: str, starts: Sequence[dict[str, Any]]) -> bool:
    """Return whether no number of training can depend on a key; a path's content counts, if it was recorded."""
    if key == "checkpoint.init_from" or _TEXT.fullmatch(key):
        return all(one.get("weights_digest" if key == "checkpoint.init_from" else "data_sha256") for one in starts)
    return key.startswith(_NO_CAUSE)


def _held_out(pair: Sequence[Row]) -> Iterator[str]:
    """Yield settings by which one run alone may hold out training data for validation."""
    elsewhere, validates = [], []
    for row in pair:
        data, train = (one if isinstance(one := row["settings"].get(key), dict) else {} for key in ("data", "train"))
        elsewhere.append(any(data.get(key) for key in ("valid_path", "valid_paths", "valid_datasets")))
        validates.append(bool(train.get("valid_interval_steps")))
    if len({*elsewhere}) > 1:
        yield "data.valid_"
    if len({*validates}) > 1:
        yield "train.valid_interval_steps"


def _weights(seen: Sequence[RunFolder], found: RecordDifference) -> dict[str, Any] | None:
    """Return the first checkpoint whose weights differ before the rows do; damaged ones are left out."""
    try:
        names = [{one.name: one for one in list_checkpoints(run.path / CHECKPOINTS)} for run in seen]
        # because: once the rows differ, all weights do
        before = [
            name
            for name in sorted(names[0].keys() & names[1].keys())
            if found.step is None or (step_from_name(name) or 0) < found.step
        ]
        found_in = (_different(*(one[name] for one in names)) for name in reversed(before))
        told = [*takewhile(bool, found_in)]
        return told[-1] if told else None
    except (LmtrainError, OSError, ValueError) as error:
        return {"step": None, "tensors": [], "said": f"checkpoints could not be compared: {shorten(error)}"}


def _different(a: Path, b: Path) -> dict[str, Any] | None:
    """Return which weights of two checkpoints of a step differ, and in how many numbers the first of them."""
    if sum(file.stat().st_size for file in a.iterdir()) > _LARGEST:
        return None
    both = Contents(a), Contents(b)
    tensors = [(key, value) for key, value in value_differences(*both) if key.startswith("model.")]
    if not tensors:
        return None
    (key, value), step = tensors[0], both[0].manifest.step
    many = f" and of {len(tensors) - 1} more" * (len(tensors) > 1)
    return {
        "step": step, "tensors": [name for name, _ in tensors],
        "said": f"{value.num_different:,} of {value.num_values:,} numbers of {key}{many} differ in the checkpoints of "
        f"step {step:,}",
    }  # fmt: skip


def diff_lines(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the facts as name and text."""
    yield "a, b", f"{facts['a']}, {facts['b']}"
    yield "rows", _rows_words(facts)
    for key, step in sorted(facts["first"].items(), key=lambda one: one[1]):
        until = facts["equal_until"].get(key)
        yield key, f"differs from step {step:,} on" + (f"; equal in every row up to step {until:,}" if until else "")
    for at in facts["loss_after"]:
        yield f"loss at {at['step']:,}", f"{at['a']!r} and {at['b']!r}, {at['apart']:+.3g}"
    for name, found in (
        ("setting", "settings"), ("environment", "environment"), ("at the start", "begun"), ("in the end", "ended")
    ):  # fmt: skip
        for key, (ours, theirs) in facts[found].items():
            after = _after(facts, key) if found in ("settings", "environment") else ""
            yield name, f"{key}: {show(ours)} and {show(theirs)}{after}"
    for cause in facts["causes"] or (["nothing that was recorded"] if facts["first"] else []):
        yield "cause", cause
    for said in facts["not_compared"]:
        yield "not compared", said


def _rows_words(facts: dict[str, Any]) -> str:
    rows = facts["rows"]
    if not rows["shared"]:
        return "no step of which both have a row"
    until = f"{plural(rows['shared'], 'step')} of both, the last {rows['last_step']:,}"
    if facts["first_step"] is None:
        return f"{until}: all equal, bit for bit"
    return f"{until}: the first that differs is step {facts['first_step']:,}"
