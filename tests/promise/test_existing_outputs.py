"""Nothing that exists is replaced by accident: every output of every verb, with everything that may be in its place.

Options and arguments that take a path are found by walking the commands; a new one needs a row here, or has to be named
among those that are read. What is there is compared before and after each command: the names, modes and bytes of all.
"""

from __future__ import annotations

import hashlib
import os
import random
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import pytest

from lmtrain.cli import subcommands
from lmtrain.data.store.indexed_dataset import SUFFIXES
from tests.cli.harness import outcome
from tests.promise.options.bases import BASES, BEFORE, RUN
from tests.promise.options.command_tree import every_option, every_verb
from tests.promise.options.small_world import World, write_texts

READ = {
    "--against", "--baseline", "--compare", "--config-dir", "--diff", "--from-run", "--of", "--prompt-file",
    "--prompts", "--run", "--tokenizer", "a", "b", "checkpoint", "checkpoints", "files", "folders", "path", "prefix",
    "prefixes", "recipe", "run", "runs", "source",
}  # fmt: skip
# of these it is the folder that another verb made, in which they write, or what they only print
NOT_WRITTEN = {("corpus match", "--work"), ("corpus join", "--work"), ("corpus drop", "--work"), ("branch", "--output")}
Again = Literal["is there already", "is refused", "is replaced", "is not tried"]


@dataclass(frozen=True)
class Place:
    """A place to which a verb writes."""

    verb: str
    option: str  # or argument; "" if the verb chooses the place
    path: str  # what is written there first
    line: str = ""  # the words after the verb; without it its base command
    again: Again = "is there already"  # what the same command finds of its own
    other: str = ""  # words with which the verb makes another one there
    has_overwrite: bool = True
    takes: tuple[str, ...] = ()  # what is of its own kind too, or a folder to which it adds

    def words(self, line: str = "") -> list[str]:
        return [*self.verb.split(), *shlex.split(line or self.line or BASES[self.verb])]

    def __str__(self) -> str:
        return f"{self.verb} {self.option or self.path}"


