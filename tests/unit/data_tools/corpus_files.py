"""Small files for the tests of corpus steps: JSON lines in and out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from data_tools.corpus.flow.run_one_corpus_step_in_workers import (
    ReadOptions,
    Report,
    Step,
    StepOptions,
    report_path,
    run_step,
)
from data_tools.read.cut_files_into_chunks import SizeLimits, TaskPart
from data_tools.read.parse_chunks_and_bad_lines import OnError

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "mu", "nu", "xi", "pi"]


def write_jsonl(path: Path, documents: Iterable[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(d, ensure_ascii=False) + "\n" for d in documents), encoding="utf-8")
    return path


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def texts(path: Path) -> list[str]:
    return [document["text"] for document in read_jsonl(path)]


def run(step: Step, inputs: Sequence[Path], output: Path, **how: Any) -> Report:
    """Run a step that writes documents; `part` and `on_error` as text, limits by their names, `workers` as in Work."""
    limits = SizeLimits(**{name: how.pop(name) for name in ("slice_bytes", "max_doc_bytes") if name in how})
    part, on_error = TaskPart.parse(how.pop("part", "0/1")), OnError(how.pop("on_error", "stop"))
    work = StepOptions(how.pop("workers", 1), ReadOptions(how.pop("key", "text"), on_error, limits, part))
    assert not how
    return run_step(step, list(inputs), dict.fromkeys(step.files, output), work, report_path(output))
