"""The documentation is in step: generated pages are current, links lead somewhere, commands exist as they are typed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from lmtrain.cli.main import app
from lmtrain.cli.reference import commands, main, pages
from lmtrain.cli.settings_reference import YamlFile
from lmtrain.config.compose import compose, conf_dir, sweep
from lmtrain.errors import LmtrainError
from lmtrain.train.config import RunConfig

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")
BLOCK = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)


def command_lines(text: str) -> Iterator[list[str]]:
    """The words of every `$ lmtrain ...` line in the text's console blocks; a backslash joins lines."""
    for block in BLOCK.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("$ lmtrain"):
                yield shlex.split(line[2:], comments=True)


def command_problem(words: list[str]) -> str | None:
    """Why a command line is not one of ours: an unknown verb, or an option that the verb lacks."""
    known = commands(get_command(app))
    verbs = sorted((verb for verb in known if words[: len(verb.split())] == verb.split()), key=len)
    if not verbs:
        return f"{shlex.join(words)}: there is no such command"
    rest = words[len(verbs[-1].split()) :]
    options = {name for param in known[verbs[-1]].params for name in (*param.opts, *param.secondary_opts)}
    for word in rest:
        if re.match(r"--?[A-Za-z]", word) and word.split("=")[0] not in options | {"--help", "-h", "--debug"}:
            return f"{shlex.join(words)}: {verbs[-1]} has no option {word}"
    return None


def settings_problem(words: list[str]) -> str | None:
    """Why a pretrain command's settings would be refused; configs of the reader's own cannot be judged."""
    overrides = [word for word in words[2:] if re.match(r"[a-z_./]+=", word)]
    if words[:2] != ["lmtrain", "pretrain"] or "--config-dir" in words or not overrides:
        return None
    try:
        for combination in sweep(overrides)[:4] if "-m" in words else [overrides]:  # a few stand for all
            compose(RunConfig, combination)
    except LmtrainError as error:
        return f"{shlex.join(words)}: {error}"
    return None


def broken_links(path: Path) -> list[str]:
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = []
    for target in LINK.findall(text):
        file = target.split("#")[0]
        if file and not re.match(r"[a-z]+:", file) and not (path.parent / file).exists():
            found.append(f"{path.name}: {target}")
    return found


def test_generated_pages_are_current() -> None:
    stale = [
        name
        for name, text in pages().items()
        if not (path := ROOT / "docs" / "reference" / name).exists() or path.read_text(encoding="utf-8") != text
    ]
    assert not stale, f"{', '.join(stale)}: run `python -m lmtrain.cli.reference docs/reference`"


def test_the_check_finds_a_stale_page_and_writing_cures_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check", str(tmp_path)]) == 1
    assert "errors.md is out of date" in capsys.readouterr().err
    assert main([str(tmp_path)]) == 0
    assert main(["--check", str(tmp_path)]) == 0
    (tmp_path / "cli.md").write_text("old", encoding="utf-8")
    assert main(["--check", str(tmp_path)]) == 1


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_resolve(path: Path) -> None:
    assert not broken_links(path)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_exist_as_they_are_typed(path: Path) -> None:
    lines = list(command_lines(path.read_text(encoding="utf-8")))
    problems = [p for words in lines if (p := command_problem(words) or settings_problem(words))]
    assert not problems, "\n" + "\n".join(problems)


def test_there_are_commands_to_check() -> None:
    assert sum(len(list(command_lines(path.read_text(encoding="utf-8")))) for path in PAGES) > 20


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("lmtrain cook", "no such command"),
        ("lmtrain pretrain --epochs 3", "no option --epochs"),
        ("lmtrain pretrain data.path=x optim.lrr=1", "Did you mean lr"),
        ("lmtrain pretrain -m data.path=x model=gpt_tiny,gpt_huge", "model=gpt_huge is not in"),
    ],
)
def test_a_wrong_command_is_found(line: str, said: str) -> None:
    (words,) = command_lines(f"```console\n$ {line}\n```\n")
    assert said in (command_problem(words) or settings_problem(words) or "")


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("[a](page.md#x) [b](absent.md) [c](https://x.y)\n```\n[d](no.md)\n```\n", encoding="utf-8")
    assert broken_links(page) == ["page.md: absent.md"]


def _bare_keys() -> list[str]:
    return [
        f"{path.relative_to(conf_dir())}: {key}"
        for path in sorted(conf_dir().rglob("*.yaml"))
        for file in [YamlFile(path)]
        for key in file.values
        if key not in file.comments and not key.startswith("defaults")
    ]


def test_every_key_of_the_shipped_configs_has_a_comment() -> None:
    assert not _bare_keys()


def test_comments_are_read_beside_and_above(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("# one\n# two\na: 1\n\n# lost\n\nb:\n  c: '#3'  # three\n  d: 4\ne: 5 # five\n", encoding="utf-8")
    file = YamlFile(path)
    assert file.values == {"a": "1", "b.c": "'#3'", "b.d": "4", "e": "5"}
    assert file.comments == {"a": "one two", "b.c": "three", "e": "five"}


def test_nothing_speaks_of_a_command_that_is_gone(house: Any) -> None:
    """Messages and docstrings too name commands in backquotes; a group such as `lmtrain tokenizer` is one."""
    groups = {verb.rsplit(" ", 1)[0] for verb in commands(get_command(app))}
    problems = [
        f"{module.shown}: {problem}"
        for module in house.modules.values()
        for line in re.findall(r"`(lmtrain [a-z][^`\n]*)`", module.text)
        if "{" not in line and line not in groups and (problem := command_problem(line.replace("...", "").split()))
    ]
    assert not problems, "\n" + "\n".join(problems)