_STEP = "corpus.jsonl --output out.jsonl"
_EVAL = "runs/a --task perplexity --data eval.jsonl --device cpu"
_FITTED = "runs/long runs/longer hardware=cpu --calibrate --output some/hardware/mine.yaml"
PLACES = [
    Place("corpus get", "--output", "got/train.jsonl"),
    Place("corpus fetch", "--output", "recipe.yaml", again="is not tried", has_overwrite=False),
    *(
        Place(f"corpus {step}", "--output", "out.jsonl", other=f"{BASES[f'corpus {step}']} {more}")
        for step, more in {
            "clean": "--script latin", "dedupe": "--exact-only", "drop": "--on-error skip",
            "decontaminate": "--action drop", "shuffle": "--seed 5", "sample": "--seed 5",
        }.items()
    ),
    Place("corpus split", "--output", "split/train.jsonl", other=f"{BASES['corpus split']} --seed 5"),
    Place("corpus merge", "output", "out.jsonl", again="is not tried"),
    Place("corpus build", "recipe", "built/documents.jsonl"),
    Place("corpus sign", "--work", "work", again="is replaced",
          other="corpus.jsonl --work work --workers 1 --exact-only"),
    Place("tokenizer train", "--output", "made/tokenizer.json", other="corpus.jsonl --output made --vocab-size 290",
          takes=("data/a.tokenizer.json",)),
    *(
        Place(verb, "--output", f"{prefix}{suffix}", other=other, takes=(f"data/a{suffix}",) * (suffix != ".bin"))
        for verb, prefix, other in (
            ("preprocess", "out", "corpus.jsonl --tokenizer tokenizer --output out --workers 1 --no-append-eod"),
            ("data merge", "joined", "data/b data/a --output joined"),
            ("data split", "one", "data/a --shares 20,80 --output one --output two"),
        )
        for suffix in (".bin", ".idx", ".json")
    ),
    Place("pretrain", "run.dir", "runs/new", again="is not tried", has_overwrite=False,
          takes=("_folder", "_link_to_folder", "runs/a", "data")),
    Place("slurm submit", "", "runs/new/job.sbatch", f"{RUN} --tasks-per-node 1", "is not tried", has_overwrite=False),
    Place("slurm render", "--output", "new.sbatch", f"{BASES['slurm render']} --output new.sbatch", "is refused"),
    Place("trace", "--output", "new.json", "runs/a --output new.json", "is refused"),
    Place("trace", "", "runs/a/trace/trace.json", again="is replaced", has_overwrite=False),
    Place("report", "--output", "new.html", "runs/a --output new.html", "is refused", "runs/b --output new.html"),
    Place("report", "--svg", "figures/loss.svg", "runs/a --svg figures", "is refused", "runs/b --svg figures"),
    Place("report", "", "runs/a/report.html", again="is replaced", has_overwrite=False),
    Place("eval", "--output", "new.json", f"{_EVAL} --output new.json", other=f"{_EVAL} --output new.json --limit 1"),
    Place("eval", "--samples", "new.jsonl", f"{_EVAL} --samples new.jsonl", "is refused"),
    Place("generate", "--output", "new.jsonl", f"{BASES['generate']} --output new.jsonl", "is refused"),
    Place("import", "--output", "imported/step_00000000",
          other="hf --output imported --set dropout=0.5"),
    Place("export", "--output", "exported", other=f"{BASES['export']} --dtype bf16",
          takes=("megatron",)),
    Place("reshard", "--output", "resharded", again="is not tried",
          other="runs/a --to pp=2 --output resharded", takes=("runs/a/checkpoints/step_00000004",)),
    Place("merge", "--output", "merged", again="is not tried",
          other="--last 1 --of runs/a --output merged", takes=("runs/a/checkpoints/step_00000004",)),
    Place("plan", "--html", "new.html", f"{BASES['plan']} --html new.html", "is refused"),
    Place("plan", "--output", "some/hardware/mine.yaml", _FITTED, "is refused"),
    Place("demo", "--output", "made", "--output made", "is not tried", has_overwrite=False),
]  # fmt: skip
QUICK = ("corpus shuffle --output", "tokenizer train --output")

# ---- what may be there


def _text(path: Path) -> None:
    path.write_text("notes of mine\n")


def _folder(path: Path) -> None:
    path.mkdir()
    (path / "notes.txt").write_text("notes of mine\n")


def _link(path: Path) -> None:
    Path("linked.txt").write_text("notes of mine\n")
    path.symlink_to(Path("linked.txt").resolve())


def _link_to_folder(path: Path) -> None:
    Path("linked").mkdir(exist_ok=True)
    path.symlink_to(Path("linked").resolve())


def _dangling_link(path: Path) -> None:
    path.symlink_to("nowhere")


SIMPLE: tuple[Callable[[Path], None], ...] = (_text, _folder, _link, _link_to_folder, _dangling_link)


def _foreign(world: World) -> Iterator[tuple[str, Callable[[Path], object]]]:
    """Yield (name, function that puts it at a path) for what lmtrain itself makes."""
    world.make()
    folder = world.folder
    for name in ("data/a.bin", "data/a.idx", "data/a.json", "data/a.tokenizer.json", "runs/a/metrics.jsonl"):
        yield name, partial(shutil.copyfile, folder / name)
    for name in ("runs/a", "runs/a/checkpoints/step_00000004", "hf", "megatron", "data"):
        yield name, partial(shutil.copytree, folder / name)


# ---- the comparison


def everything(folder: Path) -> dict[str, tuple[int, str]]:
    """Return the name of each file, folder and link -> its mode, and a hash of its content or the link's target."""
    return {str(path.relative_to(folder)): _state(path) for path in sorted(folder.rglob("*"))}


