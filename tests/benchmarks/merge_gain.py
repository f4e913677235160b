"""Is the mean of a trunk's last checkpoints better than its last one, and how near does it come to a decay?

    python -m tests.benchmarks.merge_gain                        about fifteen minutes of two cores
    python -m tests.benchmarks.merge_gain --seeds 1              a short look
    python -m tests.benchmarks.merge_gain --steps 60 --every 5 --items 20    tiny: whether it works

Each seed trains a trunk, the demo's model and corpus at a constant learning rate after its warm-up, and keeps a
checkpoint every few steps. `lmtrain merge` makes the mean of the last six. A branch begins at the oldest of these six
and decays along a line to zero over as many tokens as the trunk read from there on. All are judged by `lmtrain eval` on
the demo's held-out files, which were chosen before and are in no training. The trunk also keeps an exponential average
of its weights, which is judged beside them. Finished runs are not run again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
from pathlib import Path

from data_tools.corpora.stdlib import build_stdlib_corpus
from tests.benchmarks.lamb_batch import lmtrain
from tests.benchmarks.stages_pay import finish

VOCAB_SIZE = 1024  # the demo's
NUM_MERGED = 6
TRUNK, AVERAGE, DECAYED = "trunk, last step", "trunk, average while training", "decay"
MERGED, LINEAR_MEAN = "merge of the last 6", "merge, --mean linear"
MEANS = {MERGED: ("--mean", "uniform"), LINEAR_MEAN: ("--mean", "linear")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2400, help="steps of each trunk")
    parser.add_argument("--every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--threads", type=int, default=2, help="threads of each run")
    parser.add_argument("--ema-decay", type=float, default=0.995, help="of the trunk's average")
    parser.add_argument("--items", type=int, default=0, help="documents to judge on; 0: all that are held out")
    parser.add_argument("--output", type=Path, default=Path("runs/merge_gain"))
    arguments = parser.parse_args()
    data = prepare(arguments.output)
    losses: dict[str, list[float]] = {name: [] for name in (TRUNK, *MEANS, AVERAGE, DECAYED)}
    for seed in range(1, arguments.seeds + 1):
        trunk = train_trunk(data, arguments, seed)
        sources = {TRUNK: trunk, **merges(trunk), AVERAGE: trunk, DECAYED: train_decay(trunk, arguments)}
        for name, source in sources.items():
            weights = "ema" if name == AVERAGE else "model"
            losses[name].append(held_out_loss(source, weights, data, arguments.items))
            print(f"seed {seed}, {name}: {losses[name][-1]:.4f} nats a token", flush=True)
    print(table(losses))
    (arguments.output / "losses.json").write_text(json.dumps(losses, indent=1))


def prepare(folder: Path) -> Path:
    """Write the demo's datasets train and heldout, if they are not there, and return their folder."""
    data, corpus, tokenizer = (folder / name for name in ("data", "corpus", "tokenizer"))
    if not (data / "heldout.idx").exists():
        build_stdlib_corpus(corpus)
        lmtrain("tokenizer", "train", corpus / "train.jsonl", "--output", tokenizer, "--vocab-size", VOCAB_SIZE)
        for part in ("train", "heldout"):
            words = ["--tokenizer", tokenizer, "--output", data / part, "--overwrite"]
            lmtrain("preprocess", corpus / f"{part}.jsonl", *words)
    return data


def train_trunk(data: Path, arguments: argparse.Namespace, seed: int) -> Path:
    """Train a trunk, unless an earlier one is there, and return its run folder."""
    folder: Path = arguments.output / f"trunk_{seed}_{arguments.steps}_{arguments.every}"
    settings = {
        "experiment": "demo", "schedule.decay_fraction": 0, "schedule.warmup_steps": min(60, arguments.steps // 10),
        "train.seed": seed, "train.steps": arguments.steps, "train.valid_interval_steps": 0,
        "compute.threads": arguments.threads, "data.path": data / "train",
        "checkpoint.interval_steps": arguments.every, "checkpoint.keep_last": NUM_MERGED,
        "checkpoint.ema.decay": arguments.ema_decay,
        "observe.tensorboard": "false", "observe.trace": "none",
    }  # fmt: skip
    finish(folder, *(f"{key}={value}" for key, value in settings.items()))
    return folder


def merges(trunk: Path) -> dict[str, Path]:
    """Merge the last checkpoints of a trunk by each mean, and return the merged checkpoints by the name of the mean."""
    paths = {name: trunk.with_name(f"{trunk.name}_merged_{words[-1]}") for name, words in MEANS.items()}
    for name, path in paths.items():
        shutil.rmtree(path, ignore_errors=True)
        lmtrain("merge", "--last", NUM_MERGED, "--of", trunk, "--output", path, *MEANS[name])
    return paths


def train_decay(trunk: Path, arguments: argparse.Namespace) -> Path:
    """Train the branch that decays from the oldest of the merged checkpoints to the trunk's last step, unless an
    earlier one is there, and return its run folder.
    """
    folder, length = trunk.with_name(f"{trunk.name}_decay"), (NUM_MERGED - 1) * arguments.every
    begin = trunk / "checkpoints" / f"step_{arguments.steps - length:08d}"
    stage = (f"stages.decay.steps={length}", "stages.decay.schedule={kind: linear}")
    finish(folder, "--from-run", begin, "checkpoint.ema.decay=null", *stage)
    return folder


def held_out_loss(source: Path, weights: str, data: Path, num_items: int) -> float:
    """Return the mean loss on the held-out files in nats a token, of a checkpoint or a run's newest one: of its weights
    "model", or of their average "ema".
    """
    report = data.parent / "evaluation.json"
    limit = ["--limit", num_items] if num_items else []
    words = ["--task", "perplexity", "--stride", 96, "--data", data / "heldout", "--output", report, *limit]
    report.unlink(missing_ok=True)
    lmtrain("eval", source, "--weights", weights, *words)
    (result,) = json.loads(report.read_text())["results"]
    return float(result["nll_sum_nats"] / result["num_targets"])


def table(losses: dict[str, list[float]]) -> str:
    """Return a table in Markdown: the losses of each seed, and the share of the gap between the trunk's last step and
    the decay that each merge closes, with the spread of both.
    """
    num_seeds, sentences = len(losses[TRUNK]), list[str]()
    seeds = " | ".join(f"seed {number}" for number in range(1, num_seeds + 1))
    lines = [f"| held-out loss, nats a token | {seeds} | mean | lowest and highest |", "|---" * (num_seeds + 3) + "|"]
    lines += [_row(name, values, "{:.4f}") for name, values in losses.items()]
    gaps = [trunk - decayed for trunk, decayed in zip(losses[TRUNK], losses[DECAYED], strict=True)]
    for name in (*MEANS, AVERAGE):
        gains = [trunk - merged for trunk, merged in zip(losses[TRUNK], losses[name], strict=True)]
        shares = [gain / gap for gain, gap in zip(gains, gaps, strict=True)]
        lines.append(_row(f"{name}: share of the gap to the decay that it closes", shares, "{:.0%}"))
        sentences.append(f"{name}: better than the trunk's last step in {sum(g > 0 for g in gains)} of {num_seeds}")
    return "\n".join([*lines, "", *sentences])


def _row(name: str, values: list[float], form: str) -> str:
    texts = [form.format(value) for value in [*values, statistics.mean(values)]]
    return f"| {name} | {' | '.join(texts)} | {form.format(min(values))} to {form.format(max(values))} |"


if __name__ == "__main__":
    main()
