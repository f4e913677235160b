"""Wrong command lines, drawn with a seed from every verb, option and setting that there is.

A line is a right one with one to three mistakes in it. Each kind of mistake is a function; what it may change is found
by walking the commands and the settings, so that a new verb, option or setting is drawn too.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal, get_args, get_origin

from lmtrain.cli.subcommands import parameter_types
from lmtrain.config.compose_run_settings import conf_dir, group_choices
from lmtrain.config.foreign_names import FOREIGN_NAMES
from lmtrain.config.name_suggestions import types_by_key, union_members
from lmtrain.config.strict_yaml import read_yaml
from lmtrain.start.other_tools.foreign_options import CONVERSIONS, VALUE_NOTES
from lmtrain.train.run_config import RunConfig
from tests.mistakes.world import commands, right_line

PRETRAIN = ("pretrain",)
TEXTS = ("notes.txt", "docs.jsonl", "more", "more/part0.txt", "more/code1.py", "no_such_file", "my.yaml")
NONSENSE = ("soon", "fast", "x", "many", "all of them", "?", "ä", "1..5", "--", "0x10", "1/3", "10%", "3 h", "5GB")


@dataclass(frozen=True)
class Line:
    """A wrong command line: its words; the mistakes in it, by name; and the values that must not get lost."""

    words: tuple[str, ...]
    verb: tuple[str, ...]
    kinds: tuple[str, ...] = ()
    kept: tuple[str, ...] = field(default=())
    meant: tuple[str, ...] = ()  # the line that says it rightly; if that is refused, nothing need be kept
    has_right_words: bool = False  # nothing need be left out

    def added(self, kind: str, *words: str, kept: Sequence[str] = (), meant: Sequence[str] = ()) -> Line:
        """This line with words at its end, which mean the words `meant`."""
        new, right = _with(self.words, words), _with(self.meant or self.words, meant)
        # because: a word may take the place of an earlier one
        gone = [word for word in self.words if word not in new]
        still = [value for value in self.kept if not any(value in word for word in gone)]
        return replace(
            self, words=new, kinds=(*self.kinds, kind), kept=(*still, *kept), meant=right,
            has_right_words=bool(meant) and not self.kinds,
        )  # fmt: skip

    def changed(self, kind: str, at: int, *words: str) -> Line:
        """This line with other words in the place of one."""
        new = (*self.words[:at], *words, *self.words[at + 1 :])
        kept = tuple(value for value in self.kept if value not in self.words[at])
        return replace(self, words=new, kinds=(*self.kinds, kind), kept=kept)


def _with(line: Sequence[str], words: Sequence[str]) -> tuple[str, ...]:
    """Return `line` with words at its end; of a setting that stands there already, the new word alone."""
    keys = {word.lstrip("+~").partition("=")[0] for word in words if "=" in word and not word.startswith("-")}
    return (*(word for word in line if "=" not in word or word.partition("=")[0] not in keys), *words)


@cache
def settings() -> dict[str, tuple[Any, tuple[str, ...]]]:
    """Return, for each key of a setting, its type and the words that must be typed for a run to have it."""
    chosen: dict[str, tuple[str, ...]] = {}
    for group, choices in group_choices().items():
        for choice in sorted(choices, key=lambda name: (name not in ("gpt_tiny", "dataset", "adamw", "cosine"), name)):
            if group not in ("experiment", "stage"):
                for key in read_yaml(conf_dir() / group / f"{choice}.yaml").data:
                    needs = (f"{group}={choice}", *(("model=bert_tiny",) if choice == "masked" else ()))
                    needs += (
                        ("data.datasets=[{path: data/train, weight: 1}]", "~data.path") if choice == "blend" else ()
                    )
                    chosen.setdefault(f"{group}.{key}", needs)
    return {key: (hint, chosen.get(key, ())) for key, hint in types_by_key(RunConfig).items()}


def right_value(hint: Any, rng: random.Random) -> str:
    """A value of this type, whether or not the key allows it."""
    option = next(one for one in union_members(hint) if one is not type(None))
    if get_origin(option) is Literal:
        return str(rng.choice(get_args(option)))
    if get_origin(option) is tuple:
        inner = get_args(option)[0]
        return (
            "[]"
            if isinstance(inner, type) and inner not in (int, float, str, bool)
            else (f"[{','.join(right_value(inner, rng) for _ in range(rng.randint(1, 3)))}]")
        )
    if get_origin(option) is dict:
        return "{a: data/books}"
    return {
        int: str(rng.choice([0, 1, 2, 3, 4, 7, 8, 16, 100])),
        float: rng.choice(["0.1", "0.5", "2.0", "1e-3", "30"]),
        bool: rng.choice(["true", "false"]),
        str: rng.choice(["some", "data/books", "runs/a", "data/train"]),
    }.get(option, "some")


def _parts(value: str) -> list[str]:
    """The single values of a list; a value that is none alone."""
    return [part for part in re.split(r"[\[\]{},]|: ", value) if part.strip()]


def _misspelt(name: str, rng: random.Random) -> str:
    at = rng.randrange(1, max(2, len(name) - 1)) if len(name) > 1 else 0
    return rng.choice(
        [
            name[:at] + name[at + 1 :],
            name[:at] + name[at - 1 : at] + name[at:],
            name + "s",
            name.removesuffix("s"),
            name[:at] + name[at : at + 2][::-1] + name[at + 2 :],
            name.replace("_", "-"),
            name.upper(),
            re.sub(r"_(\w)", lambda match: match[1].upper(), name),
        ]
    )


# ---- mistakes in settings: (line, random numbers) -> line


def _pick(rng: random.Random) -> tuple[str, Any, tuple[str, ...]]:
    key = rng.choice(list(settings()))
    return key, *settings()[key]


def wrong_type(line: Line, rng: random.Random) -> Line:
    key, hint, needs = _pick(rng)
    wrong = {
        int: ["1.5", "true", "two"],
        float: ["true", "fast", "0,1"],
        bool: ["maybe", "3", "null"],
        str: ["true", "[1,2]"],
    }
    option = next(one for one in union_members(hint) if one is not type(None))
    value = rng.choice([*wrong.get(option, ["nonsense", "3", "yes"]), *NONSENSE])
    return line.added("wrong type", *needs, f"{key}={value}")


def wrong_number(line: Line, rng: random.Random) -> Line:
    numbers = [key for key, (hint, _) in settings().items() if {int, float} & set(union_members(hint))]
    key = rng.choice(numbers)
    value = rng.choice(["-1", "0", "-0.5", "1e30", "nan", "inf", "1099511627776", "1000000", "3", "5", "7", "1e-30"])
    return line.added("wrong number", *settings()[key][1], f"{key}={value}")


def wrong_unit(line: Line, rng: random.Random) -> Line:
    numbers = [key for key, (hint, _) in settings().items() if {int, float} & set(union_members(hint))]
    key = rng.choice(numbers)
    value = rng.choice(
        ["10%", "5 GB", "3hours", "2k", "1.5M", "100_000", "1,000", "10x", "4h", "1GiB", "half", "3/4", "+5"]
    )
    return line.added("wrong unit", *settings()[key][1], f"{key}={value}")


def wrong_name(line: Line, rng: random.Random) -> Line:
    key, hint, needs = _pick(rng)
    group, _, last = key.partition(".")
    value = right_value(hint, rng)
    name = rng.choice(
        [
            f"{group}.{_misspelt(last, rng)}",
            f"{_misspelt(group, rng)}.{last}",
            last,
            _misspelt(last, rng),
            f"{rng.choice(list(group_choices()))}.{last}",
            f"{group}.{last}.{last}",
            key.replace(".", "_"),
            key.replace(".", "/"),
            key.upper(),
        ]
    )
    is_given = any(word.startswith(f"{key}=") for word in line.words)
    meant = () if is_given else (*needs, f"{key}={value}")
    return line.added("wrong name", *needs, f"{name}={value}", kept=_parts(value), meant=meant)


def list_for_one(line: Line, rng: random.Random) -> Line:
    key, hint, needs = _pick(rng)
    value = right_value(hint, rng)
    if value.startswith(("[", "{")):
        return one_for_list(line, rng)
    return line.added("list for one", *needs, f"{key}=[{value}]")


def one_for_list(line: Line, rng: random.Random) -> Line:
    lists = [
        key
        for key, (hint, _) in settings().items()
        if any(get_origin(one) in (tuple, dict) for one in union_members(hint))
    ]
    key = rng.choice(lists)
    hint, needs = settings()[key]
    option = next(one for one in union_members(hint) if get_origin(one) in (tuple, dict))
    inner = get_args(option)[-1] if get_origin(option) is dict else get_args(option)[0]
    values = [right_value(inner, rng) for _ in range(rng.randint(1, 3))]
    values = values[: 1 if rng.random() < 0.3 else None]
    value = rng.choice([",".join(values), f"[{','.join(values)}]", f"({','.join(values)})"])
    kept = values if inner in (str, int, float) else ()
    return line.added(
        "one for list", *needs, f"{key}={value}", kept=kept, meant=(*needs, f"{key}=[{','.join(values)}]")
    )


def several_texts(line: Line, rng: random.Random) -> Line:
    key = rng.choice(
        ["data.path", "data.text", "data.valid_path", "data.valid_text", "data.tokenizer", "eval.tasks", "run.dir"]
    )
    names = rng.sample(["data/train", "data/books", "notes.txt", "docs.jsonl"], 2)
    values = [",".join(names), f"[{','.join(names)}]", " ".join(names), ":".join(names)]
    return line.added("several texts", f"{key}={rng.choice(values)}", kept=names)


def several_datasets(line: Line, rng: random.Random) -> Line:
    """Several datasets for one, as other tools join them."""
    names = ["data/train", "data/books"]
    key = rng.choice(["data.path", *FOREIGN_NAMES["data.path"].split()])
    value = ",".join(names)
    words = rng.choice(
        [
            [f"{key}={value}"], [f"{key}=[{value}]"], [f"{key}={' '.join(names)}"], [f'{key}="{value}"'],
            [f"--{key.replace('_', '-')}", *names], [f"--{key.replace('_', '-')}", value],
        ]
    )  # fmt: skip
    meant = ["data=blend", f"data.datasets=[{','.join(f'{{path: {name}, epochs: 1}}' for name in names)}]"]
    alone = replace(line, words=tuple(word for word in line.words if not word.startswith("data.path=")))
    return alone.added("several datasets", *words, kept=names, meant=meant)


def sweep(line: Line, rng: random.Random) -> Line:
    """Several values for each of one or two settings that may be misspelt, or another tool's, mostly with -m."""
    words, meant, kept = list[str](), list[str](), list[str]()
    values = {"optim.lr": ["0.001", "0.0003"], "train.seed": ["5", "6"], "model.dropout": ["0.2", "0.3"],
              "train.global_batch": ["4", "8", "16"], "optim.weight_decay": ["0.01", "0.02"]}  # fmt: skip
    for key in rng.sample(list(values), rng.choice([1, 2])):
        last = key.rpartition(".")[2]
        names = [key, last, *FOREIGN_NAMES.get(key, "").split(), f"{key.partition('.')[0]}.{_misspelt(last, rng)}"]
        name, listed = rng.choice(names), ",".join(values[key])
        words.append(rng.choice([f"{name}={listed}", f"{name}={listed}", f"--{name}={listed}"]))
        meant.append(f"{key}={listed}")
        kept += values[key]
    words += ["-m"] if rng.random() < 0.8 else []
    return line.added("sweep", *words, kept=kept, meant=(*meant, "-m"))


