"""Explain an option of another tool by the tables of a single verb: its words here, why it can be left out, or that
there is nothing like it. Also finds words such as sample_by="paragraph" that stand where a verb takes files.

Called by explain_click_errors, which knows the problems of the whole line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress

from lmtrain.config.settings_file import FILE_NAMES
from lmtrain.errors import leave_out, shell_quoted, way
from lmtrain.runfolder.file_names import CHECKPOINTS, step_folder_name
from lmtrain.start.other_tools import options_by_verb as tables
from lmtrain.start.other_tools.foreign_options import FALSE, TRUE
from lmtrain.start.other_tools.option_synonyms import NOTHING
from lmtrain.start.other_tools.typed_line import TypedLine

_KNOWN_SUFFIX = re.compile(r"\.(txt|jsonl|parquet|gz|bz2|xz|zst)$")
# options of sbatch that the file does not have by itself: --sbatch=--NAME=VALUE gives them
_SBATCH = (
    "acctg-freq batch bb bbf cluster-constraint container container-id cores-per-socket cpu-freq export export-file "
    "extra get-user-env gid gpu-bind gpus-per-socket gres-flags ignore-pbs input kill-on-invalid-dep mcs-label "
    "mem-bind nodefile oom-kill-step prefer propagate reboot resv-ports segment sockets-per-node spread-job stepmgr "
    "tres-bind thread-spec uid use-min-nodes wait wait-all-nodes mail-user mail-type qos mem mem-per-cpu mem-per-gpu "
    "constraint signal cpus-per-task cpus-per-gpu exclude nodelist reservation begin deadline dependency comment "
    "licenses hold exclusive nice priority job-name error wckey tmp switches network power profile overcommit "
    "oversubscribe distribution hint time-min contiguous clusters threads-per-core immediate mincpus extra-node-info "
    "core-spec gpu-freq delay-boot"
)
# short options of sbatch -> their long names
_SHORT_SBATCH = {
    "-t": "time", "-p": "partition", "-A": "account", "-N": "nodes", "-J": "job-name", "-q": "qos", "-C": "constraint",
    "-c": "cpus-per-task", "-x": "exclude", "-w": "nodelist", "-d": "dependency", "-e": "error", "-o": "output",
    "-b": "begin", "-L": "licenses", "-H": "hold", "-n": "ntasks", "-D": "chdir", "-a": "array", "-k": "no-kill",
    "-M": "clusters", "-m": "distribution", "-S": "core-spec", "-B": "extra-node-info", "-F": "nodefile", "-G": "gpus",
    "-i": "input", "-O": "overcommit", "-s": "oversubscribe", "-W": "wait", "-Q": "quiet",
}  # fmt: skip
_SETTINGS_SUFFIXES = (".yaml", ".yml")
_NO_ARGUMENTS = (*FALSE, *TRUE, "debug", "info", "warning", "error", "critical")  # values that a switch may have
_FORMATS_OF_OUTPUT = ("format", "output-format", "out-format", "fmt", "output-type")
Words = tuple[list[str], bool]  # words to type, and whether the option has a value, which they replace


def explain_by_verb(option: str, command: TypedLine) -> str | None:
    """Return the marked message about `option`, which the verb of `command` does not have, by the tables of the verb;
    None if they do not have it.
    """
    verb, name = " ".join(command.verb), spelt(option)
    unit = next((unit for unit in command.units if unit[0].partition("=")[0] == option), None)
    if unit is None:
        return None
    typed = " ".join(map(shell_quoted, unit))
    sign, value = unit[0].partition("=")[1:]
    value = " ".join([*([value] if sign else []), *unit[1:]])
    if folder := _step_folder(command, name, value):
        run, use = folder
        return f"{typed} is not an option of lmtrain {verb}. Use {way(use, instead_of=(option, run), shown=use)}."
    if name in _FORMATS_OF_OUTPUT and value.lower() == "json" and "--json" in command.options:
        return f"{typed} is not an option of lmtrain {verb}. Use {way('--json', instead_of=option)}."
    for find in (_settings_file, _words, _sbatch):
        if found := find(verb, name, value):
            words, takes_value = found
            # because: of a switch, the word that follows is an argument
            kept = [] if takes_value or sign else unit[1:]
            shown = " ".join(map(shell_quoted, words))
            use = way(*words, *kept, instead_of=option, shown=shown)
            return f"{option if kept else typed} is not an option of lmtrain {verb}. Use {use}."
    if name in tables.FORMATS.split() and _has_unknown_suffix(command):
        return None
    name = _SHORT_SBATCH.get(name, name) if is_among(verb, "slurm") else name
    sentence = _entry(tables.ABSENT, verb, f"{name}={value.lower()}") or _entry(tables.ABSENT, verb, name)
    if sentence and value.lower() in FALSE:
        return f"{typed} is not an option of lmtrain {verb}. It is off here as well. {leave_out(option)}."
    if sentence:
        return f"{option} is not an option of lmtrain {verb}. {sentence}"
    if sentence := _entry(tables.ANYWAY, verb, name):
        kept = unit[1:] if name in tables.SWITCHES.split() and value.lower() not in _NO_ARGUMENTS else ()
        advice = way(*kept, instead_of=option, shown="Leave it out") if kept else leave_out(option)
        return f"{option if kept else typed} is not an option of lmtrain {verb}. {sentence} {advice}."
    if any(name in names.split() for verbs, names in NOTHING.items() if is_among(verb, verbs)):
        return f"{option} is not an option of lmtrain {verb}. lmtrain {verb} has nothing like it."
    return None


def _has_unknown_suffix(command: TypedLine) -> bool:
    """Return whether an argument is standard input or a file whose suffix does not say its format."""
    words = [unit[0] for unit in command.units if len(unit) == 1]
    return "-" in words or any(os.path.isfile(word) and not _KNOWN_SUFFIX.search(word) for word in words)


def with_dashes(word: str) -> str:
    """Return a word such as sample_by=paragraph as the option that it can be meant as."""
    name, _, value = word.partition("=")
    return f"--{name.replace('_', '-')}={value.lstrip('=').strip(chr(34) + chr(39))}"


def spelt(option: str) -> str:
    """Return an option as the tables have it: "--Sample_By" -> "sample-by"; short ones keep their dash."""
    return option.lstrip("-").lower().replace("_", "-") if len(option) > 2 else option


def _step_folder(command: TypedLine, name: str, value: str) -> tuple[str, str] | None:
    """Return the typed run of a verb that reads a checkpoint, and the folder of its checkpoint of the step `value`."""
    if name not in tables.STEP_NAMES.split() or not value.isdecimal() or not is_among(
        " ".join(command.verb), tables.CHECKPOINT_VERBS
    ):  # fmt: skip
        return None
    words = (unit[0].rstrip("/") for unit in command.units if len(unit) == 1 and not unit[0].startswith("-"))
    runs = [word for word in words if os.path.isdir(os.path.join(word, CHECKPOINTS))]
    if len(runs) != 1:
        return None
    typed = next(unit[0] for unit in command.units if unit[0].rstrip("/") == runs[0])
    return typed, f"{runs[0]}/{CHECKPOINTS}/{step_folder_name(int(value))}"


def _settings_file(verb: str, name: str, value: str) -> Words | None:
    """Return the words for another tool's option that names a file of settings, for a verb that takes one."""
    names = ["-c", "-f", *FILE_NAMES.replace("_", "-").split()]
    is_named = name.rpartition(".")[2] in names and is_among(verb, tables.FILE_VERBS)
    return ([value], True) if is_named and value.endswith(_SETTINGS_SUFFIXES) else None


