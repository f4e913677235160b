"""Does a decay pay, and does a cleaner blend while it lasts? Tails of a trunk, two by two, on Python's own sources.

    python -m tests.benchmarks.stages_pay                        about eight minutes of one core
    python -m tests.benchmarks.stages_pay --seeds 1              a short look
    python -m tests.benchmarks.stages_pay --trunk 1.2M --tail 300k

Each seed trains one trunk at a constant learning rate, on as many samples of the standard library's modules as of its
tests. Four tails begin at its end and read equally many tokens: at the constant rate or decaying to zero, on the
trunk's blend or on modules alone. All are judged on modules that were held out before, are in no blend, and share
little with any text that is. Finished runs are not run again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from data_tools.corpora.stdlib import NEAR_COPY, Document, choose_heldout, overlaps, read_library, write_jsonl
from data_tools.corpus.flow.word_ngram_hashes import shingles
from lmtrain.observe.metrics import read_metrics
from lmtrain.units import parse_count
from tests.benchmarks.lamb_batch import lmtrain

VOCAB_SIZE, SEQ_LEN, BATCH = 1024, 128, 8
TESTS_BYTES = 8 << 20  # because: as much as the modules have, and encoded in seconds
SHINGLE_WORDS = 8
LR = "4e-3"
SCHEDULES = {"constant": "{kind: constant}", "decay": "{kind: linear}"}
BLENDS = ("same", "cleaner")


@dataclass(frozen=True)
class Tail:
    schedule: str
    blend: str

    @property
    def name(self) -> str:
        return f"{self.schedule}, {self.blend} blend"


TAILS = [Tail(schedule, blend) for blend in BLENDS for schedule in SCHEDULES]
# what is compared: a description, the tail without the change, and the tail with it
COMPARISONS = [
    ("decay, on the same blend", Tail("constant", "same"), Tail("decay", "same")),
    ("decay, on the cleaner blend", Tail("constant", "cleaner"), Tail("decay", "cleaner")),
    ("cleaner blend, at the constant rate", Tail("constant", "same"), Tail("constant", "cleaner")),
    ("cleaner blend, during the decay", Tail("decay", "same"), Tail("decay", "cleaner")),
    ("both", Tail("constant", "same"), Tail("decay", "cleaner")),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trunk", type=parse_count, default=409_600, help="tokens of each trunk")
    parser.add_argument("--tail", type=parse_count, default=102_400, help="tokens of each tail")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--output", type=Path, default=Path("runs/stages_pay"))
    arguments = parser.parse_args()
    data = prepare(arguments.output)
    losses: dict[Tail, list[float]] = {tail: [] for tail in TAILS}
    trunk_losses = []
    for seed in range(1, arguments.seeds + 1):
        trunk = train_trunk(data, arguments.output, arguments.trunk, seed)
        trunk_losses.append(held_out_loss(trunk))
        for tail in TAILS:
            losses[tail].append(train_tail(tail, trunk, data, arguments.tail))
            print(f"seed {seed}, {tail.name}: held-out loss {losses[tail][-1]:.4f}", flush=True)
    print(table(trunk_losses, losses))
    report = {"trunk": trunk_losses} | {tail.name: values for tail, values in losses.items()}
    (arguments.output / "losses.json").write_text(json.dumps(report, indent=1))


def prepare(folder: Path) -> Path:
    """Write the datasets modules, tests and heldout, if they are not there, and return their folder."""
    data = folder / "data"
    if (data / "heldout.idx").exists():
        return data
    texts = {name: folder / "corpus" / f"{name}.jsonl" for name in ("modules", "tests", "heldout")}
    for (name, path), documents in zip(texts.items(), choose_documents(), strict=True):
        write_jsonl(path, documents)
        print(f"{name}: {len(documents)} files, {sum(document.num_bytes for document in documents):,} bytes")
    tokenizer = folder / "tokenizer"
    lmtrain("tokenizer", "train", texts["modules"], texts["tests"], "--output", tokenizer, "--vocab-size", VOCAB_SIZE)
    for name, path in texts.items():
        lmtrain("preprocess", path, "--tokenizer", tokenizer, "--output", data / name, "--overwrite")
    return data


def choose_documents() -> tuple[list[Document], list[Document], list[Document]]:
    """Return modules and tests to train on, and held-out modules that are near-copies of neither."""
    library = Path(sysconfig.get_path("stdlib"))
    if not (library / "test").is_dir():
        raise SystemExit(f"{library} has no folder `test`. Use a Python with its tests, such as a build of CPython.")
    found = sorted(read_library(library), key=lambda document: document.rank)
    modules = [document for document in found if document.source.endswith(".py")]
    tests, num_bytes = list[Document](), 0
    for document in sorted(read_library(library / "test"), key=lambda document: document.rank):
        if document.source.endswith(".py") and num_bytes + document.num_bytes <= TESTS_BYTES:
            tests.append(document)
            num_bytes += document.num_bytes
    held_out, _ = choose_heldout(modules, 0.03)
    chosen = [document for document in modules if document.source in held_out]
    shares = overlaps([shingles(d.text, SHINGLE_WORDS) for d in [*chosen, *tests]], range(len(chosen)))
    judged = [document for document, share in zip(chosen, shares, strict=True) if share < NEAR_COPY]
    return [document for document in modules if document.source not in held_out], tests, judged


def train_trunk(data: Path, output: Path, tokens: int, seed: int) -> Path:
    """Train a trunk, unless an earlier one is there, and return its run folder."""
    folder = output / f"trunk_{seed}_{tokens}"
    settings = {
        "experiment": "demo", "compute.threads": 1, "train.seed": seed, "train.global_batch": BATCH, "optim.lr": LR,
        "schedule.decay_fraction": 0, "data": "blend", "data.datasets": blend_of(data, "same"),
        "data.valid_datasets": f"[{{path: {data / 'heldout'}, weight: 1}}]", "train.valid_samples": "100k",
        "train.valid_interval_steps": tokens // (BATCH * SEQ_LEN), "stages.trunk.tokens": tokens,
        "checkpoint.interval_steps": 0, "observe.tensorboard": "false", "observe.trace": "none",
        "observe.log_interval_steps": 20,
    }  # fmt: skip
    finish(folder, *(f"{key}={value}" for key, value in settings.items()))
    return folder


def train_tail(tail: Tail, trunk: Path, data: Path, tokens: int) -> float:
    """Train a tail of a trunk, unless an earlier one is there, and return its loss on the held-out files."""
    folder = trunk.with_name(f"{trunk.name}_{tail.schedule}_{tail.blend}_{tokens}")
    stage = {"tokens": tokens, "schedule": SCHEDULES[tail.schedule], "data.datasets": blend_of(data, tail.blend)}
    finish(folder, "--from-run", trunk, *(f"stages.tail.{key}={value}" for key, value in stage.items()))
    return held_out_loss(folder)


def held_out_loss(folder: Path) -> float:
    """Return the loss on the held-out files at the end of a run."""
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if row["event"] == "valid"]
    loss: float = rows[-1]["loss"]
    return loss


def blend_of(data: Path, blend: str) -> str:
    """Return the setting data.datasets of a blend."""
    names = ("modules",) if blend == "cleaner" else ("modules", "tests")
    return f"[{', '.join(f'{{path: {data / name}, weight: 1}}' for name in names)}]"


def finish(folder: Path, *words: object) -> None:
    """Train a run into `folder` unless it is there; a run that was interrupted is begun again."""
    if not folder.exists():
        unfinished = folder.with_name(folder.name + ".unfinished")
        lmtrain("pretrain", *words, f"run.dir={unfinished}")
        unfinished.rename(folder)


def table(trunk_losses: list[float], losses: dict[Tail, list[float]]) -> str:
    """Return two tables in Markdown: the losses, and the effects within each seed."""
    named = {"the trunk's end": trunk_losses} | {tail.name: values for tail, values in losses.items()}
    lines = ["| tail | held-out loss, mean of seeds | lowest and highest |", "|---|---|---|"]
    for name, values in named.items():
        lines.append(f"| {name} | {statistics.mean(values):.4f} | {min(values):.4f} to {max(values):.4f} |")
    lines += ["", "| change within a seed | mean effect on the loss | lowest and highest | better in |"]
    lines.append("|---|---|---|---|")
    for name, before, after in COMPARISONS:
        changes = [b - a for a, b in zip(losses[before], losses[after], strict=True)]
        lines.append(
            f"| {name} | {statistics.mean(changes):+.4f} | {min(changes):+.4f} to {max(changes):+.4f} "
            f"| {sum(change < 0 for change in changes)} of {len(changes)} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
