"""Corpus tools at size: 100,000 documents with planted exact and near copies, and planted evaluation passages.

    python tests/benchmarks/data_corpora.py                            100,000 documents
    python tests/benchmarks/data_corpora.py --documents 5000           anywhere, to see that it runs
    python tests/benchmarks/data_corpora.py --against lambada_test.jsonl --against wiki.test.tokens

Deduplication runs in a process of its own, whose peak memory is printed. A planted copy counts as found when it is
left out; whatever else is left out counts against precision. Documents that merely share a third of their text with
another are planted too, and must stay. The same bars at both sizes: tests/unit/data_tools/corpus/test_signatures.py.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

VOCABULARY = 30_000


class Prose:
    """Made-up documents with word frequencies as in a natural text (Zipf's law)."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        letters = "etaoinshrdlucmfwypvbgk"
        self._words = ["".join(self.random.choices(letters, k=self.random.randint(2, 10))) for _ in range(VOCABULARY)]
        self._cumulative = list(accumulate(1 / (rank + 3) for rank in range(VOCABULARY)))

    def words(self, count: int) -> list[str]:
        return self.random.choices(self._words, cum_weights=self._cumulative, k=count)

    def document(self) -> list[str]:
        return self.words(self.random.randint(60, 400))

    def exact_copy(self, words: list[str]) -> str:
        """As it comes from another site: other spaces, other capitals."""
        joined = ("\n" if self.random.random() < 0.5 else "  ").join(words)
        return joined.upper() if self.random.random() < 0.2 else joined

    def near_copy(self, words: list[str]) -> list[str]:
        """A few edits, each of which spoils five runs of five words: about 0.9 of the runs stay in common."""
        copy = list(words)
        for _ in range(max(1, len(copy) // 120)):
            at = self.random.randrange(len(copy))
            match self.random.randrange(3):
                case 0:
                    copy[at] = self.words(1)[0]
                case 1:
                    del copy[at]
                case _:
                    copy.insert(at, self.words(1)[0])
        return copy

    def relative(self, words: list[str]) -> list[str]:
        """A third of another document with text of its own: no copy."""
        return words[: len(words) // 3] + self.words(2 * len(words) // 3)


def jaccard(first: list[str], second: list[str], length: int = 5) -> float:
    left, right = ({tuple(words[i : i + length]) for i in range(len(words) - length + 1)} for words in (first, second))
    return len(left & right) / max(len(left | right), 1)


def planted_documents(count: int, seed: int = 0) -> Iterator[tuple[str, str]]:
    """(kind, text); kinds: original, exact, near (Jaccard similarity over 0.8), relative."""
    prose = Prose(seed)
    recent: list[list[str]] = []
    for _ in range(count):
        chance = prose.random.random()
        if len(recent) < 100 or chance < 0.7:
            words = prose.document()
            recent.append(words)
            if len(recent) > 20_000:
                recent[prose.random.randrange(20_000)] = recent.pop()
            yield "original", " ".join(words)
        elif chance < 0.8:
            yield "exact", prose.exact_copy(prose.random.choice(recent))
        elif chance < 0.95:
            words = prose.random.choice(recent)
            copy = prose.near_copy(words)
            while jaccard(words, copy) < 0.82:
                copy = prose.near_copy(words)
            yield "near", " ".join(copy)
        else:
            yield "relative", " ".join(prose.relative(prose.random.choice(recent)))


@dataclass(frozen=True)
class Found:
    """What deduplication made of the planted copies."""

    num_planted: int
    num_found: int
    num_dropped: int

    @property
    def recall(self) -> float:
        return self.num_found / self.num_planted

    @property
    def precision(self) -> float:
        return self.num_found / self.num_dropped


def write_planted(path: Path, count: int, seed: int = 0) -> None:
    with open(path, "w", encoding="utf-8") as file:
        for number, (kind, text) in enumerate(planted_documents(count, seed)):
            file.write(json.dumps({"id": number, "kind": kind, "text": text}) + "\n")


def judge(before: Path, after: Path) -> Found:
    with open(before, encoding="utf-8") as all_rows, open(after, encoding="utf-8") as kept_rows:
        kept = {json.loads(line)["id"] for line in kept_rows}
        kinds = [(row["kind"] in ("exact", "near"), row["id"] in kept) for row in map(json.loads, all_rows)]
    dropped = [is_copy for is_copy, stays in kinds if not stays]
    return Found(sum(is_copy for is_copy, _ in kinds), sum(dropped), len(dropped))


def passages(files: Sequence[Path], count: int, seed: int = 0) -> list[str]:
    """Runs of 25 to 60 words of these texts, from one word's beginning to another's end."""
    chance = random.Random(seed)
    texts: dict[Path, list[list[str]]] = {}
    for path in files:
        content = path.read_text(encoding="utf-8")
        found = [json.loads(line)["text"] for line in content.splitlines()] if path.suffix == ".jsonl" else [content]
        texts[path] = [text.split() for text in found if len(text.split()) > 80]
    chosen: list[str] = []
    while len(chosen) < count:
        words = chance.choice(texts[files[len(chosen) % len(files)]])
        start, length = chance.randrange(len(words) - 60), chance.randint(25, 60)
        passage = words[start : start + length]
        if sum(any(map(str.isalnum, word)) for word in passage) >= 13:  # because: tables of signs have no words
            chosen.append(" ".join(passage))
    return chosen


def disguised(passage: str, chance: random.Random) -> str:
    """The same words with other case, punctuation and line breaks."""
    words = passage.split(" ")
    joined = "".join(word + chance.choice([" ", " ", "\n", ", ", " - "]) for word in words)
    return joined.upper() if chance.random() < 0.3 else joined


def bench_dedupe(folder: Path, count: int, workers: int) -> None:
    before, after = folder / "planted.jsonl", folder / "unique.jsonl"
    write_planted(before, count)
    size = before.stat().st_size / 1e6
    began = time.perf_counter()
    command = ["corpus", "dedupe", str(before), "--output", str(after), "--workers", str(workers)]
    subprocess.run([sys.executable, "-m", "lmtrain.cli.main", *command], check=True)
    seconds = time.perf_counter() - began
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = judge(before, after)
    print(
        f"{count} documents ({size:.0f} MB): recall {found.recall:.4f}, precision {found.precision:.4f} of "
        f"{found.num_planted} planted; {seconds:.1f} s wall, {usage.ru_utime + usage.ru_stime:.1f} s CPU, "
        f"largest process {usage.ru_maxrss / 1024:.0f} MiB"
    )


def bench_decontaminate(folder: Path, files: Sequence[Path], count: int) -> None:
    chance = random.Random(1)
    prose = Prose(1)
    before, after = folder / "spoilt.jsonl", folder / "honest.jsonl"
    planted = passages(files, count)
    with open(before, "w", encoding="utf-8") as file:
        for passage in planted:
            text = f"{' '.join(prose.document())} {disguised(passage, chance)} {' '.join(prose.document())}"
            file.write(json.dumps({"text": text}) + "\n")
            file.write(json.dumps({"text": " ".join(prose.document())}) + "\n")
    command = [
        "corpus", "decontaminate", str(before), "--output", str(after), "--action", "drop",
        *(word for path in files for word in ("--against", str(path))),
    ]  # fmt: skip
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "lmtrain.cli.main", *command], check=True)
    seconds = time.perf_counter() - began
    kept = after.read_bytes().count(b"\n")
    print(f"{count} planted passages, {count} clean documents: {kept} documents stay; {seconds:.1f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--against", type=Path, action="append", default=[], help="an evaluation file; may be repeated")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bench_dedupe(Path(folder), arguments.documents, arguments.workers)
        if arguments.against:
            bench_decontaminate(Path(folder), arguments.against, max(arguments.documents // 50, 100))


if __name__ == "__main__":
    main()
