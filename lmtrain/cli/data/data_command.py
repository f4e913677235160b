"""`lmtrain data`: inspect, verify, join, split and index .bin/.idx datasets, by the functions of lmtrain.data."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmtrain.cli.inspect.dataset_view import print_dataset, print_documents, print_samples
from lmtrain.cli.screen.print_facts_and_tables import print_facts, print_table
from lmtrain.cli.screen.print_messages_and_json import echo, print_json, progress
from lmtrain.cli.settings_keys.shell_completion import complete_override
from lmtrain.cli.shared_options import (
    ConfigDir,
    Json,
    Plugins,
    check_seed,
    parse_numbers,
    parse_output_prefix,
)
from lmtrain.config.settings_file import expand_settings_file
from lmtrain.errors import DataError, UsageError, example, fill_in, join_few, joined, leave_out, own, spelling_hint, way
from lmtrain.runtime.files.similar_path import refuse_lists
from lmtrain.start.facts_of_outputs.facts_of_dataset import (
    check_sample_number,
    dataset_facts,
    document_rows,
    sample_row,
)
from lmtrain.units import format_count, plural

if TYPE_CHECKING:
    from lmtrain.data.store.indexed_dataset import IndexedDataset
    from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer
    from lmtrain.train.run_config import RunConfig

app = typer.Typer(no_args_is_help=True)
_UNWRITTEN = "no unfinished dataset is left. The same command begins anew."

Prefix = Annotated[Path, typer.Argument(metavar="PREFIX", help="A dataset: its .bin's path without the suffix.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace existing datasets.")]
TokenizerPath = Annotated[
    Path | None, typer.Option(help="Tokenizer of a dataset that was stored without one: a file or folder.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE", autocompletion=complete_override, callback=expand_settings_file,
        help="The settings of the run, as `lmtrain pretrain` takes them."),
]


@app.command()
def inspect(
    prefix: Prefix,
    all_: Annotated[bool, typer.Option("--all", help="Also show the whole sidecar, PREFIX.json.")] = False,
    as_json: Json = False,
) -> None:
    """Show what a dataset holds, from its header and sidecar; `lmtrain inspect PREFIX` shows the same."""
    facts = dataset_facts(prefix)
    return print_json(facts) if as_json else print_dataset(facts, all_)


@app.command()
def verify(
    prefixes: Annotated[list[Path], typer.Argument(metavar="PREFIX", help="Datasets to check.")],
    as_json: Json = False,
) -> None:
    """Read every byte of datasets and check their index, token ids and checksum; stop at the first damage."""
    from lmtrain.data.store import merge_split_verify_datasets
    from lmtrain.data.store.joined_dataset import dataset_exists, open_dataset

    facts = []
    refuse_lists(prefixes, dataset_exists)
    for prefix in prefixes:
        dataset = open_dataset(prefix)
        with progress(f"reading {dataset.prefix}"):
            facts.append({"dataset": str(dataset.prefix)} | merge_split_verify_datasets.verify(dataset))
        if not as_json:
            comparison = _describe_content_check(facts[-1])
            echo(f"{dataset.prefix} is whole: sha256 {facts[-1]['content_sha256']}, {comparison}")
    if as_json:
        print_json(facts)


@app.command()
def merge(
    prefixes: Annotated[list[Path], typer.Argument(metavar="PREFIX", help="Datasets to join, in this order.")],
    output: Annotated[Path, typer.Option(metavar="PREFIX", parser=parse_output_prefix, help="The dataset to make.")],
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Join datasets that have the same dtype and tokenizer into one; the counts in their sidecars are added up."""
    from lmtrain.data.store import merge_split_verify_datasets
    from lmtrain.data.store.joined_dataset import dataset_exists

    refuse_lists(prefixes, dataset_exists)
    with progress(f"writing {output}", interrupted=_UNWRITTEN):
        is_new = merge_split_verify_datasets.merge(prefixes, output, overwrite=overwrite)
    _print_written([output], as_json, is_new=is_new)


