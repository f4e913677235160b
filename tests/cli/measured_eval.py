"""One process of an evaluation that measures itself: `python -m tests.cli.measured_eval CHECKPOINT TEXT FOLDER WORDS`.

Started by test_eval_memory.py, alone or by the launcher as several; writes FOLDER/RANK.json.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

# because: all that an evaluation imports is there before the baseline is taken
import lmtrain.eval.load_model
import lmtrain.parallel.mesh
import lmtrain.runtime.processes.process_group  # noqa: F401
from lmtrain.checkpoint.tensor_reader import CheckpointReader  # noqa: F401
from lmtrain.cli.eval.print_evaluation import EvaluationScreen
from lmtrain.eval.read_texts import TextInput
from lmtrain.eval.run_task import run
from lmtrain.eval.task import find_task
from lmtrain.runtime.processes.process_environment import ProcessEnv
from lmtrain.start.evaluation.run_tasks import Options, Session, choose_layout
from lmtrain.start.find_model_at_path import find_model
from tests.layouts.memory import living_tensors, storages


def status(key: str) -> int:
    found = re.search(rf"{key}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def main() -> None:
    checkpoint, text, folder, *words = sys.argv[1:]
    task, subject, env = find_task("perplexity"), find_model(Path(checkpoint)), ProcessEnv.detect()
    before = set(storages(living_tensors()))
    imported_bytes = status("VmRSS")
    parallel = choose_layout(words, subject.settings, env)
    options = Options(
        baseline=None, batch_size=4, stride=None, seq_len=None, limit=None, device="cpu", precision="fp32", output=None,
        samples=None,
    )  # fmt: skip
    views = EvaluationScreen(is_quiet=True, as_json=False, full=False).views()
    with Session([], options, env, [parallel], views).open_loader() as load:
        loaded = load(subject, 0)
        after = storages(living_tensors())
        held_bytes = sum(size for at, (size, _) in after.items() if at not in before)
        result = run(task, loaded.subject, TextInput("text", [text], "", "it"), batch_size=4).result
    found = {"weights": held_bytes, "peak": status("VmHWM") - imported_bytes, "nats": result.nll_sum_nats}
    (Path(folder) / f"{env.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
