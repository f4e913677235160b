"""Translate a command line of another tool (Megatron-LM, nanoGPT, ...) to settings, for the error message about it.

Called by main if a verb does not have an option. Other tools' names of settings are in config/name_suggestions.py; this
module converts their values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmtrain.cli.settings_keys.apply_advice import shell_lines
from lmtrain.config.compose_run_settings import group_choices
from lmtrain.config.name_suggestions import FOREIGN_NAMES, UNSUPPORTED_SETTINGS, SettingNames
from lmtrain.errors import shorten
from lmtrain.runtime.processes.process_environment import ProcessEnv
from lmtrain.train.run_config import RunConfig

PROCESS_COUNT_NAMES = ("num_processes", "num_gpus", "gpus", "devices", "n_gpus", "nproc_per_node", "ngpu")
_SWITCHES = {
    "swiglu": "model.activation=silu model.gated=true", "squared_relu": "model.activation=relu2",
    "disable_bias_linear": "model.bias=none", "add_qkv_bias": "model.bias=all",
    "untie_embeddings_and_output_weights": "model.tied=false",
    "use_rotary_position_embeddings": "model.positions=rotary",
    "qk_layernorm": "model.qk_norm=head", "use_qk_norm": "model.qk_norm=head",
    "apply_layernorm_1p": "model.norm_weight=from_zero", "use_parallel_residual": "model.parallel_block=two_norms",
    "use_rope_scaling": "model.rotary_scaling=llama3 model.rotary_factor=8 model.rotary_original_len=8192",
    "use_distributed_optimizer": "parallel.zero=1", "recompute_activations": "recompute=attention",
    "gradient_checkpointing": "recompute=full", "checkpoint_activations": "recompute=full",
    "use_cpu": "compute.device=cpu", "no_cuda": "compute.device=cpu", "cpu": "compute.device=cpu",
}  # fmt: skip
_POSITIONS = {
    "yarn": "model.positions=rotary model.rotary_scaling=yarn", "none": "model.positions=rotary model.layer_pattern=F"
}  # fmt: skip
# options in another unit: the setting, and the setting to multiply with or to divide by
_CONVERSIONS = {
    "min_lr": ("schedule.min_ratio", "/", "optim.lr"), "warmup_ratio": ("schedule.warmup_steps", "*", "train.steps"),
    "lr_warmup_fraction": ("schedule.warmup_steps", "*", "train.steps"),
    "train_samples": ("train.steps", "/", "train.global_batch"),
    "lr_warmup_samples": ("schedule.warmup_steps", "/", "train.global_batch"),
    "eval_iters": ("train.valid_samples", "*", "train.global_batch"),
    "gradient_accumulation_steps": ("train.global_batch", "*", "train.micro_batch"),
}  # fmt: skip
_BETAS = {"adam_beta1": 0, "adam_beta2": 1, "beta1": 0, "beta2": 1}
_OFF_SWITCHES = {"decay_lr": "schedule=constant"}  # overrides for options that are off; on is the default here
_FALSE, _TRUE = ("false", "0", "no", "none"), ("true", "1", "yes")


@dataclass
class Translation:
    """Another tool's options in terms of lmtrain: settings, number of processes, notes, and options that are unknown.
    """

    settings: dict[str, str] = field(default_factory=dict)
    processes: str = ""
    notes: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


def translate_options(options: Mapping[str, Sequence[str]]) -> Translation:
    """Translate another tool's command-line options (Megatron-LM, nanoGPT, ...) to settings of lmtrain. `options` maps
    each option, such as "--train-iters", to its values as typed. Options without a counterpart are listed in the
    result's `notes` or `unknown`.
    """
    result, to_convert, betas = Translation(), list[tuple[str, str, str]](), ["0.9", "0.95"]
    groups = group_choices()
    names = SettingNames(RunConfig, groups)
    for option, values in options.items():
        name, value = option.lstrip("-").lower().replace("-", "_"), " ".join(values)
        last = name.rpartition(".")[2]
        if last in PROCESS_COUNT_NAMES:
            result.processes = value
        elif last in _BETAS:
            betas[_BETAS[last]] = value
            result.settings["optim.betas"] = f"[{','.join(betas)}]"
        elif last in _CONVERSIONS:
            to_convert.append((option, last, value))
        elif last in UNSUPPORTED_SETTINGS:
            result.notes.append(f"{option}: {UNSUPPORTED_SETTINGS[last]}")
        elif last in _OFF_SWITCHES and value.lower() in _FALSE:
            _add_override(result, _OFF_SWITCHES[last])
        elif last in _OFF_SWITCHES or (value.lower() in _FALSE and _switch_override(last, groups)):
            continue  # because: a feature that is off there is off here by default
        elif override := (
            (_switch_override(last, groups) if value.lower() in ("", *_TRUE) else "")
            or _decoder_overrides(last, values)
        ):
            _add_overrides(result, override)
        elif override := _combined_override(last, values):
            _add_override(result, override)
        elif overrides := names.suggest_overrides(name, _to_yaml(value)):
            _add_override(result, overrides[0])
        else:
            result.unknown.append(option)
    # because: other conversions depend on train.global_batch, so it comes first
    for option, last, value in sorted(to_convert, key=lambda item: _CONVERSIONS[item[1]][0] != "train.global_batch"):
        key, operator, factor_key = _CONVERSIONS[last]
        # because: nanoGPT's --eval_iters counts micro-batches, and Megatron's --eval-iters batches
        if option == "--eval_iters" and "train.micro_batch" in result.settings:
            factor_key = "train.micro_batch"
        _add_converted(result, option, value, key, operator, factor_key)
    if {"add_qkv_bias", "disable_bias_linear"} <= {option.lstrip("-").replace("-", "_") for option in options}:
        result.settings["model.bias"] = "qkv"  # because: each of the two alone says another value
    if result.settings.get("checkpoint.resume") == result.settings.get("run.dir"):
        result.settings.pop("checkpoint.resume", None)  # because: a run resumes from its own checkpoints by default
    if result.settings.get("schedule") == "constant":
        result.settings.pop("schedule.min_ratio", None)
    return result


def foreign_line_message(command: str, error: Any, argv: Sequence[str]) -> str | None:
    """Return the error message for a command line `argv` with another tool's options: the lmtrain command to type
    instead, and the options without a counterpart. Return None if fewer than two options are foreign. `command` is the
    full name, such as "lmtrain pretrain", and `error` the error of click.
    """
    own_options = {name: param for param in error.ctx.command.params for name in (*param.opts, *param.secondary_opts)}
    verb, kept_words, options, scripts = command.split()[1:], list[str](), dict[str, list[str]](), list[str]()
    remaining = list(argv[len(verb) :])
    while remaining:
        option, sign, value = remaining.pop(0).partition("=")
        values = [value] if sign else []
        own_option = own_options.get(option) if option.startswith("-") else None
        while option.startswith("-") and not sign and remaining and not _begins_option_or_setting(remaining[0]):
            if own_option is not None and (values or getattr(own_option, "is_flag", False)):
                break
            values.append(remaining.pop(0))
        if own_option is not None:
            kept_words += [option, *values]
        elif option.startswith("--"):
            options[option] = values
        elif option.endswith(".py") and not sign:
            scripts.append(option)
        else:
            kept_words.append(f"{option}{sign}{value}")
    if len(options) < 2:
        return None
    translation = translate_options(options)
    translation.notes += [
        f"{script}: lmtrain reads no settings from a program; give them as KEY=VALUE." for script in scripts
    ]
    settings = [f"{key}={value}" for key, value in translation.settings.items()]
    count = translation.processes
    if not count and ProcessEnv.detect().world_size == 1:
        count = _layout_process_count(translation.settings)
    processes = ["--nproc", count] if count and "--nproc" in own_options and "--nproc" not in kept_words else []
    if translation.processes and "--nproc" not in own_options:
        translation.notes.append(f"{count} processes follow from the layout: parallel.dp_shard={count}.")
    line = shell_lines([*command.split()[1:], *kept_words, *settings, *processes])
    unknown = [f"{option} has no counterpart that lmtrain knows." for option in translation.unknown]
    notes = "".join(f"\n  {note}" for note in [*translation.notes, *unknown])
    return (
        f"{shorten(', '.join(options))} are not options of {command}, whose settings are words without dashes."
        + (f" Left out:{notes}\n" if notes else " ")
        + f"Type:\n  {line}"
    )


def _layout_process_count(settings: Mapping[str, str]) -> str:
    """Return, as text, the product of parallel.tp, pp, dp_replicate and dp_shard in these settings (1 where not set):
    the number of processes. Return "" if it is 1, or if a size is not a whole number.
    """
    sizes = [settings.get(f"parallel.{axis}", "1") for axis in ("tp", "pp", "dp_replicate", "dp_shard")]
    count = math.prod(int(size) if size.isdecimal() else 0 for size in sizes)
    return str(count) if count > 1 else ""


def _begins_option_or_setting(word: str) -> bool:
    """Return True if a word is an option or a setting, not a value; a negative number is a value."""
    return (word.startswith("-") and not word[1:2].isdigit()) or "=" in word


def _to_yaml(value: str) -> str:
    """Return a value in YAML's spelling; a switch without a value is `true`."""
    return {"": "true", "True": "true", "False": "false", "None": "null"}.get(value, value)


