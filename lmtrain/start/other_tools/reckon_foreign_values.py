"""Reckon the settings that follow from several of another tool's options together, such as betas, batches and stages.

Called by translate_foreign_flags when all options that stand by themselves are translated.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lmtrain.config.compose_run_settings import group_choices
from lmtrain.config.foreign_names import FOREIGN_NAMES, UNSUPPORTED_SETTINGS
from lmtrain.config.parse_and_apply_overrides import override_key
from lmtrain.runfolder.file_names import CHECKPOINTS, CONFIG, step_folder_name
from lmtrain.start.other_tools import foreign_options as tables
from lmtrain.start.other_tools.foreign_translation import Option, Translation
from lmtrain.start.other_tools.steps_of_epochs import count_epoch


def reckon(result: Translation) -> None:
    """Translate the options that were put aside, then settle what contradicts or repeats itself."""
    for names, step in _STEPS:
        if options := [option for option in result.later if option.path in names or option.name in names]:
            step(result, options)
    _share_processes(result)
    # because: a conversion depends on train.global_batch, and that on the size of a micro-batch
    converted = [option for option in result.later if _conversion(option) is not None]
    targets = {option: key for option in converted if (found := _conversion(option)) and (key := found[0])}
    batches = [option for option in converted if targets[option] in ("train.micro_batch", "train.global_batch")]
    for option in sorted(batches, key=lambda option: targets[option] == "train.global_batch"):
        _convert(result, option)
    if "train.global_batch" not in targets.values():
        _add_global_batch(result)
    lengths = [option for option in converted if targets[option] == "train.steps"]
    for option in lengths:
        _convert(result, option)
    if epochs := [option for option in result.later if option.name in tables.EPOCHS]:
        _set_epochs(result, epochs)
    for option in result.later:
        if option.name in tables.STRATEGIES:
            _set_interval_of_epoch(result, option, tables.STRATEGIES[option.name])
        elif option.name in tables.TIMES_AN_EPOCH:
            times = max(_number_of(option), 1e-9)
            _set_interval_of_epoch(result, option, tables.TIMES_AN_EPOCH[option.name], 1 / times)
        elif option.name in tables.EPOCHS_BETWEEN:
            _set_interval_of_epoch(result, option, tables.EPOCHS_BETWEEN[option.name], _number_of(option))
    for option in converted:
        if option not in (*batches, *lengths):
            _convert(result, option)
    for option in result.later:
        if option.name == "exit_interval":
            _stop_between(result, option)
    _settle(result)


def _conversion(option: Option) -> tuple[str, str, str] | None:
    """Return the key that an option is in another unit, the operator and the factor; None for other options."""
    if found := option.within(tables.CONVERSIONS):
        return found
    key = next((key for key in tables.SHARES_OF_STEPS if option.name in FOREIGN_NAMES.get(key, "").split()), None)
    key = key or next((key for key in tables.SHARES_OF_STEPS if key.endswith(f".{option.name}")), None)
    return (key, "x", "train.steps") if key else None


def _convert(result: Translation, option: Option) -> None:
    """Set the key that an option is in another unit: its value times or divided by another setting's."""
    found = _conversion(option)
    assert found is not None
    key, operator, factor_key = found
    # because: nanoGPT's eval_iters counts micro-batches, and Megatron's batches
    is_nanogpt = option.name == "eval_iters" and "batch_size" in result.all_names
    if is_nanogpt and "train.micro_batch" in result.settings:
        factor_key = "train.micro_batch"
    if key == "train.global_batch" and key in result.settings and factor_key not in result.settings:
        # because: nanoGPT's batch is a micro-batch
        result.settings[factor_key] = result.settings[key]
        result.origins.pop(key, None)
    processes = result.processes if key == "train.global_batch" else ""
    try:
        factor = float(factor_key if factor_key.isdecimal() else str(result.value_of(factor_key)))
        product = float(option.value) * factor if operator == "x" else float(option.value) / factor
        product *= float(processes or 1)
        is_share = key in ("schedule.min_ratio", "schedule.decay_fraction")
        rounded = f"{product:.6g}" if is_share else str(max(int(product > 0), round(product)))
    except (ValueError, ZeroDivisionError, OverflowError):
        operation = "times" if operator == "x" else "divided by"
        result.omit(option, f"It is {key} here, which is its value {operation} {factor_key}.")
        return
    result.set(option, f"{key}={rounded}")
    reckoning = f"{option.value} {operator} {factor_key}" + (f" x {processes} processes" if processes else "")
    result.changed[-1] = f"{result.changed[-1].removesuffix('.')}, {reckoning}."


