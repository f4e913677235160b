"""`lmtrain preprocess` end to end beside Megatron-LM's tools: wall, CPU, peak memory, medians of interleaved runs.

    python tests/benchmarks/data_preprocess.py --vocab gpt2/ --megatron ~/Megatron-LM --books books.jsonl.xz
    python tests/benchmarks/data_preprocess.py --smoke        anywhere: 20 MB and a vocabulary of our own, ours alone

`--vocab` is a folder with GPT-2's vocab.json and merges.txt. Without `--megatron` only our own figures are printed.
Megatron's tools need transformers, triton and, for the fast one, gigatoken and awkward, here or on `--pythonpath`; on a
Python before 3.12 they get the one name of `typing` that they miss. The slow one runs on `--slow-mb` of the corpus (its
cost a byte does not fall with size), and its start-up is taken off by a run on one document.

The corpus is real text in pieces of at most 20 kB: books, if given, then documentation and sources that the machine
carries. Where they are less than `--corpus-mb`, they are cut again at other places. All writers' files are compared.
What waits for the disk is apart: ours by its own clock, Megatron's by a sync afterwards.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import os
import random
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer
from lmtrain.tokenizer.train import train_bpe

PIECE = 20_000
SUFFIXES = frozenset({".py", ".pyi", ".rst", ".md", ".txt", ".html", ".h", ".hpp", ".c", ".cpp", ".js", ".json", ".po"})
SHIM = "import typing\nif not hasattr(typing, 'override'):\n    typing.override = lambda function: function\n"


# ---- the corpus


def folders() -> list[Path]:
    """Where a machine keeps text: this Python's packages and library, documentation, headers."""
    paths = sysconfig.get_paths()
    found = [Path(paths["purelib"]), Path(paths["stdlib"]), Path("/usr/share/doc"), Path("/usr/share/perl")]
    found += [Path("/usr/include"), Path("/usr/share/javascript"), Path("/usr/lib/python3"), Path("/usr/share/man")]
    return [folder for folder in found if folder.is_dir()]