def path_for_text(line: Line, rng: random.Random) -> Line:
    texts = [
        key
        for key, (hint, _) in settings().items()
        if str in union_members(hint) or any(get_origin(o) is Literal for o in union_members(hint))
    ]
    key = rng.choice(texts)
    return line.added("path for text", *settings()[key][1], f"{key}={rng.choice(TEXTS)}")


def no_partner(line: Line, rng: random.Random) -> Line:
    key, hint, needs = _pick(rng)
    value = right_value(hint, rng)
    words = rng.choice(
        [
            [key],
            [f"{key}="],
            [key, value],
            [f"{key}:{value}"],
            [f"{key}:", value],
            [key, "=", value],
            [f"{key}=", value],
            [f"{key}", f"={value}"],
            [f"-{key}={value}"],
            [f"--{key}={value}"],
            [f"--{key}", value],
            [f"{key}:={value}"],
            [f"{key}=={value}"],
            [f"~{key}"],
            [f"~{key}={value}"],
            [f"+{key}={value}"],
            [f"++{key}={value}"],
            [f"{key}={value},"],
            [f"{key}={value};"],
            [f"{key}='{value}"],
            [f'{key}="{value}"'],
            [f"${{{key}}}={value}"],
            [f"{key}=${{{_misspelt(key, rng)}}}"],
        ]
    )
    return line.added("no partner", *needs, *words)