def _state(path: Path) -> tuple[int, str]:
    if path.is_symlink():
        return 0, os.readlink(path)
    content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
    return path.stat().st_mode, content


def changes(words: Sequence[str], codes: tuple[int, ...]) -> Iterator[str]:
    """Run a command that has to end with one of these exit codes and to change nothing; yield what it does else."""
    before = everything(Path.cwd())
    code, text = outcome(*words)
    changed = sorted(name for name, _ in before.items() ^ everything(Path.cwd()).items())
    if code not in codes or changed:
        yield f"{shlex.join(words)}: exit code {code}, changed {changed}: {text[-400:]}"


def removed(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def of_another_kind(place: Place, plants: Sequence[tuple[str, Callable[[Path], object]]]) -> Iterator[str]:
    path = Path(place.path)
    path.parent.mkdir(parents=True, exist_ok=True)
    for name, plant in plants:
        plant(path)
        tries: list[list[str]] = [["--overwrite"]] * place.has_overwrite
        if plant in SIMPLE or not place.has_overwrite:
            tries.append([])
        if name in place.takes:
            tries = [[]] * place.has_overwrite
        for more in tries:
            yield from (f"{name} there: {change}" for change in changes([*place.words(), *more], (2, 66, 73)))
        removed(path)


def of_its_own_kind(place: Place) -> Iterator[str]:
    """Yield what is wrong about the verb's own output at its place, once it is finished."""
    path, words = Path(place.path), place.words()
    code, text = outcome(*words)
    assert code == 0, text
    assert os.path.lexists(path), f"{place} writes nothing to {path}"
    if place.again == "is replaced":
        assert outcome(*words)[0] == 0
    elif place.again != "is not tried":
        yield from changes(words, (0,) if place.again == "is there already" else (73,))
    if not place.has_overwrite:
        return
    replacing = [*place.words(place.other), "--overwrite"]
    if place.other:
        yield from changes(replacing[:-1], (73,))
    mode = path.stat().st_mode
    path.chmod(mode & ~0o222)
    yield from changes(replacing, (73,))
    path.chmod(mode)
    before = everything(path.parent), path.stat().st_ino
    code, text = outcome(*replacing)
    if code != 0 or (everything(path.parent), path.stat().st_ino) == before:
        yield f"{shlex.join(replacing)}: exit code {code}, or nothing is replaced: {text[-400:]}"
    if place.other:
        yield from changes(words, (73,))


@contextmanager
def standing_in(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def brought(place: Place, world: World) -> None:
    """Copy what the place's commands name, and run what has to be run before."""
    line = " ".join([*BEFORE.get(place.verb, ()), *place.words(), *place.words(place.other)])
    world.bring(line, Path.cwd())
    for earlier in BEFORE.get(place.verb, ()):
        code, text = outcome(*shlex.split(earlier))
        assert code == 0, text


# because: what is at the place of some is the work of the command before
_KEPT = ("corpus fetch", "corpus merge")


@pytest.mark.wide
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_what_is_there_stays_but_as_its_kind_says(place: Place, world: World, tmp_path: Path) -> None:
    plants = [*((plant.__name__, plant) for plant in SIMPLE), *_foreign(world)]
    with standing_in(tmp_path / "here"):
        brought(place, world)
        if place.verb in _KEPT:
            removed(Path(place.path))
        found = [*of_another_kind(place, plants)]
        if place.again != "is not tried" or place.other:
            found += of_its_own_kind(place)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("place", [place for place in PLACES if str(place) in QUICK], ids=str)
def test_the_same_of_a_few_verbs(place: Place, tmp_path: Path) -> None:
    with standing_in(tmp_path / "here"):
        write_texts()
        found = [*of_another_kind(place, [(plant.__name__, plant) for plant in SIMPLE]), *of_its_own_kind(place)]
    assert not found, "\n".join(found)


# ---- kills

KILLED = (
    "corpus shuffle --output", "tokenizer train --output", "data merge --output", "preprocess --output",
    "reshard --output", "merge --output", "import --output", "export --output", "report --output",
)  # fmt: skip
# what Python reports of each change of a folder, and of the first use of renameat2
_CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "shutil.rmtree", "ctypes.dlsym")


def run_in_child(words: Sequence[str], kill_at: int | None) -> tuple[int, int]:
    """Run a command in a forked process, killed before its change number `kill_at`; return (its exit code, how many
    changes it has begun).
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:

        def count(event: str, args: tuple[object, ...]) -> None:
            is_written = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
            if event in _CHANGES or is_written:
                if len(seen) == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                seen.append(event)
                os.write(writer, b".")

        seen: list[str] = []
        sys.addaudithook(count)
        code, _ = outcome(*words)
        os._exit(int(str(code)))
    os.close(writer)
    with open(reader, "rb") as pipe:
        num_changes = len(pipe.read())
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), num_changes


def output_of(place: Place) -> dict[str, tuple[int, str]]:
    """Return what is at the place; of a dataset, all of its files."""
    path = Path(place.path)
    files = [path.with_suffix(suffix) for suffix in SUFFIXES] if path.suffix == ".bin" else [path]
    states = everything(Path.cwd()).items()
    return {name: state for name, state in states if any(Path(name).is_relative_to(file) for file in files)}


@pytest.mark.wide
@pytest.mark.parametrize(
    "place", [place for place in PLACES if (str(place) in KILLED and place.path[-4:] not in (".idx", "json"))
              or str(place) == "tokenizer train --output"], ids=str,
)  # fmt: skip
def test_a_killed_overwrite_leaves_the_old_or_the_new(place: Place, world: World, tmp_path: Path) -> None:
    words = [*place.words(place.other), "--overwrite"]
    with standing_in(tmp_path / "before"):
        brought(place, world)
        assert outcome(*place.words())[0] == 0
        old = output_of(place)
    with standing_in(shutil.copytree(tmp_path / "before", tmp_path / "here")):
        code, num_changes = run_in_child(words, None)
        new = output_of(place)
    assert (code, new != old) == (0, True)
    draws = random.Random(str(place)).sample(range(num_changes - 2), min(num_changes - 2, 4))
    for kill_at in [*draws, num_changes - 2, num_changes - 1]:
        shutil.rmtree(tmp_path / "here")
        with standing_in(shutil.copytree(tmp_path / "before", tmp_path / "here")):
            assert run_in_child(words, kill_at)[0] == -signal.SIGKILL
            left = output_of(place)
            if left not in (old, new):
                assert place.path.endswith(".bin"), f"killed before change {kill_at} of {num_changes}: {left}"
                assert place.path.replace(".bin", ".idx") not in left
                assert ".idx is missing" in outcome("data", "inspect", place.path[:-4])[1]
            completed, text = outcome(*words)
            assert completed == 0, text
            assert output_of(place) == new


def test_every_path_that_a_verb_takes_is_read_or_has_a_row() -> None:
    taken = {(option.verb, option.name) for option in every_option() if "Path" in str(option.hint)}
    for verb, command in every_verb():
        hints = subcommands.parameter_types(command)
        arguments = [param.name for param in command.params if param.param_type_name == "argument"]
        taken |= {(verb, name) for name in arguments if "Path" in str(hints.get(name))}
    known = {(place.verb, place.option) for place in PLACES}
    unknown = {pair for pair in taken if pair[1] not in READ} - known - NOT_WRITTEN
    assert not unknown, f"add a row to PLACES, or a name to READ: {sorted(unknown)}"
    assert taken >= NOT_WRITTEN
    overwriting = {option.verb for option in every_option() if option.name == "--overwrite"}
    assert overwriting == {place.verb for place in PLACES if place.has_overwrite}
