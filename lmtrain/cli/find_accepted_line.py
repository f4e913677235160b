"""Find the line that is accepted: what was typed, changed as its errors advise until its words and settings are right.

Called by main before it prints an error. The words and settings of each corrected line are checked by the rules of its
verb, so that the line printed below an error is not refused for them in its turn, and so that what else is wrong with
them is told at once. Files and data are looked at when the line is typed.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import islice, product
from typing import Any

from lmtrain.cli.settings_keys.explain_click_errors import PLACE_OF_OPTION, usage_error_from_click
from lmtrain.cli.settings_keys.parse_typed_line import command_of, parse_line, with_fillers
from lmtrain.cli.subcommands import ClickError
from lmtrain.config.compose_run_settings import expand_sweep, group_choices, whole_sweep_in_ways
from lmtrain.config.name_suggestions import is_variable
from lmtrain.config.parse_and_apply_overrides import override_key, parse_overrides
from lmtrain.errors import (
    LayoutError,
    LmtrainError,
    MissingInputError,
    SettingsError,
    UsageError,
    Way,
    joined,
    settings_error,
    shell_quoted,
)
from lmtrain.start.other_tools.explain_foreign_line import is_about, is_own_key
from lmtrain.start.other_tools.options_without_dashes import explain_words
from lmtrain.start.other_tools.typed_line import (
    VALUE_SIGNS,
    TypedLine,
    corrects,
    fits,
    has_rival,
    is_setting,
    nearest_first,
)
from lmtrain.train.run_config import RunConfig

# what is to be filled in, in a word of the corrected line: PREFIX, N or {hf,megatron}
_PLACE = re.compile(r"(?:^|=)([A-Z]{2,}|N|\{[\w-]+(?:,[\w-]+)+\})$")
_UNFILLED = re.compile(r"[a-z_.]+=[A-Z]{2,}")  # a setting to be filled in
_PLACE_OF_KEY = re.compile(r"\S+=[A-Z]{2,} ")  # the begin of a problem about what is to be filled in
_MAX_ROUNDS = 6  # corrected lines, one after another, each of which shows what the one before had hidden
_MAX_ALTERNATIVES = 8  # combinations of alternatives to try in a round
_WIDTH = 70  # columns of a line of the command that is printed
_MAX_RUNS = 8  # of a sweep, whose settings are checked


def lead_on(error: LmtrainError, argv: Sequence[str]) -> tuple[LmtrainError, str]:
    """Return what to print for `error`, the refusal of the command line `argv`: the error with what else is wrong with
    that line, and the text of the line to type next, with what it leaves out. The text is "" if an error leaves it to
    the user what to type.
    """
    typed = command = parse_line(argv)
    if not typed.has_foreign_options:  # because: what is wrong beside these has been explained with them
        error = explain_words(error, typed)
    error = _without_replaced_defaults(error, typed)
    errors, seen, changed, refusal = [error], {typed.units}, set[str](), error
    advised_units, is_left_to_user = dict.fromkeys(typed.units), False
    for _ in range(_MAX_ROUNDS):
        step = _best_step(command, refusal)
        if step is None or step[0].units in seen:
            return joined(errors), ""
        following, refused, takes_example = step
        is_left_to_user |= takes_example
        changed |= _given_other_values(command, following)
        seen.add(following.units)
        command = following
        advised_units |= dict.fromkeys(command.units)
        if refused is None and is_left_to_user:
            return joined(errors), ""
        if refused is None:
            if sum(len(error.ways) for error in errors) > 1:
                command = _with_own_values(command, typed, errors)
            return (told := joined(errors)), _line(told, typed, command, advised_units)
        refusal = refused
        if not changed & {text.partition("=")[0] for text in getattr(refused, "problems", [str(refused)])}:
            errors.append(refused)  # because: what the advice itself brought in is no mistake of the user
    return joined(errors), ""


def _without_replaced_defaults(error: LmtrainError, typed: TypedLine) -> LmtrainError:
    """Return an error without its problems of default values that are replaced when another problem is mended, as when
    a setting is typed with a wrong name: the value that was meant is checked with the corrected line.
    """
    given = {override_key(unit[0]) for unit in typed.units}
    ways = [way for each in error.ways for way in each[:1] if given.intersection(way.old)]
    replaced = {override_key(word) for way in ways for word in way.new if is_setting(word)} - given
    return _without_problems(error, lambda text: any(is_about(text, key) for key in replaced)) or error


def _given_other_values(before: TypedLine, after: TypedLine) -> set[str]:
    """Return the keys and options with a value of the advice's own, not only in another form than it was typed."""
    typed = " ".join(before.words)
    new = [unit for unit in after.units if unit not in before.units]
    values = {override_key(unit[0]): VALUE_SIGNS.split(unit[-1].partition("=")[2]) for unit in new}
    return {key for key, parts in values.items() if not all(part in typed for part in parts)}


