"""lm-evaluation-harness in a process of its own, offline, on files of ours: a JSON of jobs in, a JSON of answers out.

    python -m tests.unit.eval.harness_run jobs.json answers.json

The tasks are the harness's own, their data ours: rows in the form of the published sets.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

Answers = dict[str, dict[str, Any]]  # by task: its "results", and of each of its documents the responses
Models = dict[str, tuple[str, dict[str, Any]]]  # by a name of ours: the harness's name and the arguments

MEASURES = [f"{name},none" for name in ("word_perplexity", "byte_perplexity", "bits_per_byte", "perplexity")]
MEASURES += [f"{name},none" for name in ("acc", "acc_norm", "exact_match")]
YAMLS = {
    "wikitext": "wikitext/wikitext", "lambada_openai": "lambada/lambada_openai", "hellaswag": "hellaswag/hellaswag",
    "lambada_standard": "lambada/lambada_standard", "piqa": "piqa/piqa", "arc_easy": "arc/arc_easy",
    "race": "race/race", "piqa_3shot": "piqa/piqa",
}  # fmt: skip
SHOTS: dict[str, Any] = {
    "training_split": "train", "fewshot_split": "train", "num_fewshot": 3, "fewshot_config": {"sampler": "first_n"},
}  # fmt: skip
BY_QUESTION: dict[str, Any] = {
    "output_type": "multiple_choice",
    "doc_to_text": "Article: {{article}}\n\nQuestion: {{question}}\nAnswer:",
    "doc_to_choice": "{{options}}",
    "doc_to_target": "{{'ABCD'.index(answer)}}",
    "metric_list": [
        {"metric": metric, "aggregation": "mean", "higher_is_better": True} for metric in ("acc", "acc_norm")
    ],
}
WRITES: dict[str, Any] = {
    "output_type": "generate_until",
    "doc_to_text": "{{text}}",
    "doc_to_target": "{{text}}",
    "generation_kwargs": {"until": ["e", "\n\n"], "max_gen_toks": 12, "do_sample": False},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}


def run_harness(folder: Path, models: Models, tasks: dict[str, Path]) -> dict[str, Answers]:
    """What the harness says, by model; a task is its name there and the rows that it reads."""
    jobs, answers = folder / "jobs.json", folder / "answers.json"
    jobs.write_text(json.dumps({"models": models, "tasks": {name: str(rows) for name, rows in tasks.items()}}))
    env = os.environ | {
        "HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.unit.eval.harness_run", str(jobs), str(answers)]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Answers] = json.loads(answers.read_text())
    return found


def _task(name: str, rows: str, folder: Path) -> str:
    """A file that says the harness's own task again, but for where its rows are."""
    import lm_eval.tasks

    files = {"test": rows}
    splits: dict[str, Any] = {"test_split": "test", "validation_split": None, "training_split": None}
    if name in YAMLS:
        own = {"include": f"{Path(lm_eval.tasks.__file__).parent / YAMLS[name]}.yaml"}
    else:
        own = {"writes": WRITES, "race_by_question": BY_QUESTION}[name]
    if name.endswith("shot"):
        files["train"], splits = str(Path(rows).with_name("shots.jsonl")), splits | SHOTS
    data = {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": {"data_files": files}}
    file = folder / f"{name}.task.yaml"
    file.write_text(json.dumps({**own, "task": name, **data, **splits}))  # JSON is YAML
    return str(file)


def _answers(model: str, arguments: dict[str, Any], tasks: list[str]) -> Answers:
    from lm_eval import simple_evaluate

    found = simple_evaluate(
        model=model, model_args=arguments, tasks=tasks, batch_size=4, device="cpu", bootstrap_iters=0
    )
    return {
        name: {
            "results": {
                key: float(value) for key, value in results.items() if key.endswith(",none") and value != "N/A"
            },
            "responses": [
                [response[0] for response in sample["resps"]]
                for sample in sorted(found["samples"][name], key=lambda sample: sample["doc_id"])
            ],
        }
        for name, results in found["results"].items()
    }


def main() -> None:
    import torch

    import lmtrain.eval.harness  # noqa: F401  # makes the model known

    torch.set_num_threads(1)
    jobs, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[1]).parent
    tasks = [_task(name, rows, folder) for name, rows in jobs["tasks"].items()]
    answers = {name: _answers(model, arguments, tasks) for name, (model, arguments) in jobs["models"].items()}
    Path(sys.argv[2]).write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
