"""The day on a GPU, on a CPU: what its parts are, that it goes on where it was cut off, what it carries and says."""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
import tarfile
import time
import zipfile
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from lmtrain.models.initial_weights import apply_ties
from lmtrain.runfolder import tensorboard_metric_names
from tests.benchmarks.bare_torch import Bare
from tests.benchmarks.one_run import shape_of
from tests.benchmarks.switches import SWITCHES, Switch, present, turn_off
from tests.benchmarks.workloads import WORKLOADS
from tests.gpu.day import __main__ as day
from tests.gpu.day.archive import needs
from tests.gpu.day.carried import name_of, unpack
from tests.gpu.day.parts import PART_S, ROOT, Part, Where, parts
from tests.gpu.day.suites import PYTEST, Item
from tests.gpu.day.summary import pack, summary

HOURS = 3600.0


def where(**values: Any) -> Where:
    return Where(Path("data"), Path("runs"), memory_GiB=140.0, **values)


def test_each_part_is_short_and_the_first_make_25_minutes() -> None:
    found = parts(where())
    names = [part.name for part in found]
    assert names[:2] == ["start", "tests"]
    assert all(0 < part.expect_s <= PART_S < 480 for part in parts(where(nanogpt="n", titan="t")))
    assert names[names.index("models") + 1] == "more_ranks"
    assert sum(part.expect_s for part in found[: names.index("more_ranks")]) <= 25 * 60
    assert all(item.expect_s <= item.limit_s < 0.6 * PART_S for part in found for item in part.items)


def test_items_have_names_of_their_own_and_modules_that_are_there() -> None:
    for part in parts(where(nanogpt="n", titan="t")):
        assert len({item.name for item in part.items}) == len(part.items)
        assert all(item.words[0] == "-m" and find_spec(item.words[1]) for item in part.items)


def test_contenders_take_turns() -> None:
    (speed,) = (part for part in parts(where(nanogpt="n")) if part.name == "speed")
    assert [item.words[2] for item in speed.items] == ["lmtrain", "bare", "nanogpt"] * 3


# one of each family; the others differ in size, or in what they read
TWINS = ("gpt_tiny", "llama_8k_window")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.wide] * (name not in TWINS))
        for name, work in WORKLOADS.items()
        if not work.model.startswith("bert")
    ],
)
def test_a_twin_has_as_many_weights(name: str) -> None:
    """BERT's has no layer between blocks and scores, and no head for pairs."""
    config = WORKLOADS[name].config(Path("data"), Path("run"))
    model: Any = config.model
    with torch.device("meta"):
        twin = Bare(shape_of(config, WORKLOADS[name]))
        ours = model.with_vocab(model.vocab_size).build()
        apply_ties(ours)
    assert sum(p.numel() for p in twin.parameters()) == sum(p.numel() for p in ours.parameters())


def test_a_small_device_gets_a_smaller_model() -> None:
    small = Where(Path("data"), Path("runs"), memory_GiB=79.6)
    assert [work for work in small.largest if "8_layers" not in work] == []
    assert "model.num_layers=8" in WORKLOADS["high_flyer_8_layers"].changed


def test_all_kinds_of_recompute_are_measured() -> None:
    (masks,) = (part for part in parts(where()) if part.name == "masks")
    kinds = {path.stem for path in (ROOT / "conf/recompute").glob("*.yaml")} - {"none"}
    assert {item.name for item in masks.items if item.name.startswith("recompute_")} == {
        f"recompute_{kind}" for kind in kinds
    }


def test_a_switch_that_the_tree_lacks_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "lmtrain.parallel.blocks.recompute_and_compile"
    monkeypatch.setitem(SWITCHES, "nothing", Switch(module, "no_such_name", set))
    monkeypatch.setitem(SWITCHES, "something", Switch(module, "apply_compile", set))
    assert "something" in present()
    assert "nothing" not in present()


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_has_not_lost_what_it_turns_off(name: str) -> None:
    """A file that is there and has no such name any more would take its A/B out of the day without a word."""
    assert SWITCHES[name].is_there or not SWITCHES[name].file.exists()


def test_a_switch_turns_off(monkeypatch: pytest.MonkeyPatch) -> None:
    switch = Switch("lmtrain.runfolder.tensorboard_metric_names", "score_by_step", lambda: "off")
    monkeypatch.setitem(SWITCHES, "something", switch)
    monkeypatch.setattr(tensorboard_metric_names, "score_by_step", "on")
    turn_off(["something"])
    assert tensorboard_metric_names.score_by_step == "off"  # type: ignore[comparison-overlap]


SAYS = ("-c", "import json; print('words'); print(json.dumps({'number': 7}))")