def _best_step(command: TypedLine, error: LmtrainError) -> tuple[TypedLine, LmtrainError | None, bool] | None:
    """Return the command after a way out of each problem of `error`, the error that refuses it, None if there are ways
    that are accepted, and whether an example of a value was taken for a way: it is no advice, but with it the rest of
    the line can be checked. Return None if a problem has neither.
    """
    choices, corrected, takes_example = list[list[Way]](), command, False
    for all_ways in error.ways:
        # because: an option or a number that an earlier way sets is what the later ones are about
        ways = [way for way in all_ways if fits(command, way) or fits(corrected, way)]
        meant = nearest_first(corrected, ways) or [way for way in ways if way.is_form]
        choices.append(meant or ways[:1])
        takes_example |= not meant
        corrected = parse_line(corrected.apply(choices[-1][0]).words) if choices[-1] else corrected
    first = None
    for combination in islice(product(*choices), _MAX_ALTERNATIVES) if all(choices) else ():
        following = command
        for way in combination:
            following = parse_line(following.apply(way).words)  # because: the verb may be what was misspelt
        refusal = refusal_of(following)
        first = first or (following, refusal, takes_example)
        if refusal is None or _asks_for_processes(refusal):
            return following, refusal, takes_example
    return first


def _with_own_values(command: TypedLine, typed: TypedLine, errors: Sequence[LmtrainError]) -> TypedLine:
    """Return an accepted command in which a setting that was changed to fit another has its typed value again, where it
    is accepted with it, since the other has been changed as well. The value may stand in the ways of the errors alone,
    as that of another tool's setting.
    """
    text = " ".join(typed.words)
    ways = [way for error in errors for each in error.ways for way in each]
    for unit in (*typed.units, *(unit for way in ways for unit in typed.as_units(way.new))):
        key = override_key(unit[0]) if is_setting(unit[0]) else ""
        is_typed = all(part in text for part in VALUE_SIGNS.split(unit[0].partition("=")[2]))
        is_changed = any(is_setting(each[0]) and override_key(each[0]) == key for each in command.units)
        if is_typed and is_changed and is_own_key(key) and unit not in command.units:
            candidate = command.apply(Way(unit))
            command = candidate if refusal_of(candidate) is None else command
    return command


def _asks_for_processes(error: LmtrainError) -> bool:
    """Return whether all that is missing is that more processes are started, which is no reason for a smaller layout.
    """
    return all(any(way.new[:1] == ("--nproc",) for way in ways) for ways in error.ways)


