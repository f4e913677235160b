"""A wrong option, verb, value or argument is told with the words to type, and all of one line together."""

from __future__ import annotations

from typing import Any

import pytest

from lmtrain.cli.find_accepted_line import settings_problems
from lmtrain.cli.main import app
from lmtrain.cli.settings_keys.explain_click_errors import usage_error_from_click
from lmtrain.cli.settings_keys.parse_typed_line import advised, command_of, parse_line
from lmtrain.cli.subcommands import HELP, ClickError
from lmtrain.errors import LmtrainError, shell_quoted
from lmtrain.start.other_tools import verb_synonyms
from tests.cli.harness import outcome
from tests.cli.test_foreign_lines import final_words


def refused(line: str) -> LmtrainError:
    """The error of a command line that click refuses."""
    with pytest.raises(ClickError) as caught:
        app(line.split(), standalone_mode=False)
    error: Any = caught.value
    return usage_error_from_click(error, line.split(), settings_problems)


def advice(line: str) -> str:
    """The command to type next, and what it leaves out that the message does not name; "" if there is none."""
    error = refused(line)
    found = advised(error, line.split())
    if found is None:
        return ""
    lost = (" ".join(map(shell_quoted, unit)) for unit in found.lost_units(parse_line(line.split())))
    return " ".join([*found.words, *(text for text in lost if text not in str(error))])


@pytest.mark.parametrize(
    ("line", "typed"),
    [
        ("eval x --taks a --taks=b --task c", "eval x --task a --task b --task c"),
        ("eval --lits x", "eval --list x"),
        ("tokenizer train x --output y --vocab_size 9", "tokenizer train x --output y --vocab-size 9"),
        ("evall x --taks y", "eval x --task y"),
        ("data shwo x", "data show x"),
        ("dta shwo x", "data show x"),
        ("--debgu env", "--debug env"),
        ("generate x --device gpu", "generate x --device cuda"),
        ("generate x --seed 3x", "generate x --seed 3"),
        (f"data show x --random 2 --seed {2**63}", "data show x --random 2 --seed=0"),
        (f"data split x --shares 1,1 --seed {-2**63 - 1}", "data split x --shares 1,1 --seed=4294967295"),
        *((f"corpus {verb} x --output y --seed {2**64 + 5}", f"corpus {verb} x --output y --seed=5")
          for verb in ("split", "sample", "shuffle")),
        ("preprocess x --tokenizer t --max-bad -1", "preprocess x --tokenizer t --max-bad 0"),
        ("verify a b", "verify a"),
        ("verify a a", "verify a"),
        ("generate x top_k=3", "generate x --top-k 3"),
        ("env --json=yes", "env --json"),
        ("env --json=false", "env"),
        ("corpus clean a -o b --field f -j 3", "corpus clean a --output b --key f --workers 3"),
        ("generate --ckpt x --temp 1 --max_tokens 4", "generate x --temperature 1 --max-new-tokens 4"),
        ("eval x --tasks a,b", "eval x --task a --task b"),
        ("slurm render data.path=x --output_dir o", "slurm render data.path=x run.dir=o"),
        ("config explain optim.lr --lr 3", "config explain optim.lr optim.lr=3"),
        ("tokenizer train --input x --vocab 9 -o y --type bpe",
         "tokenizer train x --vocab-size 9 --output y --kind bpe"),
        ("reshard --load-dir x --save-dir y --target-tensor-parallel-size 2 --target-pipeline-parallel-size 4",
         "reshard x --output y --to tp=2,pp=4"),
        ("eval x -task a -limit=3", "eval x --task a --limit 3"),
        ("merge a --out b --model c", "merge a --output b c"),
        ("eval x --tp 2 --tasks a", "eval x parallel.tp=2 --nproc 2 --task a"),
        ("branch r --lr 1e-3 --dcay 10", "branch r optim.lr=1e-3 --decay 10"),
        ("eval x --tassk a --tassk b --data y", "eval x --task a --task b --data y"),
    ],
)  # fmt: skip
def test_the_words_to_type(line: str, typed: str) -> None:
    assert advice(line) == typed


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("generate", "CHECKPOINT is not given, and lmtrain generate needs it. Give CHECKPOINT."),
        ("verify x --plugin", "--plugin is given without its value. Give --plugin PACKAGE."),
        ("generate x --seed k", "--seed k is not a whole number. Give a whole number."),
        ("data decode x 1 k", "k for DOCUMENT is not a whole number. Give a whole number."),
        ("preprocess x -ofoo --tokenizer t", "-o is not an option of lmtrain preprocess. Did you mean --output?"),
        ("env --mystery 3", "--mystery is not an option of lmtrain env. `lmtrain env --help` lists its options."),
    ],
)  # fmt: skip
def test_what_cannot_be_guessed_is_asked_for(line: str, said: str) -> None:
    assert str(refused(line)) == said
    assert advice(line) == ""


@pytest.mark.parametrize(
    ("line", "typed"),
    [
        ("export x --output --to hf", "export x --output DIR --to hf"),
        ("export x --output y --to hf --output z", "export x --output y --to hf"),
        ("data sample x seed 5", "data sample x --seed 5"),
        ("corpus sample x --output y count= 5", "corpus sample x --output y --count 5"),
        ("pretrain data.path=x -optim.lr=1", "pretrain data.path=x optim.lr=1"),
        ("pretrain data.path=x -m=true", "pretrain data.path=x -m"),
        ("spm_train x --output y --vocab-size 300", "tokenizer train x --output y --vocab-size 300"),
    ],
)
def test_what_is_out_of_place_is_put_right(line: str, typed: str) -> None:
    assert final_words(outcome(*line.split())[1]) == typed.split()


def test_names_of_commands_in_other_tools_are_told_once_and_lead_to_commands() -> None:
    groups = (*verb_synonyms._NAMES.values(), *verb_synonyms._ABSENT.values())
    names = [name for group in groups for name in group.split()]
    assert [name for name in {*names} if names.count(name) > 1] == []
    assert [name for name in names if name in HELP] == []
    assert [verb for verb in verb_synonyms._NAMES if command_of(verb.split())[0] is None] == []


def test_options_that_share_a_word_are_named() -> None:
    said = str(refused("preprocess x --tokenizer t --min-length 3"))
    assert "Options named alike: --min-chars, --min-tokens." in said


def test_everything_wrong_is_told_once() -> None:
    assert str(refused("export x --to onnx --layuot a --devcie b")).splitlines() == [
        "4 things are wrong:",
        "  1. --layuot is not an option of lmtrain export. Did you mean --layout?",
        "  2. --devcie is not an option of lmtrain export. `lmtrain export --help` lists its options.",
        "  3. --to onnx is not one of hf, megatron. Give one of these.",
        "  4. --output is not given, and lmtrain export needs it. Give --output DIR.",
    ]


def test_an_unknown_option_takes_the_value_that_follows() -> None:
    assert parse_line(["verify", "--foo", "3", "x"]).units == (("--foo", "3"), ("x",))
    assert parse_line(["verify", "--foo", "--json", "x"]).units == (("--foo",), ("--json",), ("x",))
    several = parse_line(["pretrain", "--data-path", "0.3", "a", "-1", "optim.lr=1"]).units
    assert several == (("--data-path", "0.3", "a", "-1"), ("optim.lr=1",))
