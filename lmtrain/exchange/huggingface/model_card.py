"""The README.md of an exported folder: a model card of what the checkpoint records, and of nothing else. Torch-free.

It says what the model is, how it was trained, which evaluations lie beside the checkpoint, and how to load it. The
licence is the owner's to choose.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from lmtrain import __version__
from lmtrain.checkpoint.read_merge_record import merge_record
from lmtrain.checkpoint.view_with_ema_as_weights import WeightSet, average_facts
from lmtrain.errors import LmtrainError
from lmtrain.exchange.huggingface.preserved_source_files import CONFIG, parse_original
from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.models.model_settings import ModelSettings
from lmtrain.runfolder.file_names import CHECKPOINTS, METRICS
from lmtrain.runfolder.metrics_rows import read_metrics
from lmtrain.runfolder.run_facts import RunFacts
from lmtrain.runfolder.settings_differences import flatten
from lmtrain.runtime.files.atomic_files import parse_json, read_bytes
from lmtrain.units import format_measure

_SETTINGS = ("model", "optim", "schedule", "precision", "train")  # groups to show
_MAX_RESULT_BYTES = 4 << 20
_MAX_RESULT_FILES = 200
_AUTO_CLASSES = {"ForCausalLM": "AutoModelForCausalLM", "LMHeadModel": "AutoModelForCausalLM",
                 "ForMaskedLM": "AutoModelForMaskedLM", "ForPreTraining": "AutoModelForPreTraining"}  # fmt: skip
_PIPELINES = {True: "text-generation", False: "fill-mask"}
Row = tuple[str, object]


def model_card(
    name: str, checkpoint: Path, state: Mapping[str, Any], settings: ModelSettings, config: Mapping[str, Any],
    original: Mapping[str, bytes], tokenizer_class: str = "AutoTokenizer", weights: WeightSet = "model", *,
    run: RunFacts, is_path: Callable[[str], bool] | None,
) -> str:  # fmt: skip
    """Return the text of a README.md for the exported folder `name`. `checkpoint` and `state` are the source's path and
    the state in its manifest, `config` is the exported config.json, `original` has the files kept from an imported
    folder ({} for a model of lmtrain's own), `tokenizer_class` is the transformers class that loads the tokenizer, and
    `weights` tells whether the weights or their average were exported. `run` is what the run was at the checkpoint.
    `is_path` tells by the dotted key which settings are paths, which are not shown; without it none is shown.
    """
    architecture, causal = config["architectures"][0], settings.shape.causal
    tags = "\n".join(f"- {tag}" for tag in ("lmtrain", config["model_type"]))
    parts = [
        f"---\nlibrary_name: transformers\npipeline_tag: {_PIPELINES[causal]}\ntags:\n{tags}\n---",
        f"# {name}",
        f"A language model of {settings.num_parameters:,} parameters, exported by lmtrain {__version__}.",
        "## Model",
        _table(_model_rows(settings, architecture, str(config["dtype"]))),
        "## Training",
        *_training(state, original, weights, run, is_path),
        "## Evaluation",
        _evaluation(checkpoint, state, weights),
        "## Use",
        _use(name, architecture, tokenizer_class, causal=causal, is_own=not original),
        "## Licence",
        "This card states no licence: it is the owner's to choose. Add it as `license:` to the head of this file.",
    ]
    return "\n\n".join(parts) + "\n"


def _table(rows: Sequence[Row]) -> str:
    """Return the rows that have a value as a table of two columns."""
    lines = [f"| {key} | {_cell(value)} |" for key, value in rows if value is not None]
    return "\n".join(["| | |", "|---|---|", *lines])


def _cell(value: object) -> str:
    text = f"{value:,}" if isinstance(value, int) else str(value)
    return " ".join(text.replace("|", "\\|").split())


def _model_rows(settings: ModelSettings, architecture: str, dtype: str) -> list[Row]:
    shape = settings.shape
    is_grouped = isinstance(settings, GPTSettings) and shape.num_kv_heads != shape.num_heads
    return [
        ("architecture in transformers", f"`{architecture}`"),
        ("parameters", settings.num_parameters),
        ("layers", shape.num_layers),
        ("width", shape.width),
        ("attention heads", shape.num_heads),
        ("heads of keys and values", shape.num_kv_heads if is_grouped else None),
        ("vocabulary", shape.vocab_size),
        ("longest text, in tokens", shape.seq_len),
        ("type of the weights", dtype),
    ]


def _training(
    state: Mapping[str, Any], original: Mapping[str, bytes], weights: WeightSet, run: RunFacts,
    is_path: Callable[[str], bool] | None,
) -> Iterator[str]:  # fmt: skip
    """Yield the paragraphs of a model card about the training. `state` is the state in the checkpoint's manifest,
    `original` has the files kept from an imported folder, and `weights` tells whether the weights or their average were
    exported. `is_path` is that of `model_card`.
    """
    recorded = state.get("settings")
    if isinstance(imported := state.get("imported"), dict):
        source = {"huggingface": "a Hugging Face folder", "megatron": "a Megatron-LM checkpoint"}
        text = f"The weights were imported from {source.get(str(imported.get('format')), 'another program')}"
        name = parse_original(original, CONFIG).get("_name_or_path")
        yield f"{text}{f' of the name `{name}`' if name and isinstance(name, str) else ''} and not trained since."
    elif not isinstance(recorded, dict):
        yield "The checkpoint does not record how it was trained."
    else:
        yield _table(_training_rows(state, recorded, weights, run))
        if run.named_stages:
            yield "The stages of the run, and what each step of them read:"
            yield _stage_table(run)
        if is_path is None:
            return
        yield "All settings of the run that concern its model and its training:"
        groups = {
            group: {
                key: value for key, value in recorded[group].items()
                if not any(is_path(leaf) for leaf, _ in flatten(value, f"{group}.{key}"))
            }
            for group in _SETTINGS if isinstance(recorded.get(group), dict)
        }  # fmt: skip
        yield f"```json\n{json.dumps(groups, indent=1, ensure_ascii=False)}\n```"


def _training_rows(
    state: Mapping[str, Any], recorded: Mapping[str, Any], weights: WeightSet, run: RunFacts
) -> list[Row]:
    optim, schedule, data = (
        group if isinstance(group, dict) else {}
        for group in (*(recorded.get(name) for name in ("optim", "schedule")), state.get("data"))
    )
    of_stage = f" of the stage {run.stage_name}" if run.stage_name else ""
    checkpoint = recorded.get("checkpoint") or {}
    first_weights = checkpoint.get("init_from")
    whose = "the average in" if checkpoint.get("init_weights") == "ema" else "those of"
    average = average_facts(state, "The checkpoint") if weights == "ema" else None
    merge = merge_record(state, "The checkpoint")
    return [
        ("weights before the first step", f"{whose} {Path(first_weights).name}" if first_weights else "random"),
        ("weights", None if average is None else f"the {average.summary}"),
        ("merged", None if merge is None else merge.summary),
        ("steps", run.step),
        ("steps of the run", run.steps),
        ("starts", run.starts),
        ("samples", state.get("samples")),
        ("tokens", run.tokens),
        ("stage", run.stage.text if run.stage and run.stage_name else None),
        (f"batch{of_stage}", run.batch_text or None),
        (f"data{of_stage}", _names_alone(run.data)),
        ("parameters with padding", run.padded_parameters if run.padded_parameters != run.parameters else None),
        ("optimizer",
         f"{optim.get('kind')}, learning rate {optim.get('lr')}{' of the run' * bool(run.named_stages)}, weight decay "
         f"{optim.get('weight_decay')}"),
        ("learning rate of the last step", None if run.lr is None else f"{run.lr:.6g}"),
        (f"learning-rate schedule{of_stage}",
         run.stage.schedule if run.stage and run.stage_name
         else f"{schedule.get('kind')}, {schedule.get('warmup_steps')} warm-up steps"),
        ("precision", (recorded.get("precision") or {}).get("kind")),
        ("seed", str(state.get("seed"))),
        (f"tokens of the training data{of_stage}", data.get("num_tokens")),
        (f"documents of the training data{of_stage}", data.get("num_documents")),
        (f"SHA-256 of the training data{of_stage}", data.get("content_sha256")),
        ("fingerprint of the tokenizer", (state.get("tokenizer") or {}).get("fingerprint")),
    ]  # fmt: skip


def _stage_table(run: RunFacts) -> str:
    """Return a Markdown table of the stages that the run has begun by this checkpoint, the steps of the last one up to
    it.
    """
    begun = [stage for stage in run.named_stages if stage.first_step <= run.step]
    rows = [stage.cells() | {"<data": _names_alone(stage.data) or ""} for stage in begun]
    lines = [f"| {' | '.join(title.lstrip('<') for title in rows[0])} |", "|---" * len(rows[0]) + "|"] if rows else []
    return "\n".join([*lines, *(f"| {' | '.join(map(_cell, row.values()))} |" for row in rows)])


def _names_alone(data: str | None) -> str | None:
    """Return the datasets in a text without the folders in which they lie, which a card does not show."""
    return None if data is None else ", ".join(PurePath(path).name for path in data.split(", "))


def _evaluation(checkpoint: Path, state: Mapping[str, Any], weights: WeightSet) -> str:
    """Return a Markdown table of the evaluations of a checkpoint's `weights` ("model" or "ema") that are found in its
    run's folders, or a sentence that says that there are none. `state` is the state in its manifest.
    """
    step = int(state["step"])
    # because: the run of a merged checkpoint's newest parent has measured that parent
    rows = [] if state.get("merged") is not None else [*_rows_of_run(checkpoint, step, weights)]
    rows += _rows_of_result_files(checkpoint, step, weights)
    if not rows:
        return "No evaluation of this checkpoint was found beside it."
    return "\n".join(["| what | result |", "|---|---|", *(f"| {_cell(name)} | {_cell(text)} |" for name, text in rows)])


def _rows_of_run(checkpoint: Path, step: int, weights: WeightSet) -> Iterator[tuple[str, str]]:
    """Yield (what was measured, result as text) for each validation and evaluation at `step` that the run of
    `checkpoint` has recorded for these `weights` ("model" or "ema"). Yield nothing if there is no readable record.
    """
    folder = checkpoint.resolve().parent
    metrics = (folder.parent if folder.name == CHECKPOINTS else folder) / METRICS
    try:
        rows = [row for row in read_metrics(metrics) if row["step"] == step] if metrics.is_file() else []
    except LmtrainError:  # because: a damaged record of the run should not stop an export
        return
    for row in rows:
        # because: a row has the measures of the weights, and those of their average under a key of its own
        of_weights = row["measures"] if row["event"] == "eval" else row
        values = of_weights if weights == "model" else row.get("ema") or {}
        if row["event"] == "valid" and values.get("loss") is not None:
            yield "loss on the run's validation data, nats per token", f"{values['loss']:.4f}"
        elif row["event"] == "eval" and values:
            yield str(row["name"]), _figures(values, row["headline"])


def _rows_of_result_files(checkpoint: Path, step: int, weights: WeightSet) -> Iterator[tuple[str, str]]:
    """Yield (task and data, measures as text) for each result of `lmtrain eval --output` about these `weights` of this
    checkpoint at `step`. The JSON files beside the checkpoint and in its run's folder are searched; others are skipped.
    """
    path = checkpoint.resolve()
    folders = [path.parent, *([path.parent.parent] if path.parent.name == CHECKPOINTS else [])]
    files = [file for folder in folders for file in sorted(folder.glob("*.json"))]
    for file in files[:_MAX_RESULT_FILES]:
        try:
            document = parse_json(read_bytes(file, _MAX_RESULT_BYTES), file)
            model = document["model"]
            subject = model["step"], Path(model["checkpoint"]).resolve(), model.get("weights", "model")
            if document["format"] == "lmtrain evaluation" and subject == (step, path, weights):
                for result in document["results"]:
                    where = f"{result['task']}, on {Path(result['data']).name}"
                    yield where, _figures(result["measures"], result["headline"])
        except (LmtrainError, KeyError, TypeError, ValueError, AttributeError):
            continue  # because: other files lie there as well


def _figures(measures: Mapping[str, float], headline: str) -> str:
    """Format an evaluation's measures, by name, with the measure named `headline` first."""
    names = sorted(measures, key=lambda name: name != headline)
    return "; ".join(f"{name.replace('_', ' ')} {format_measure(name, measures[name])}" for name in names)


def _use(name: str, architecture: str, tokenizer_class: str, *, causal: bool, is_own: bool) -> str:
    """Return the paragraph of a model card with the Python code that loads the exported folder `name` by transformers.
    `is_own` is True for a model that lmtrain trained, which expects no special tokens around a text, and False for one
    of another program.
    """
    auto_class = next(auto for ending, auto in _AUTO_CLASSES.items() if architecture.endswith(ending))
    example = (
        f'inputs = tokenizer("Once upon a time", {"add_special_tokens=False, " if is_own else ""}return_tensors="pt")\n'
        "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=40)[0]))"
        if causal
        else 'outputs = model(**tokenizer("A text.", return_tensors="pt"))'
    )
    return (
        f"```python\nfrom transformers import {auto_class}, {tokenizer_class}\n\n"
        f'tokenizer = {tokenizer_class}.from_pretrained("{name}")\nmodel = {auto_class}.from_pretrained("{name}")\n'
        f"{example}\n```\n\n"
        "transformers reads a special token that is written in a text, such as `<s>` or `[MASK]`, as that token. "
        "lmtrain reads it as plain text, as `tokenizer(text, split_special_tokens=True)` does."
    )