def _line(
    error: LmtrainError, typed: TypedLine, command: TypedLine, advised_units: Iterable[tuple[str, ...]]
) -> str:
    """Return the lines to print below an error: what the corrected command leaves out of the typed one and of
    `advised_units`, which were advised before, and the command.
    """
    # because: a value that is corrected is named in the error, and what is left out need not be
    said = str(error)
    replaced = {name for ways in error.ways for way in ways if way.new for name in way.old}
    lost = command.lost_units(typed) + [
        unit for unit in advised_units
        if unit not in typed.units and unit not in command.units and not corrects(command, unit)
        and not _is_moved(command, unit)
    ]  # fmt: skip
    left_out = [
        text for unit in lost
        # because: a switch may have another form here
        if not (len(unit) == 1 and unit[0] in replaced and "=" not in unit[0])
        and (
            not _is_told(text := " ".join(map(shell_quoted, unit)), unit, said, command) or has_rival(typed, unit)
        )
    ]
    words = " ".join(typed.words)
    places = [*dict.fromkeys(place for word in command.words for place in _PLACE.findall(word) if place not in words)]
    form = f", with {' and '.join(places)} filled in" if places else ""
    list_of_lost = f"\nLeft out: {', '.join(dict.fromkeys(left_out))}." if left_out else ""
    variables = [
        word for word in typed.words
        if is_setting(word) and is_variable(word.partition("=")[0], RunConfig) and word not in command.words
    ]
    return f"{list_of_lost}\nType{form}:\n  {_shell_lines(command.words, variables)}"


def _shell_lines(words: Iterable[str], variables: Iterable[str] = ()) -> str:
    """Return the words of an lmtrain command, behind environment variables NAME=VALUE, as text to paste into a shell:
    words are quoted where needed, and lines over 70 characters are broken with backslashes.
    """
    lines = [" ".join([*map(shell_quoted, variables), "lmtrain"])]
    for word in map(shell_quoted, words):
        if len(lines[-1]) + len(word) > _WIDTH and lines[-1]:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return " \\\n    ".join(lines)


def _is_moved(command: TypedLine, unit: Sequence[str]) -> bool:
    """Return whether a setting stands in the command as one of a stage, with the same value."""
    return any(each[0].startswith("stages.") and each[0].endswith(f".{unit[0]}") for each in command.units)


def _is_told(text: str, unit: tuple[str, ...], said: str, command: TypedLine) -> bool:
    """Return whether the message `said` tells what became of a unit of the command, whose text is `text`: it has
    another value, or is something else here, or there is a reason why it is left out.
    """
    if corrects(command, unit):
        key, _, values = unit[0].partition("=")
        each_told = [f"{key}={value} " in said for value in values.split(",") if value not in " ".join(command.words)]
        return all(each_told or [False]) or any(form in said for form in (text, " ".join(unit), "=".join(unit)))
    others = [part for value in unit[1:] for part in value.split(",") if part not in " ".join(command.words)]
    if others and all(f"={part} is not " in said for part in others):
        return True  # because: the option has another name, and its value is corrected with that
    place = rf"(?:^ *(?:\d+\. )?|, ){re.escape(text)}(: | is (?!not )| has no counterpart)"
    return bool(re.search(place, said, re.MULTILINE))


def refusal_of(command: TypedLine) -> LmtrainError | None:
    """Return the error that refuses a command for its words or its settings, before any file is read; None if there is
    none. What is to be filled in is no mistake, and hides none.
    """
    words = [word for word in command.words if word != "--debug"]  # because: main takes it out
    refusal = _without_problems(_refusal(words), _is_about_place)
    filled = [word for word in words if not _UNFILLED.fullmatch(word)]
    if refusal is not None or filled == words:
        return refusal
    return _without_problems(_refusal(filled), lambda text: " is not set" in text or " is not given" in text)


def _refusal(words: Sequence[str]) -> LmtrainError | None:
    """Return the error that refuses a command line for its words or its settings; None if there is none."""
    click_command, verb = command_of(words)
    if click_command is None or {"--help", "-h", "--version"} & set(words):
        return None
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            filled, unknown = with_fillers(words)
            context = click_command.make_context(" ".join(verb), filled[len(verb) :], obj=words)
            _check_settings_of(verb, {**context.params, **dict.fromkeys(unknown), "context": context}, unknown)
    except (SettingsError, LayoutError) as error:
        return explain_words(error, parse_line(words))
    except UsageError as error:
        return error
    except ClickError as error:
        return usage_error_from_click(error, words, settings_problems)
    except MissingInputError as error:
        return error if any(error.ways) else None  # because: without a way out it is told when the line is typed
    except LmtrainError:
        return None  # because: it is about a file
    return None


