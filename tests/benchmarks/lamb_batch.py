"""Does LAMB hold at four times the batch what AdamW reaches at one? A small GPT on the standard library's own sources.

    python -m tests.benchmarks.lamb_batch                        about half an hour of one core
    python -m tests.benchmarks.lamb_batch --tokens 100k          a short look
    python -m tests.benchmarks.lamb_batch --svg docs/explanation/lamb.svg

Every contender sees the same tokens in the same order and is judged on the same held-out files. Each has its learning
rate tuned alike: three rates a factor of 2 apart, and on from there until the best is not at the edge. The best is then
run with two more seeds. Finished runs are not run again.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from data_tools.corpora.stdlib import build_stdlib_corpus
from lmtrain.cli.main import main as main_of_lmtrain
from lmtrain.observe.metrics import read_metrics
from lmtrain.units import parse_count

SEQ_LEN, VOCAB_SIZE = 128, 1024
SEEDS = (1, 2, 3)
MODEL = {
    "experiment": "demo", "model.num_layers": 2, "model.width": 64, "model.ffn_width": 192, "compute.threads": 1,
    "train.valid_samples": 256, "observe.tensorboard": "false", "observe.log_interval_steps": 100,
    "checkpoint.interval_steps": "null",
}  # fmt: skip


@dataclass(frozen=True)
class Contender:
    name: str
    optim: str
    global_batch: int
    lr: float  # where the search begins
    colour: str


@dataclass(frozen=True)
class Curve:
    """Held-out loss after so many tokens."""

    lr: float
    seed: int
    points: list[tuple[int, float]]

    @property
    def loss(self) -> float:
        return self.points[-1][1]


@dataclass(frozen=True)
class Tuned:
    searched: list[Curve]  # by learning rate, one seed
    best: list[Curve]  # by seed, one learning rate

    @property
    def losses(self) -> list[float]:
        return [curve.loss for curve in self.best]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=parse_count, default=2_621_440)
    parser.add_argument("--batch", type=int, default=4, help="sequences in AdamW's batch; others also have 4x as many")
    parser.add_argument("--output", type=Path, default=Path("runs/lamb"))
    parser.add_argument("--svg", type=Path, help="where to draw the curves")
    arguments = parser.parse_args()
    batch = arguments.batch
    contenders = [
        Contender(f"AdamW, batch {batch}", "adamw", batch, 8e-3, "#888888"),
        Contender(f"AdamW, batch {4 * batch}", "adamw", 4 * batch, 1.6e-2, "#d97706"),
        Contender(f"LAMB, batch {4 * batch}", "lamb", 4 * batch, 2e-2, "#0d9488"),
    ]
    data = prepare(arguments.output)
    found = {c: tuned(partial(trained, c, data, arguments.output, arguments.tokens), c.lr) for c in contenders}
    print(table(found))
    report = {c.name: asdict(t) for c, t in found.items()}
    (arguments.output / "curves.json").write_text(json.dumps(report, indent=1))
    if arguments.svg:
        arguments.svg.write_text(drawing(found))


def prepare(folder: Path) -> Path:
    data = folder / "data"
    if not (data / "heldout.idx").exists():
        build_stdlib_corpus(folder / "corpus")
        train = folder / "corpus" / "train.jsonl"
        lmtrain("tokenizer", "train", train, "--output", folder / "tokenizer", "--vocab-size", VOCAB_SIZE)
        for part in ("train", "heldout"):
            text = folder / "corpus" / f"{part}.jsonl"
            lmtrain("preprocess", text, "--tokenizer", folder / "tokenizer", "--output", data / part, "--overwrite")
    return data


def tuned(run: Callable[[float, int], Curve], start: float) -> Tuned:
    rates = {lr: run(lr, SEEDS[0]) for lr in (start / 2, start, start * 2)}
    while (best := min(rates, key=lambda lr: rates[lr].loss)) in (min(rates), max(rates)):
        lr = best / 2 if best == min(rates) else best * 2
        rates[lr] = run(lr, SEEDS[0])
    return Tuned([rates[lr] for lr in sorted(rates)], [rates[best], *(run(best, seed) for seed in SEEDS[1:])])


def trained(contender: Contender, data: Path, output: Path, tokens: int, lr: float, seed: int) -> Curve:
    """A run of `lmtrain pretrain`, or what an earlier one of the same settings has left."""
    batch = contender.global_batch
    steps = tokens // (batch * SEQ_LEN)
    folder = output / f"{contender.optim}_{batch}_{lr:g}_{seed}_{steps}"
    if not (folder / "metrics.jsonl").exists():
        settings = MODEL | {
            "optim": contender.optim, "optim.lr": lr, "train.seed": seed, "train.steps": steps,
            "train.global_batch": batch, "train.micro_batch": batch, "schedule.warmup_steps": steps // 10,
            "train.valid_interval_steps": steps // 10, "data.path": data / "train", "data.valid_path": data / "heldout",
        }  # fmt: skip
        unfinished = folder.with_name(folder.name + ".unfinished")
        lmtrain("pretrain", *(f"{key}={value}" for key, value in settings.items()), f"run.dir={unfinished}")
        unfinished.rename(folder)
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if row["event"] == "valid"]
    losses = {row["step"] * batch * SEQ_LEN: row["loss"] for row in rows}  # the last step may be told twice
    curve = Curve(lr, seed, list(losses.items()))
    print(f"{contender.name}, lr {lr:g}, seed {seed}: held-out loss {curve.loss:.4f}", flush=True)
    return curve


def lmtrain(*words: object) -> None:
    """A command in this process, so that torch is imported once."""
    output = io.StringIO()
    try:
        with redirect_stdout(output), redirect_stderr(output):
            main_of_lmtrain([str(word) for word in words])
    except SystemExit as end:
        if end.code:
            raise SystemExit(output.getvalue()) from end


def table(found: dict[Contender, Tuned]) -> str:
    lines = [
        "| contender | steps | best lr | held-out loss, mean of seeds | lowest and highest | losses by lr, one seed |",
        "|---|---|---|---|---|---|",
    ]
    for contender, t in found.items():
        steps = t.best[0].points[-1][0] // (contender.global_batch * SEQ_LEN)
        searched = ", ".join(f"{c.lr:g}: {c.loss:.3f}" for c in t.searched)
        lines.append(
            f"| {contender.name} | {steps} | {t.best[0].lr:g} | {statistics.mean(t.losses):.4f} "
            f"| {min(t.losses):.4f} - {max(t.losses):.4f} | {searched} |"
        )
    return "\n".join(lines)


def mean_of(curves: list[Curve]) -> list[tuple[int, float]]:
    at_once = zip(*(curve.points for curve in curves), strict=True)
    return [(points[0][0], statistics.mean(loss for _, loss in points)) for points in at_once]


def drawing(found: dict[Contender, Tuned], width: int = 640, height: int = 360) -> str:
    """One line a contender: held-out loss, the mean over seeds, by tokens seen."""
    means = {c: mean_of(t.best) for c, t in found.items()}
    tokens = max(at for points in means.values() for at, _ in points)
    low = min(loss for points in means.values() for _, loss in points) - 0.1
    high = max(points[1][1] for points in means.values()) + 0.1  # because: the first tenth would flatten the rest

    def x(at: float) -> float:
        return 50.0 + (width - 70) * at / tokens

    def y(loss: float) -> float:
        return 20.0 + (height - 60) * (high - loss) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12" fill="#777">',
        f'<text x="{width / 2}" y="{height - 6}" text-anchor="middle">tokens seen</text>',
    ]
    for tick in range(int(low * 5) + 1, int(high * 5) + 1):
        at = y(tick / 5)
        parts.append(f'<path d="M50 {at:.1f}H{width - 20}" stroke="#8884"/>')
        parts.append(f'<text x="44" y="{at + 4:.1f}" text-anchor="end">{tick / 5:.1f}</text>')
    for share in (0.25, 0.5, 0.75, 1.0):
        label = f"{share * tokens / 1e6:.2f}M"
        parts.append(f'<text x="{x(share * tokens):.1f}" y="{height - 24}" text-anchor="middle">{label}</text>')
    for row, (contender, points) in enumerate(means.items()):
        shown = [(at, loss) for at, loss in points if loss <= high]
        line = " ".join(f"{x(at):.1f},{y(loss):.1f}" for at, loss in shown)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{contender.colour}" stroke-width="2"/>')
        place = f'x="{width - 30}" y="{40 + 18 * row}" text-anchor="end" fill="{contender.colour}"'
        parts.append(f"<text {place}>{contender.name}</text>")
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    main()