def _words(verb: str, name: str, value: str) -> Words | None:
    """Return the words of the table WORDS for an option with this value."""
    for verbs, names, by_value in tables.WORDS:
        if name not in names.split() or not is_among(verb, verbs):
            continue
        key = value.lower().replace("_", "-")
        if template := by_value.get(key):
            return template.split(), True
        if value and "*" in by_value:
            with suppress(KeyError):  # because: a value that is no number has none of its parts
                return [word.format_map(_parts(value)) for word in by_value["*"].split()], True
        elif "" in by_value and key not in ("false", "0", "no", "off"):
            return by_value[""].split(), False
    return None


def _parts(value: str) -> dict[str, str]:
    """Return what the placeholders of the table WORDS stand for, by name, for an option's value."""
    parts = {"value": value, "module": f"module load {value}", "suffix": f".{value.lstrip('.*')}"}
    if os.path.lexists(value):
        parts["path"] = value
    if value.startswith("FILE:"):
        parts["file"] = value.removeprefix("FILE:")
    if value.isdecimal() and int(value):
        parts["last"] = str(int(value) - 1)
    if model := re.search(r"(?:^|,)(?:pretrained|path)=([^,]+)", value):
        parts["pretrained"] = model[1]
    if numbers := re.findall(r"\d+", value):
        parts["number"] = numbers[-1]
    with suppress(ValueError):
        percent = float(value.rstrip("%")) * (100 if float(value.rstrip("%")) < 1 and "%" not in value else 1)
        if 0 < percent < 100:
            parts["shares"], parts["train"] = f"{100 - percent:g},{percent:g}", f"{percent:g},{100 - percent:g}"
            parts["part"], parts["kept"] = f"{percent / 100:g}", f"{1 - percent / 100:g}"
            parts["thirds"] = f"{percent / 100:g},{(100 - percent) / 200:g},{(100 - percent) / 200:g}"
    return parts


def _sbatch(verb: str, name: str, value: str) -> Words | None:
    """Return the words for an option of sbatch, which `lmtrain slurm` has too or passes on."""
    long_name = _SHORT_SBATCH.get(name, name)
    if not is_among(verb, "slurm") or (long_name == name and name not in _SBATCH.split()):
        return None
    if long_name in ("time", "partition", "account", "nodes"):
        return [f"--{long_name}", value], True
    if long_name == "array":
        return ["--array", *(["--array-tasks", value] if value else [])], True
    if long_name not in ("output", *_SBATCH.split()):  # because: render's own --output is the sbatch file
        return None
    return [f"--sbatch=--{long_name}{f'={value}' if value else ''}"], True


def _entry(table: Sequence[tuple[str, Mapping[str, str]]], verb: str, name: str) -> str | None:
    """Return the sentence of a table for an option of a verb; None if there is none."""
    return next(
        (
            sentence for verbs, names_by_sentence in table if is_among(verb, verbs)
            for sentence, names in names_by_sentence.items() if name in names.split()
        ), None,
    )  # fmt: skip


def is_among(verb: str, verbs: str) -> bool:
    """Return whether `verb`, such as "data show", is one of `verbs`, separated by commas, or a subcommand of one."""
    return any(f"{verb} ".startswith(f"{each} ") for each in verbs.split(", "))