@app.command()
def split(
    prefix: Prefix,
    shares: Annotated[str, typer.Option(help="Two or three shares of the documents, as in 98,2.")],
    output: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PREFIX", parser=parse_output_prefix, help="A dataset to write; give one for each share."
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            callback=check_seed, help="Draw the documents at random by this seed. [default: consecutive documents]"
        ),
    ] = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Split a dataset at document borders into two or three datasets, each with its documents in the original order."""
    from lmtrain.data.store import merge_split_verify_datasets

    wanted = parse_numbers("--shares", shares, f"Give shares, such as {example('98,2')}.")
    with progress(f"dividing {prefix}", interrupted=_UNWRITTEN):
        is_new = merge_split_verify_datasets.split(prefix, wanted, output or [], overwrite=overwrite, seed=seed)
    _print_written(output or [], as_json, is_new=is_new)


@app.command()
def show(
    prefix: Annotated[
        str | None, typer.Argument(metavar="[PREFIX]", help="A dataset; not with --run, which names its own.")
    ] = None,
    overrides: Overrides = None,
    sample: Annotated[
        list[str] | None,
        typer.Option(
            "--sample", metavar="NUMBER", help="A training sample of a run, from 0, or several, as in 0-3. Repeatable."
        ),
    ] = None,
    document: Annotated[
        list[str] | None,
        typer.Option("--document", metavar="NUMBER", help="A document, from 0, or several, as in 0-19. Repeatable."),
    ] = None,
    random: Annotated[int | None, typer.Option(min=1, help="Draw this many documents at random. [default: 3]")] = None,
    seed: Annotated[int | None, typer.Option(callback=check_seed, help="With --random: seed of the draw.")] = None,
    run: Annotated[
        Path | None, typer.Option(metavar="RUN", help="With --sample: a run's folder, for its data and settings.")
    ] = None,
    stage: Annotated[
        str | None, typer.Option(metavar="NAME", help="With --sample: the stage, if the run has several.")
    ] = None,
    most: Annotated[int | None, typer.Option(min=1, help="Show at most N tokens of each. [default: all]")] = None,
    ids: Annotated[bool, typer.Option("--ids", help="Show token ids and not the text.")] = False,
    tokenizer: TokenizerPath = None,
    config_dir: ConfigDir = None,
    plugin: Plugins = None,
    as_json: Json = False,
) -> None:
    """Show documents of a dataset, or training samples as the model reads them, as text or token ids.

    A sample depends on how a run cuts them: give its folder, or the settings that it was started with.
    """
    given, settings = check_shown(
        prefix=prefix, overrides=overrides, sample=sample, document=document, random=random, seed=seed, run=run,
        config_dir=config_dir, stage=stage,
    )  # fmt: skip
    if sample:
        settings += [] if tokenizer is None else [f"data.tokenizer={tokenizer}"]
        ranges = [_number_range("--sample", text) for text in sample]
        return _show_samples(ranges, given, settings, run, config_dir, stage, most, ids, as_json)
    chosen_documents = None if document is None else [_number_range("--document", text) for text in document]
    return _show_documents(Path(given[0]), chosen_documents, random or 3, seed or 0, most, ids, tokenizer, as_json)


def check_shown(*, prefix: str | None, overrides: list[str] | None, **options: Any) -> tuple[list[str], list[str]]:
    """Return (the arguments that are no settings, the settings) of `lmtrain data show`. Raise a UsageError that names
    every word which has no effect beside the others.
    """
    words = expand_settings_file([*([prefix] if prefix else []), *(overrides or [])]) or []
    given, settings = [word for word in words if "=" not in word], [word for word in words if "=" in word]
    chosen = [name for name in ("sample", "document", "random") if options[name]]
    needs = {"--seed": "random", "--run": "sample", "--config-dir": "sample", "--stage": "sample"}
    typed = [name for name in needs if options[name.removeprefix("--").replace("-", "_")] is not None]
    without = [(name, [name]) for name in typed if needs[name] != (chosen or ["random"])[0]]
    without += [(settings[0], settings)] if settings and chosen != ["sample"] else []
    problems = [f"--{' and --'.join(chosen)} were given together. Give only one of them."] * (len(chosen) > 1)
    problems += [
        f"{name} has an effect only with --{(needed := needs.get(name, 'sample'))} NUMBER, which was not given. Give "
        f"--{needed} NUMBER, or {leave_out(*names, shown=f'leave {name} out')}."
        for name, names in without
    ]  # fmt: skip
    if len(given) > 1:
        numbers = [word for word in given[1:] if word.isdecimal()]
        new = way(*(part for word in numbers for part in ("--document", word)), instead_of=given[1:])
        is_clear = numbers and not options["sample"] and not options["random"]
        way_out = f"To show a document, give its number: {new}." if is_clear else "Give one of them."
        problems.append(f"`lmtrain data show` shows one dataset, but {' and '.join(given)} were given. {way_out}")
    if options["run"] is None and not given:
        problems.append("PREFIX is missing. Give a dataset such as data/books, or --run RUN --sample NUMBER.")
    if problems:
        raise joined([UsageError(problem) for problem in problems])
    return given, settings


@app.command(hidden=True)
def sample(
    prefix: Prefix,
    number: Annotated[int, typer.Option("-n", "--number", min=1, help="How many documents.")] = 3,
    seed: Annotated[int, typer.Option(callback=check_seed, help="Another seed, other documents.")] = 0,
    most: Annotated[int, typer.Option(min=1, help="Show so many tokens of a document.")] = 200,
    ids: Annotated[bool, typer.Option("--ids", help="Show token ids and not the text.")] = False,
    tokenizer: TokenizerPath = None,
    as_json: Json = False,
) -> None:
    """Show random documents: the older spelling of `lmtrain data show PREFIX --random N`."""
    _show_documents(prefix, None, number, seed, most, ids, tokenizer, as_json)


@app.command(hidden=True)
def decode(
    prefix: Prefix,
    documents: Annotated[list[int], typer.Argument(metavar="DOCUMENT", help="Numbers of documents, from 0.")],
    most: Annotated[int | None, typer.Option(min=1, help="Show so many tokens of a document. [default: all]")] = None,
    ids: Annotated[bool, typer.Option("--ids", help="Show token ids and not the text.")] = False,
    tokenizer: TokenizerPath = None,
    as_json: Json = False,
) -> None:
    """Show documents: the older spelling of `lmtrain data show PREFIX --document N`."""
    _show_documents(prefix, [range(number, number + 1) for number in documents], 0, 0, most, ids, tokenizer, as_json)


@app.command()
def stats(prefix: Prefix, as_json: Json = False) -> None:
    """Show how many documents a dataset has by length, as a histogram."""
    from lmtrain.data.store import merge_split_verify_datasets
    from lmtrain.data.store.joined_dataset import open_dataset

    dataset = open_dataset(prefix)
    counts, facts = merge_split_verify_datasets.length_histogram(dataset)
    bars = [{"from": 1 << i >> 1, "to": (1 << i) - 1, "documents": int(n)} for i, n in enumerate(counts)]
    if as_json:
        return print_json(facts | {"lengths": bars})
    lines = [(name.replace("_", " "), f"{value:,}" if isinstance(value, int) else f"{value:,.1f}")
             for name, value in facts.items()]  # fmt: skip
    print_facts(f"dataset {dataset.prefix}", lines)
    echo("\ntokens in a document")
    highest = max((bar["documents"] for bar in bars), default=0) or 1
    for bar in bars:
        label = f"{bar['from']}-{bar['to']}" if bar["to"] > bar["from"] else str(bar["from"])
        echo(f"{label:>19} {format_count(bar['documents']):>6} {_bar(bar['documents'] / highest)}".rstrip())
    return None


@app.command()
def index(overrides: Overrides = None, config_dir: ConfigDir = None, as_json: Json = False) -> None:
    """Build the index files that a run with these settings needs, so that the run does not have to build them at its
    start.
    """
    from lmtrain.train.startup_checks.preflight import load_stages

    began = perf_counter()
    streams = {
        key: part
        for inputs in load_stages(_compose(overrides, config_dir), None, None)
        for key, part in zip(inputs.data.history.streams, inputs.data.parts, strict=True)
    }  # stages that read the same samples count once
    facts = {
        "datasets": len({part.indexed.prefix for part in streams.values()}),
        "samples": sum(part.dataset.num_samples for part in streams.values()),
        "seconds": round(perf_counter() - began, 3),
    }
    lines = ((name, f"{value:,}") for name, value in facts.items())
    return print_json(facts) if as_json else print_facts("indexes are built", lines)


@app.command()
def blend(overrides: Overrides = None, config_dir: ConfigDir = None, as_json: Json = False) -> None:
    """Show how many samples and tokens each dataset contributes to a run with these settings, or to each of its stages.
    """
    from lmtrain.train.startup_checks.preflight import load_data, load_stages

    config = _compose(overrides, config_dir)
    if not config.stages:
        rows = load_data(config, with_validation=False)[2].contributions(config.seq_len)
        total: dict[str, Any] = {key: sum(row[key] for row in rows) for key in rows[0] if key != "dataset"}
        total |= {"dataset": f"{len(rows)} datasets", "epochs": total["run_samples"] / total["samples"]}
    else:
        stages = zip(config.stage_configs, load_stages(config, None, None), strict=True)
        rows, total = [
            {"stage": stage.stage_name} | row
            for stage, inputs in stages for row in inputs.data.contributions(stage.seq_len)
        ], {}  # fmt: skip
    if as_json:
        return print_json(rows)
    counts = ("documents", "samples", "run_samples", "run_tokens")
    return print_table([
        ({"<stage": row["stage"]} if config.stages else {})
        | {"<dataset": row["dataset"], "share": f"{row['share']:.4%}"}
        | {name.replace("_", " "): format_count(row[name]) for name in counts}
        | {"epochs": f"{row['epochs']:.3g}"}
        for row in [*rows, *([total] if total else [])]
    ])  # fmt: skip


def _compose(overrides: Sequence[str] | None, config_dir: Path | None) -> RunConfig:
    from lmtrain.start.init_from_settings_and_import import compose_settings

    return compose_settings(list(overrides or []), config_dir=config_dir)


def _tokenizer_of(dataset: IndexedDataset, given: Path | None) -> Tokenizer:
    from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer

    path = given or dataset.tokenizer_path
    if given is None and not path.exists():
        raise UsageError(
            f"The dataset {dataset.prefix} was stored without a tokenizer. Give --tokenizer PATH, or {way('--ids')} "
            "to show token ids."
        )
    tokenizer = Tokenizer.load(path)
    if dataset.info is not None and dataset.info.tokenizer_fingerprint != tokenizer.fingerprint:
        raise DataError(
            f"The tokenizer {path} has the fingerprint {tokenizer.fingerprint[:12]}, but the dataset {dataset.prefix} "
            f"was written with a tokenizer of fingerprint {dataset.info.tokenizer_fingerprint[:12]}. Give that "
            f"tokenizer, or use {way('--ids')} to show token ids."
        )
    return tokenizer


def _show_documents(
    prefix: Path, documents: list[range] | None, num_random: int, seed: int, max_tokens: int | None, ids: bool,
    tokenizer: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Print the documents of a dataset whose numbers are in the ranges `documents`, or `num_random` random ones if it
    is None, each cut to `max_tokens` tokens (None: whole). They are printed as text, or with `ids` as token ids.
    """
    import numpy as np

    from lmtrain.data.sample_dataset_interface import permute
    from lmtrain.data.store.document_boundaries import use_recorded_checksums
    from lmtrain.data.store.joined_dataset import open_dataset

    if ids and tokenizer is not None:
        raise UsageError(
            f"--tokenizer={tokenizer} has no effect with --ids, which shows the numbers that the dataset holds. "
            f"{leave_out('--tokenizer', shown='Leave --tokenizer out')}, or {leave_out('--ids', shown='--ids')}."
        )
    dataset = open_dataset(prefix)
    use_recorded_checksums(dataset)
    if documents is None:
        count = min(num_random, dataset.num_documents)
        numbers = permute(np.arange(count), dataset.num_documents, seed).tolist() if count else []
    else:
        numbers = [*chain.from_iterable(_within(each, dataset) for each in documents)]
    rows = [*document_rows(dataset, numbers, max_tokens, None if ids else _tokenizer_of(dataset, tokenizer))]
    return print_json(rows, ensure_ascii=False) if as_json else print_documents(rows, max_tokens)