def _switch_override(name: str, groups: Mapping[str, Sequence[str]]) -> str:
    """Return the overrides, with a blank between two, for an option that is a switch, such as "swiglu", or the name of
    a choice of a group; empty for others.
    """
    return _SWITCHES.get(name) or next((f"{group}={name}" for group, choices in groups.items() if name in choices), "")


def _decoder_overrides(name: str, values: Sequence[str]) -> str:
    """Return the lmtrain overrides, separated by blanks, for a Megatron-LM option whose value has to be converted, such
    as window_size. `name` is the option in snake case, `values` are its words. Return "" for an option or value that
    this function does not know.
    """
    value = " ".join(values)
    if name == "position_embedding_type":
        return _POSITIONS.get(value, "")
    numbers = [int(word) for word in value.strip("()").replace(",", " ").split() if word.isdecimal()]
    number = numbers[0] if numbers else 0
    match name:
        case "window_size" if len(numbers) == 2:
            return f"model.window={number + 1}"  # because: Megatron-LM's number leaves the token itself out
        case "window_attn_skip_freq" if len(numbers) == 1 and number > 1:
            return f"model.layer_pattern={'w' * (number - 1)}f"
        case "no_rope_freq" if len(numbers) == 1 and number > 1:
            return f"model.layer_pattern={'f' * (number - 1)}F"
        case "rotary_seq_len_interpolation_factor":
            return f"model.rotary_scaling=linear model.rotary_factor={value}"
    return ""