def shell_habit(line: Line, rng: random.Random) -> Line:
    words = rng.choice(
        [
            ["data=blend", "data.datasets=[{path:", "data/train,", "weight:", "1}]"],
            ["data.text=~/notes.txt"],
            ["data.text=more/*.txt"],
            ["data.text=more/part0.txt", "more/part1.txt", "more/part2.txt"],
            ["data.text=$HOME/x.txt"],
            ["notes.txt"],
            ["data/train"],
            ["my.yaml"],
            ["train.py"],
            ["config/train.py"],
            ["optim.betas=[0.9,", "0.95]"],
            ["data.split=[98,", "1,", "1]"],
            ["train={steps:", "5}"],
            ["train.steps=5;"],
            ["&&"],
            ["run.dir=my", "runs"],
            ["parallel.tp=2,parallel.pp=2"],
            ["optim.lr=1e-3,optim.eps=1e-8"],
            ["data.path=data/*"],
            ["*.txt"],
            ["{a,b}"],
        ]
    )
    return line.added("shell habit", *words)


def foreign_word(line: Line, rng: random.Random) -> Line:
    key, names = rng.choice(list(FOREIGN_NAMES.items()))
    name = rng.choice([name for name in names.split() if name not in {*VALUE_NOTES, *CONVERSIONS}] or names.split())
    value = (
        right_value(settings()[key][0], rng) if key in settings() else rng.choice(group_choices().get(key, ["some"]))
    )
    words = rng.choice(
        [
            [f"{name}={value}"],
            [f"--{name}", value],
            [f"--{name}={value}"],
            [f"--{name.replace('_', '-')}", value],
            [f"training.{name}={value}"],
            [f"--training.{name}", value],
            [f"{name}", value],
        ]
    )
    is_given = any(word.startswith(f"{key}=") for word in line.words)
    return line.added("foreign word", *words, kept=_parts(value), meant=() if is_given else [f"{key}={value}"])


