"""A command line of another tool, as one types it here: its options become settings, or it is said that there is none.

Called by main, where an option is none of a verb's. What other tools call a setting stands in config/setting_names.py;
here is how their values are written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmtrain.config.compose import group_choices
from lmtrain.config.overrides import shell_quoted
from lmtrain.config.setting_names import FOREIGN_NAMES, UNSUPPORTED_SETTINGS, SettingNames
from lmtrain.errors import shorten
from lmtrain.runtime.processes.process import ProcessEnv
from lmtrain.train.config import RunConfig

PROCESSES = ("num_processes", "num_gpus", "gpus", "devices", "n_gpus", "nproc_per_node", "ngpu")
_SWITCHES = {
    "swiglu": "model.activation=swiglu", "disable_bias_linear": "model.bias=false",
    "untie_embeddings_and_output_weights": "model.tied=false",
    "use_rotary_position_embeddings": "model.positions=rotary",
    "use_distributed_optimizer": "parallel.zero=1", "recompute_activations": "recompute=attention",
    "gradient_checkpointing": "recompute=full", "checkpoint_activations": "recompute=full",
    "use_cpu": "compute.device=cpu", "no_cuda": "compute.device=cpu", "cpu": "compute.device=cpu",
}  # fmt: skip
# what is a number of another unit: the setting, and what to multiply with or to divide by
_UNITS = {
    "min_lr": ("schedule.min_ratio", "/", "optim.lr"), "warmup_ratio": ("schedule.warmup_steps", "*", "train.steps"),
    "lr_warmup_fraction": ("schedule.warmup_steps", "*", "train.steps"),
    "train_samples": ("train.steps", "/", "train.global_batch"),
    "lr_warmup_samples": ("schedule.warmup_steps", "/", "train.global_batch"),
    "eval_iters": ("train.valid_samples", "*", "train.global_batch"),
    "gradient_accumulation_steps": ("train.global_batch", "*", "train.micro_batch"),
}  # fmt: skip
_WIDTH = 70
_BETAS = {"adam_beta1": 0, "adam_beta2": 1, "beta1": 0, "beta2": 1}
_OFF = {"decay_lr": "schedule=constant"}  # what it means that these are off; that they are on is the rule here
_FALSE, _TRUE = ("false", "0", "no", "none"), ("true", "1", "yes")


@dataclass
class Translated:
    """The options of a foreign line: what they are here, those that are nothing here, and those that nobody knows."""

    settings: dict[str, str] = field(default_factory=dict)
    processes: str = ""
    notes: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


def translated(options: Mapping[str, Sequence[str]]) -> Translated:
    """Return what options mean here; they come with their dashes and values, as they were typed."""
    found, later, betas = Translated(), list[tuple[str, str, str]](), ["0.9", "0.95"]
    groups = group_choices()
    names = SettingNames(RunConfig, groups)
    for option, values in options.items():
        name, value = option.lstrip("-").lower().replace("-", "_"), " ".join(values)
        last = name.rpartition(".")[2]
        if last in PROCESSES:
            found.processes = value
        elif last in _BETAS:
            betas[_BETAS[last]] = value
            found.settings["optim.betas"] = f"[{','.join(betas)}]"
        elif last in _UNITS:
            later.append((option, last, value))
        elif last in UNSUPPORTED_SETTINGS:
            found.notes.append(f"{option}: {UNSUPPORTED_SETTINGS[last]}")
        elif last in _OFF and value.lower() in _FALSE:
            _put(found, _OFF[last])
        elif last in _OFF or (values and value.lower() in _FALSE and _switch(last, groups)):
            continue  # because: what is switched off there is not on here
        elif word := (value.lower() in ("", *_TRUE) and _switch(last, groups)) or _of_several(last, values):
            _put(found, word)
        elif meant := names.suggest_overrides(name, _ours(value)):
            _put(found, meant[0])
        else:
            found.unknown.append(option)
    # because: the batch decides other numbers
    for option, last, value in sorted(later, key=lambda one: _UNITS[one[1]][0] != "train.global_batch"):
        key, sign, other = _UNITS[last]
        # because: what nanoGPT writes so counts batches of an accumulation, and Megatron's --eval-iters those of a step
        other = "train.micro_batch" if option == "--eval_iters" and "train.micro_batch" in found.settings else other
        _put_in_our_unit(found, option, value, key, sign, other)
    if found.settings.get("checkpoint.resume") == found.settings.get("run.dir"):
        found.settings.pop("checkpoint.resume", None)  # because: a run goes on with its own checkpoints by itself
    if found.settings.get("schedule") == "constant":
        found.settings.pop("schedule.min_ratio", None)
    return found


def whole_line(command: str, error: Any, words: Sequence[str]) -> str | None:
    """Return the message about a line with several foreign options; None if there is only one."""
    own = {name: one for one in error.ctx.command.params for name in (*one.opts, *one.secondary_opts)}
    verb, kept, options, scripts = command.split()[1:], list[str](), dict[str, list[str]](), list[str]()
    rest = list(words[len(verb) :])
    while rest:
        option, sign, value = rest.pop(0).partition("=")
        takes = [value] if sign else []
        known = own.get(option) if option.startswith("-") else None
        while option.startswith("-") and not sign and rest and not _is_key(rest[0]):
            if known is not None and (takes or getattr(known, "is_flag", False)):
                break
            takes.append(rest.pop(0))
        if known is not None:
            kept += [option, *takes]
        elif option.startswith("--"):
            options[option] = takes
        elif option.endswith(".py") and not sign:
            scripts.append(option)
        else:
            kept.append(f"{option}{sign}{value}")
    if len(options) < 2:
        return None
    found = translated(options)
    found.notes += [f"{script}: Settings are no program here; give those in it as words." for script in scripts]
    settings = [f"{key}={value}" for key, value in found.settings.items()]
    count = found.processes or (_of_layout(found.settings) if ProcessEnv.detect().world_size == 1 else "")
    processes = ["--nproc", count] if count and "--nproc" in own and "--nproc" not in kept else []
    if found.processes and "--nproc" not in own:
        count = found.processes
        found.notes.append(f"{count} processes are what the layout makes: parallel.dp_shard={count}.")
    line = _in_lines([*command.split(), *kept, *settings, *processes])
    unknown = [f"{option} is nothing that is known here." for option in found.unknown]
    notes = "".join(f"\n  {note}" for note in [*found.notes, *unknown])
    listed = shorten(", ".join(options))
    return (
        f"{listed} are not options of {command}, whose settings are words without dashes."
        + (f" Left out:{notes}\n" if notes else " ")
        + f"Type:\n  {line}"
    )


def _of_layout(settings: Mapping[str, str]) -> str:
    """Return the number of processes that a layout takes; nothing for one, or where a size is no number."""
    sizes = [settings.get(f"parallel.{axis}", "1") for axis in ("tp", "pp", "dp_replicate", "dp_shard")]
    count = math.prod(int(size) if size.isdecimal() else 0 for size in sizes)
    return str(count) if count > 1 else ""


def _in_lines(words: Sequence[str]) -> str:
    """Words as one pastes them into a shell, in lines that go on where they end in a backslash."""
    lines = [""]
    for word in map(shell_quoted, words):
        if len(lines[-1]) + len(word) > _WIDTH and lines[-1]:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return " \\\n    ".join(lines)


def _is_key(word: str) -> bool:
    """Return whether a word begins an option or a setting; a negative number is a value."""
    return (word.startswith("-") and not word[1:2].isdigit()) or "=" in word


def _ours(value: str) -> str:
    """Return a value as YAML writes it; a switch without one is on."""
    return {"": "true", "True": "true", "False": "false", "None": "null"}.get(value, value)


def _switch(name: str, groups: Mapping[str, Sequence[str]]) -> str:
    chosen = (f"{group}={name}" for group, choices in groups.items() if name in choices)
    return _SWITCHES.get(name) or next(chosen, "")


def _of_several(name: str, values: Sequence[str]) -> str:
    """Values that are one setting together."""
    if name == "rampup_batch_size" and len(values) == 3:
        return "train.rampup={{start: {}, increment: {}, samples: {}}}".format(*values)
    if name == "split" and values:
        return f"data.split=[{','.join(values)}]"
    if values and len(values) % 2 == 0 and name in FOREIGN_NAMES["data.path"].split():
        pairs = zip(values[::2], values[1::2], strict=True)
        return f"data.datasets=[{', '.join(f'{{path: {path}, weight: {weight}}}' for weight, path in pairs)}]"
    return ""


def _put(found: Translated, word: str) -> None:
    key, _, value = word.partition("=")
    if key == "data.datasets":
        found.settings["data"] = "blend"
    found.settings[key] = value


def _put_in_our_unit(found: Translated, option: str, value: str, key: str, sign: str, other: str) -> None:
    """Convert a number of another unit by a value that the line holds; add a note if the line has none."""
    if key == "train.global_batch" and key in found.settings:
        found.settings.setdefault(other, found.settings[key])  # because: nanoGPT's batch is one of several in an update
    try:
        by, number = float(found.settings[other]), float(value)
        product = number * by if sign == "*" else number / by
        if key == "train.global_batch":
            product *= float(found.processes or 1)
        whole = str(max(1, round(product)))
    except (KeyError, ValueError, ZeroDivisionError, OverflowError):
        how = "times" if sign == "*" else "divided by"
        found.notes.append(f"{option} is {key} here, which is its value {how} {other}.")
        return
    found.settings[key] = f"{product:.6g}" if key == "schedule.min_ratio" else whole
