"""Mistakes by the family, drawn with a seed: keys and choices are walked from the settings themselves."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args, get_origin

from lmtrain.config.compose_run_settings import conf_dir, group_choices
from lmtrain.config.name_suggestions import FOREIGN_NAMES, types_by_key, union_members
from lmtrain.config.strict_yaml import read_yaml
from lmtrain.train.run_config import RunConfig
from tests.mistakes.mistake import Mistake

SHOW = ("pretrain", "--print-config", "data.path=x")
OURS = ("pretrain", "--config-dir", "{here}", "--print-config", "data.path=x", "schedule.warmup_steps=0")
LEFT_OUT = ("data.datasets", "data.valid_datasets", "train.rampup")  # lists and groups that null leaves out


def show(name: str, word: str, *says: str, before: tuple[str, ...] = (), **kwargs: Any) -> Mistake:
    others = [one for one in SHOW if one.partition("=")[0] != word.partition("=")[0]]
    return Mistake(name, (*others, *before, word), says, wrong=word, **kwargs)


def homes() -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    """Every key with its type and the words that choose a kind which has it."""
    chosen: dict[str, tuple[str, ...]] = {}
    for group, choices in group_choices().items():
        if group == "experiment":
            continue
        for choice in sorted(choices, key=lambda name: (name not in ("gpt_tiny", "dataset", "adamw", "cosine"), name)):
            for key in read_yaml(conf_dir() / group / f"{choice}.yaml").data:
                needs = (f"{group}={choice}", *(("model=bert_tiny",) if choice == "masked" else ()))
                needs += ("data=masked",) if choice.startswith("bert") else ()
                needs += ("data.datasets=[{path: x, weight: 1}]", "~data.path") if choice == "blend" else ()
                chosen.setdefault(f"{group}.{key}", needs)
    for key, hint in types_by_key(RunConfig).items():
        if not key.startswith(LEFT_OUT) and key != "data.path":
            yield key, hint, chosen.get(key, ())


def wrong_types(rng: random.Random) -> Iterator[Mistake]:
    for key, hint, needs in homes():
        option = next(one for one in union_members(hint) if one is not type(None))
        values = {int: ["soon", "1.5", "true", "[1]"], float: ["fast", "true", "[0.1]"], bool: ["maybe", "3", "null"]}
        if get_origin(option) is Literal:
            near = str(get_args(option)[0])
            wrong = rng.choice([f"{near}x", near[:-1] or "x", "nonsense", "true"])
        elif get_origin(option) is tuple:
            wrong = rng.choice(["3", "[a,b]", "yes"])
        elif option in values:
            wrong = rng.choice(values[option])
        elif option is str:
            wrong = rng.choice(["true", "[1,2]"])
        else:
            continue
        yield show(f"type {key}", f"{key}={wrong}", key, before=needs, code_after=None)


def no_numbers(rng: random.Random) -> Iterator[Mistake]:
    for key, hint, needs in homes():
        if {int, float} & set(union_members(hint)):
            wrong = rng.choice(["nan", "inf", "1e30", "-1e40"] if int in union_members(hint) else ["nan", "inf"])
            yield show(f"number {key}", f"{key}={wrong}", key, before=needs, code_after=None)


def other_levels(rng: random.Random) -> Iterator[Mistake]:
    lasts = [key.rpartition(".")[2] for key in types_by_key(RunConfig)]
    foreign = " ".join(FOREIGN_NAMES.values()).split()
    for key, hint, needs in homes():
        last = key.rpartition(".")[2]
        if needs[:1] not in ((), ("model=gpt_tiny",), ("data=dataset",), ("optim=adamw",), ("schedule=cosine",)):
            continue
        value = _right(hint)
        if value is None:
            continue
        place = rng.randrange(1, max(2, len(last) - 1))
        typo = last[:place] + last[place + 1 :]
        if lasts.count(last) == 1 and last not in foreign:  # a word of other tools too, as batch_size, is theirs first
            yield show(f"level {last}", f"{last}={value}", f"{last}={value}", key, code_after=None)
        if len(last) > 4 and typo not in lasts:
            group = key.partition(".")[0]
            yield show(f"typo {group}.{typo}", f"{group}.{typo}={value}", f"{group}.{typo}", code_after=None)


def other_tools(rng: random.Random) -> Iterator[Mistake]:
    hints = types_by_key(RunConfig)
    for key, names in FOREIGN_NAMES.items():
        if key in ("data.path", "run.dir", "optim.betas", "train.rampup"):
            continue
        group = key if "." not in key else ""
        value = rng.choice(group_choices()[group]) if group else _right(hints[key])
        if value is None:
            continue
        needs = ("model=llama_tiny",) if key == "model.rotary_base" else ()
        for name in rng.sample(names.split(), 1):
            word = f"{name}={value}"
            yield show(f"tool {name}", word, name, key, before=needs, code_after=None)
            option = f"--{name.replace('_', '-')}"
            yield Mistake(f"tool {option}", (*SHOW, *needs, f"{option}={value}"), (option, key), f"{option}={value}",
                          code_after=None)  # fmt: skip


def _right(hint: Any) -> str | None:
    """A value that its key may well have."""
    option = next(one for one in union_members(hint) if one is not type(None))
    if get_origin(option) is Literal:
        return str(get_args(option)[0])
    return {int: "2", float: "0.5", bool: "true", str: "some"}.get(option)


def choices(rng: random.Random) -> Iterator[Mistake]:
    for group, names in group_choices().items():
        for name in rng.sample(names, min(2, len(names))):
            place = rng.randrange(1, max(len(name) - 1, 2))
            typo = name[:place] + name[place + 1 :]
            if typo and typo not in names:
                yield show(f"choice {group}={typo}", f"{group}={typo}", f"{group}={typo}", code_after=None)
            if group in ("model", "optim", "precision", "schedule", "recompute"):
                word = f"{group}.name={name}"
                yield show(f"name {word}", word, word, f"{group}={name}", code_after=None)


FAMILIES: dict[Callable[[random.Random], Iterator[Mistake]], int] = {
    wrong_types: 40, no_numbers: 15, other_levels: 25, other_tools: 30, choices: 20,
}  # fmt: skip


def drawn(seed: int) -> list[Mistake]:
    """Of each family so many."""
    rng = random.Random(seed)
    found: dict[str, Mistake] = {}
    for family, number in FAMILIES.items():
        every = list(family(rng))
        for mistake in rng.sample(every, min(number, len(every))):
            found[mistake.name] = mistake
    return list(found.values())