def _combined_override(name: str, values: Sequence[str]) -> str:
    """Return the one override for another tool's option that takes several values, such as `--split 98 1 1`. `name` is
    the option in snake case, `values` are its words. Return "" for all other options.
    """
    if name == "rampup_batch_size" and len(values) == 3:
        return "train.rampup={{start: {}, increment: {}, samples: {}}}".format(*values)
    if name == "split" and values:
        return f"data.split=[{','.join(values)}]"
    if values and len(values) % 2 == 0 and name in FOREIGN_NAMES["data.path"].split():
        pairs = zip(values[::2], values[1::2], strict=True)
        return f"data.datasets=[{', '.join(f'{{path: {path}, weight: {weight}}}' for weight, path in pairs)}]"
    return ""


def _add_overrides(result: Translation, overrides: str) -> None:
    """Add `overrides`, KEY=VALUE words separated by blanks, to `result.settings`. The first one replaces an earlier
    value of its key; the others are added only if their key has no value yet.

    because: the others are an option's defaults, which an option of its own may have set before
    """
    first, *others = overrides.split()
    _add_override(result, first)
    for override in others:
        if override.partition("=")[0] not in result.settings:
            _add_override(result, override)


def _add_override(result: Translation, override: str) -> None:
    """Add one override KEY=VALUE to `result.settings`, replacing an earlier value. The key `data.datasets` also sets
    `data` to "blend", the kind of data that reads several datasets.
    """
    key, _, value = override.partition("=")
    if key == "data.datasets":
        result.settings["data"] = "blend"
    result.settings[key] = value


def _add_converted(result: Translation, option: str, value: str, key: str, operator: str, factor_key: str) -> None:
    """Set `key` in `result.settings` to a converted value: `value` times (`operator` "*") or divided by ("/") the
    setting `factor_key`. If `result.settings` lacks that setting, or one of them is not a number, add a sentence about
    `option` to `result.notes` instead.
    """
    if key == "train.global_batch" and key in result.settings:
        # because: nanoGPT's batch is a micro-batch
        result.settings.setdefault(factor_key, result.settings[key])
    try:
        factor, number = float(result.settings[factor_key]), float(value)
        product = number * factor if operator == "*" else number / factor
        if key == "train.global_batch":
            product *= float(result.processes or 1)
        rounded = str(max(1, round(product)))
    except (KeyError, ValueError, ZeroDivisionError, OverflowError):
        operation = "times" if operator == "*" else "divided by"
        result.notes.append(f"{option} is {key} here, which is its value {operation} {factor_key}.")
        return
    result.settings[key] = f"{product:.6g}" if key == "schedule.min_ratio" else rounded