def wrong_choice(line: Line, rng: random.Random) -> Line:
    group, names = rng.choice(list(group_choices().items()))
    name = rng.choice(names)
    word = rng.choice(
        [
            f"{group}={_misspelt(name, rng)}",
            f"{group}.name={name}",
            f"{group}.kind={name}",
            f"{group}={name}.yaml",
            name,
            f"{group}=[{name}]",
            f"{group}=null",
            f"{group}={{{group}: {name}}}",
            f"{group}/{name}",
            f"+{group}={name}",
            f"{group}s={name}",
            f"{group}@x={name}",
            f"conf/{group}={name}",
            f"{group}=other/{name}",
        ]
    )
    return line.added("wrong choice", word)


def wrong_layout(line: Line, rng: random.Random) -> Line:
    keys = [
        "parallel.tp",
        "parallel.pp",
        "parallel.vp",
        "parallel.dp_shard",
        "parallel.dp_replicate",
        "parallel.zero",
        "train.global_batch",
        "train.micro_batch",
        "model.num_heads",
        "model.num_layers",
        "model.width",
    ]
    words = [f"{key}={rng.choice([1, 2, 3, 4, 5, 6, 8, 12])}" for key in rng.sample(keys, rng.randint(2, 5))]
    if rng.random() < 0.3:
        words.append(
            f"parallel.schedule={rng.choice(['1f1b', 'gpipe', 'interleaved', 'zb_h1', 'zb_v', '1F1B', 'dualpipe'])}"
        )
    return line.added("wrong layout", *words, meant=words)