def _number_range(option: str, text: str) -> range:
    """Return the numbers that a value of --document or --sample names: "7" or, with both ends, "0-19"."""
    match = re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", text)
    if match is not None and int(match[1]) <= int(match[2] or match[1]):
        return range(int(match[1]), int(match[2] or match[1]) + 1)
    slice_ = re.fullmatch(r"(\d{0,18})(?::|\.\.)(\d{1,18})", text)
    if slice_ is not None and int(slice_[1] or 0) < int(slice_[2]):
        meant = f"{int(slice_[1] or 0)}-{int(slice_[2]) - 1}"
        raise UsageError(
            f"{option}={text} is not a number or a range of numbers. Did you mean "
            f"{_other_range(option, text, meant)}?"
        )
    raise UsageError(
        f"{option}={text} is not a number or a range of numbers. Give one such as {example('7')} or "
        f"{example('0-19')}."
    )


def _other_range(option: str, typed: str, meant: str) -> str:
    """Return `meant`, marked as what to give in place of one value of an option that is repeatable."""
    return way(option, meant, instead_of=(f"{option}={typed}", f"{option} {typed}"), shown=meant)


def _within(documents: range, dataset: IndexedDataset) -> range:
    """Return a range of document numbers. Raise UsageError if it is of several, and ends beyond the last document."""
    if len(documents) > 1 and documents[-1] >= dataset.num_documents > documents[0]:
        typed, fitting = f"{documents[0]}-{documents[-1]}", f"{documents[0]}-{dataset.num_documents - 1}"
        meant = _other_range("--document", typed, fitting)
        raise UsageError(
            f"--document={typed} ends beyond the last document of {dataset.prefix}. Use {meant}."
        )
    return documents if documents[0] < dataset.num_documents else documents[:1]  # the first is refused by its number


