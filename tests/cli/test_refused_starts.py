"""A start that is refused leaves its folder as it was, whatever refuses it and whatever the folder held."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lmtrain.errors import REFUSED_CODES
from lmtrain.runtime.files.atomic_files import folder_lock
from tests.cli.harness import Toy, lmtrain, outcome, start

RUN = {"model__width": 32, "train__valid_interval_steps": 2, "observe__tensorboard": "true"}


@dataclass(frozen=True)
class World:
    """The texts, datasets, tokenizers and checkpoints with which starts are refused, and the runs that they meet."""

    toy: Toy
    folder: Path

    def words(self, run: Path, *more: object) -> list[object]:
        """The settings of a start over `run`, with which a run in it goes on; a text takes the place of the dataset."""
        has_text = any(str(word).startswith("data.text=") for word in more)
        words = self.toy.settings(run, **RUN)
        return [*(word for word in words if not (has_text and word.startswith("data.path="))), *more]


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def damaged_weights(checkpoint: Path) -> None:
    for file in checkpoint.glob("*.safetensors"):
        damage(file)


@pytest.fixture(scope="module")
def world(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("refused")
    made = World(toy, folder)
    (folder / "short.txt").write_text("a few words " * 20)
    (folder / "long.txt").write_text("\n\n".join(page.read_text() for page in sorted(toy.text.iterdir())[:20]))
    (folder / "keyless.jsonl").write_text('{"content": "a"}\n')
    lmtrain("tokenizer", "train", toy.text, "--output", folder / "tokenizer", "--vocab-size", 300)
    for name in ("blind", "cut", "flipped"):
        for file in toy.data.parent.glob(f"{toy.data.name}.*"):
            shutil.copy(file, folder / f"{name}{file.name.removeprefix(toy.data.name)}")
    (folder / "blind.tokenizer.json").unlink()
    (folder / "cut.bin").write_bytes((folder / "cut.bin").read_bytes()[:100])
    damage(folder / "flipped.bin")
    done = made.words(folder / "done", "train.steps=8")
    lmtrain("pretrain", *done)
    shutil.copytree(folder / "done", folder / "one")
    shutil.rmtree(folder / "one/checkpoints/step_00000004")
    lost = start("pretrain", *made.words(folder / "lost", "train.steps=8"))
    assert "done: 8 steps" in lost.communicate(timeout=300)[0]
    fault = {"LMTRAIN_ALLOW_FAULTS": "1", "LMTRAIN_FAULT": "kill:point=start.loop"}
    lost = start("pretrain", *made.words(folder / "lost"), env=fault)
    lost.communicate(timeout=300)
    assert (folder / "lost/starts.json").is_file()
    lmtrain("pretrain", *made.words(folder / "wide", "model.width=48", "train.steps=4"))
    lmtrain("pretrain", "model=llama_tiny", *made.words(folder / "llama", "train.steps=4"))
    lmtrain("export", folder / "llama", "--to", "hf", "--output", folder / "hf")
    shutil.copytree(folder / "done", folder / "bad")
    damaged_weights(folder / "bad/checkpoints/step_00000008")
    return made


NUM_QUICK = 2
FOLDERS = ("nothing", "empty", "done", "lost")  # what the folder holds before the start


def named(cases: Mapping[str, Any]) -> list[Any]:
    """The values with their names, the first few of which are tried in `make test`."""
    return [
        pytest.param(value, id=name, marks=() if number < NUM_QUICK else pytest.mark.wide)
        for number, (name, value) in enumerate(cases.items())
    ]


def lay_out(world: World, here: Path, kind: str) -> Path:
    """The folder of the run, in a folder that is compared as a whole."""
    run = here / "of" / "run"
    if kind == "empty":
        run.mkdir(parents=True)
    elif kind != "nothing":
        shutil.copytree(world.folder / kind, run)
    return run


def entries(folder: Path) -> dict[str, bytes | None]:
    """The bytes of every file below a folder, by its path; None for folders."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


