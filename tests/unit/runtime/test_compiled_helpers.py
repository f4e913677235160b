"""The compiled helpers give what their twins give; where none was compiled there is nothing to compare."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lmtrain
from lmtrain.data.sample_dataset_interface import permute_twin
from lmtrain.errors import LmtrainError
from lmtrain.runtime import compiled_helpers

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def lib() -> ModuleType:
    if compiled_helpers.lib is None:
        pytest.skip("lmtrain._native was not compiled")
    return compiled_helpers.lib


@settings(max_examples=150, deadline=None)
@given(n=st.integers(1, 2**62), seed=st.integers(0, 2**64 - 1), data=st.data())
def test_permute(lib: ModuleType, n: int, seed: int, data: st.DataObject) -> None:
    ids = np.array(data.draw(st.lists(st.integers(0, n - 1), max_size=20)), np.int64)
    assert lib.permute(ids, n, seed).tolist() == permute_twin(ids, n, seed).tolist()


@pytest.mark.parametrize("ids", [[-1], [5], [0, 7]])
def test_permute_refuses_ids_outside(lib: ModuleType, ids: list[int]) -> None:
    with pytest.raises(ValueError, match="sample numbers must lie"):
        lib.permute(np.array(ids, np.int64), 5, 0)


def slow_crc32c(data: bytes, crc: int = 0) -> int:
    """CRC-32C bit by bit, from its definition."""
    crc ^= 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_crc32c_of_the_standard(lib: ModuleType) -> None:
    assert lib.crc32c(b"123456789") == 0xE3069283  # RFC 3720, B.4
    assert lib.crc32c(bytes(32)) == 0x8A9136AA


@settings(max_examples=100, deadline=None)
@given(left=st.binary(max_size=70), right=st.binary(max_size=70))
def test_crc32c(lib: ModuleType, left: bytes, right: bytes) -> None:
    assert lib.crc32c(left + right) == slow_crc32c(left + right)
    assert lib.crc32c(right, lib.crc32c(left)) == lib.crc32c(left + right)


def run(code: str, folder: Path, environment: dict[str, str] | None = None) -> str:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_it_can_be_ruled_out(repository: Path) -> None:
    code = "import lmtrain.runtime.compiled_helpers; print(lmtrain.runtime.compiled_helpers.lib)"
    assert run(code, repository, {"LMTRAIN_NATIVE": "0"}) == "None"


def test_the_build_backend_shows_the_compiler_the_headers(repository: Path) -> None:
    code = (
        "import lmtrain_build, os, pathlib, sys\n"
        "assert {'build_wheel', 'build_editable', 'build_sdist'} <= set(dir(lmtrain_build))\n"
        "folders = os.environ['CPLUS_INCLUDE_PATH'].split(os.pathsep)\n"
        "print(any((pathlib.Path(f) / 'pybind11' / 'pybind11.h').is_file() for f in folders))\n"
    )
    pytest.importorskip("pybind11")
    assert run(code, repository / "csrc") == "True"


# A helper that was compiled for another version


def declared() -> str:
    """What csrc/ offers Python: names and arguments."""
    files = sorted((ROOT / "csrc").glob("*.cpp"))
    found = [re.findall(r'def\(\s*"\w+"|py::arg\("\w+"\)|py::class_<\w+|py::init', file.read_text()) for file in files]
    return hashlib.sha256(json.dumps([one for one in found if one]).encode()).hexdigest()[:12]


def test_the_interface_is_counted_on_when_it_changes() -> None:
    """When this fails: count INTERFACE on in both files, compile, and put the new pair here."""
    assert (compiled_helpers.INTERFACE, declared()) == (3, "ffffcf35ca9f")
    assert f'module.attr("interface") = {compiled_helpers.INTERFACE};' in (ROOT / "csrc" / "native.cpp").read_text()


@pytest.mark.parametrize("interface", [None, compiled_helpers.INTERFACE - 1, compiled_helpers.INTERFACE + 1])
def test_a_helper_of_other_sources_is_refused(monkeypatch: pytest.MonkeyPatch, interface: int | None) -> None:
    old = ModuleType("lmtrain._native")
    old.__file__ = "lmtrain/_native.so"
    if interface is not None:
        monkeypatch.setattr(old, "interface", interface, raising=False)
    monkeypatch.setattr(lmtrain, "_native", old, raising=False)
    with pytest.raises(LmtrainError, match=r"^lmtrain/_native\.so was compiled for another .* Run `make native`"):
        compiled_helpers._load()
    monkeypatch.setenv("LMTRAIN_NATIVE", "0")
    assert compiled_helpers._load() is None


OLD = """
import sys, types, lmtrain
lmtrain._native = types.ModuleType("lmtrain._native")
lmtrain._native.__file__ = "lmtrain/_native.so"
from lmtrain.cli.main import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize("words", [["preprocess", "text", "--tokenizer", "tokenizer", "--output", "out"], ["--help"]])
def test_the_command_line_says_so(tmp_path: Path, words: list[str]) -> None:
    """Where it used to end in the midst of the work, with a traceback."""
    (tmp_path / "text").write_text("a text\n")
    done = subprocess.run(
        [sys.executable, "-c", OLD, *words], cwd=tmp_path, capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    if words == ["--help"]:
        assert done.returncode == 0
    else:
        assert done.returncode == 70, done.stderr
        assert done.stderr.startswith("error: lmtrain/_native.so was compiled for another version")


def test_compiled_helpers_let_other_threads_run() -> None:
    """So that Ctrl-C is answered, by the thread beside each command, while one of them works."""
    instant = {"mapped.cpp"}  # these look at a few numbers
    root = Path(__file__).resolve().parents[3] / "csrc"
    holding = {
        file.name for file in root.glob("*.cpp")
        if "def(\"" in (text := file.read_text()) and "gil_scoped_release" not in text
    }  # fmt: skip
    assert holding == instant