def _show_samples(
    ranges: list[range], prefixes: list[str], settings: list[str], run: Path | None, config_dir: Path | None,
    stage: str | None, max_tokens: int | None, ids: bool, as_json: bool,
) -> None:  # fmt: skip
    from lmtrain.checkpoint.find_and_prune import latest_checkpoint
    from lmtrain.config.build_typed_settings import build_settings
    from lmtrain.runfolder.file_names import CHECKPOINTS
    from lmtrain.runfolder.folder_reader import read_settings
    from lmtrain.train.run_config import RunConfig, with_resolved_paths
    from lmtrain.train.startup_checks.preflight import load_data, load_stages
    from lmtrain.train.startup_checks.resume_checks import open_resume_checkpoint, split_rule_of

    if run is not None and (prefixes or settings):
        words = [*prefixes, *settings]
        way_out = f"{leave_out(*words, shown='Give --run alone')}, or a dataset with settings and no --run."
        raise UsageError(f"--run={run} already names the data and the settings, so {words[0]} cannot be given too. "
                         f"{way_out}")  # fmt: skip
    paths = [f"data.path={path}" for path in prefixes]
    config = _compose([*paths, *settings], config_dir) if run is None else build_settings(
        RunConfig, with_resolved_paths(read_settings(run), run)
    )  # fmt: skip
    # because: what data.split keeps from training is as the run began with it
    newest = None if run is None else latest_checkpoint(run / CHECKPOINTS)
    split_rule = split_rule_of(open_resume_checkpoint(config, newest))
    names = [each.stage_name for each in config.stage_configs]
    if config.stages or stage is not None:
        inputs = load_stages(config, None, None)[_stage_index(stage, names if config.stages else [])]
        tokenizer, data = inputs.tokenizer, inputs.data
    else:
        tokenizer, _, data = load_data(config, with_validation=run is not None, split_rule=split_rule)
    for numbers in ranges:
        check_sample_number(data, numbers[-1])
    rows = [sample_row(data, number, max_tokens, tokenizer) for numbers in ranges for number in numbers]
    return print_json(rows, ensure_ascii=False) if as_json else print_samples(rows, ids)