def _is_about_place(problem: str) -> bool:
    return bool(_PLACE_OF_KEY.match(problem) or PLACE_OF_OPTION.match(problem))


def _without_problems(error: LmtrainError | None, is_left_out: Callable[[str], bool]) -> LmtrainError | None:
    """Return an error without the problems of which `is_left_out` is true; None if nothing is left of it."""
    if error is None:
        return None
    problems = _problems_of(error)
    others = [problem for problem in problems if not is_left_out(problem)]
    return error if len(others) == len(problems) else settings_error(others) if others else None


def _problems_of(error: LmtrainError) -> Sequence[str]:
    return getattr(error, "marked_problems", (error.marked,))


def settings_problems(words: Sequence[str], params: Mapping[str, Any]) -> Iterator[str]:
    """Yield the marked problems of the settings in a command line, whose parsed parameters are `params`. A setting that
    is missing is none of them, as the word that gives it may be the one that is wrong.
    """
    try:
        _check_settings_of(command_of(words)[1], params)
    except (SettingsError, LayoutError) as error:
        for problem in _problems_of(explain_words(error, parse_line(words))):
            if " is not set. " not in problem and not _PLACE_OF_KEY.match(problem):
                yield problem
    except LmtrainError:
        return  # because: it is about a file or a missing word, and is reported when the corrected line is typed


def _check_settings_of(verb: Sequence[str], params: Mapping[str, Any], unknown: frozenset[str] = frozenset()) -> None:
    """Call the check of a verb. The parameters `unknown` are None, as their values are still to be filled in."""
    if check := _CHECKS.get(" ".join(verb)):
        check({**params, "unknown": unknown})


def _check_run(params: Mapping[str, Any]) -> None:
    for config in _iter_runs(params):
        if "nproc" in params and not (params["print_config"] or params["elastic"] or config.parallel.auto):
            from lmtrain.start.processes_of_command import ProcessOptions, detect_process
            from lmtrain.train.startup_checks.check_machine_and_processes import check_machine

            processes = ProcessOptions(params["nproc"], params["nproc_per_node"], params["max_restarts"])
            with contextlib.suppress(SettingsError):  # because: of what is missing on a machine, not in a line
                check_machine(config, detect_process(processes), starts_run=not params["dry_run"])


def _iter_runs(params: Mapping[str, Any]) -> Iterator[RunConfig]:
    """Yield the settings of the first runs of a command line; raise SettingsError if they are wrong."""
    from lmtrain.start.settings_from_earlier_run import RunRequest, compose_run

    overrides, config_dir = params["overrides"] or [], params["config_dir"]
    request = RunRequest(overrides, config_dir, params["config_name"], params["from_run"], params["from_beginning"])
    is_sweep = params.get("multirun") or params.get("array")
    runs = expand_sweep(overrides, config_dir=config_dir) if is_sweep else [overrides]
    for run in _covering(runs)[:_MAX_RUNS]:
        with whole_sweep_in_ways(run, runs):
            config = compose_run(replace(request, words=run))
            _refuse_texts(config)
        yield config


def _covering(runs: Sequence[list[str]]) -> list[list[str]]:
    """Return the runs of a sweep that have a word which none before them has: with them every value is seen once."""
    seen, result = set[str](), list[list[str]]()
    for run in runs:
        if not (result and seen.issuperset(run)):
            seen.update(run)
            result.append(run)
    return result