# a refusal by what is typed; {} is the world's folder
TYPED = {
    "text too short": "data.text={}/short.txt model.seq_len=4096",
    "damaged weights": "checkpoint.init_from={}/bad",
    "key": "optim.lrr=1",
    "value": "model.num_heads=5",
    "layout": "parallel.tp=2",
    "shared text too short": "data.text={}/short.txt model.seq_len=4096 data.text_dir={here}/texts",
    "text of a sweep too short": "-m data.text={}/short.txt model.seq_len=4096 optim.lr=1e-3,2e-3",
    "text of two processes too short": "data.text={}/short.txt model.seq_len=4096 parallel.dp_shard=2 --nproc 2",
    "text without key": "data.text={}/keyless.jsonl",
    "text and vocabulary": "data.text={}/long.txt model.vocab_size=99",
    "text and missing tokenizer": "data.text={}/long.txt data.tokenizer={}/none",
    "text and missing weights": "data.text={}/long.txt checkpoint.init_from={}/none",
    "text and missing checkpoint": "data.text={}/long.txt checkpoint.resume={}/none",
    "text and other weights": "data.text={}/long.txt checkpoint.init_from={}/wide",
    "text and damaged weights": "data.text={}/long.txt checkpoint.init_from={}/bad",
    "text and other data's checkpoint": "data.text={}/long.txt checkpoint.resume={}/done",
    "text and missing task data": "data.text={}/long.txt 'eval.tasks=[{{task: perplexity, data: none}}]'",
    "text and unknown task": "data.text={}/long.txt 'eval.tasks=[{{task: perplexed, data: none}}]'",
    "text and unknown measure": "data.text={}/long.txt checkpoint.keep_best=1 checkpoint.best_by=eval/a/b "
    "'eval.tasks=[{{task: perplexity, data: {}/long.txt}}]'",
    "dataset missing": "data.path={}/none",
    "dataset cut": "data.path={}/cut",
    "dataset flipped": "data.path={}/flipped data.verify=full",
    "no tokenizer": "data.path={}/blind",
    "tokenizer missing": "data.tokenizer={}/none",
    "other tokenizer": "data.tokenizer={}/tokenizer",
    "samples": "model.seq_len=1000000",
    "checkpoint missing": "checkpoint.resume={}/none",
    "checkpoint of another model": "checkpoint.resume={}/wide",
    "damaged checkpoint": "checkpoint.resume={}/bad",
    "weights of another model": "checkpoint.init_from={}/wide",
    "damaged weights and two processes": "checkpoint.init_from={}/bad parallel.dp_shard=2 --nproc 2",
    "stage without length": "stages.one.optim.lr=1",
    "stage of another tokenizer": "stages.one.steps=2 stages.two.steps=2 stages.two.data.tokenizer={}/tokenizer",
}  # fmt: skip
# those that only a folder with a run in it can meet
OVER_A_RUN = {
    "other seed": "train.seed=7",
    "other data": "data.text={}/long.txt",
    "other model": "model.width=48",
    "too few steps": "train.steps=4",
    "new run": "checkpoint.resume=none",
}


def check(world: World, here: Path, run: Path, words: str) -> None:
    """Start with these words; if that is refused, nothing below `here` is another than before."""
    before = entries(here)
    typed = [word.format(world.folder, here=here) for word in shlex.split(words.replace("{}", "{0}"))]
    code, said = outcome("pretrain", *world.words(run, *typed))
    assert code in REFUSED_CODES, f"exit code {code}:\n{said}"
    after = entries(here)
    assert sorted(after) == sorted(before), said
    assert [path for path in before if after[path] != before[path]] == [], said


