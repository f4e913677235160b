"""Translate options of another tool (Megatron-LM, nanoGPT, transformers, ...) to settings, for the message about them.

Called by explain_foreign_line. Its tables are in foreign_options.py, and names that only stand for another key in
config/foreign_names.py.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from lmtrain.config.compose_run_settings import MAX_LISTED, group_choices, names_data
from lmtrain.config.foreign_names import FOREIGN_NAMES, UNSUPPORTED_SETTINGS
from lmtrain.config.ideas_without_counterpart import idea_of
from lmtrain.config.name_suggestions import is_variable, nearest_name, types_by_key, union_members
from lmtrain.config.names_without_counterpart import sentence_about, sentence_about_variable
from lmtrain.config.parse_and_apply_overrides import named_values
from lmtrain.runtime.files.similar_path import similar_path
from lmtrain.start.other_tools import foreign_options as tables
from lmtrain.start.other_tools.foreign_translation import Option, Translation
from lmtrain.start.other_tools.reckon_foreign_values import reckon
from lmtrain.start.other_tools.sweep_of_foreign_values import join_sweep
from lmtrain.train.run_config import RunConfig

_KEY_OF = {name: key for key, names in FOREIGN_NAMES.items() for name in names.split()}
_DATASET_KEYS = ("data.path", "data.valid_path", "data.text")
_MAX_SWEEP = 20  # values of a list, each of which is translated
_YAML = {"": "true", "True": "true", "False": "false", "None": "null"}


def translate_options(
    units: Sequence[tuple[str, ...]], typed_settings: Sequence[str] = (), counts_as: str = "",
    from_run: str | None = None, *, is_sweep: bool = False, takes_variables: bool = False,
    has_option: Callable[[str], object],
) -> Translation:  # fmt: skip
    """Translate another tool's options, each a tuple of the option and its values as typed, to settings of lmtrain.
    Options without a counterpart are in `left_out`, `unknown` or `refused` of the result. `counts_as` is the key that
    the verb has for a number of processes, if any. `from_run` is the run typed for its option --from-run, "" if none
    is, and None if it has no such option. With `is_sweep`, a list of values is one of runs, even of datasets. With
    `takes_variables`, the verb has an option --env. `has_option` tells whether a command of lmtrain has an option.
    """
    options = [Option(tuple(unit)) for unit in units]
    lists = {option: values for option in options if len(values := _values_of_sweep(option, is_sweep)) > 1}

    def translate(chosen: Mapping[Option, str]) -> Translation:
        return _translate_each(
            [option.with_value(chosen[option]) if option in chosen else option for option in options],
            Translation(has_option, typed_settings, counts_as, from_run, takes_variables),
        )

    firsts = {option: values[0] for option, values in lists.items()}
    result = translate(firsts)
    for option, values in lists.items():
        others = [translate(firsts | {option: value}) for value in values]
        join_sweep(result, option, firsts[option], others)
    return result


def _translate_each(options: Sequence[Option], result: Translation) -> Translation:
    for option in options:
        result.all_names.add(option.name)
        is_known = any(step(result, option) for step in _STEPS)
        (result.known if is_known else result.unknown).append(option)
    reckon(result)
    _take_run(result)
    return result


def _take_run(result: Translation) -> None:
    """Turn a checkpoint to resume from into the option --from-run, which brings its settings, if the command names no
    data and another run.dir.
    """
    settings = dict(word.partition("=")[::2] for word in result.typed_settings) | result.settings
    resumed, folder = result.settings.get("checkpoint.resume", ""), settings.get("run.dir")
    path = Path(resumed) if os.path.isdir(resumed) else similar_path(Path(resumed), Path.is_dir) if resumed else None
    has_data = any(key.partition(".")[0] == "data" for key in settings)
    if result.from_run != "" or not folder or path is None or has_data or path.is_relative_to(folder):
        return
    del result.settings["checkpoint.resume"]
    option = result.origins.pop("checkpoint.resume")
    result.options += ["--from-run", str(path)]
    result.changed.append(f"{option.typed} is --from-run {path} here, with the settings of that run.")


def _values_of_sweep(option: Option, is_sweep: bool) -> list[str]:
    """Return the values that an option names for the runs of a sweep, as in optim.lr=1e-3,3e-4; one or none if it names
    a single value, which may be a list.
    """
    takes_list = not is_sweep and _KEY_OF.get(option.name, "") in _DATASET_KEYS
    takes_list = takes_list or _is_variable(option)
    if takes_list or option.name in tables.LISTS or len(option.values) != 1 or re.search(r"[\[({'\"]", option.value):
        return []
    values = [value for value in option.value.split(",") if value]
    return values if len(values) <= _MAX_SWEEP else []


def _take_processes(result: Translation, option: Option) -> bool:
    if option.name not in tables.PROCESS_COUNT_NAMES or not option.value.isdecimal():
        return False
    result.processes, result.counted_by = option.value, option
    return True


def _is_variable(option: Option) -> bool:
    return option.is_word and is_variable(option.unit[0].partition("=")[0], RunConfig)


def _take_variable(result: Translation, option: Option) -> bool:
    """Translate an environment variable that is typed like a setting, as in NCCL_DEBUG=WARN."""
    if not _is_variable(option):
        return False
    (word,) = option.unit
    if not result.takes_variables:
        return result.omit(option, sentence_about_variable(option.typed))
    result.options += ["--env", word]
    result.changed.append(f"{option.typed} is an environment variable: --env {option.typed} sets it in the job.")
    return True


def _take_misspelt_group(result: Translation, option: Option) -> bool:
    """Translate a setting whose group is misspelt, or which is in capitals: its last part may have another meaning in
    other tools.
    """
    if option.is_word and option.path in types_by_key(RunConfig):
        return _rename(result, option)
    parent, _, name = option.path.rpartition(".")
    groups = {key.rpartition(".")[0] for key in types_by_key(RunConfig)} - {""}
    near = nearest_name(parent, groups - {parent}) if parent else None
    return f"{near}.{name}" in types_by_key(RunConfig) and _rename(result, option)


def _take_value(result: Translation, option: Option) -> bool:
    """Translate an option by a table of its values."""
    value = option.value.lower()
    if option.name == "init_from" and Path(option.value).is_dir():
        return result.set(option, f"checkpoint.init_from={option.value}", is_as_typed=True)
    if option.path == "data" and names_data(option.value):
        return result.set(option, f"data.path={option.value}", is_as_typed=True)
    if option.name == "max_duration" and (unit := re.fullmatch(r"(\d[\d.e]*)(ba|tok|ep)", value)):
        if unit[2] == "ep":
            return result.omit(option, f"epochs={unit[1]} in its place is translated to the steps of so many epochs.")
        return result.set(option, f"train.{'steps' if unit[2] == 'ba' else 'tokens'}={unit[1]}")
    if overrides := (option.within(tables.VALUES) or {}).get(value):
        return result.set(option, overrides)
    notes = option.within(tables.VALUE_NOTES) or {}
    why = notes.get(value) or notes.get("")
    return result.omit(option, why) if why else False


def _take_other_verb(result: Translation, option: Option) -> bool:
    if (sentence := option.within(tables.OTHER_VERBS)) is None:
        return False
    if option.is_off:
        return result.omit(option, "It is off here as well.")
    result.refused.append(f"{option.typed}: {sentence}")
    return True


def _take_switch(result: Translation, option: Option) -> bool:
    """Translate an option that is on or off, or the name of a choice of a group, such as --bf16."""
    own_names = {key.rpartition(".")[2] for key in types_by_key(RunConfig)}
    choices = group_choices().items() if option.name not in own_names else ()
    choice = next((f"{group}={option.name}" for group, names in choices if option.name in names), "")
    on, off = option.within(tables.SWITCHES) or choice, option.within(tables.OFF_SWITCHES)
    if overrides := (option.is_off and off) or (option.is_on and on):
        return result.set(option, overrides)
    if option.is_off and on:
        return result.omit(option, "It is off here as well.")
    if option.is_on and off and option.name not in _KEY_OF:
        return result.omit(option, "It is on here as well.")
    return False


def _leave_for_later(result: Translation, option: Option) -> bool:
    """Put an option aside that depends on other settings; its name decides."""
    names = (
        *tables.CONVERSIONS, *tables.BETAS, *tables.LOAD_STEPS, *tables.EPOCHS, *tables.POSITION_COUNTS,
        *tables.VIRTUAL_STAGES, *tables.LAYERS_PER_STAGE, *tables.PROFILE_STEPS, *tables.DURATION, "finetune", "flavor",
        "exit_interval",
    )  # fmt: skip
    is_share = _is_number(option.value) and 0 < float(option.value) < 1 and _plain_key(option) in tables.SHARES_OF_STEPS
    is_each_epoch = option.name in tables.STRATEGIES and option.value == "epoch"
    is_each_epoch = is_each_epoch or (
        option.name in (*tables.TIMES_AN_EPOCH, *tables.EPOCHS_BETWEEN) and not option.is_off
    )
    if is_share or is_each_epoch or option.path in names or option.name in names or option.path == "model.name":
        result.later.append(option)
        return True
    return False


def _plain_key(option: Option) -> str:
    """Return the setting that an option is a name of; "" if its value is said in other words or another unit."""
    plain = tables.PATHS.get(option.path) or _KEY_OF.get(option.name)
    return plain or next((key for key in tables.SHARES_OF_STEPS if key.endswith(f".{option.name}")), "")


def _take_reason(result: Translation, option: Option) -> bool:
    why = sentence_about(option.path)
    return result.omit(option, why) if why else False


def _take_numbers(result: Translation, option: Option) -> bool:
    """Translate an option of Megatron-LM with several numbers, or one that counts otherwise."""
    parts = re.sub(r"[\[\](),]", " ", option.value).split()
    numbers = [int(word) for word in parts if word.isdecimal()]
    number = numbers[0] if numbers else 0
    match option.name:
        case name if name in tables.BOTH_BETAS and len(parts) == 2 and all(map(_is_number, parts)):
            return result.set(option, f"optim.betas=[{','.join(parts)}]")
        case "window_size" if len(numbers) == 2:
            return result.set(option, f"model.window={number + 1}")  # because: there the token itself is left out
        case "window_attn_skip_freq" if len(numbers) == 1 and number > 1:
            return result.set(option, f"model.layer_pattern={'w' * (number - 1)}f")
        case "no_rope_freq" if len(numbers) == 1 and number > 1:
            return result.set(option, f"model.layer_pattern={'f' * (number - 1)}F")
        case "rotary_seq_len_interpolation_factor":
            return result.set(option, f"model.rotary_scaling=linear model.rotary_factor={option.value}")
        case "rampup_batch_size" if len(parts) == 3:
            start, increment, samples = parts
            rampup = f"train.rampup={{start: {start}, increment: {increment}, samples: {samples}}}"
            return result.set(option, rampup, is_as_typed=True)
        case name if name in tables.VALID_SHARES and _is_number(option.value) and 0 < float(option.value) < 100:
            percent = float(option.value) * (100 if float(option.value) < 1 else 1)
            return result.set(option, f"data.split=[{100 - percent:g},{percent:g},0]")
        case "split" if parts:
            return result.set(option, f"data.split=[{','.join(parts)}]", is_as_typed=True)
        case "eval_iters" | "eval_samples" | "max_eval_steps" if option.value == "0":
            return result.set(option, "train.valid_interval_steps=0")
    return False


def _take_respelt(result: Translation, option: Option) -> bool:
    """Translate an option whose name is nearly one that the tables have, and of which no setting is the nearer one."""
    if result.names.suggest_overrides(option.path, option.value):
        return False
    known = difflib.get_close_matches(option.name, _table_names(), n=1, cutoff=0.85)
    if not known or known[0] == option.name:
        return False
    respelt = Option(option.unit, f"{option.path.removesuffix(option.name)}{known[0]}")
    result.all_names.add(respelt.name)
    return any(step(result, respelt) for step in _STEPS if step is not _take_respelt)


@cache
def _table_names() -> list[str]:
    """Return the names of other tools that are more than another name of a setting."""
    groups = (
        tables.SWITCHES, tables.CONVERSIONS, tables.BETAS, tables.EPOCHS, tables.VALID_SHARES, tables.OTHER_VERBS,
        UNSUPPORTED_SETTINGS,
    )  # fmt: skip
    return sorted({name for group in groups for name in group})


def _take_datasets(result: Translation, option: Option) -> bool:
    """Translate a list of datasets: pairs of weight and path, or paths, which are mixed in proportion to their sizes.
    """
    key = _KEY_OF.get(option.name, "")
    words = [word for value in option.values for word in re.split(r"[,\s]+", value.strip("[]() ")) if word]
    words = [word.strip("'\"") for word in words]
    if key not in ("data.path", "data.valid_path") or len(words) < 2:
        return False
    pairs = list(zip(words[1::2], words[::2], strict=False))
    is_weighted = len(words) % 2 == 0 and all(_is_number(weight) for _, weight in pairs)
    if is_weighted and len(pairs) == 1:
        return result.set(option, f"{key}={pairs[0][0]}")
    if not is_weighted and key == "data.valid_path":
        return result.set(option, f"data.valid_paths={named_values(words)}", is_as_typed=True)
    share = "weight: {}" if is_weighted else "epochs: 1"
    parts = ", ".join(f"{{path: {path}, {share.format(weight)}}}" for path, weight in (
        pairs if is_weighted else [(word, "") for word in words]
    ))  # fmt: skip
    result.settings["data"] = "blend"
    result.set(option, f"{key.removesuffix('path')}datasets=[{parts}]", is_as_typed=True)
    if not is_weighted:
        result.changed.append(f"{option.typed} is data=blend here, with all of each dataset, whatever their sizes.")
    return True


def _rename(result: Translation, option: Option) -> bool:
    """Translate an option whose value stays: to the key that it stands for or is spelled like."""
    value = _YAML.get(option.value, option.value)
    if key := tables.PATHS.get(option.path):
        found = result.names.suggest_overrides(key, value) if "." not in key else [f"{key}={value}"]
    elif option.name.startswith(("no_", "disable_")) and option.name not in _KEY_OF:
        return False  # because: a name that is nearly the same would say the opposite
    else:
        found = result.names.suggest_overrides(option.path, value)
    if not found:
        return False
    if found[0].endswith("=NAME"):
        group, choices = found[0].partition("=")[0], group_choices()[found[0].partition("=")[0]]
        known = f"`lmtrain config list {group}` shows" if len(choices) > MAX_LISTED else f"{', '.join(choices)} are"
        result.set(option, found[0], is_as_typed=True)
        result.changed.append(f"{option.typed}: There is no such {group} here; {known} the choices for {found[0]}.")
        return True
    key, _, new = found[0].partition("=")
    is_switch = not option.is_word and bool in union_members(types_by_key(RunConfig).get(key))
    if not option.value and not is_switch:
        result.refused.append(f"{option.typed}: It has no value. Give {key}=VALUE.")
        return True
    if key in tables.ZERO_IS_NULL and _is_number(new) and float(new) == 0:
        new = "null"
    result.set(option, f"{key}={new}", is_as_typed=True)
    if new != option.value:
        result.changed.append(f"{option.typed} is {key}={new} here.")
    elif len(found) > 1:
        result.changed.append(f"{option.typed} is {key}={new} here; it could also be {' or '.join(found[1:])}.")
    return True


def _take_idea(result: Translation, option: Option) -> bool:
    """Leave out an option that no table names, with what there is of the idea that the words of its name stand for."""
    why = idea_of(option.path)
    if why and not option.is_word and result.has_option(f"--{option.path.replace('_', '-')}"):
        return False  # because: it is an option of another command of lmtrain
    if why and option.value.lower() in ("false", "no", "off", "none"):
        return result.omit(option, "It is off here as well.")
    return result.omit(option, why) if why else False


def _is_number(text: str) -> bool:
    with suppress(ValueError):
        return math.isfinite(float(text))
    return False


_STEPS: tuple[Callable[[Translation, Option], bool], ...] = (
    _take_misspelt_group, _take_variable, _take_processes, _take_numbers, _take_value, _take_other_verb, _take_switch,
    _leave_for_later, _take_reason, _take_datasets, _take_respelt, _rename, _take_idea,
)  # fmt: skip
