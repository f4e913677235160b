"""Ranks that were started differently, by `--nproc` and by torchrun: none begins, and it is said in what and why.

A `sitecustomize` on PYTHONPATH changes the command line and the module path of single ranks as Python starts, which is
before a line of the product runs; what runs then is the product as users have it. Each rank of `--nproc` starts Python
by itself for this: ranks that are forked from one server cannot differ in this way.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.apart import Way, World, given, make_world
from tests.cli.harness import ROOT
from tests.marks import slow
from tests.unit.train.test_compare_ranks import NAMES

pytestmark = pytest.mark.wide

SITE = """
import json, os, sys
mine = json.loads(os.environ["APART"]).get(os.environ.get("RANK"))
if mine:
    sys.argv[-mine["num"]:] = mine["settings"]
    sys.path[:0] = mine["modules"]
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("apart")
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(SITE)
    return make_world(folder, "parallel.timeout_s=60")


def begin(world: World, launcher: str, num: int, apart: Mapping[int, Sequence[str]]) -> tuple[int, str]:
    """Exit code and output of a run of so many ranks, some of which are started in these ways."""
    ways = {rank: [world.ways[name] for name in names] for rank, names in apart.items()}
    settings = [*world.settings, f"parallel.dp_shard={num}"]
    changes = {
        str(rank): {"num": len(settings), "settings": given(settings, chosen),
                    "modules": [way.modules for way in chosen if way.modules]}
        for rank, chosen in ways.items()
    }  # fmt: skip
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num}", "-m", "lmtrain", "pretrain"]
    if launcher == "nproc":
        start = ["-m", "lmtrain", "pretrain", "--nproc", str(num)]
    env = {"PYTHONPATH": f"{world.folder / 'site'}:{ROOT}", "PYTHONSAFEPATH": "1", "APART": json.dumps(changes)}
    env |= {"LMTRAIN_FORK": "0"}
    shutil.rmtree(world.folder / "run", ignore_errors=True)  # because: a test in which ranks agree leaves one
    done = subprocess.run(
        [sys.executable, *start, *settings], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "200", **env},
    )  # fmt: skip
    return done.returncode, done.stdout


def check(world: World, launcher: str, num: int, apart: Mapping[int, Sequence[str]]) -> str:
    code, output = begin(world, launcher, num, apart)
    if launcher == "nproc":
        assert code == 2, output
    else:  # because: torchrun ends with 1, and says how those processes ended that it did not have to end itself
        assert set(re.findall(r"exitcode +: (-?\d+)", output)) == {"2"}, output
    assert output.count("error: The ranks of this run differ") == 1, output
    assert "error: rank" not in output
    assert "step  1/" not in output
    assert not (world.folder / "run").exists()
    return output


@pytest.mark.slow  # because: among two ranks too each is shown by the unit tests, and all twelve at once below
@pytest.mark.parametrize("launcher", ["nproc", "torchrun"])
@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_that_differ_in_one_thing(world: World, launcher: str, name: str) -> None:
    output = check(world, launcher, 2, {1: [name]})
    (line,) = [line for line in output.splitlines() if world.ways[name].named in line]
    assert "on rank 0" in line
    assert "on rank 1" in line


@pytest.mark.parametrize("launcher", ["nproc", "torchrun"])
def test_four_ranks_that_differ_in_twelve_things(world: World, launcher: str) -> None:
    apart = {rank: NAMES[rank - 1 :: 3] for rank in (1, 2, 3)}
    lines = check(world, launcher, 4, apart).splitlines()
    for rank, names in apart.items():
        for name in names:
            (line,) = [line for line in lines if world.ways[name].named in line]
            assert f"on rank {rank}, and " in line
            assert line.endswith("on the other 3")


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["nproc", "torchrun"])
@pytest.mark.parametrize("name", NAMES)
def test_one_of_four_ranks_differs_in_one_thing(world: World, launcher: str, name: str) -> None:
    output = check(world, launcher, 4, {2: [name]})
    (line,) = [line for line in output.splitlines() if world.ways[name].named in line]
    assert "on rank 2, and " in line
    assert "on the other 3" in line


@pytest.mark.parametrize(("launcher", "refused"), [("nproc", 1), *slow(("torchrun", 0), ("torchrun", 1))])
def test_where_one_rank_is_refused_the_other_says_why(world: World, launcher: str, refused: int) -> None:
    gone = Way("", (f"data.path={world.folder / 'gone'}",))
    code, output = begin(replace(world, ways={"gone": gone}), launcher, 2, {refused: ["gone"]})
    assert code == (66 if launcher == "nproc" else 1), output
    assert output.count("gone.idx does not exist") == 2
    said = [line for line in output.splitlines() if "No process starts, because rank" in line]
    assert len(said) == 1, output
    assert f"because rank {refused} on " in said[0]
    assert "gone.idx does not exist" in said[0]
    assert "waited" not in output


@pytest.mark.parametrize("launcher", ["nproc", *slow("torchrun")])
def test_ranks_that_agree_begin(world: World, launcher: str, tmp_path: Path) -> None:
    settings = tuple(f"run.dir={tmp_path}" if one.startswith("run.dir=") else one for one in world.settings)
    code, output = begin(replace(world, settings=settings), launcher, 2, {})
    assert code == 0, output
    assert "done: 4 steps" in output