def _share_processes(result: Translation) -> None:
    """Let the processes that the layout does not use share the work on other samples."""
    if result.counts_as and result.counted_by is not None:
        result.set(result.counted_by, f"{result.counts_as}={result.processes}")
        return
    if result.counted_by is None or any("parallel.dp_" in word for word in (*result.settings, *result.typed_settings)):
        return
    with suppress(ValueError, ZeroDivisionError):
        copies, rest = divmod(int(result.processes), math.prod(
            int(str(result.value_of(f"parallel.{axis}"))) for axis in ("tp", "pp", "dp_replicate", "dp_shard")
        ))  # fmt: skip
        if copies > 1 and not rest:
            result.settings["parallel.dp_shard"] = str(copies)
            result.changed.append(f"{result.counted_by.typed} is parallel.dp_shard={copies} here.")


def _add_global_batch(result: Translation) -> None:
    """Set train.global_batch if only the size of a micro-batch is given: each copy of the model reads one, as there."""
    option = result.origins.get("train.micro_batch")
    typed = {override_key(word) for word in result.typed_settings}
    if option is None or option.name not in tables.MICRO_BATCHES or "train.global_batch" in {*result.settings, *typed}:
        return
    with suppress(ValueError, ZeroDivisionError):
        size, tp, pp = (int(str(result.value_of(k))) for k in ("train.micro_batch", "parallel.tp", "parallel.pp"))
        layout = math.prod(int(str(result.value_of(f"parallel.dp_{axis}"))) for axis in ("replicate", "shard"))
        copies = max(layout, int(result.processes or 1) // (tp * pp), 1)
        result.settings["train.global_batch"] = str(size * copies)
        note = f" on {copies} copies of the model" if copies > 1 else ""
        result.changed.append(f"{option.typed} is train.global_batch={size * copies} too, one micro-batch{note}.")


def _set_betas(result: Translation, options: list[Option]) -> None:
    """Set both betas of Adam from options for one of them."""
    betas = ["0.9", "0.95"]
    for option in options:
        betas[tables.BETAS[option.name]] = option.value
    result.settings["optim.betas"] = f"[{','.join(betas)}]"
    if len(options) < len(betas):
        result.changed.append(f"{options[0].typed} is optim.betas=[{','.join(betas)}] here.")


def _set_positions(result: Translation, options: list[Option]) -> None:
    """Set the number of learned positions, if it is not the length of a sequence; rotary positions have no number."""
    *_, option = options
    typed = {override_key(word): word.partition("=")[2] for word in result.typed_settings}
    length = result.settings.get("model.seq_len") or typed.get("model.seq_len")
    if length is None:
        result.set(option, f"model.seq_len={option.value}")
    elif option.value == length:
        result.omit(option, f"It is model.seq_len={length}.")
    elif result.value_of("model.positions") == "learned":
        result.set(option, f"model.num_positions={option.value}")
    else:
        result.omit(option, "Rotary positions have no greatest number.")


def _set_virtual_stages(result: Translation, options: list[Option]) -> None:
    """Set parallel.vp, from the number of stages of a process or from the layers of each stage."""
    *_, option = options
    try:
        count = int(option.value)
        if option.name in tables.LAYERS_PER_STAGE:
            layers, pp = (int(str(result.value_of(key))) for key in ("model.num_layers", "parallel.pp"))
            count, rest = divmod(layers, pp * count)
            if rest or not count:
                raise ValueError
    except (ValueError, ZeroDivisionError):
        result.omit(option, "It is parallel.vp here: model.num_layers / parallel.pp / the layers of a stage.")
        return
    if count == 1:
        result.omit(option, "parallel.vp is 1 by default.")
        return
    result.set(option, f"parallel.vp={count} parallel.schedule=interleaved")


def _set_model(result: Translation, options: list[Option]) -> None:
    """Choose the model of torchtitan's --model.name and --model.flavor, whose default is Llama 3."""
    parts = {option.path: option.value.lower() for option in options}
    family, flavor = parts.get("model.name", "llama3"), parts.get("model.flavor", parts.get("flavor", ""))
    choice = f"{family}_{flavor}"
    if family == "llama3" and flavor == "debugmodel":
        choice = "llama_tiny"
    if choice not in group_choices()["model"]:
        typed = " ".join(option.typed for option in options)
        result.settings["model"] = "NAME"
        result.changed.append(f"{typed}: `lmtrain config list model` shows the choices for model=NAME.")
        return
    result.settings["model"] = choice
    result.changed.append(f"{' '.join(option.typed for option in options)} is model={choice} here.")


def _set_duration(result: Translation, options: list[Option]) -> None:
    """Set the length of a run from OLMo's two options for it."""
    parts = {option.name: option for option in options}
    unit, number = parts["unit"].value if "unit" in parts else "steps", parts.get("value")
    if number is None or unit not in ("steps", "tokens"):
        for option in options:
            result.omit(option, UNSUPPORTED_SETTINGS["num_train_epochs"])
        return
    result.set(number, f"train.{unit}={number.value}")


def _set_profile(result: Translation, options: list[Option]) -> None:
    """Set the first and last step to profile, of which other tools give the last as the one after it."""
    steps = {option.name == "profile_step_start": option for option in options}
    try:
        first = int(steps[True].value) if True in steps else 10
        last = int(steps[False].value) - 1 if False in steps else first + 1
    except ValueError:
        for option in options:
            result.omit(option, "It is observe.profile_steps=[FIRST,LAST] here.")
        return
    for option in options:
        result.origins["observe.profile_steps"] = option
    result.settings["observe.profile_steps"] = f"[{first},{last}]"
    typed = " ".join(option.typed for option in options)
    result.changed.append(f"{typed} is observe.profile_steps=[{first},{last}] here.")


def _finetune(result: Translation, options: list[Option]) -> None:
    """Let a run begin with the weights of --load, instead of going on from it."""
    *_, option = options
    if option.is_off:
        result.omit(option, "It is off here as well.")
    elif source := result.settings.pop("checkpoint.resume", None):
        load = result.origins.pop("checkpoint.resume")
        result.settings["checkpoint.init_from"] = source
        result.changed.append(f"{load.typed} {option.typed} is checkpoint.init_from={source} here.")
    else:
        result.omit(option, "checkpoint.init_from=PATH begins with the weights of a checkpoint.")


def _load_step(result: Translation, options: list[Option]) -> None:
    """Let a run begin at a step of the run that --load or --from-run names, in a folder of its own."""
    *_, option = options
    run = result.settings.get("checkpoint.resume") or result.from_run
    if result.from_run is None or not run or not option.value.isdecimal():
        result.omit(option, "--from-run RUN/checkpoints/step_NNNNNNNN goes on from the checkpoint of a step.")
        return
    run = run.rstrip("/").removesuffix(f"/{CHECKPOINTS}")
    result.settings.pop("checkpoint.resume", None)
    load = result.origins.pop("checkpoint.resume", None)
    _begin_from(result, run, f"{run}/{CHECKPOINTS}/{step_folder_name(int(option.value))}", option, load)
    if result.value_of("run.dir") in (run, None) or "run.dir" not in {
        *result.settings, *map(override_key, result.typed_settings)
    }:  # fmt: skip
        result.settings["run.dir"] = f"{run}-from-{option.value}"
        result.changed.append(f"run.dir={result.settings['run.dir']} keeps the later checkpoints of {run}.")


def _begin_from(result: Translation, run: str, source: str, *options: Option | None) -> None:
    """Let a run begin from the run or checkpoint `source` with its settings."""
    result.options = ["--from-run", source]
    typed = " ".join(option.typed for option in options[::-1] if option is not None)
    result.changed.append(f"{typed} is --from-run {source} here, with the settings of {run}.")


def _set_epochs(result: Translation, options: list[Option]) -> None:
    """Set the steps of so many epochs, if the dataset is there to count them and no number of steps is given."""
    *_, option = options
    typed = {override_key(word) for word in result.typed_settings}
    if given := {"train.steps", "train.tokens"} & {*result.settings, *typed}:
        result.omit(option, f"{min(given)} is given.")
        return
    words = [*result.typed_settings, *(f"{key}={value}" for key, value in result.settings.items())]
    counted = None if result.from_run else count_epoch(words)
    with suppress(ValueError):
        if counted and math.isfinite(float(option.value)) and float(option.value) > 0:
            samples, batch, is_estimate = counted
            steps = math.ceil(float(option.value) * samples / batch)
            result.set(option, f"train.steps={steps}")
            about = "about " if is_estimate else ""
            reckoning = f"{option.value} x {about}{samples} samples / train.global_batch={batch}"
            result.changed[-1] = f"{result.changed[-1].removesuffix('.')}, {reckoning}."
            return
    result.omit(option, UNSUPPORTED_SETTINGS["num_train_epochs"])


def _stop_between(result: Translation, option: Option) -> None:
    """Let a run stop at a step before its end, whose learning rates stay: two stages, with a stop after the first."""
    has_others = result.from_run or any(override_key(word).startswith("stages.") for word in result.typed_settings)
    try:
        first, total = int(option.value), int(str(result.value_of("train.steps")))
    except ValueError:
        first, total = 0, 0
    if has_others or not 0 < first < total:
        why = f"The run ends at train.steps={total}." if 0 < total <= first else UNSUPPORTED_SETTINGS["exit_interval"]
        result.omit(option, why)
        return
    result.settings.pop("train.steps", None)
    length = result.origins.pop("train.steps", None)
    stages = {"first.steps": first, "first.stop_after": "true", "rest.steps": total - first}
    result.settings |= {f"stages.{key}": str(value) for key, value in stages.items()}
    typed = f"{length.typed} {option.typed}" if length else option.typed
    result.changed.append(
        f"{typed} is a stop between two stages here, of train.steps={total} together, over which the learning rate "
        "falls; the same command goes on after it."
    )


def _number_of(option: Option) -> float:
    """Return the number that an option gives; 1 for a switch."""
    with suppress(ValueError):
        return float(option.value)
    return 1.0


def _set_interval_of_epoch(result: Translation, option: Option, key: str, epochs: float = 1.0) -> None:
    """Set the interval `key` to the steps of so many epochs, if the dataset is there to count them."""
    words = [*result.typed_settings, *(f"{key}={value}" for key, value in result.settings.items())]
    if counted := None if result.from_run else count_epoch(words):
        samples, batch, is_estimate = counted
        about = "about " if is_estimate else ""
        result.set(option, f"{key}={math.ceil(epochs * samples / batch)}")
        of_epochs = "an epoch" if epochs == 1 else f"{epochs:g} epochs"
        result.changed[-1] = f"{result.changed[-1].removesuffix('.')}, {about}the steps of {of_epochs}."
    else:
        result.omit(option, UNSUPPORTED_SETTINGS["save_strategy"])


def _settle(result: Translation) -> None:
    """Change what contradicts or repeats itself in the translated settings."""
    settings, origins = result.settings, result.origins
    if {"add_qkv_bias", "disable_bias_linear"} <= result.all_names:
        settings["model.bias"] = "qkv"  # because: each of the two alone says another value
        result.left_out = [text for text in result.left_out if not text.endswith("sets model.bias too.")]
        result.changed.append("--add-qkv-bias --disable-bias-linear is model.bias=qkv here.")
    resume = origins.get("checkpoint.resume")
    if resume is not None and settings.get("checkpoint.resume") == settings.get("run.dir"):
        del settings["checkpoint.resume"]
        result.omit(resume, "A run resumes from its own run.dir by itself.")
    elif resume is not None and result.from_run == "" and (Path(settings["checkpoint.resume"]) / CONFIG).is_file():
        run = settings.pop("checkpoint.resume")  # because: settings that were not typed must be those of that run
        _begin_from(result, run, run, resume)
    ratio = origins.get("schedule.min_ratio")
    if ratio is not None and settings.get("schedule") == "constant":
        del settings["schedule.min_ratio"]
        result.omit(ratio, "A constant schedule has no end.")
        result.changed = [text for text in result.changed if not text.startswith(f"{ratio.typed} ")]
    of_wsd = [key for key in ("schedule.decay_fraction", "schedule.decay") if key in settings]
    if of_wsd and not {"schedule", "stages"} & {*settings, *map(override_key, result.typed_settings)}:
        settings["schedule"] = "wsd"
        result.changed.append(f"{origins[of_wsd[0]].typed} needs schedule=wsd here.")
    wandb = [key for key in settings if key.startswith("observe.wandb_")]
    if wandb and result.value_of("observe.wandb") == "none":
        settings["observe.wandb"] = "online"
        result.changed.append(f"{origins[wandb[0]].typed} needs observe.wandb=online here.")


_STEPS: tuple[tuple[tuple[str, ...], Callable[[Translation, list[Option]], None]], ...] = (
    (("model.name", "flavor"), _set_model),
    (tuple(tables.BETAS), _set_betas),
    (tables.POSITION_COUNTS, _set_positions),
    ((*tables.VIRTUAL_STAGES, *tables.LAYERS_PER_STAGE), _set_virtual_stages),
    (("finetune",), _finetune),
    (tables.LOAD_STEPS, _load_step),
    (tables.PROFILE_STEPS, _set_profile),
    (tables.DURATION, _set_duration),
)
