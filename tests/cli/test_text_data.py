"""`lmtrain pretrain data.text=...`: a run that makes its tokenizer and dataset of a text, as a new user types it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.harness import Toy, lmtrain


def tiny(toy: Toy, folder: Path, **overrides: object) -> list[str]:
    """The settings of a toy run without data."""
    return [word for word in toy.settings(folder, **overrides) if not word.startswith("data.path=")]


@pytest.fixture(scope="module")
def notes(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("notes") / "notes.txt"
    path.write_text("\n\n".join(page.read_text() for page in sorted(toy.text.iterdir())[:20]))
    return path


def test_a_text_file_in_one_line(toy: Toy, notes: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    said = lmtrain("pretrain", f"data.text={notes}", *tiny(toy, run, train__steps=3))
    assert f"data.text={notes}: 1 file, " in said
    assert "tokenizer: BPE, 512 pieces, trained on this text in " in said
    assert "dataset: 1 document, " in said
    assert f"everything is in {run}" in said
    again = lmtrain("pretrain", f"data.text={notes}", *tiny(toy, run, train__steps=4))
    assert f"data.text={notes} is unchanged: {run}/data/text was made of it at an earlier start (1 document, " in again
    assert "continuing from" in again


def test_a_text_that_has_changed_is_refused_until_the_run_is_another(toy: Toy, tmp_path: Path) -> None:
    text, run = tmp_path / "notes.txt", tmp_path / "run"
    text.write_text("the fox and the dog " * 400)
    words = [f"data.text={text}", *tiny(toy, run, train__steps=3)]
    lmtrain("pretrain", *words)
    text.write_text("the fox and the cat " * 400)
    said = lmtrain("pretrain", *words, code=65)
    assert "notes.txt has changed since. Give another run.dir" in said
    assert "continuing from" in lmtrain("pretrain", *words[1:], f"data.path={run}/data/text", "train.steps=4")


def test_a_large_text_is_refused_with_the_commands_to_type(toy: Toy, notes: Path, tmp_path: Path) -> None:
    said = lmtrain("pretrain", f"data.text={notes}", f"run.dir={tmp_path}/run", "data.text_limit=20KiB", code=2)
    assert f"\n  lmtrain tokenizer train {notes} --output data/notes_tokenizer --vocab-size 512\n" in said
    assert f"\n  lmtrain preprocess {notes} --tokenizer data/notes_tokenizer --output data/notes\n" in said
    assert f"\n  lmtrain pretrain data.path=data/notes run.dir={tmp_path}/run\n" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["data.path=x"], 2, "both name the data to train on. Leave data.path out"),
        (["data=blend"], 2, "data.text=notes.txt is not a setting"),
        (["data.text="], 2, "data.text= names no text"),
        (["data.text=absent.txt"], 66, "absent.txt does not exist"),
    ],
)  # fmt: skip
def test_refusals(tmp_path: Path, words: list[str], code: int, said: str) -> None:
    words = [*(["data.text=notes.txt"] if not any(w.startswith("data.text=") for w in words) else []), *words]
    assert said in lmtrain("pretrain", *words, f"run.dir={tmp_path}/run", code=code)
    assert not (tmp_path / "run").exists()