def test_an_item_that_was_done_is_not_run_again(tmp_path: Path) -> None:
    (tmp_path / "items").mkdir()
    part = Part("some", "", (Item("one", SAYS, 1), Item("two", ("-c", "raise SystemExit(3)"), 1)))
    assert day.run(part, tmp_path, dict(os.environ), HOURS * 1e6) == 0
    one, two = (json.loads((tmp_path / f"items/some.{name}.json").read_text()) for name in ("one", "two"))
    assert (one["code"], one["said"], two["code"]) == (0, {"number": 7}, 3)
    (tmp_path / "items/some.one.json").write_text("{}")
    assert day.run(part, tmp_path, dict(os.environ), HOURS * 1e6) == 0
    assert (tmp_path / "items/some.one.json").read_text() == "{}"


def test_an_item_that_would_end_too_late_is_left(tmp_path: Path) -> None:
    (tmp_path / "items").mkdir()
    part = Part("some", "", (Item("long", SAYS, 100_000),))
    assert day.run(part, tmp_path, dict(os.environ), HOURS * 1e6) == 1
    assert not list((tmp_path / "items").glob("*.json"))


def test_an_item_without_room_has_a_second_try_and_no_third(tmp_path: Path) -> None:
    """Else it would begin anew at each call, and nothing behind it ever."""
    (tmp_path / "items").mkdir()
    waits = ("-c", "import time; time.sleep(600)")
    part = Part("some", "", (Item("waits", waits, 0), Item("next", SAYS, 0)))
    assert [day.run(part, tmp_path, dict(os.environ), time.monotonic() + 0.2) for _ in range(2)] == [2, 1]
    assert json.loads((tmp_path / "items/some.waits.json").read_text())["ended"] == "cut off"
    assert day.run(part, tmp_path, dict(os.environ), time.monotonic() + HOURS) == 0
    assert json.loads((tmp_path / "items/some.next.json").read_text())["code"] == 0


COLLECTS = """
import json, sys, pytest
class Chosen:
    def pytest_collection_finish(self, session):
        print(json.dumps([item.nodeid for item in session.items]))
for words in json.loads(sys.argv[1]):
    pytest.main([*words, "--collect-only", "-q"], plugins=[Chosen()])
"""


