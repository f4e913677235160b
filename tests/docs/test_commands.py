"""Every command of README.md and of the site's pages is typed, page by page, or has a mark that says why not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import ROOT, WHY_NOT, blocks, pages_with_commands
from tests.docs.typist import AT_ROOT, PROGRAMS, seated, small
from tests.docs.world import World
from tests.marks import slow, wide

TUTORIAL = ROOT / "docs/tutorials/first_run.md"
# because: each takes half a minute, and tests/cli types nearly all that is in them
LONG = [
    ROOT / f"docs/how_to/{name}.md"
    for name in ("evaluate", "run_on_several_gpus", "start_from_a_hugging_face_model", "sweep")
]
OTHERS = [page for page in pages_with_commands() if page not in (TUTORIAL, *LONG)]


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest.mark.parametrize("page", [TUTORIAL, *wide(*OTHERS), *slow(*LONG)], ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_works_as_it_is_typed(page: Path, world: World, tmp_path: Path) -> None:
    with seated(world, tmp_path) as typist:
        for block in blocks(page.read_text("utf-8")):
            try:
                typist.type(block)
            except Exception as error:
                raise AssertionError(f"{page.relative_to(ROOT)}:{block.line}: {error}") from error


def mark_problems(text: str) -> list[str]:
    """Marks that say nothing or stand before nothing, and commands that nobody can type here without one."""
    found = []
    for block in blocks(text):
        needless = not (block.commands or block.kind == "python")
        if block.why_not is not None and (block.why_not not in WHY_NOT or needless):
            found.append(f"line {block.line}: `not run: {block.why_not}`, which is not of {', '.join(WHY_NOT)}")
        strange = [line for line in block.commands if line.split()[0] not in {*PROGRAMS, *AT_ROOT}]
        if block.why_not is None and strange:
            found.append(f"line {block.line}: `{strange[0]}` needs a mark `<!-- not run: WHY -->` before its block")
    if text.count("<!-- not run") != sum(block.why_not is not None for block in blocks(text)):
        found.append("a mark stands before no block")
    return found


@pytest.mark.parametrize("page", pages_with_commands(), ids=lambda page: str(page.relative_to(ROOT)))
def test_what_is_not_run_says_why(page: Path) -> None:
    assert not mark_problems(page.read_text("utf-8"))


def test_most_commands_are_run() -> None:
    found = [block for page in pages_with_commands() for block in blocks(page.read_text("utf-8"))]
    run = sum(len(block.commands) for block in found if block.why_not is None)
    left = sum(len(block.commands) for block in found if block.why_not is not None)
    assert run > 70
    assert left < run


@pytest.mark.parametrize(
    "text",
    [
        "<!-- not run: tired -->\n\n```console\n$ lmtrain env\n```\n",
        "<!-- not run: needs GPUs -->\n\n```text\nloss 1\n```\n",
        "<!-- not run: needs GPUs -->\n\nSome words.\n\n```console\n$ lmtrain env\n```\n",
        "```console\n$ sudo lmtrain env\n```\n",
    ],
)
def test_a_mark_without_sense_is_found(text: str) -> None:
    assert len(mark_problems(text)) == 1


@pytest.mark.wide
def test_a_page_that_does_not_work_is_found(world: World, tmp_path: Path) -> None:
    wrong = [
        "```console\n$ lmtrain data inspect data/nothing\n```\n",
        "```console\n$ grep -q nothing-of-this-kind Makefile\n```\n",
        "```text\n$ lmtrain pretrain data.path=x model.num_heads=5\nerror: some other words\n```\n",
    ]
    for text in wrong:
        (block,) = blocks(text)
        with pytest.raises(AssertionError), seated(world, tmp_path) as typist:
            typist.type(block)


def test_only_runs_are_made_small() -> None:
    assert small(["lmtrain", "data", "index", "train.steps=9"])[-1] == "train.steps=9"
    made = small(["lmtrain", "pretrain", "data.path=x", "train.steps=null", "train.tokens=2B", "model.num_layers=6"])
    assert made[3:6] == ["train.steps=null", "train.tokens=1k", "model.num_layers=6"]
    assert "model.width=32" in made


def test_stages_are_made_small() -> None:
    made = small(["lmtrain", "pretrain", "stages.a.tokens=2B", "stages.b=long_context", "stages.b.steps=null"])
    assert made[2:5] == ["stages.a.tokens=1k", "stages.b=long_context", "stages.b.steps=null"]
    assert "stages.b.model.seq_len=256" in made
    assert not [word for word in made if word.startswith("train.steps")]
