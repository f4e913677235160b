"""This checkout beside an earlier one: CPU seconds of what users wait for, in interleaved runs.

    python -m tests.benchmarks.beside --before ../before --folder beside --vocab gpt2/ --books books.jsonl.xz

Each round runs before, now, before: so the earlier checkout is compared with itself as well, which tells how far equal
code can differ on this machine. A job is a command of `lmtrain`, or a few lines that both checkouts understand; both
run with this interpreter, from their own sources and with their own compiled helpers (`make native` in each). A job
passes if the median of its ratios is within the spread of the earlier checkout against itself, or within 1.03.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

from lmtrain.tokenizer.train import train_bpe
from tests.benchmarks.data_preprocess import build_corpus, machine_texts
from tests.benchmarks.reshard_speed import model_of_bytes, write

ROOT = Path(__file__).resolve().parents[2]
MOST = 1.03
ENCODE = """
import sys
from pathlib import Path
from lmtrain.tokenizer.bulk_encoding import build_encoder
try:
    from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer
except ModuleNotFoundError:  # an earlier checkout
    from lmtrain.tokenizer.base import Tokenizer
encoder, data = build_encoder(Tokenizer.load(Path(sys.argv[1]))), Path(sys.argv[2]).read_bytes()
for _ in range(3):
    encoder.encode_jsonl(data, "text")
"""
SMALL = {
    "model": "gpt_tiny", "model.width": 64, "model.num_layers": 4, "model.num_heads": 4, "model.seq_len": 16,
    "train.steps": 600, "train.global_batch": 2, "train.micro_batch": 2, "train.valid_interval_steps": 0,
    "checkpoint.interval_steps": "null", "observe.tensorboard": "false", "schedule.warmup_steps": 2,
}  # fmt: skip
SAVES = SMALL | {"model.width": 768, "model.num_layers": 8, "model.num_heads": 12, "train.steps": 4}
SAVES |= {"checkpoint.interval_steps": 1, "checkpoint.keep_last": 1}
STARTED = {"train.steps": 2, "checkpoint.interval_steps": 0, "schedule.warmup_steps": 0}  # saved at its end alone


def jobs(folder: Path) -> dict[str, list[str]]:
    """Every job by its name: what follows `python`. Each may write into `folder/output`, which is emptied before it."""
    lmtrain, output = ["-m", "lmtrain.cli.main"], folder / "output"
    vocab, text, data = folder / "vocab", folder / "text.jsonl", folder / "data"
    run = [*lmtrain, "pretrain", f"data.path={data}", f"run.dir={output}/run"]
    typed = [f"{key}={value}" for key, value in SMALL.items()]
    one_more = [f"{key}={value}" for key, value in (SAVES | STARTED | {"train.steps": 3}).items()]
    return {
        "preprocess": [*lmtrain, "preprocess", f"{text}", "--tokenizer", f"{vocab}", "--output", f"{output}/data"],
        "encode": ["-c", ENCODE, f"{vocab}", f"{text}"],
        "reshard": [*lmtrain, "reshard", f"{folder}/source", "--to", "tp=4,pp=2", "--output", f"{output}/resharded"],
        "verify": [*lmtrain, "verify", f"{folder}/source"],
        "inspect": [*lmtrain, "inspect", f"{folder}/source", "--json"],
        "resume": [*run, *one_more, f"checkpoint.resume={folder}/run"],
        "save": [*run, *(f"{key}={value}" for key, value in SAVES.items())],
        "train, one process": [*run, *typed],
        "train, tp=2": [*run, *typed, "parallel.tp=2", "--nproc", "2"],
    }


def prepare(folder: Path, before: Path, vocab: Path | None, books: Path | None, text_mb: int) -> None:
    folder.mkdir(parents=True)
    build_corpus(folder / "text.jsonl", text_mb << 20, books)
    if vocab is None:
        train_bpe(machine_texts(), 2000).save(folder / "vocab")
    else:
        (folder / "vocab").symlink_to(vocab.resolve())
    command = ["-m", "lmtrain.cli.main", "preprocess", str(folder / "text.jsonl"), "--tokenizer", str(folder / "vocab")]
    cpu_seconds(ROOT, [*command, "--output", str(folder / "data")])
    made = write(folder / "made", model_of_bytes(1 << 30), "tp=2,dp=2")
    (folder / "source").symlink_to(made.resolve())
    started = ["-m", "lmtrain.cli.main", "pretrain", f"data.path={folder / 'data'}", f"run.dir={folder / 'run'}"]
    cpu_seconds(before, started + [f"{key}={value}" for key, value in (SAVES | STARTED).items()])


def cpu_seconds(tree: Path, command: list[str]) -> float:
    """User and system time of the process and of all that it waited for."""
    env = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, *command], cwd=tree, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdout is not None
    said = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"{tree}: {' '.join(command)} ended with {process.returncode}:\n{said.decode()[-2000:]}")
    return usage.ru_utime + usage.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="a checkout of the earlier commit, helpers compiled")
    parser.add_argument("--folder", type=Path, required=True, help="made, filled and removed again")
    parser.add_argument("--vocab", type=Path, help="a folder or file of GPT-2's tokenizer; otherwise one is trained")
    parser.add_argument("--books", type=Path, help="JSON lines of long texts, .xz or plain")
    parser.add_argument("--text-mb", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", action="append", help="a job's name; several times for several")
    given = parser.parse_args()
    failed, before = [], given.before.resolve()
    prepare(given.folder.resolve(), before, given.vocab, given.books, given.text_mb)
    try:
        for name, command in jobs(given.folder.resolve()).items():
            if given.only and name not in given.only:
                continue
            seconds: dict[str, list[float]] = {"before": [], "now": [], "again": []}
            for number in range(given.rounds + 1):
                for contender, tree in (("before", before), ("now", ROOT), ("again", before)):
                    shutil.rmtree(given.folder / "output", ignore_errors=True)
                    (given.folder / "output").mkdir()
                    took = cpu_seconds(tree, command)
                    if number:  # the first round warms up
                        seconds[contender].append(took)
            ratios = [now / old for now, old in zip(seconds["now"], seconds["before"], strict=True)]
            spread = [again / old for again, old in zip(seconds["again"], seconds["before"], strict=True)]
            middle, limit = statistics.median(ratios), max(MOST, *spread)
            failed += [name] if middle > limit else []
            print(
                f"{name:<20} before {statistics.median(seconds['before']):6.2f} s  now / before {middle:.3f} "
                f"({min(ratios):.3f}-{max(ratios):.3f})  before / before {min(spread):.3f}-{max(spread):.3f}",
                flush=True,
            )
    finally:
        shutil.rmtree(given.folder)
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
