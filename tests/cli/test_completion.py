"""What the shell offers behind TAB, asked for as bash and zsh ask: in a process of its own, by the environment."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from lmtrain.cli.settings_keys.shell_completion import _rejoin_words
from lmtrain.config.compose_run_settings import group_choices
from lmtrain.models.rotary_settings import RotarySettings
from lmtrain.start.complete_settings import SettingsCompleter

SCRIPT = "import sys; sys.argv = ['lmtrain']; from lmtrain.cli.main import main; main([])"
ANGLES = {field.name for field in fields(RotarySettings)} - {"rotary_share"}
MOST_CPU_S = 1.0  # 0.3 on an idle core; a neighbour on both cores doubles it, and torch alone takes two


def ask(**environment: str) -> list[str]:
    """The lines that the shell gets; typer takes what it completes from the environment."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True,
        env={**os.environ, **environment, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
    )  # fmt: skip
    return done.stdout.split("\n") if done.stdout.strip() else []


def bash(line: str) -> list[str]:
    """As bash does: words are cut at `=`, each a word of its own."""
    words = line.replace("=", " = ").split(" ")
    words = [word for number, word in enumerate(words) if word or number == len(words) - 1]
    if line.endswith("="):
        words.pop()
    asked = {"COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1)}
    return [one for one in ask(**asked, _LMTRAIN_COMPLETE="complete_bash") if one]


def zsh(line: str) -> list[str]:
    found = ask(_TYPER_COMPLETE_ARGS=line, _LMTRAIN_COMPLETE="complete_zsh")
    return [one.split('"')[1] for one in found if '"' in one]


@pytest.mark.wide
def test_groups_and_parts_for_zsh_with_their_help() -> None:
    lines = ask(_TYPER_COMPLETE_ARGS="lmtrain pretrain mod", _LMTRAIN_COMPLETE="complete_zsh")
    assert "model=" in lines[0]
    assert f"{len(group_choices()['model'])} to choose from" in lines[0]
    assert "model." in lines[1]


@pytest.mark.parametrize(
    ("typed", "word", "offered"),
    [
        ([], "stag", {"stages.decay=decay", "stages.long_context=long_context"}),
        (["stages.decay.steps=5"], "stages.d", {"stages.decay."}),
        ([], "stages.x=d", {"stages.x=decay"}),
        ([], "stages.x.s", {"stages.x.steps=", "stages.x.samples=", "stages.x.stop_after=", "stages.x.schedule="}),
        ([], "stages.x.model.", {f"stages.x.model.{key}=" for key in ("seq_len", "dropout", *ANGLES)}),
        ([], "stages.x.data.text", set()),  # a dataset is made of a text for the whole run
        ([], "stages.x.schedule=l", {"stages.x.schedule=linear"}),
        ([], "stages.x.stop_after=t", {"stages.x.stop_after=true"}),
    ],
)  # fmt: skip
def test_names_and_keys_of_stages(typed: list[str], word: str, offered: set[str]) -> None:
    found = {text for text, _ in SettingsCompleter(typed, None).completions(word) if text.startswith(word)}
    found -= {text for text in found if text.count(".") > 2 and word.count(".") < 3}  # keys below a group of the stage
    assert found == offered


@pytest.mark.wide
def test_choices_for_bash() -> None:
    offered = ["gpt2_large", "gpt2_medium", "gpt2_small", "gpt2_xl"]
    assert bash("lmtrain pretrain model=gpt2_") == offered
    assert set(offered) < set(bash("lmtrain pretrain model="))


def test_a_key_for_bash_in_little_time() -> None:
    """Two offers where one would do: bash puts a space behind the only one, and the value has to follow."""
    seconds: list[float] = []
    while len(seconds) < 3 and not (seconds and seconds[-1] <= MOST_CPU_S):  # because: other work makes cores slower
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert bash("lmtrain pretrain model=gpt_tiny optim.l") == ["optim.lr=", "optim.lr=3.0e-4"]
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime)
    assert seconds[-1] <= MOST_CPU_S, f"CPU seconds behind one TAB, three times: {seconds}"


@pytest.mark.wide
@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("lmtrain pretrain model=", "model=bert_base"),
        ("lmtrain pretrain compute.device=", "compute.device=cuda"),
        ("lmtrain pretrain compute.com", "compute.compile=true"),
        ("lmtrain pretrain optim=muon optim.", "optim.momentum="),
        ("lmtrain pretrain tra", "train.steps="),
        ("lmtrain eval --task lam", "lambada/megatron-strict"),
        ("lmtrain config show mod", "model"),
        ("lmtrain config show model bert_b", "bert_base"),
        ("lmtrain config explain optim.l", "optim.lr"),
        ("lmtrain config explain optim.lr experiment=", "experiment=demo"),
        ("lmtrain data blend data=", "data=blend"),
        ("lmtrain pretrain --dry", "--dry-run"),
        ("lmtrain pre", "pretrain"),
    ],
)
def test_whole_words_for_zsh(line: str, offered: str) -> None:
    assert offered in zsh(line)


@pytest.mark.wide
def test_only_the_keys_of_the_chosen_kind(tmp_path: Path) -> None:
    assert "optim.momentum=" not in bash("lmtrain pretrain optim.")
    assert "optim.momentum=" in bash("lmtrain pretrain experiment=demo optim.")
    (tmp_path / "optim").mkdir()
    (tmp_path / "optim/mine.yaml").write_text("kind: muon\n")
    assert "mine" in bash(f"lmtrain pretrain --config-dir {tmp_path} optim=m")
    assert bash("lmtrain pretrain data.path=da") == []


@pytest.mark.parametrize(
    ("words", "joined"),
    [
        (["model"], ["model"]),
        (["model", ""], ["model="]),
        (["model", "=", "gp"], ["model=gp"]),
        (["model", "=", "gpt_tiny", ""], ["model=gpt_tiny", ""]),
        (["model", "=", "gpt_tiny", "optim"], ["model=gpt_tiny", "optim"]),
        (["model=gpt_tiny", "optim.lr=3"], ["model=gpt_tiny", "optim.lr=3"]),
        (["a", "=", "1", "b", "=", "2"], ["a=1", "b=2"]),
        ([""], [""]),
    ],
)
def test_words_are_joined_again(words: list[str], joined: list[str]) -> None:
    assert _rejoin_words(words) == joined
