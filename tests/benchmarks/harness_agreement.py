"""Whether lm-evaluation-harness gives an exported checkpoint the log-likelihood that `lmtrain eval` gives its source.

    python -m tests.benchmarks.harness_agreement --text shakespeare.txt --tokenizer gpt2/ --harness OTHER/bin/python

trains a GPT-2 and a LLaMA for a few steps, exports both, and lets both programs score the same text. Only the Python of
--harness imports lm_eval; it may be another environment's, made by `pip install torch 'lm_eval[hf]'`.

The harness takes logarithms of probabilities in the model's type unless softmax_dtype says otherwise, and in float32
over a large vocabulary that rounds by more than the limit. Both are shown, and float64 is what has to agree.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

MOST_NATS = 1e-4  # per 1,000 tokens
SEQ_LEN = 128
STYLES = {"GPT-2": "gpt_tiny", "LLaMA": "llama_tiny"}


def lmtrain(*arguments: object) -> str:
    command = [sys.executable, "-m", "lmtrain.cli.main", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"lmtrain {arguments[0]} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def whole_windows(text: str, tokenizer: Path, num_windows: int) -> str:
    """The longest beginning of the text that is at most so many whole windows of tokens.

    The harness gives a last window that is not whole the tokens before it as context, and `lmtrain eval` does not.
    """
    from lmtrain.tokenizer.base import Tokenizer

    encode = Tokenizer.from_bytes(tokenizer.read_bytes()).encode
    ends = [i for i, character in enumerate(text) if character.isspace()]
    low, high = 0, len(ends) - 1
    while low < high:  # the last end of a word that leaves no more than these tokens
        middle = (low + high + 1) // 2
        low, high = (middle, high) if len(encode(text[: ends[middle]])) <= num_windows * SEQ_LEN else (low, middle - 1)
    for end in reversed(ends[: low + 1]):
        if len(encode(text[:end])) % SEQ_LEN == 0:
            return text[:end]
    raise SystemExit("No beginning of the text is a whole number of windows. Give another text.")


def by_lmtrain(checkpoint: Path, text: Path) -> dict[str, Any]:
    options = ("--data", text, "--stride", SEQ_LEN, "--device", "cpu", "--json")
    result: dict[str, Any] = json.loads(lmtrain("eval", checkpoint, "--task", "perplexity", *options))["results"][0]
    return result


def by_harness(python: str, folder: Path, text: Path, softmax: str | None) -> dict[str, Any]:
    """This file again, in an environment that has lm_eval and need not have lmtrain."""
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [python, str(Path(__file__).resolve()), "--score", str(folder), "--text", str(text)]
    done = subprocess.run(
        [*command, *(["--softmax", softmax] if softmax else [])], capture_output=True, text=True, env=env
    )
    if done.returncode:
        raise SystemExit(f"lm_eval failed:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def score(folder: Path, text: Path, softmax: str | None) -> dict[str, Any]:
    """The harness's own evaluation of a task whose one document is the text."""
    evaluate = import_module("lm_eval").simple_evaluate
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch) / "window.jsonl"
        data.write_text(json.dumps({"page": text.read_text(encoding="utf-8")}) + "\n", encoding="utf-8")
        task = {
            "task": "window", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}},
            "output_type": "loglikelihood_rolling", "test_split": "test", "doc_to_text": "",
            "doc_to_target": "{{page}}", "metric_list": [{"metric": "bits_per_byte"}],
        }  # fmt: skip
        arguments: dict[str, Any] = {"pretrained": str(folder), "dtype": "float32", "device": "cpu"}
        if softmax:
            arguments["softmax_dtype"] = softmax
        found = evaluate(model="hf", model_args=arguments, tasks=[task], batch_size=1, log_samples=True)
    bits = found["results"]["window"]["bits_per_byte,none"]
    nats = bits * math.log(2) * len(text.read_bytes())
    return {"nats": nats, "lm_eval": version("lm_eval"), "transformers": version("transformers")}


def agree(name: str, model: str, given: argparse.Namespace, folder: Path) -> bool:
    run, exported, text = folder / name / "run", folder / name / "hf", folder / name / "window.txt"
    lmtrain(
        "pretrain", f"model={model}", f"model.seq_len={SEQ_LEN}", f"data.path={folder / 'data'}", f"run.dir={run}",
        f"train.steps={given.steps}", "train.global_batch=4", "train.micro_batch=4", "train.valid_interval_steps=0",
        "schedule.warmup_steps=5", "optim.lr=1e-3", "compute.device=cpu", "compute.compile=false", "precision=fp32",
        "observe.tensorboard=false",
    )  # fmt: skip
    lmtrain("reshard", run, "--to", "hf", "--output", exported)
    text.write_text(whole_windows(given.text.read_text(encoding="utf-8"), run / "tokenizer.json", given.windows))
    ours = by_lmtrain(run, text)
    apart = math.inf
    for softmax in (None, "float64"):
        theirs = by_harness(given.harness, exported, text, softmax)
        apart = abs(theirs["nats"] - ours["nll_sum_nats"]) / ours["num_targets"] * 1000
        print(
            f"{name}: {ours['num_targets']} tokens, lmtrain {ours['nll_sum_nats']:.6f} nats, "
            f"lm_eval {theirs['lm_eval']} (transformers {theirs['transformers']}, softmax {softmax or 'float32'}) "
            f"{theirs['nats']:.6f}: {apart:.1e} nats apart per 1,000 tokens",
            flush=True,
        )
    return apart <= MOST_NATS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="trained on, and its beginning scored")
    parser.add_argument("--tokenizer", type=Path, help="as for lmtrain preprocess; one is trained by default")
    parser.add_argument("--harness", default=sys.executable, metavar="PYTHON", help="a Python that imports lm_eval")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--windows", type=int, default=16, help=f"of {SEQ_LEN} tokens each")
    parser.add_argument("--score", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--softmax", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.score:
        print(json.dumps(score(given.score, given.text, given.softmax)))
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        tokenizer = given.tokenizer
        if tokenizer is None:
            tokenizer = folder / "tokenizer"
            lmtrain("tokenizer", "train", given.text, "--output", tokenizer, "--vocab-size", 1024)
        lmtrain("preprocess", given.text, "--tokenizer", tokenizer, "--output", folder / "data")
        agreed = [agree(name, model, given, folder) for name, model in STYLES.items()]
        return int(not all(agreed))


if __name__ == "__main__":
    raise SystemExit(main())
