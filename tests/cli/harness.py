"""A corpus, a tokenizer and a dataset made through the command line once, and a way to call `lmtrain` as users do."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

from lmtrain.cli.main import main
from tests.cli.at_work_lines import without_at_work_lines
from tests.cli.forking import forked
from tests.toytext import write_toy_texts

ROOT = Path(__file__).resolve().parents[2]


class Preset(str):
    """A setting of a toy run, which gives way to one that a test adds to it."""


def typed(arguments: Sequence[object]) -> list[str]:
    """The words of a command line, in which no setting stands twice."""
    words = [str(one) for one in arguments]
    keys = [word.lstrip("+~").partition("=")[0] for word in words]
    again = [isinstance(one, Preset) and keys[at] in keys[at + 1 :] for at, one in enumerate(arguments)]
    return [word for word, is_again in zip(words, again, strict=True) if not is_again]


def start(
    *arguments: object, env: Mapping[str, str] | None = None, output: int = subprocess.PIPE, fresh: bool = False
) -> subprocess.Popen[str]:
    """`lmtrain ARGUMENTS` in a process of its own; errors come with the output.

    It is forked from a process that has imported everything; `fresh` starts Python instead, for tests about starting.
    A pipe that nobody reads stops a process that writes for long: give that one `output=subprocess.DEVNULL`.
    """
    words = typed(arguments)
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "200", **(env or {})}
    if not fresh and (process := forked(words, variables, output)) is not None:
        return process
    return subprocess.Popen(
        [sys.executable, "-m", "lmtrain", *words], stdout=output, stderr=subprocess.STDOUT, text=True, env=variables
    )


def lmtrain(*arguments: object, code: int = 0, env: Mapping[str, str] | None = None) -> str:
    """Run to the end, expect this exit code, give the output. In this process, so that torch is imported once."""
    found, output = outcome(*arguments, env=env)
    assert found == code, f"exit code {found}, not {code}:\n{output}"
    return output


def outcome(*arguments: object, env: Mapping[str, str] | None = None) -> tuple[object, str]:
    """Exit code and output, whatever they are."""
    output, old = io.StringIO(), dict(os.environ)
    os.environ.update({"NO_COLOR": "1", "COLUMNS": "200"} | dict(env or {}))
    found: object = 0
    try:
        with redirect_stdout(output), redirect_stderr(output):
            main(typed(arguments))
    except SystemExit as end:
        found = end.code or 0
    except Exception:  # what --debug shows, or a crash: a shell sees a traceback and exit code 1
        output.write(traceback.format_exc())
        found = 1
    finally:
        os.environ.clear()
        os.environ.update(old)
    return found, without_at_work_lines(output.getvalue())


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_terminal(*arguments: object, columns: int = 80, code: int = 0) -> str:
    """What stands on a terminal of so many columns in the end; a live view leaves everything that it has drawn."""
    output, found = _Terminal(), 0
    env = {"COLUMNS": str(columns), "TERM": "xterm", "NO_COLOR": "1"}
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(output), redirect_stderr(output):
        for name, value in env.items():
            patch.setenv(name, value)
        try:
            main(typed(arguments))
        except SystemExit as end:
            found = int(end.code or 0)
    assert found == code, output.getvalue()
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.getvalue())


@dataclass(frozen=True)
class Toy:
    """A dataset and the settings of a run that takes a second or two."""

    text: Path
    tokenizer: Path
    data: Path

    def settings(self, folder: Path, **overrides: object) -> list[str]:
        values: dict[str, object] = {
            "data.path": self.data, "run.dir": folder, "train.steps": 12, "train.global_batch": 4,
            "train.micro_batch": 2, "train.valid_interval_steps": 0, "model.seq_len": 32,
            "model.num_layers": 2, "model.width": 32, "model.num_heads": 2,
            "model.vocab_multiple": 8, "compute.threads": 1,
            "observe.log_interval_steps": 1, "observe.tensorboard": "false", "checkpoint.interval_steps": 4,
            "schedule.warmup_steps": 2, "optim.lr": "3e-3",
        }  # fmt: skip
        values |= {key.replace("__", "."): value for key, value in overrides.items()}
        return [Preset(f"{key}={value}") for key, value in values.items()]


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    folder = tmp_path_factory.mktemp("toy")
    text = folder / "text"
    text.mkdir()
    write_toy_texts(text)
    made = Toy(text, folder / "tokenizer", folder / "data" / "toy")
    lmtrain("tokenizer", "train", text, "--output", made.tokenizer, "--vocab-size", 400)
    lmtrain("preprocess", text, "--tokenizer", made.tokenizer, "--output", made.data)
    return made


@pytest.fixture(scope="session")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """The same texts cut into sentences, for BERT."""
    folder = tmp_path_factory.mktemp("sentences")
    text = folder / "text"
    text.mkdir()
    write_toy_texts(text)
    made = Toy(text, folder / "tokenizer", folder / "data" / "pages")
    lmtrain("tokenizer", "train", text, "--output", made.tokenizer, "--vocab-size", 400, "--kind", "wordpiece")
    lmtrain("preprocess", text, "--tokenizer", made.tokenizer, "--output", made.data, "--split-sentences")
    return made