def _refuse_texts(config: RunConfig) -> None:
    """Raise SettingsError if a text is given to a run or one of its stages as its dataset."""
    from lmtrain.data.refuse_text_as_dataset import refuse_text_as_dataset

    for stage in config.stage_configs:
        refuse_text_as_dataset(stage.data)


def _check_job(params: Mapping[str, Any]) -> None:
    from lmtrain.start.slurm_job.sbatch_options import SlurmOptions
    from lmtrain.start.slurm_job.tasks_of_array import check_array_tasks

    options = SlurmOptions(**{field.name: params[field.name] for field in fields(SlurmOptions)})
    if not params["unknown"]:
        options.check()
    if options.array_tasks is not None:
        runs = expand_sweep(params["overrides"] or [], config_dir=params["config_dir"]) if params["array"] else [()]
        check_array_tasks(options.array_tasks, len(runs))
    for config in _iter_runs(params):
        if (options.gpus_per_node or options.tasks_per_node) and not config.parallel.auto:
            options.shape(config.parallel)


def _check_evaluation(params: Mapping[str, Any]) -> None:
    from lmtrain.start.evaluation.tasks_and_texts import build_jobs, check_tasks_fit, refuse_loose_files
    from lmtrain.start.find_model_at_path import find_model

    if params["checkpoint"] and not (params["compare"] or params["list_tasks"]):
        refuse_loose_files(params["layout"] or [])
        names = ("task", "data", "baseline", "format_", "key", "suffix")
        jobs = build_jobs(*(params[name] for name in names), report=lambda _: None)
        source = find_model(params["checkpoint"], params["weights"])
        check_tasks_fit(jobs, [source], params["seq_len"], params["stride"])


def _check_texts(params: Mapping[str, Any]) -> None:
    from data_tools.read.find_input_files import find_texts

    names = ("inputs", "output", "format_", "suffix", "key")
    find_texts(*(params[name] for name in names), report=lambda _: None)
    if params["prepend_bos"]:
        from data_tools.preprocess.preprocess_pipeline import check_begin_token
        from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer

        check_begin_token(Tokenizer.load(params["tokenizer"]))


def _check_inputs(params: Mapping[str, Any]) -> None:
    from data_tools.read.find_input_files import find_sources
    from lmtrain.cli.shared_options import resolve_text_inputs

    find_sources(resolve_text_inputs(*(params[name] for name in ("inputs", "format_", "suffix"))))


def _check_shown_tokenizer(params: Mapping[str, Any]) -> None:
    from data_tools.preprocess.tokenizer_of_text_files import find_texts_to_count

    words = params["text"] or [], params["data"] or []
    find_texts_to_count(*words, params["format_"], params["split"], report=lambda _: None)


def _check_split(params: Mapping[str, Any]) -> None:
    from lmtrain.cli.data.corpus_command import build_split

    build_split(*(params[name] for name in ("ratios", "seed", "by")))
    _check_inputs(params)


def _check_clean(params: Mapping[str, Any]) -> None:
    from lmtrain.cli.data.corpus_command import build_clean_step

    if "context" in params and not params["unknown"]:
        build_clean_step(*(params[name] for name in ("context", "rule", "script", "min_script_share")))
    _check_inputs(params)


def _check_training(params: Mapping[str, Any]) -> None:
    _check_inputs(params)
    from lmtrain.tokenizer.train import check_training

    check_training(*(params[name] for name in ("kind", "pattern", "lowercase", "vocab_size")))


def _check_prompt(params: Mapping[str, Any]) -> None:
    from lmtrain.eval.read_prompts import check_prompt_options
    from lmtrain.eval.sampling_and_precision_settings import build_samplings

    names = ("temperature", "top_k", "top_p", "seed", "num_samples")
    if not params["unknown"]:
        build_samplings(*(params[name] for name in names))
    check_prompt_options(params["prompt"], params["prompt_file"], params["prompts"])


