"""The memory of reshard and merge is bounded by what they are told, not by the size of the checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.reshard_speed import model_of_bytes, write
from tests.cli.harness import lmtrain
from tests.peak import peak_bytes

MIB = 1 << 20


@pytest.mark.slow
@pytest.mark.parametrize(("before", "to"), [("tp=1", "tp=4,pp=2"), ("tp=4,pp=2,dp=2", "tp=1")], ids=" to ".join)
def test_memory_is_bounded(tmp_path: Path, before: str, to: str) -> None:
    """The whole process, with the code that it maps, on checkpoints two and four times as large as its bound."""
    for num_bytes in (400 * MIB, 800 * MIB):
        source = write(tmp_path / f"source{num_bytes}", model_of_bytes(num_bytes), before)
        assert sum(file.stat().st_size for file in source.iterdir()) > 0.8 * num_bytes
        output = tmp_path / f"output{num_bytes}"
        options = ("--output", output, "--max-memory", f"{200 * MIB}", "--workers", 2)
        assert peak_bytes("reshard", source, "--to", to, *options) < 200 * MIB
        lmtrain("verify", output)


@pytest.mark.slow
def test_memory_of_a_merge_is_bounded(tmp_path: Path) -> None:
    """The merge is of three checkpoints at two layouts."""
    model, run = model_of_bytes(400 * MIB), tmp_path / "checkpoints"
    layouts = ((1, "tp=1"), (2, "tp=4,pp=2"), (3, "tp=1"))
    sources = [write(run, model, layout, step) for step, layout in layouts]
    options = ("--output", tmp_path / "out", "--max-memory", f"{200 * MIB}", "--workers", 2)
    assert peak_bytes("merge", *sources, *options) < 200 * MIB
