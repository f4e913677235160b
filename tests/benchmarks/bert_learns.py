"""Does BERT learn more than how often words occur? 300 steps of a small one on the standard library's own sources.

    python -m tests.benchmarks.bert_learns                     about four minutes of one core
    python -m tests.benchmarks.bert_learns model.norm_order=post
    python -m tests.benchmarks.bert_learns --layout     and then as pp2 x dp2 x tp2: eight processes beside one

Masked tokens of held-out files are predicted. Who knows only how often each of them is masked there pays their entropy;
the run must stay 15% below. With `--layout` the same run on eight processes must have the loss of one at each of its
steps, to one part in 1,000. Everything goes through the command line, as a user would do it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from data_tools.corpora.stdlib import build_stdlib_corpus
from lmtrain.batch import IGNORED
from lmtrain.cli.main import main as lmtrain
from lmtrain.config.compose_run_settings import compose
from lmtrain.data.sample_dataset_interface import Dataset
from lmtrain.observe.metrics import read_metrics
from lmtrain.train.run_config import RunConfig
from lmtrain.train.startup_checks.preflight import load_data

FOLDER = Path("runs/bert_learns")
VOCAB_SIZE, STEPS, LEAST = 1024, 300, 0.15
MOST_APART = 1e-3
LAYOUT = {
    "parallel.pp": 2, "parallel.dp_shard": 2, "parallel.tp": 2, "train.micro_batch": 64,
    "run.dir": FOLDER / "eight",
}  # fmt: skip
# Short rows, a large batch and pieces masked one by one: what a word's neighbours say is learnt through the table of
# positions, which so few steps fill only where there are few of them (with rows of 64 and a batch of 32 the loss stays
# at the entropy).
SETTINGS = {
    "model": "bert_tiny", "model.seq_len": 32, "model.num_layers": 2, "model.width": 128, "model.num_heads": 4,
    "model.init_std": 0.1, "data": "masked", "data.path": FOLDER / "train", "data.valid_path": FOLDER / "heldout",
    "data.whole_word": "false", "data.short_share": 0,
    "train.steps": STEPS, "train.global_batch": 256, "train.micro_batch": 128, "train.valid_interval_steps": 100,
    "train.valid_samples": 2048, "optim.lr": "3e-3", "optim.betas": "[0.9,0.95]", "schedule": "wsd",
    "schedule.warmup_steps": 30, "schedule.decay_fraction": 0.4, "schedule.min_ratio": 0.0, "compute.threads": 1,
    "compute.device": "cpu", "checkpoint.interval_steps": "null", "observe.log_interval_steps": 1,
    "observe.tensorboard": "false", "run.dir": FOLDER / "run",
}  # fmt: skip


def main(arguments: list[str]) -> int:
    overrides = [argument for argument in arguments if argument != "--layout"]
    prepare()
    settings = [f"{key}={value}" for key, value in SETTINGS.items()] + overrides
    wrong = learn(settings)
    if "--layout" in arguments:
        cut = settings + [f"{key}={value}" for key, value in LAYOUT.items()]
        wrong += learn(cut, "--nproc", 8) + compare(*(Path(compose(RunConfig, s).run.dir) for s in (settings, cut)))
    return int(wrong > 0)


def learn(settings: list[str], *launch: object) -> int:
    """Train, and say how far below the entropy it comes; 1 if that is too little."""
    config = compose(RunConfig, settings)
    run_lmtrain("pretrain", *settings, *launch)
    valid = load_data(config)[2].valid[""]
    entropy, num_labels = label_entropy(valid, min(config.train.valid_samples, valid.num_samples))
    last = [row for row in read_metrics(Path(config.run.dir) / "metrics.jsonl") if row["event"] == "valid"][-1]
    loss = last.get("loss/mlm", last["loss"])
    below = 1 - loss / entropy
    print(
        f"{num_labels} masked tokens: entropy {entropy:.4f} nats, loss {loss:.4f} after {last['step']} steps, "
        f"{below:.1%} below; accuracy {last['accuracy']:.1%}"
    )
    return int(below < LEAST)


def compare(one: Path, eight: Path) -> int:
    """How far apart the losses of two runs are at most; 1 if that is too far."""
    a, b = ([row for row in read_metrics(run / "metrics.jsonl") if row["event"] == "step"] for run in (one, eight))
    assert [row["samples_hash"] for row in a] == [row["samples_hash"] for row in b]
    apart = [abs(x["loss"] - y["loss"]) / x["loss"] for x, y in zip(a, b, strict=True)]
    worst = max(apart)
    print(f"{len(a)} losses of eight processes: at most {worst:.1e} apart from one's, at step {apart.index(worst) + 1}")
    return int(worst > MOST_APART)


def prepare() -> None:
    """Texts, a WordPiece vocabulary and datasets of sentences; in sources a line is one."""
    if (FOLDER / "heldout.idx").exists():
        return
    build_stdlib_corpus(FOLDER / "corpus")
    text, tokenizer = FOLDER / "corpus" / "train.jsonl", FOLDER / "tokenizer"
    run_lmtrain("tokenizer", "train", text, "--output", tokenizer, "--vocab-size", VOCAB_SIZE, "--kind", "wordpiece")
    for part in ("train", "heldout"):
        text = FOLDER / "corpus" / f"{part}.jsonl"
        run_lmtrain(
            "preprocess", text, "--tokenizer", tokenizer, "--output", FOLDER / part, "--overwrite",
            "--split-sentences", "--lines-end-sentences",
        )  # fmt: skip


def label_entropy(valid: Dataset, num_samples: int) -> tuple[float, int]:
    """What the best guesser pays that looks at no text but knows these very labels' frequencies."""
    labels = valid.batch(np.arange(num_samples)).labels_BT
    counts = np.bincount(labels[labels != IGNORED])
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum()), int(counts.sum())


def run_lmtrain(*arguments: object) -> None:
    try:
        lmtrain([str(a) for a in arguments])
    except SystemExit as end:
        if end.code:
            raise


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