def _check_export(params: Mapping[str, Any]) -> None:
    from lmtrain.cli.checkpoint.export_command import parse_layout

    parse_layout(params["to"], params["layout"])


def _check_import(params: Mapping[str, Any]) -> None:
    from lmtrain.cli.checkpoint.import_command import parse_settings

    parse_settings(params["set_"] or [])


def _check_reshard(params: Mapping[str, Any]) -> None:
    from lmtrain.cli.checkpoint.reshard_command import check_options

    names = ("source", "output", "to", "from_", "tokenizer", "dtype")
    check_options(**{name: params[name] for name in names}, settings=params["set_"] or [])


def _check_merge(params: Mapping[str, Any]) -> None:
    from lmtrain.start.merge_checkpoints import find_checkpoints

    if not params["unknown"]:
        find_checkpoints(params["checkpoints"] or [], params["last"], params["of"])


def _check_sample(params: Mapping[str, Any]) -> None:
    from data_tools.corpus.split_sample_shuffle import check_sample_size

    _check_inputs(params)
    if not params["unknown"]:
        check_sample_size(params["fraction"], params["count"])


def _check_shares(params: Mapping[str, Any]) -> None:
    from lmtrain.cli.shared_options import parse_numbers
    from lmtrain.data.store.merge_split_verify_datasets import check_outputs

    check_outputs(params["prefix"], parse_numbers("--shares", params["shares"], ""), params["output"] or [])


def _check_shown(params: Mapping[str, Any]) -> None:
    from lmtrain.start.facts_of_outputs.choose_documents_and_samples import check_shown

    names = ("prefix", "overrides", "sample", "document", "random", "seed", "run", "config_dir", "stage")
    check_shown(**{name: params[name] for name in names})


def _check_settings(params: Mapping[str, Any]) -> None:
    from lmtrain.start.init_from_settings_and_import import compose_settings

    _refuse_texts(compose_settings(params["overrides"] or [], config_dir=params["config_dir"]))


def _check_branches(params: Mapping[str, Any]) -> None:
    from lmtrain.start.decay_branches import build_branches

    parse_overrides(params["overrides"] or [], group_choices())  # because: a branch adds words of its own
    names = ("run", "at", "decay", "decay_steps", "decay_tokens", "shape", "output", "overrides")
    build_branches(**{name: params[name] for name in names})


def _check_question(params: Mapping[str, Any]) -> None:
    from lmtrain.start.plans.plan_question_and_search import error_of_layout, read_question

    if not params["calibrate"]:
        names = ("layout", "config_dir", "config_name")
        question = read_question(params["overrides"] or [], *(params[name] for name in names))
        if (error := error_of_layout(question)) is not None:
            raise error


def _check_explained(params: Mapping[str, Any]) -> None:
    from lmtrain.start.explain.explain_setting import ComposedSettings
    from lmtrain.start.settings_from_earlier_run import RunRequest

    request = RunRequest(params["overrides"] or [], params["config_dir"], params["config_name"], params["from_run"])
    ComposedSettings.compose(request)


# verbs -> what refuses words that are wrong together, or settings
_CHECKS: dict[str, Callable[[Mapping[str, Any]], None]] = {
    "pretrain": _check_run, "slurm render": _check_job, "slurm submit": _check_job, "plan": _check_question,
    "branch": _check_branches, "data show": _check_shown, "data index": _check_settings, "data blend": _check_settings,
    "config explain": _check_explained, "data split": _check_shares, "eval": _check_evaluation,
    "preprocess": _check_texts, "tokenizer train": _check_training,
    "tokenizer show": _check_shown_tokenizer, "generate": _check_prompt,
    "export": _check_export, "import": _check_import, "reshard": _check_reshard, "merge": _check_merge,
    "corpus sample": _check_sample, "corpus split": _check_split, "corpus clean": _check_clean,
    **dict.fromkeys(("corpus dedupe", "corpus decontaminate", "corpus shuffle"), _check_inputs),
}  # fmt: skip
