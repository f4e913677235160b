"""`python -m tests.mutants.unexecuted`: list the statements that no test executes, by the records of both suites.

A statement that a test on this machine can execute is tested or deleted. Others are in EXCUSED, with what they want;
`--all` lists them too. Of a statement that is newer than the record nothing is known, and it counts as not executed.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from fnmatch import fnmatch
from pathlib import Path

from tests.mutants import record
from tests.mutants.mutant import ROOT
from tests.mutants.numbering import keys_and_places, number_statements
from tests.mutants.workers import SUITES

GPU, EXTRA, SLOW, TWIN = "a GPU", "an extra", "`make test-slow`", "an installation without compiled helpers"
LOSS = "a process that is lost, stopped or hindered at one moment"
# what a statement wants -> file or file:function, as patterns
EXCUSED = {
    GPU: (
        "lmtrain/kernels/triton_*", "lmtrain/kernels/activations.py", "lmtrain/kernels/adamw.py",
        "lmtrain/kernels/cross_entropy.py", "lmtrain/kernels/vector_norms.py",
        "lmtrain/runtime/machine/choose_device.py",
        "lmtrain/runtime/machine/visible_gpus_without_torch.py:_driver_count", "lmtrain/api/load_model.py:_find_device",
        "lmtrain/checkpoint/save/background_writer.py:HostMemory.capture",
        "lmtrain/models/layers/flex_attention_block_masks.py", "lmtrain/models/layers/attention.py:mask_rows",
        "lmtrain/observe/measure/process_and_gpu_memory.py:device_peak_bytes",
        "lmtrain/parallel/blocks/dropout_random_numbers.py:_generator",
        "lmtrain/parallel/linear_forward_backward_products.py:*add_product",
        "lmtrain/parallel/build_parallel_model.py:apply_block_masks",
        "lmtrain/parallel/inference_scores_and_logits.py:_use_dense_masks",
        "lmtrain/parallel/pipeline/execute_schedule.py:Pipeline.__init__",
    ),
    EXTRA: (
        "lmtrain/eval/harness.py", "lmtrain/cli/harness.py", "lmtrain/observe/sinks/weights_and_biases.py",
        "lmtrain/api/read_run_metrics.py:Metrics.to_pandas",
    ),
    LOSS: (
        "lmtrain/observe/hang_watch/*", "lmtrain/runtime/processes/fork_server.py",
        "lmtrain/runtime/processes/local_rank_launcher.py", "lmtrain/runtime/processes/start_rank_processes.py",
        "lmtrain/runtime/processes/rendezvous.py", "lmtrain/runtime/processes/stop_signals.py",
        "lmtrain/start/launch_ranks.py", "lmtrain/start/run_attempt_bookkeeping.py",
        "lmtrain/start/sweep_runs.py:_CommandRunner.run", "lmtrain/start/dataset_from_text.py:_sizes_below",
        "lmtrain/start/evaluation/run_tasks.py:Session.write_samples", "lmtrain/cli/main.py:_ExitHandler.__call__",
        "lmtrain/cli/main.py:_main", "lmtrain/train/in_loop/save_and_stop_requests.py",
        "data_tools/read/process_portions_in_workers.py",
    ),
    SLOW: ("lmtrain/cli/demo_command.py",),
    TWIN: (
        "lmtrain/runtime/compiled_helpers.py:_load", "lmtrain/tokenizer/text_from_json_lines.py:read_jsonl",
        "data_tools/preprocess/encode_documents.py:split_sentences",
    ),
}


def excuse(file: str, function: str) -> str | None:
    """Return what a statement wants that a machine for tests lacks; None if it lacks nothing."""
    names = (file, f"{file}:{function}")
    return next((
        why for why, patterns in EXCUSED.items() if any(fnmatch(name, each) for name in names for each in patterns)
    ), None)  # fmt: skip


def unexecuted(recorded: Path, suites: dict[str, str]) -> dict[str, list[tuple[int, str]]]:
    """Return for each file the line and the key of every statement that no test of these suites executes."""
    reached: dict[str, set[str]] = defaultdict(set)
    for marks in suites.values():
        for file, keys in record.read(recorded, marks).executed().items():
            reached[file] |= keys
    found: dict[str, list[tuple[int, str]]] = {}
    for file, (_, known) in number_statements(ROOT).files.items():
        lines = {"file": 0} | {key: line for key, (line, _) in _places(file)}
        if left := [(lines[key], key) for key in known if key not in reached[file]]:
            found[file] = sorted(left)
    return found


def _places(file: str) -> list[tuple[str, tuple[int, int]]]:
    return keys_and_places((ROOT / file).read_text()) if file.endswith(".py") else []


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.unexecuted", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "mutants")
    parser.add_argument("--all", action="store_true", help="list those that are excused too")
    given = parser.parse_args()
    counts: Counter[str] = Counter()
    for file, statements in unexecuted(given.out / "recorded.jsonl", SUITES).items():
        for line, key in statements:
            function, text, _ = f"{key}||".split("|", 2)
            why = excuse(file, function)
            counts[why or "nothing that is not here"] += 1
            if given.all or why is None:
                print(f"{file}:{line} {function}: {text}" + (f"  (wants {why})" if why else ""))
    for why, count in counts.most_common():
        print(f"{count:6} want {why}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
