"""Right command lines, one for each verb, in a folder of small things; mistakes are made in these.

Verbs are found by themselves. What an argument or a required option needs is looked up by its name and by the word that
help shows for its value, so that a new verb has a line as long as it calls things by the usual names.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lmtrain.cli.subcommands import HELP, build_verb
from tests.cli.harness import lmtrain
from tests.docs.world import SMALL, World

# name of a parameter, or the word that help shows for it -> words that it takes in the world below
WORDS = {
    "inputs": ["docs.jsonl"], "DIR": ["out"], "FILE": ["out.jsonl"], "output": ["out"], "work": ["work"],
    "tokenizer": ["tokenizer"], "vocab_size": ["300"], "PREFIX": ["data/train"], "shares": ["90,10"],
    "group": ["optim"], "name": ["adamw"], "key": ["optim.lr"], "documents": ["1"], "text": ["words"],
    "checkpoint": ["runs/a"], "CHECKPOINT": ["runs/a"], "RUN": ["runs/a"], "FOLDER": ["runs"], "source": ["runs/a"],
    "a": ["runs/a"], "b": ["runs/b"], "path": ["runs/a"], "against": ["more.jsonl"], "recipe": ["recipe.yaml"],
    "url": ["file:///nowhere"], "sha256": ["0" * 64],
}  # fmt: skip
# parameters of single verbs that need other words, and options without which a verb has nothing to do
SPECIAL: dict[str, dict[str, list[str]]] = {
    "corpus get": {"name": ["wikitext103_raw"]},
    "corpus decontaminate": {"against": ["notes.txt"]},
    "corpus sample": {"--fraction": ["0.5"]},
    "tokenizer show": {"path": ["tokenizer"]},
    "data merge": {"prefixes": ["data/train", "data/books"], "output": ["out_data"]},
    "data split": {"shares": ["0.9,0.1"], "--output": ["out_train", "--output", "out_valid"]},
    "data show": {"prefix": ["data/train"], "overrides": []},
    "preprocess": {"--output": ["out_data"]},
    "import": {"source": ["models/a"]},
    "export": {"--to": ["hf"]},
    "reshard": {"--to": ["tp=2"]},
    "merge": {"checkpoints": ["runs/kept/checkpoints/step_00000002", "runs/kept/checkpoints/step_00000003"]},
    "eval": {"checkpoint": ["runs/a"], "--task": ["perplexity"], "--data": ["notes.txt"]},
    "generate": {"--prompt": ["words"]},
    "branch": {"run": ["runs/kept"], "overrides": [], "--at": ["2"]},
    "plan": {"overrides": ["gpus=8", "hardware=h100"]},
    "report": {"--output": ["out.html"]},
    "slurm render": {"--gpus-per-node": ["1"]},
    "slurm submit": {"--gpus-per-node": ["1"]},
    "demo": {"overrides": ["train.steps=9"], "--output": ["out"]},
}  # fmt: skip
# verbs whose right line is refused in this world, as it needs what another verb or the network brings
LACKING = (
    "corpus get", "corpus fetch", "corpus match", "corpus join", "corpus drop", "corpus merge", "corpus build",
)  # fmt: skip
SETTINGS = ["data.path=data/train"]  # of verbs that take a run's settings


def commands(command: Any = None, name: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every command with the words that call it, such as ("data", "show")."""
    for word, verb in command.commands.items() if command else ((verb, build_verb(verb)) for verb in HELP):
        if getattr(verb, "commands", None):
            yield from commands(verb, (*name, word))
        else:
            yield (*name, word), verb


def right_line(name: tuple[str, ...], command: Any) -> list[str]:
    """A line of this command that is accepted."""
    special = SPECIAL.get(" ".join(name), {})
    words = list(name)
    for param in command.params:
        given = (
            special.get(str(param.name)) or WORDS.get(str(param.name)) or WORDS.get(str(param.metavar), ["notes.txt"])
        )
        if param.param_type_name == "argument" and param.name == "overrides":
            words += special.get("overrides", SETTINGS)
        elif param.param_type_name == "argument" and (param.required or param.name in special):
            words += given
        elif param.required and not set(param.opts) & special.keys():
            words += [param.opts[0], *given]
    for option, value in special.items():
        if option.startswith("--"):
            words += [option, *value]
    return words


def make_world(folder: Path) -> Path:
    """Fill `folder` with what the lines name."""
    world = World(folder.with_name(f"{folder.name}_made"))
    folder.mkdir()
    for name in ("notes.txt", "tokenizer", "gpt2", "data/train", "data/books", "runs/a", "runs/b", "models/a"):
        world.bring(name, folder)
    settings = [f"{key}={value}" for key, value in (SMALL | {"train.steps": "3"}).items()]
    with contextlib.chdir(folder):
        lmtrain("pretrain", "data.path=data/train", "run.dir=runs/kept", "checkpoint.interval_steps=1", *settings)
    rows = [{"text": f"The text of row {n}.", "body": f"Another text {n}.", "id": n} for n in range(20)]
    for name in ("docs.jsonl", "more.jsonl"):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "more").mkdir()
    for n in range(3):
        (folder / "more" / f"part{n}.txt").write_text(f"Some text of part {n}.\n\nAnd more of it.\n")
        (folder / "more" / f"code{n}.py").write_text(f"print({n})\n")
    (folder / "my.yaml").write_text("train:\n  steps: 7\n")
    shutil.copy(folder / "gpt2" / "vocab.json", folder / "vocab.json")
    return folder