def _stage_index(stage: str | None, names: Sequence[str]) -> int:
    """Return the index of the stage `stage` in `names`, the names of a run's stages. Raise UsageError if it is not
    among them, or if it is None, because samples are numbered separately in each stage.
    """
    if stage in names:
        return names.index(stage)
    if not names:
        raise UsageError(f"--stage={stage} names a stage, but the run has none. {leave_out()}.")
    if stage is None:
        place = fill_in("--stage", "NAME")
        raise UsageError(f"The run has stages, each with samples of its own. Add {place}: {join_few(names)}.")
    raise UsageError(f"--stage={stage} is not a stage of the run. {spelling_hint(stage, names, own)}")


def _print_written(prefixes: Sequence[Path], as_json: bool, *, is_new: bool) -> None:
    from lmtrain.data.store.indexed_dataset import IndexedDataset


    facts: list[dict[str, Any]] = [
        {"dataset": str(made.prefix), "documents": made.num_documents, "tokens": made.num_tokens}
        for made in map(IndexedDataset.open, prefixes)
    ]
    if as_json:
        print_json(facts)
    else:
        for row in facts:
            documents, tokens = row["documents"], row["tokens"]
            echo(
                f"{row['dataset']}: {plural(documents, 'document', f'{documents:,}')}, "
                f"{plural(tokens, 'token', f'{tokens:,}')}{'' if is_new else '; is already there'}"
            )


def _describe_content_check(facts: dict[str, Any]) -> str:
    """Return the clause that ends the message "PREFIX is whole: ..." after a check of a dataset: whether its content
    was compared with its sidecar file, with the record that an earlier run left, or with nothing. `facts` is the result
    of `merge_split_verify_datasets.verify`.
    """
    if not facts["compared_with_sidecar"]:
        seen = ", and all that a run has read of it is as it was then" if facts["compared_with_record"] else ""
        return f"and no sidecar to compare with{seen}"
    unsigned = "; the sidecar was written by an older lmtrain and has no hash of itself"
    return f"as its sidecar says{'' if facts['sidecar_has_hash'] else unsigned}"


def _bar(share: float) -> str:
    """Draw a bar in eighths of a character; a share of 1 is 50 characters wide."""
    whole, eighths = divmod(round(share * 50 * 8), 8)
    return "█" * whole + " ▏▎▍▌▋▊▉"[eighths]
