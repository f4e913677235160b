"""The documentation is in step: generated pages are current, links lead somewhere, and whatever a page names is there.

That is: commands with their options, settings, files and folders, modules, names in files, and targets of the Makefile.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import lmtrain
from lmtrain.cli.main import app
from lmtrain.cli.reference import generate_pages, list_commands, main, settings_page
from lmtrain.config.compose_run_settings import compose, conf_dir, expand_sweep
from lmtrain.errors import LmtrainError
from lmtrain.exchange.huggingface.model_family_base import families
from lmtrain.start.explain.describe_all_settings import CommentedFile
from lmtrain.train.run_config import RunConfig
from tests.docs.pages import ROOT, blocks, command_lines

ROOT_COMMAND = get_command(app)
COMMANDS = list_commands(ROOT_COMMAND)
PAGES = sorted([*ROOT.glob("*.md"), ROOT / "csrc/README.md", *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`]+)`")
ROOMS = sorted(path.name for path in (ROOT / "lmtrain").iterdir() if path.is_dir() and path.name[0] not in "_.")
# a path from the root, or a Python file from its room on: `data/sample_dataset_interface.py`
FILE = re.compile(
    rf"(?<![\w./~-])((?:lmtrain|data_tools|tests|conf|csrc|docs|\.ci)/[\w./{{}},*-]*|(?:{'|'.join(ROOMS)})/[\w./]+\.py)"
)
FILE_ENDS = (".jsonl", ".json", ".bin", ".idx", ".py", ".yaml", ".txt")
# not the compiled module, which may be absent, nor the group of entry points that packages offer filters under
MODULE = re.compile(r"(?<![\w./\"-])((?:lmtrain|data_tools|tests)(?!\.(?:_native|filters)\b)(?:\.[A-Za-z_]\w*)+)")
NAME_IN_FILE = re.compile(r"`(\w+)` in\s`([\w./]+\.py)`")


def command_problem(words: list[str]) -> str | None:
    """Why a command line is not one of ours: an unknown verb, or an option that the verb lacks."""
    if words[1:] and words[1] in {name for param in ROOT_COMMAND.params for name in param.opts}:
        return None
    if words[1:2] == ["runs"] and " ".join(words[:3]) not in COMMANDS:
        words = [*words[:2], "list", *words[2:]]  # because: what is no verb of it is a folder to list
    verbs = sorted((verb for verb in COMMANDS if words[: len(verb.split())] == verb.split()), key=len)
    if not verbs:
        return f"{shlex.join(words)}: there is no such command"
    rest = words[len(verbs[-1].split()) :]
    options = {name for param in COMMANDS[verbs[-1]].params for name in (*param.opts, *param.secondary_opts)}
    for word in rest:
        if re.match(r"--?[A-Za-z]", word) and word.split("=")[0] not in options | {"--help", "-h", "--debug"}:
            return f"{shlex.join(words)}: {verbs[-1]} has no option {word}"
    return None


def settings_problem(words: list[str]) -> str | None:
    """Why a pretrain command's settings would be refused; configs of the reader's own cannot be judged."""
    return _settings_problem(tuple(words))


@cache  # because: pages repeat each other's commands
def _settings_problem(words: tuple[str, ...]) -> str | None:
    overrides = [word for word in words[2:] if re.match(r"(?:stages\.[\w-]+\.)?[a-z_./]+=", word)]
    if words[:2] != ("lmtrain", "pretrain") or "--config-dir" in words or not overrides:
        return None
    if "--from-run" in words and not any(word.startswith(("data.path=", "data.text=")) for word in overrides):
        overrides.append("data.path=that_of_the_run")
    try:
        every = expand_sweep(overrides) if "-m" in words else [overrides]
        for combination in every[:: max(1, len(every) - 1)]:  # the first and the last stand for all
            compose(RunConfig, combination)
    except LmtrainError as error:
        return f"{shlex.join(words)}: {error}"
    return None


def missing_files(text: str) -> list[str]:
    """Files and folders that a text names and the tree lacks; CAPITALS stand for any name, {a,b} for both."""
    return [
        shown
        for found in FILE.findall(text)
        for shown in _expanded(found.rstrip(".,"))
        for pattern in [re.sub(r"(?<![A-Za-z])[A-Z]+(?![A-Za-z])", "*", shown).rstrip("/")]
        if not any(any(folder.glob(pattern)) for folder in (ROOT, ROOT / "lmtrain"))
    ]


def _expanded(path: str) -> Iterator[str]:
    words = [part.split(",") for part in re.split(r"\{([^}]*)\}", path)]
    yield from ("".join(choice) for choice in product(*words)) if len(words) > 1 else [path]


def missing_modules(text: str) -> list[str]:
    """Dotted names below our packages that no module is called, nor anything in one."""
    found = []
    for dotted in MODULE.findall(text):
        parts, depth = dotted.split("."), 1
        if parts[0] == "lmtrain" and parts[1] in lmtrain.__all__:
            continue
        while depth < len(parts) and ROOT.joinpath(*parts[:depth], parts[depth]).is_dir():
            depth += 1
        path = ROOT.joinpath(*parts[: depth + 1]).with_suffix(".py")
        if depth < len(parts) and not (path.exists() and all(_has_name(path, name) for name in parts[depth + 1 :])):
            found.append(dotted)
    return found


def missing_names(text: str) -> list[str]:
    """Of "`Name` in `lmtrain/file.py`": names that the file lacks."""
    return [
        f"{name} in {file}"
        for name, file in NAME_IN_FILE.findall(text)
        if not ((ROOT / file).exists() and _has_name(ROOT / file, name))
    ]


def _has_name(path: Path, name: str) -> bool:
    pattern = rf"^\s*(?:class|def) {name}\b|^\s*{name}(?::.*)? = |^\s*{name}: "
    return bool(re.search(pattern, path.read_text("utf-8"), re.MULTILINE))


@cache
def known_settings() -> frozenset[str]:
    keys = [key.split(".") for key in re.findall(r"^\| `([\w.]+)` \|", settings_page(), re.MULTILINE)]
    return frozenset(".".join(key[:depth]) for key in keys for depth in range(1, len(key) + 1))


def missing_settings(text: str) -> list[str]:
    """Dotted keys in backquotes, with or without a value, that no settings class has."""
    known = known_settings()
    return [
        word
        for code in INLINE.findall(FENCED.sub("", text))
        for word in _without_stages(code).split()
        if not code.startswith("lmtrain ") and not word.endswith(FILE_ENDS)
        if (match := re.fullmatch(r"([a-z_]+)((?:\.[a-z_]+)*)(?:\.\*|\.[A-Z]+)?(?:=.*)?", word))
        if "." in word.split("=")[0] and match[1] in known and match[1] + match[2] not in known
    ]


def _without_stages(code: str) -> str:
    """The keys of stages as those of a run, whose settings they replace; a stage's own keys are left out."""
    return re.sub(r"\bstages\.[\w-]+(?:=\S+|\.(?:(?:steps|tokens|samples|stop_after)\b)?)", "", code)


