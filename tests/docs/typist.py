"""Types a page's commands, block by block, in a folder that holds what the page takes for granted.

Called by tests/docs/test_commands.py. Commands run as they stand, except that

* `lmtrain pretrain` gets settings that make a run small: those of SMALL that the command lacks are added, and lengths
  that would take long are those of SHORT;
* a checkpoint's step that so short a run does not reach becomes the newest one, and the number of a sample becomes 1;
* of what needs GPUs or a cluster, `lmtrain pretrain` is a dry run, and so is each run of a sweep of more than six.

A block that shows a file of the reader's own is written as that file; other Python is run. Where a block of kind `text`
begins with a command, it must end with an error, and print what the block shows.
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest

from lmtrain.config.compose_run_settings import expand_sweep
from lmtrain.config.settings_base import plugins
from tests.cli.harness import lmtrain
from tests.docs.pages import ROOT, Block
from tests.docs.world import MAKERS, SMALL, World

# lengths that a page may give
SHORT = {
    "train.steps": "2", "train.tokens": "1k", "train.global_batch": "4", "model.seq_len": "128",
    "data.megatron_samples": "64", "data.first_sample": "16", "recompute.blocks": "2",
    "schedule.warmup_steps": "0",
}  # fmt: skip
LONGER = "4"  # train.steps of a run that begins from another run's checkpoint
CHANGED = ("data", "model", "stages")  # settings with which a branch is a stage of its own, whose length is its own
# in place of what a file of conf/stage/ gives, after `stages.NAME.`
SHORT_IN_FILE = {"steps": "2", "train.global_batch": "2", "model.seq_len": "256", "schedule.warmup_steps": "0"}
SHORT_IN_STAGE = {"tokens": "1k", "samples": "8", **SHORT_IN_FILE}
PROGRAMS = ("lmtrain", "python", "torchrun", "zcat")
AT_ROOT = ("python", "grep", "git")  # these look at the repository
_SHELL = re.compile(r"[|&;<>$*]")
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
_STEP = re.compile(r"(\S+)/step_\d{8}")


def small(words: list[str]) -> list[str]:
    """`lmtrain pretrain ...` as a run of a second; any other command as it is."""
    if words[:2] != ["lmtrain", "pretrain"] or {"--dry-run", "--print-config"} & set(words):
        return words
    keys = [word.partition("=")[0] for word in words]
    kept = [word if word.endswith("=null") else _short(word) for word in words]
    from_files = [key for key in keys if re.fullmatch(r"stages\.[^.]+", key)]
    kept += [
        f"{stage}.{key}={value}"
        for stage in from_files for key, value in SHORT_IN_FILE.items() if f"{stage}.{key}" not in keys
    ]  # fmt: skip
    is_branch = "--from-run" in words and "run.dir" in keys and not any(key.startswith(CHANGED) for key in keys)
    if is_branch or "checkpoint.resume" in keys:
        # because: the run that it begins from has ended, as its steps are few too
        kept = [word for word in kept if not word.startswith("train.steps=")] + [f"train.steps={LONGER}"]
        keys.append("train.steps")
    if "--from-run" in words or any(key.startswith("stages.") for key in keys):
        keys.append("train.steps")  # because: the length follows from the run or from its stages
    return kept + [f"{key}={value}" for key, value in SMALL.items() if key not in keys]


def _short(word: str) -> str:
    """Return `key=value` with a small value, if the key is a length."""
    key, sign, _ = word.partition("=")
    in_stage = re.fullmatch(r"stages\.[^.]+\.(.+)", key)
    lengths, name = (SHORT_IN_STAGE, in_stage[1]) if in_stage else (SHORT, key)
    return f"{key}={lengths[name]}" if sign and name in lengths else word


class Typist:
    """Sits in `folder`, knows the world, and types."""

    def __init__(self, world: World, folder: Path) -> None:
        self.world, self.folder = world, folder
        self.names: dict[str, object] = {}  # of the page's Python, as in a notebook
        self.env = {"HOME": str(folder), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}

    def type(self, block: Block) -> int:
        """Do what a reader does with a block; how many commands were run."""
        if block.file is not None or block.kind == "toml":
            self._write(block)
        elif block.kind == "python" and block.why_not is None:
            self._bring(re.findall(r"[\w./~-]+", block.text))
            exec(compile(block.text, f"line {block.line}", "exec"), self.names)  # noqa: S102
        elif block.why_not in ("needs GPUs", "needs a cluster"):
            return sum(self._dry_run(line) for line in block.commands if "lmtrain pretrain" in line)
        elif block.why_not is None:
            refused = block.kind == "text"
            return sum(self._refuse(line, block) if refused else self._run(line) for line in block.commands)
        return 0

    def _write(self, block: Block) -> None:
        """A file of the reader's own; of a package, also the note that an installer would leave of its entry points."""
        self._bring(re.findall(r"[\w./~-]+", block.text))
        name = block.file or "pyproject.toml"
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text, encoding="utf-8")
        if path.suffix == ".py":
            (path.parent / "__init__.py").touch()
        if path.suffix == ".toml":
            note = self.folder / "mypackage-1.dist-info"
            note.mkdir()
            (note / "METADATA").write_text("Metadata-Version: 2.1\nName: mypackage\nVersion: 1\n")
            lines = [
                f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in points.items())
                for group, points in tomllib.loads(block.text)["project"]["entry-points"].items()
            ]
            (note / "entry_points.txt").write_text("\n".join(lines))
            importlib.invalidate_caches()

    def _run(self, line: str) -> int:
        words = small(self._words(line))
        runs = expand_sweep([word for word in words[2:] if "=" in word]) if "-m" in words else []
        if len(runs) > 6:
            for run in runs:
                lmtrain("pretrain", *run, "--dry-run", env=self.env)
        elif words[0] == "lmtrain" and not _SHELL.search(_QUOTED.sub("", line)):
            lmtrain(*words[1:], env=self.env)
        else:
            self._shell(line)
        return 1

    def _dry_run(self, line: str) -> int:
        words = small(self._words("lmtrain pretrain" + line.partition("lmtrain pretrain")[2]))
        lmtrain(*words[1:], "--dry-run", env=self.env | _task_of(line))
        return 1

    def _refuse(self, line: str, block: Block) -> int:
        with pytest.raises(AssertionError, match="exit code") as ended:  # because: of all codes but 0
            lmtrain(*self._words(line)[1:], env=self.env)
        said = str(ended.value).partition(":\n")[2].replace("\\\n", " ")
        assert block.printed.split() == said.split()
        return 1

    def _shell(self, line: str) -> None:
        """In a shell, for pipes and other programs. Commands on the repository's own files run at its root."""
        before, is_ours, after = line.partition("lmtrain pretrain ")
        if is_ours:
            line = before + shlex.join(small(shlex.split(is_ours + after)))
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        ran = subprocess.run(
            ["bash", "-c", line], text=True, capture_output=True, timeout=300, check=False,
            cwd=ROOT if line.split()[0] in AT_ROOT else self.folder,
            env={**os.environ, **self.env, "PATH": path, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert ran.returncode == 0, f"{line}\nexit code {ran.returncode}\n{ran.stdout}{ran.stderr}"

    def _words(self, line: str) -> list[str]:
        """A command's words as the shell would hand them over, once what they name is there."""
        words = shlex.split(re.sub(r"(--sample) \d+", r"\1 1", line), comments=True)
        outputs = {after for word, after in pairwise(words) if word == "--output"}
        self._bring([word for word in words if word not in outputs and not word.startswith("run.dir=")])
        return [_STEP.sub(self._newest, re.sub("^~", str(self.folder), word)) for word in words]

    def _newest(self, found: re.Match[str]) -> str:
        folder = Path(found[1].rpartition("=")[2])
        return found[0] if Path(found[0]).exists() or not folder.is_dir() else f"{found[1]}/{max(os.listdir(folder))}"

    def _bring(self, words: list[str]) -> None:
        """Whatever of the world these words name, or lie in."""
        for word in words:
            for one in re.findall(r"[\w./~-]+", word.rpartition("=")[2]):
                path = Path(one.removeprefix("~/"))
                for name in (path, *path.parents):
                    if str(name) in MAKERS:
                        self.world.bring(str(name), self.folder)


@contextmanager
def seated(world: World, folder: Path) -> Iterator[Typist]:
    """A typist in the folder; packages and plugins that a page made are forgotten in the end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        known, loaded = dict(plugins), set(sys.modules)
        try:
            yield Typist(world, folder)
        finally:
            for name in set(plugins) - set(known):
                del plugins[name]
            for name in set(sys.modules) - loaded:
                if str(getattr(sys.modules[name], "__file__", None)).startswith(str(folder)):
                    del sys.modules[name]


def _task_of(line: str) -> dict[str, str]:
    """Return the variables of the first task that an srun of this line would start with one on each node."""
    asked = re.search(r"srun .*--nodes=(\d+) --ntasks-per-node=1 ", line)
    if asked is None:
        return {}
    first = {"JOB_ID": "1", "STEP_ID": "0", "PROCID": "0", "LOCALID": "0", "NODEID": "0", "STEP_NODELIST": "n1"}
    first |= {"STEP_NUM_TASKS": asked[1], "STEP_TASKS_PER_NODE": f"1(x{asked[1]})"}
    return {f"SLURM_{name}": value for name, value in first.items()}