@pytest.mark.wide
def test_each_test_for_a_gpu_is_in_one_item() -> None:
    """And no other is in two."""
    items = [item for part in parts(where()) for item in part.items if item.words[: len(PYTEST)] == PYTEST]
    words = [item.words[2:] for item in items] + [("-p", "no:cacheprovider", "tests/gpu")]
    done = subprocess.run(
        [sys.executable, "-c", COLLECTS, json.dumps(words)], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    *chosen, there = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert all(chosen)
    times = Counter(name for one in chosen for name in one)
    assert {name for name in there if "cuda" in name or "cpu" not in name} <= times.keys() <= set(there)
    assert set(times.values()) == {1}


@pytest.mark.wide
def test_an_item_that_hangs_is_ended_with_its_ranks(tmp_path: Path) -> None:
    """And the part that it was in goes on: a hang is a finding."""
    (tmp_path / "items").mkdir()
    os.mkfifo(tmp_path / "pipe")
    end = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    waits = "import sys, time; file = open(sys.argv[1], 'wb', 0); file.write(b'x'); time.sleep(600)"
    starts = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', *sys.argv[1:]]))"
    hangs = Item("hangs", ("-c", starts, waits, str(tmp_path / "pipe")), 0, limit_s=2)
    part = Part("some", "", (hangs, Item("next", SAYS, 0)))
    assert day.run(part, tmp_path, dict(os.environ), HOURS * 1e6) == 0
    found = b""
    while select.select([end], [], [], 30)[0] and (more := os.read(end, 1)):
        found += more
    os.close(end)
    assert found == b"x", "the rank has lived, and its end of the pipe is closed"
    assert not more
    told = json.loads((tmp_path / "items/some.hangs.json").read_text())
    assert (told["code"], told["ended"]) == (None, "cut off")
    assert json.loads((tmp_path / "items/some.next.json").read_text())["code"] == 0


def test_what_is_not_installed_is_unpacked(tmp_path: Path) -> None:
    for name in ("no_such_package", "pytest"):
        with zipfile.ZipFile(tmp_path / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/__init__.py", "")
    folder = unpack(tmp_path / "out", tmp_path)
    assert [path.name for path in Path(folder).iterdir()] == ["no_such_package"]
    assert unpack(tmp_path / "other", tmp_path / "empty") == ""


def test_a_wheel_is_called_what_its_package_is_called() -> None:
    assert name_of(Path("antlr4_python3_runtime-4.9.3-py3-none-any.whl")) == "antlr4-python3-runtime"


def test_torch_is_the_machines_own() -> None:
    names = needs()
    assert not any(name.startswith("torch") for name in names)
    assert {"numpy", "hydra-core", "tokenizers", "pytest"} <= {name.partition(">")[0] for name in names}


def rows(out: Path, **said: dict[str, Any]) -> None:
    (out / "items").mkdir(parents=True, exist_ok=True)
    for name, one in said.items():
        told = {"code": 0, "ended": "exit code 0", "seconds": 1.0, "said": one, "words": [], "tail": []}
        (out / f"items/{name}.json").write_text(json.dumps(told))


def test_the_summary_has_medians_and_memory(tmp_path: Path) -> None:
    speed = {"tokens_per_s": 0.0, "mfu": 0.5, "allocated_bytes": None}
    for number, value in ((1, 10.0), (2, 30.0), (3, 20.0)):
        rows(tmp_path, **{f"speed.a-bare-{number}": speed | {"tokens_per_s": value}})
    names = ("allocated", "predicted_tensor", "device", "predicted")
    held = {f"{name}_bytes": GiB << 30 for name, GiB in zip(names, (100, 103, 110, 121), strict=True)}
    rows(tmp_path, **{"masks.recompute_full": {"tokens_per_s": 1.0, "mfu": None, **held}})
    text = summary(tmp_path, [Part("speed", "", tuple(Item(f"a-bare-{n}", SAYS, 1) for n in (1, 2, 3, 4)))])
    assert "speed: 3 of 4 done" in text
    (line,) = (line for line in text.splitlines() if line.startswith("a-bare"))
    assert line.split()[1:3] == ["20", "50.0%"]
    assert "tensors  100.0 GiB, predicted  103.0 (+3.0%); of the device  110.0, predicted  121.0 (+10.0%)" in text


def test_the_summary_begins_with_the_machine_and_nccls_environment(tmp_path: Path) -> None:
    said = {"device": "H200", "python": "3.12.3", "torch": "2.11.0", "cuda": "13.0", "nccl": "2.29.3"}
    rows(tmp_path, **{"start.machine": said | {"environment": {"CUDA_PATH": "x", "NCCL_DEBUG": "INFO"}}})
    first, second, *_ = summary(tmp_path, []).splitlines()
    assert first == "H200, Python 3.12.3, torch 2.11.0, CUDA 13.0, NCCL 2.29.3"
    assert second == "  NCCL_DEBUG=INFO"


def test_results_are_json_and_the_ends_of_logs(tmp_path: Path) -> None:
    rows(tmp_path, **{"some.one": {"number": 7}})
    (tmp_path / "items/some.one.log").write_bytes(b"x" * 1_000_000 + b"end")
    (tmp_path / "summary.txt").write_text("words")
    size = pack(tmp_path, tmp_path / "results.tar.gz")
    assert size < 16 << 20
    with tarfile.open(tmp_path / "results.tar.gz") as tar:
        members = {member.name: member.size for member in tar.getmembers()}
    assert set(members) == {"summary.txt", "some.one.json", "some.one.log"}
    assert members["some.one.log"] == 200_000


@pytest.mark.wide
def test_a_package_that_complains_as_torch_imports_it_leaves_the_tests(tmp_path: Path) -> None:
    """Many a machine with a GPU has it, and in tests warnings are errors; another one's word is an error still."""
    words = {"pynvml": "The pynvml package is deprecated. Please install", "other": "Another package is deprecated."}
    for name, said in words.items():
        (tmp_path / f"{name}.py").write_text(f"import warnings\nwarnings.warn({said!r}, FutureWarning, stacklevel=2)\n")
        (tmp_path / f"test_{name}.py").write_text(f"def test_nothing() -> None: import {name}\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"), "-rA"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([*command, str(tmp_path)], cwd=tmp_path, env=environment, capture_output=True, text=True)
    ends = dict(re.findall(r"^(PASSED|FAILED) \S*test_(\w+)\.py::", done.stdout, re.MULTILINE))
    assert ends == {"PASSED": "pynvml", "FAILED": "other"}, done.stdout


@pytest.mark.slow
def test_the_whole_day_on_a_cpu(tmp_path: Path) -> None:
    """From its archive, as on a bare machine."""
    file = tmp_path / "gpu_day.tar.gz"
    subprocess.run([sys.executable, "-m", "tests.gpu.day.archive", str(file)], cwd=ROOT, check=True)
    with tarfile.open(file) as tar:
        tar.extractall(tmp_path, filter="data")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.gpu.day", "--smoke", "--out", str(tmp_path / "out")]
    done = subprocess.run(
        command, cwd=tmp_path / "gpu_day", env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout
    assert "failed" not in done.stdout, done.stdout
    assert "are left" not in done.stdout, done.stdout
    again = subprocess.run(command, cwd=tmp_path / "gpu_day", env=environment, stdout=subprocess.PIPE, text=True)
    assert ": ok" not in again.stdout, "what was done is not done again"
