"""The corpus from a small made-up library, and from the library of the Python that runs this test."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from data_tools.corpora.stdlib import (
    NEAR_COPY,
    SHINGLE_WORDS,
    CorpusReport,
    build_stdlib_corpus,
    is_usable,
    overlaps,
)
from data_tools.corpus.flow.word_ngram_hashes import shingles
from lmtrain.errors import DataError, MissingInputError


def module(seed: int, num_lines: int = 120) -> str:
    generator = random.Random(seed)
    names = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu"]
    return "".join(f"{' '.join(generator.choices(names, k=6))}\n" for _ in range(num_lines))


def put(path: Path, text: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)


@pytest.fixture
def library(tmp_path: Path) -> Path:
    folder = tmp_path / "python3"
    for number in range(60):
        put(folder / f"package{number % 4}" / f"module{number}.py", module(number))
    put(folder / "LICENSE.txt", module(1000))
    put(folder / "pydoc_data/topics.py", f"topics = {{'with': {module(1001)!r}, 'tiny': 'too short'}}\n")
    return folder


def read(path: Path) -> dict[str, str]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {row["source"]: row["text"] for row in rows}


def build(library: Path, output: Path, **settings: float) -> tuple[dict[str, str], dict[str, str], CorpusReport]:
    ratio, limit = settings.get("heldout_ratio", 0.1), int(settings.get("max_bytes", 16 << 20))
    report = build_stdlib_corpus(output, heldout_ratio=ratio, max_bytes=limit, library=library)
    return read(output / "train.jsonl"), read(output / "heldout.jsonl"), report


def test_every_text_goes_to_one_side_and_the_report_counts_them(library: Path, tmp_path: Path) -> None:
    train, heldout, report = build(library, tmp_path / "out")
    assert not train.keys() & heldout.keys()
    assert len(train) + len(heldout) == 62
    assert {"LICENSE.txt", "pydoc_data/topics.py/with"} <= train.keys() | heldout.keys()
    assert (report.num_train, report.num_heldout) == (len(train), len(heldout))
    assert report.train_bytes == sum(len(text.encode()) for text in train.values())
    assert report.heldout_bytes == sum(len(text.encode()) for text in heldout.values())
    assert 0.07 < report.heldout_bytes / (report.heldout_bytes + report.train_bytes) < 0.13
    assert {source.split("/")[0] for source in heldout} >= {f"package{i}" for i in range(4)}


def test_the_files_do_not_depend_on_the_order_of_creation(library: Path, tmp_path: Path) -> None:
    twin = tmp_path / "elsewhere"
    for path in sorted(library.rglob("*"), reverse=True):
        if path.is_file():
            put(twin / path.relative_to(library), path.read_bytes())
    build(library, tmp_path / "a")
    build(twin, tmp_path / "b")
    for name in ("train.jsonl", "heldout.jsonl"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_a_copy_of_a_heldout_file_brings_it_to_training(library: Path, tmp_path: Path) -> None:
    source, text = next((s, t) for s, t in build(library, tmp_path / "a")[1].items() if s.startswith("package"))
    put(library / "package0/copy.py", "".join(line for i, line in enumerate(text.splitlines(True)) if i % 10))
    train, heldout, report = build(library, tmp_path / "b")
    assert {source, "package0/copy.py"} <= train.keys()
    assert not {source, "package0/copy.py"} & heldout.keys()
    assert report.num_near_copies >= 1


def test_tests_links_and_foreign_files_are_left_out(library: Path, tmp_path: Path) -> None:
    foreign = [
        "test/test_alpha.py",
        "package0/tests/test_beta.py",
        "site-packages/numpy/core.py",
        "package0/__pycache__/gamma.py",
        "config-3.11-x86_64-linux-gnu/README",
        "package0/data.bin",
    ]
    for number, source in enumerate(foreign):
        put(library / source, module(2000 + number))  # so that none goes as a copy of another
    put(tmp_path / "secret.py", module(3000))
    (library / "linked.py").symlink_to(tmp_path / "secret.py")
    train, heldout, _ = build(library, tmp_path / "out")
    assert not {*foreign, "linked.py"} & (train.keys() | heldout.keys())
    assert len(train) + len(heldout) == 62


@pytest.mark.parametrize(
    ("data", "usable"),
    [
        (b"", False),
        (b"x = 1\n", False),
        (module(1).encode() * 80, False),
        (module(1).encode() + b"# caf\xe9\n", False),
        (b"".join(b"    0x%04x: 0x%04x,  # LATIN LETTER\n" % (i, i) for i in range(200)), False),
        (b"table = '" + b"abc " * 300 + b"'\n", False),
        (module(1).encode(), True),
        ("# ωραία\n".encode() * 40, True),
    ],
)
def test_short_long_and_foreign_files_and_tables_are_not_used(data: bytes, usable: bool) -> None:
    assert is_usable(data) == usable


def test_max_bytes_bounds_the_corpus(library: Path, tmp_path: Path) -> None:
    report = build(library, tmp_path / "out", max_bytes=100_000)[2]
    assert 90_000 < report.train_bytes + report.heldout_bytes <= 100_000


def test_too_small_a_library_is_refused(tmp_path: Path) -> None:
    put(tmp_path / "python3/only.py", module(1))
    with pytest.raises(DataError, match="max_bytes or heldout_ratio"):
        build_stdlib_corpus(tmp_path / "out", library=tmp_path / "python3")
    with pytest.raises(MissingInputError, match="nowhere"):
        build_stdlib_corpus(tmp_path / "out", library=tmp_path / "nowhere")
    assert not (tmp_path / "out").exists()


@pytest.mark.wide
def test_this_python_has_a_corpus_without_near_copies(tmp_path: Path) -> None:
    report = build_stdlib_corpus(tmp_path)
    train, heldout = read(tmp_path / "train.jsonl"), read(tmp_path / "heldout.jsonl")
    assert report.train_bytes > 5_000_000
    assert 0.03 < report.heldout_bytes / report.train_bytes < 0.07
    assert len({source.split("/")[0] for source in heldout if "/" in source}) >= 10
    assert not any(part in source.split("/") for source in train | heldout for part in ("test", "site-packages"))
    sets = [shingles(text, SHINGLE_WORDS) for text in (*heldout.values(), *train.values())]
    found = overlaps(sets, range(len(heldout)))
    assert max(found) < NEAR_COPY
