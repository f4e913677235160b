"""A path with two letters swapped: every verb names the path that exists, and what it writes to type has it.

Verbs and paths are found by themselves: each word of the command line of a verb in bases.py that names something in the
small world is a path, and so are the words of the options and settings below.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.harness import outcome
from tests.promise.options.bases import BASES, RUN
from tests.promise.options.small_world import World

# lines with paths in options and settings that no base has
MORE = (
    f"pretrain {RUN}".replace("data.path=data/a", "data.text=notes.txt data.tokenizer=tokenizer"),
    f"pretrain {RUN} checkpoint.init_from=runs/a",
    f"pretrain {RUN} checkpoint.resume=runs/a/checkpoints/step_00000004",
    "pretrain --from-run=runs/a",
    "pretrain --from-run runs/a/checkpoints/step_00000002 run.dir=runs/new",
    "tokenizer show tokenizer --data notes.txt",
    "eval runs/a --task lambada/megatron-strict --data eval.jsonl --device cpu",
    "eval --compare runs/a hf --task perplexity --data eval.jsonl",
    "merge runs/a/checkpoints/step_00000002 runs/a/checkpoints/step_00000004 --output merged --workers 1",
    "inspect runs/a --diff runs/b",
    "plan --calibrate runs/long runs/longer",
    "generate runs/a --prompt-file notes.txt --device cpu",
)
OUTPUTS = ("corpus fetch",)  # the path in its line need not exist


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = World(tmp_path_factory.mktemp("mistyped") / "world")
    made.bring("runs data hf megatron", made.folder.parent)
    return made.folder


def exists(path: str) -> bool:
    return Path(path).exists() or Path(f"{path}.idx").exists()


def mistyped(path: str) -> str:
    """The path with two letters in the middle of its last name swapped, or with one more if that changes nothing."""
    folder, name = Path(path).parent, Path(path).name
    stem, dot, suffix = name.partition(".")
    at = len(stem) // 2
    wrong = stem[: at - 1] + stem[at] + stem[at - 1] + stem[at + 1 :] if len(stem) > 2 else f"{stem}x"
    if wrong == stem or exists(str(folder / (wrong + dot + suffix))):
        wrong = f"{stem}x"
    return str(folder / (wrong + dot + suffix))


def mistyped_lines() -> Iterator[tuple[list[str], str, str]]:
    """Yield (words, mistyped path, right path) for each path in each line."""
    lines = {verb: f"{verb} {base}" for verb, base in BASES.items() if verb not in ("lmtrain", *OUTPUTS)}
    for line in (*lines.values(), *MORE):
        words = shlex.split(line)
        num_verbs = next((2 for verb in lines if " " in verb and line.startswith(verb)), 1)
        for at, word in enumerate(words[num_verbs:], num_verbs):
            before, path = re.fullmatch(r"((?:(?:--)?[\w.-]+=)?)(.*)", word).groups()  # type: ignore[union-attr]
            if exists(path) and words[at - 1] != "--to":
                wrong = mistyped(path)
                yield [*words[:at], before + wrong, *words[at + 1 :]], wrong, path


@pytest.mark.wide
def test_a_checkpoint_where_a_run_is_needed(world: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is taken, or the run in which it lies is named."""
    made = tmp_path / "made"
    shutil.copytree(world, made)
    monkeypatch.chdir(made)
    checkpoint, bad, num_refused = "runs/a/checkpoints/step_00000004", [], 0
    lines = [f"{verb} {base}" for verb, base in BASES.items()]
    for line in (line for line in lines if re.search(r" runs/a( |$)", line)):
        words = [checkpoint if word == "runs/a" else word for word in shlex.split(line)]
        code, text = outcome(*words)
        num_refused += code != 0
        if code and shlex.join(shlex.split(line)) not in text.replace("\\\n    ", ""):
            bad.append((shlex.join(words), code, text))
    assert not bad, "\n".join(map(str, bad))
    assert num_refused > 3


@pytest.mark.wide
def test_the_path_that_was_meant_is_named(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(world)
    before, bad, num_lines = sorted(world.rglob("*")), [], 0
    for words, wrong, path in mistyped_lines():
        num_lines += 1
        code, text = outcome(*words)
        problem, _, to_type = text.partition("\nType:\n")
        advised = shlex.split(to_type.replace("\\\n", ""))
        right = [word.replace(wrong, path) for word in words]
        if code != 66 or f"{path}" not in problem.replace(wrong, "") or not {*right} <= {*advised}:
            bad.append((shlex.join(words), code, text))
    assert not bad, "\n".join(map(str, bad))
    assert num_lines > 50
    assert sorted(world.rglob("*")) == before


@pytest.mark.wide
def test_a_checkpoint_that_the_run_does_not_have(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another checkpoint is not what was meant: those that are there are listed."""
    monkeypatch.chdir(world)
    lines = [line for line in (*(f"{verb} {base}" for verb, base in BASES.items()), *MORE) if "/step_0000" in line]
    bad = []
    for line in lines:
        code, text = outcome(*shlex.split(re.sub(r"step_\d+", "step_00000003", line)))
        if code != 66 or "runs/a/checkpoints has step_00000002, step_00000004. Give one of them." not in text:
            bad.append((line, code, text))
    assert not bad, "\n".join(map(str, bad))
    assert len(lines) > 3