SETTING_MISTAKES: dict[Callable[[Line, random.Random], Line], int] = {
    wrong_type: 4,
    wrong_number: 5,
    wrong_unit: 3,
    wrong_name: 6,
    list_for_one: 2,
    one_for_list: 4,
    several_texts: 2,
    several_datasets: 1,
    sweep: 3,
    path_for_text: 3,
    no_partner: 6,
    shell_habit: 3,
    foreign_word: 6,
    wrong_choice: 4,
    wrong_layout: 6,
}


# ---- mistakes in options and arguments


@cache
def verbs() -> dict[tuple[str, ...], Any]:
    return dict(commands())


def _options(verb: tuple[str, ...]) -> list[Any]:
    return [param for param in verbs()[verb].params if param.param_type_name == "option"]


def _option(line: Line, rng: random.Random) -> Any:
    options = _options(line.verb)
    return rng.choice(options) if options else None


def _option_value(verb: tuple[str, ...], param: Any, rng: random.Random) -> str:
    hint = parameter_types(verbs()[verb]).get(param.name)
    for option in (hint, *get_args(hint)):
        for inner in (option, *get_args(option)):
            if get_origin(inner) is Literal:
                return str(rng.choice(get_args(inner)))
            if inner in (int, float):
                return str(rng.choice([1, 2, 5, 10]))
    return rng.choice(["some", "out2", *TEXTS[:4]])


def misspelt_option(line: Line, rng: random.Random) -> Line:
    if (param := _option(line, rng)) is None:
        return word_too_few_or_many(line, rng)
    name = param.opts[0].lstrip("-")
    wrong = rng.choice(
        [f"--{_misspelt(name, rng)}", f"-{name}", f"--{name.replace('-', '_')}", f"--{name[:-2] or name}", name,
         f"{name}="]
    )
    if param.is_flag:
        return line.added("misspelt option", wrong)
    value = _option_value(line.verb, param, rng)
    words = rng.choice([[wrong, value], [f"{wrong}={value}"], [wrong]])
    kept = [] if words == [wrong] else [value]
    return line.added("misspelt option", *words, kept=kept, meant=[param.opts[0], value])


def wrong_option_value(line: Line, rng: random.Random) -> Line:
    if (param := _option(line, rng)) is None:
        return word_too_few_or_many(line, rng)
    if param.is_flag:
        return line.added("wrong option value", rng.choice([f"{param.opts[0]}=true", f"{param.opts[0]}=1"]))
    value = rng.choice(
        [
            *NONSENSE,
            "-1",
            "0",
            "1.5",
            "a,b",
            "[a,b]",
            *TEXTS,
            "1e9",
            "",
            _misspelt(_option_value(line.verb, param, rng), rng),
        ]
    )
    words = list(line.words)
    if param.opts[0] in words:
        at = words.index(param.opts[0])
        return replace(
            line, words=(*words[: at + 1], value, *words[at + 2 :]), kinds=(*line.kinds, "wrong option value")
        )
    return line.added("wrong option value", *rng.choice([[param.opts[0], value], [f"{param.opts[0]}={value}"]]))


def option_without_value(line: Line, rng: random.Random) -> Line:
    if (param := _option(line, rng)) is None:
        return word_too_few_or_many(line, rng)
    return line.added("option without value", param.opts[0])


def option_beyond_use(line: Line, rng: random.Random) -> Line:
    """A right option, which may have no effect in this line, or lack its partner."""
    if (param := _option(line, rng)) is None:
        return word_too_few_or_many(line, rng)
    words = [param.opts[0]] if param.is_flag else [param.opts[0], _option_value(line.verb, param, rng)]
    return line.added("option beyond use", *words)