def machine_texts() -> Iterator[str]:
    seen: set[bytes] = set()
    for folder in folders():
        for path in sorted(folder.rglob("*")):
            try:
                if path.suffix not in SUFFIXES or path.is_symlink() or not 500 < path.stat().st_size < 1 << 20:
                    continue
                text = path.read_text("utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            digest = hashlib.blake2b(text.encode(), digest_size=12).digest()
            if digest not in seen:
                seen.add(digest)
                yield text


def book_texts(path: Path) -> Iterator[str]:
    with lzma.open(path, "rt", encoding="utf-8") if path.suffix == ".xz" else open(path, encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)["text"]


def up_to(num_bytes: int, texts: Iterable[str]) -> Iterator[str]:
    # because: gigatoken takes the spelling of a special token inside a text for the token; ours takes it for text
    for text in (text for text in texts if "<|endoftext|>" not in text):
        yield text
        num_bytes -= len(text.encode())
        if num_bytes <= 0:
            return


def build_corpus(path: Path, num_bytes: int, books: Path | None) -> tuple[int, int]:
    """Write at least this many bytes of text; gives the bytes of text, and how many of them stand there once only."""
    texts = list(up_to(num_bytes, chain(book_texts(books) if books else (), machine_texts())))
    random.Random(0).shuffle(texts)
    distinct, written, offset = sum(len(text.encode()) for text in texts), 0, 0
    with path.open("w", encoding="utf-8") as file:
        while written < num_bytes:
            for text in texts:
                for at in range(-offset, len(text), PIECE):
                    if piece := text[max(at, 0) : at + PIECE]:
                        file.write(json.dumps({"text": piece}, ensure_ascii=False) + "\n")
                        written += len(piece.encode())
                if written >= num_bytes:
                    break
            offset = (offset + 7919) % PIECE
    return written, min(distinct, written)


def head_of(corpus: Path, path: Path, num_bytes: int) -> int:
    """The first lines of the corpus; gives the bytes of their texts."""
    written = 0
    with corpus.open(encoding="utf-8") as lines, path.open("w", encoding="utf-8") as file:
        for line in lines:
            file.write(line)
            written += len(json.loads(line)["text"].encode())
            if written >= num_bytes:
                break
    return written


# ---- contenders


@dataclass
class Run:
    wall_s: float
    cpu_s: float
    peak_bytes: int  # of the process and its children: the sum of their sizes at the worst moment seen
    sync_s: float


@dataclass
class Contender:
    name: str
    command: list[str]
    output: Path  # the prefix of what it writes
    text_bytes: int
    env: dict[str, str]


def measured(contender: Contender) -> Run:
    for path in contender.output.parent.glob(f"{contender.output.name}*"):
        path.unlink()
    os.sync()  # what others wrote is not this one's to wait for
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    process = subprocess.Popen(
        contender.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | contender.env
    )
    peak = watched(process)
    said, _ = process.communicate()
    wall = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if process.returncode:
        raise SystemExit(f"{contender.name} failed:\n{said[-2000:]}")
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    if contender.name == "lmtrain":
        sync = float(json.loads(said[said.index("{") :])["sync_seconds"])
        return Run(wall - sync, cpu, peak, sync)
    began = time.perf_counter()
    os.sync()
    return Run(wall, cpu, peak, time.perf_counter() - began)


def watched(process: subprocess.Popen[str]) -> int:
    """The proportional size of a process tree, looked at twenty times a second."""
    peak = 0
    while process.poll() is None:
        peak = max(peak, sum(size_of(pid) for pid in tree_of(process.pid)))
        time.sleep(0.05)
    return peak


def tree_of(pid: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []
    return [pid, *(inner for child in children for inner in tree_of(child))]


def size_of(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def ours(name: str, corpus: Path, vocab: Path, folder: Path, workers: int, text_bytes: int) -> Contender:
    output = folder / "ours"
    command = [sys.executable, "-m", "lmtrain.cli.main", "preprocess", str(corpus), "--tokenizer", str(vocab)]
    command += ["--output", str(output), "--workers", str(workers), "--append-eod", "--overwrite", "--json"]
    return Contender(name, command, output, text_bytes, {})


def megatrons(
    tool: str, name: str, megatron: Path, corpus: Path, vocab: Path, folder: Path, workers: int, more: str, size: int
) -> Contender:
    shim = folder / "shim"
    shim.mkdir(exist_ok=True)
    (shim / "sitecustomize.py").write_text(SHIM)
    output = folder / name.replace(" ", "_")
    command = [sys.executable, str(megatron / "tools" / tool), "--input", str(corpus), "--output-prefix", str(output)]
    command += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(vocab), "--append-eod"]
    command += ["--workers", str(workers)] if tool == "preprocess_data.py" else ["--use-gigatoken"]
    path = os.pathsep.join([str(shim), *([more] if more else [])])
    return Contender(name, command, output, size, {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"})


def for_transformers(vocab: Path, folder: Path) -> Path:
    """GPT-2's tokenizer with the files around it that transformers asks for."""
    Tokenizer.load(vocab).save(folder / "tokenizer.json")
    for name in ("vocab.json", "merges.txt"):
        (folder / name).write_bytes((vocab / name).read_bytes())
    names = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    config = {"tokenizer_class": "GPT2TokenizerFast", "model_max_length": 1 << 40} | names
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    return folder


def digests(contender: Contender) -> dict[str, str]:
    found = sorted(contender.output.parent.glob(f"{contender.output.name}*"))
    return {p.suffix: hashlib.sha256(p.read_bytes()).hexdigest() for p in found if p.suffix in (".bin", ".idx")}


# ---- the report


def report(contender: Contender, runs: Sequence[Run], base: Run | None = None) -> tuple[float, float]:
    """One line; gives MB of text a second of wall, and of CPU, with a start-up run taken off."""
    wall, cpu = (statistics.median(getattr(run, name) for run in runs) for name in ("wall_s", "cpu_s"))
    peak, sync = max(run.peak_bytes for run in runs), statistics.median(run.sync_s for run in runs)
    text = contender.text_bytes / 1e6
    speeds = text / (wall - (base.wall_s if base else 0)), text / (cpu - (base.cpu_s if base else 0))
    print(
        f"{contender.name:18} {text:8.1f} MB {wall:7.2f} s wall {cpu:7.2f} s CPU {peak / 1e6:7.0f} MB peak "
        f"{sync:5.2f} s sync | {speeds[0]:7.1f} MB/s {speeds[1]:7.1f} MB/CPU-s" + (" marginal" if base else ""),
        flush=True,
    )
    return speeds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=Path, help="a folder with GPT-2's vocab.json and merges.txt")
    parser.add_argument("--books", type=Path, help="a .jsonl or .jsonl.xz of books to begin with")
    parser.add_argument("--corpus", type=Path, help="where the corpus is kept; it is built if it is not there")
    parser.add_argument("--corpus-mb", type=int, default=1100)
    parser.add_argument("--megatron", type=Path, help="a checkout of Megatron-LM")
    parser.add_argument("--pythonpath", default="", help="where gigatoken is, if not in this Python")
    parser.add_argument("--slow-mb", type=float, default=10, help="what preprocess_data.py is given; 0 leaves it out")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where outputs go, rather than the usual place of temporary files")
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.corpus_mb, arguments.rounds, arguments.corpus = 20, 2, None
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        run_all(arguments, Path(name))


def run_all(arguments: argparse.Namespace, folder: Path) -> None:
    corpus = arguments.corpus or folder / "corpus.jsonl"
    if not corpus.exists():
        size, distinct = build_corpus(corpus, arguments.corpus_mb * 10**6, arguments.books)
        print(f"built {corpus}: {size / 1e6:.0f} MB of text, {distinct / 1e6:.0f} MB of it different", flush=True)
    vocab = arguments.vocab
    if vocab is None:
        vocab = folder / "tokenizer"
        texts = [json.loads(line)["text"] for line, _ in zip(corpus.open(encoding="utf-8"), range(200), strict=False)]
        train_bpe(texts, 4096).save(vocab / "tokenizer.json")
    size = head_of(corpus, folder / "all.jsonl", 1 << 62)
    line = folder / "line.jsonl"
    line.write_text('{"text": "hello world"}\n')
    contenders = [ours("lmtrain", folder / "all.jsonl", vocab, folder, arguments.workers, size)]
    alone = ours("lmtrain", line, vocab, folder / "one", 1, 11)
    (folder / "one").mkdir()
    if arguments.megatron is not None:
        vocab = for_transformers(vocab, folder / "gpt2")
        common = (arguments.megatron.resolve(), folder / "all.jsonl", vocab, folder, arguments.workers)
        contenders.append(megatrons("preprocess_data_fast.py", "megatron fast", *common, arguments.pythonpath, size))
    runs: dict[str, list[Run]] = {contender.name: [] for contender in contenders}
    starts: list[Run] = []
    for number in range(arguments.rounds):
        for contender in contenders:
            runs[contender.name].append(measured(contender))
            if number == 0 and contender is not contenders[0]:
                same = digests(contender) == digests(contenders[0])
                print(f"{contender.name}'s .bin and .idx are {'the same as ours' if same else 'NOT THE SAME as ours'}")
        starts.append(measured(alone))
    print(f"\n{arguments.workers} workers, medians of {arguments.rounds} interleaved runs; peaks are the largest")
    speeds = {contender.name: report(contender, runs[contender.name]) for contender in contenders}
    print(f"one line of text: {statistics.median(run.wall_s + run.sync_s for run in starts):.2f} s wall")
    if arguments.megatron is not None and arguments.slow_mb:
        speeds["megatron"] = slow(arguments, corpus, vocab, folder, line)
    for name in speeds.keys() - {"lmtrain"}:
        wall, cpu = (mine / other for mine, other in zip(speeds["lmtrain"], speeds[name], strict=True))
        print(f"lmtrain is {wall:.1f} x {name} by wall, {cpu:.1f} x by CPU")


def slow(
    arguments: argparse.Namespace, corpus: Path, vocab: Path, folder: Path, line: Path
) -> tuple[float, float]:
    """preprocess_data.py on a part of the corpus, with what one document costs taken off, which favours it."""
    part = folder / "part.jsonl"
    size = head_of(corpus, part, int(arguments.slow_mb * 1e6))
    tool, root = "preprocess_data.py", arguments.megatron.resolve()
    base = megatrons(tool, "megatron start", root, line, vocab, folder, arguments.workers, arguments.pythonpath, 11)
    whole = megatrons(tool, "megatron", root, part, vocab, folder, arguments.workers, arguments.pythonpath, size)
    start = min((measured(base) for _ in range(2)), key=lambda run: run.wall_s)
    return report(whole, [measured(whole) for _ in range(min(arguments.rounds, 3))], start)


if __name__ == "__main__":
    main()