def test_a_text_that_is_too_short_blocks_no_other(toy: Toy, tmp_path: Path) -> None:
    short, run = tmp_path / "short.txt", tmp_path / "run"
    short.write_text("a few words " * 20)
    words = [word for word in toy.settings(run, **RUN) if not word.startswith("data.path=")]
    lmtrain("pretrain", *words, f"data.text={short}", "model.seq_len=4096", code=65)
    assert not run.exists()
    run.mkdir()
    lmtrain("pretrain", *words, f"data.text={short}", "model.seq_len=4096", code=65)
    assert list(run.iterdir()) == [], "what is written beside the text is gone as well"


@pytest.mark.wide
@pytest.mark.parametrize("words", named(TYPED))
def test_what_is_typed(world: World, tmp_path: Path, words: str) -> None:
    starts_processes = any(option in words.split() for option in ("-m", "--nproc"))
    for kind in FOLDERS[:: 3 if starts_processes else 1]:
        here = tmp_path / kind
        check(world, here, lay_out(world, here, kind), words)


@pytest.mark.wide
@pytest.mark.parametrize("words", named(OVER_A_RUN))
def test_what_is_typed_over_a_run(world: World, tmp_path: Path, words: str) -> None:
    for kind in FOLDERS[2:]:
        here = tmp_path / kind
        check(world, here, lay_out(world, here, kind), words)


def damage_newest(run: Path) -> None:
    damaged_weights(run / "checkpoints/step_00000008")


def in_the_way(file: Path) -> None:
    file.unlink()
    file.mkdir()


DAMAGE: dict[str, Callable[[Path], object]] = {
    "checkpoint": damage_newest,
    "manifest": lambda run: damage(run / "checkpoints/step_00000008/manifest.json"),
    "log": lambda run: in_the_way(run / "log.txt"),
    "settings": lambda run: in_the_way(run / "config.json"),
}


@pytest.mark.wide
@pytest.mark.parametrize("spoil", named(DAMAGE))
@pytest.mark.parametrize("more", ["", "checkpoint.fallback=true", "parallel.dp_shard=2 --nproc 2"])
def test_a_damaged_run(world: World, tmp_path: Path, spoil: Callable[[Path], object], more: str) -> None:
    for kind in ("done", "lost", "one") if not more else ("one",):
        run = lay_out(world, tmp_path / kind, kind)
        spoil(run)
        check(world, tmp_path / kind, run, more)


@pytest.mark.wide
@pytest.mark.parametrize("more", ["", "parallel.dp_shard=2 --nproc 2"])
def test_rows_that_cannot_be_read(world: World, tmp_path: Path, more: str) -> None:
    run = lay_out(world, tmp_path, "done")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([*lines[:3], "{", *lines[3:]]) + "\n")
    check(world, tmp_path, run, f"checkpoint.keep_best=1 {more}")


@pytest.mark.wide
@pytest.mark.parametrize("words", ["", "data.text={}/long.txt", "checkpoint.init_from={}/hf"])
def test_a_folder_in_use(world: World, tmp_path: Path, words: str) -> None:
    for kind in FOLDERS[1:]:
        run = lay_out(world, tmp_path / kind, kind)
        with folder_lock(run):
            check(world, tmp_path / kind, run, words)


@pytest.mark.wide
@pytest.mark.parametrize("words", ["data.text={}/long.txt", "checkpoint.init_from={}/hf"])
def test_what_was_made_is_taken_away_when_the_records_cannot_be_opened(
    world: World, tmp_path: Path, words: str
) -> None:
    run = lay_out(world, tmp_path, "empty")
    (run / "log.txt").mkdir()
    check(world, tmp_path, run, words)


@pytest.mark.wide
@pytest.mark.parametrize("place", ["", "data.text_dir={here}/texts"])
def test_a_refused_text_gives_way_to_another(world: World, tmp_path: Path, place: str) -> None:
    run = lay_out(world, tmp_path, "nothing")
    check(world, tmp_path, run, f"data.text={{}}/short.txt model.seq_len=4096 {place}")
    lmtrain("pretrain", *world.words(run, f"data.text={world.folder}/long.txt", *place.format(here=tmp_path).split()))