def word_too_few_or_many(line: Line, rng: random.Random) -> Line:
    at = rng.randrange(len(line.verb), len(line.words)) if len(line.words) > len(line.verb) else None
    if at is None or rng.random() < 0.5:
        return line.added(
            "word too many", rng.choice(["more", "extra.txt", *TEXTS, "data/train", "runs/a", "key=value"])
        )
    return line.changed("word too few", at)


def wrong_path(line: Line, rng: random.Random) -> Line:
    places = [
        at
        for at, word in enumerate(line.words)
        if at >= len(line.verb) and not word.startswith("-") and "=" not in word
    ]
    if not places:
        return word_too_few_or_many(line, rng)
    wrong = rng.choice(
        [
            *TEXTS,
            "data/train.bin",
            "data/train.idx",
            "runs",
            "runs/a/checkpoints",
            "data",
            "gpt2",
            "~/x",
            "more/*.txt",
            "nothing/*.txt",
            "tokenizer",
            "runs/kept",
            "models/a",
            "",
            "a,b",
        ]
    )
    return line.changed("wrong path", rng.choice(places), wrong)


def other_word(line: Line, rng: random.Random) -> Line:
    """An option as another tool calls it."""
    word = rng.choice(
        [
            ["--column", "body"],
            ["--text-column", "body"],
            ["-o", "out3"],
            ["--out", "out3"],
            ["--output-dir", "out3"],
            ["-j", "2"],
            ["--num-workers", "2"],
            ["--input", "docs.jsonl"],
            ["--json-keys", "text"],
            ["--output-prefix", "out3"],
            ["--vocab-file", "gpt2/vocab.json"],
            ["--merge-file", "gpt2/merges.txt"],
            ["--append-eod"],
            ["--tasks", "lambada"],
            ["--model", "runs/a"],
            ["--checkpoint", "runs/a"],
            ["--max-length", "10"],
            ["--temp", "0.5"],
            ["--verbose"],
            ["-v"],
            ["-q"],
            ["--tp", "2"],
            ["--tensor-model-parallel-size", "2"],
            ["--gpus", "2"],
            ["--nodes", "2"],
            ["--dtype", "bf16"],
            ["--cpu"],
            ["--seed", "3"],
            ["--config", "my.yaml"],
            ["--prompt-file", "notes.txt"],
            ["--batch-size", "4"],
            ["--num-proc", "2"],
            ["--force"],
            ["--no-cache"],
            ["--yes"],
            ["--steps", "10"],
            ["--lr", "0.1"],
            ["--split", "98,1,1"],
            ["--save-dir", "out3"],
            ["--trust-remote-code"],
        ]
    )
    return line.added("other word", *word)


def misspelt_verb(line: Line, rng: random.Random) -> Line:
    at = rng.randrange(len(line.verb))
    return line.changed("misspelt verb", at, _misspelt(line.verb[at], rng))


OPTION_MISTAKES: dict[Callable[[Line, random.Random], Line], int] = {
    misspelt_option: 6,
    wrong_option_value: 8,
    option_without_value: 2,
    option_beyond_use: 4,
    word_too_few_or_many: 3,
    wrong_path: 5,
    other_word: 5,
    misspelt_verb: 1,
}


def draw(rng: random.Random) -> Line:
    """Draw a wrong line, mostly one of `lmtrain pretrain` with wrong settings, else one of any verb."""
    of_settings = rng.random() < 0.55
    takes_settings = [verb for verb, command in verbs().items() if any(p.name == "overrides" for p in command.params)]
    verb = (
        PRETRAIN
        if of_settings and rng.random() < 0.85
        else rng.choice(takes_settings if of_settings else list(verbs()))
    )
    words = right_line(verb, verbs()[verb])
    if verb == PRETRAIN and rng.random() < 0.6:
        words.append("--print-config")
    line, table = Line(tuple(words), verb), SETTING_MISTAKES if of_settings else OPTION_MISTAKES
    for mistake in rng.choices(list(table), list(table.values()), k=rng.choices([1, 2, 3], [75, 18, 7])[0]):
        line = mistake(line, rng)
    return line