def missing_targets(text: str) -> list[str]:
    """`make xyz`, in backquotes or on a line of its own, that the Makefile does not have."""
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    lines = [line for block in blocks(text) for line in block.commands]
    words = [code.split() for code in (*INLINE.findall(FENCED.sub("", text)), *lines)]
    asked = [code[1] for code in words if code[:1] == ["make"] and len(code) > 1]
    return [target for target in asked if "=" not in target and target not in targets]


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
        for name, text in generate_pages().items()
        if not (path := ROOT / "docs" / "reference" / name).exists() or path.read_text(encoding="utf-8") != text
    ]
    assert not stale, f"{', '.join(stale)}: run `python -m lmtrain.cli.reference docs/reference`"


def test_every_family_of_models_names_them_for_its_page() -> None:
    assert not [name for name, family in families().items() if not type(family).__doc__]


def test_the_check_finds_a_stale_page_and_writing_cures_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cli.md").write_text("old", encoding="utf-8")
    assert main(["--check", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "errors.md is out of date" in said
    assert "cli.md is out of date" in said
    assert main([str(tmp_path)]) == 0
    assert main(["--check", str(tmp_path)]) == 0


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_resolve(path: Path) -> None:
    assert not broken_links(path)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_exist_as_they_are_typed(path: Path) -> None:
    lines = list(command_lines(path.read_text(encoding="utf-8")))
    problems = [problem for words in lines if (problem := command_problem(words))]
    assert not problems, "\n" + "\n".join(problems)


@pytest.mark.wide  # because: most of these commands are typed by tests/docs as well
@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_settings_are_accepted_as_they_are_typed(path: Path) -> None:
    lines = list(command_lines(path.read_text(encoding="utf-8")))
    problems = [problem for words in lines if (problem := settings_problem(words))]
    assert not problems, "\n" + "\n".join(problems)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_page_names_is_there(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    missing = [
        f"{kind}: {word}"
        for kind, find in {
            "file": missing_files, "module": missing_modules, "name": missing_names,
            "setting": missing_settings, "make target": missing_targets,
        }.items()
        for word in find(text)
    ]  # fmt: skip
    assert not missing, "\n" + "\n".join(missing)


def test_there_are_commands_to_check() -> None:
    assert sum(len(list(command_lines(path.read_text(encoding="utf-8")))) for path in PAGES) > 20


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("lmtrain cook", "no such command"),
        ("lmtrain pretrain --epochs 3", "no option --epochs"),
        ("srun --ntasks-per-node=2 lmtrain pretrain data.path=x --epochs 3", "no option --epochs"),
        ("lmtrain pretrain data.path=x optim.lrr=1", "Did you mean optim.lr=1"),
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


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("see `lmtrain/train/step.py`, conf/model/, lmtrain/models/NAME.py and tests/unit/.", []),
        ("see `lmtrain/train/steps.py`.", ["lmtrain/train/steps.py"]),
        ("`lmtrain/{train,trains}/`", ["lmtrain/trains/"]),
        ("`data/sample_dataset_interface.py`, `data/orders.py` and your data/train", ["data/orders.py"]),
        ("a page of mine: configs/model/mine.yaml, ~/docs/x.md", []),
    ],
)
def test_a_missing_file_is_found(text: str, missing: list[str]) -> None:
    assert missing_files(text) == missing


@pytest.mark.parametrize(
    ("find", "good", "bad"),
    [
        (missing_modules, "`python -m lmtrain.cli.reference x`", "python -m lmtrain.cli.references"),
        (missing_modules, "lmtrain.spec.LanguageModel", "lmtrain.spec.LanguageModels"),
        (missing_modules, "lmtrain.data.store", "lmtrain.data.shop"),
        (missing_names, "`Layout` in `lmtrain/layout.py`", "`Outlay` in\n`lmtrain/layout.py`"),
        (missing_settings, "`parallel.tp`, `train.steps=null`, `parallel.*`", "`parallel.tq=2`"),
        (missing_settings, "`optim.betas` and `model.norm_order`", "`data.path model.vocabulary=3`"),
        (missing_targets, "`make demo`, `make replay CASE=x`, make believe", "`make tests`"),
        (missing_targets, "```console\n$ make test\n```\n", "```console\n$ make toast\n```\n"),
    ],
)
def test_what_is_not_there_is_found(find: Callable[[str], list[str]], good: str, bad: str) -> None:
    assert not find(good)
    assert len(find(bad)) == 1


def floors_drawn(text: str) -> list[list[str]]:
    """Rooms from the roof down, as a page draws them: a line of number, name and rooms for each floor."""
    return [rooms.split() for rooms in re.findall(r"^\d+ +\S.*?\S {2,}(.+)$", text, re.MULTILINE)]


def test_the_floors_are_drawn_as_they_are(house: Any) -> None:
    page = (ROOT / "docs/explanation/where_things_live.md").read_text(encoding="utf-8")
    assert floors_drawn(page) == house.rules["floors"][::-1]


def test_a_floor_drawn_wrong_is_found() -> None:
    assert floors_drawn("8  roof   cli\n7  the apps    train  eval\nsome text\n") == [["cli"], ["train", "eval"]]


def _bare_keys() -> list[str]:
    return [
        f"{path.relative_to(conf_dir())}: {key}"
        for path in sorted(conf_dir().rglob("*.yaml"))
        for file in [CommentedFile(path)]
        for key in file.values
        if key not in file.comments and not key.startswith("defaults")
    ]


def test_every_key_of_the_shipped_configs_has_a_comment() -> None:
    assert not _bare_keys()


def test_comments_are_read_beside_and_above(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("# one\n# two\na: 1\n\n# lost\n\nb:\n  c: '#3'  # three\n  d: 4\ne: 5 # five\n", encoding="utf-8")
    file = CommentedFile(path)
    assert file.values == {"a": "1", "b.c": "'#3'", "b.d": "4", "e": "5"}
    assert file.comments == {"a": "one two", "b.c": "three", "e": "five"}


def test_nothing_speaks_of_a_command_that_is_gone(house: Any) -> None:
    """Messages and docstrings too name commands in backquotes; a group such as `lmtrain tokenizer` is one."""
    groups = {verb.rsplit(" ", 1)[0] for verb in COMMANDS}
    problems = [
        f"{module.shown}: {problem}"
        for module in house.modules.values()
        for line in re.findall(r"`(lmtrain [a-z][^`\n]*)`", module.text)
        if "{" not in line and line not in groups and (problem := command_problem(line.replace("...", "").split()))
    ]
    assert not problems, "\n" + "\n".join(problems)
