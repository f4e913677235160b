"""Keys of caches, journals and records: each input on which the value depends changes the key, and no other input does.

Inputs that are fields of a class are listed by the class and options by the command, so that a new one fails here
until it is part of the key or is named as one without effect.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from fractions import Fraction
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from data_tools.corpus import build_from_yaml
from data_tools.corpus.build_from_yaml import (
    BuildSettings,
    CleanSettings,
    DecontaminateSettings,
    DedupeSettings,
    SplitSettings,
)
from data_tools.corpus.copies.dedupe import MinHash, _input_facts
from data_tools.corpus.flow.run_one_corpus_step_in_workers import check_outputs_of_command
from data_tools.corpus.split_sample_shuffle import draw_number
from data_tools.preprocess.length_and_script_filters import Filters
from data_tools.preprocess.preprocess_pipeline import Options, _run_identity
from data_tools.preprocess.resumable_dataset_writer import _chained_hash
from data_tools.preprocess.tokenizer_and_dataset_from_text import TextRequest
from data_tools.read.find_input_files import Source, TextSuffixes
from lmtrain.checkpoint.disk.safetensors_file import PieceSpec
from lmtrain.checkpoint.disk.tensor_slice_geometry import Box
from lmtrain.checkpoint.reshard.reshard_tensors import work_key
from lmtrain.cli.eval.evaluate_command import evaluate
from lmtrain.data.assemble_training_data import _sample_identity, _stream_key
from lmtrain.data.cut_datasets_into_samples import DataRequirements, DatasetBuilder
from lmtrain.data.data_settings import DataChoice, DataSettings, MaskedSettings
from lmtrain.data.store.dataset_writer import DatasetWriter
from lmtrain.data.store.document_boundaries import index_identity, record_path
from lmtrain.data.store.indexed_dataset import IndexedDataset
from lmtrain.data.store.merge_split_verify_datasets import _files
from lmtrain.data.training_data_by_source import TrainingPart
from lmtrain.eval.resume_journal import Journal, model_identity
from lmtrain.eval.score_targets import _request_key
from lmtrain.eval.windows import MaskedRequest
from lmtrain.exchange.import_foreign_model import _made_from
from lmtrain.runtime.files import existing_output
from lmtrain.runtime.files.existing_output import made_from
from lmtrain.start.evaluation.existing_results import ResultsOrigin
from lmtrain.train.ranks.facts_equal_on_all_ranks import code_digests
from tests.unit.data.writing import add_document


class Keyed(NamedTuple):
    """A function that computes a key of its keyword arguments, `inputs`; those in `without_effect`, names divided by
    spaces, must not change it. `others` has the other values of an input for which `others_of` finds no suitable one.
    """

    key: Callable[..., object]
    inputs: dict[str, Any]
    without_effect: str = ""
    others: Mapping[str, list[Any]] = {}


def others_of(value: Any) -> Iterator[Any]:
    """Yield values that differ from `value` in one thing each: in every field of a dataclass, or of its fields."""
    if is_dataclass(value) and not isinstance(value, type):
        for name, inner in values_of(value).items():
            yield from (replace(value, **{name: other}) for other in others_of(inner))
    elif isinstance(value, Enum):
        yield from (other for other in type(value) if other != value)
    elif isinstance(value, bool) or value is None:
        yield not value
    elif isinstance(value, tuple):
        yield (*value, next(others_of(value[0]), None) if value else "other")
        yield from ((other, *value[1:]) for other in (others_of(value[0]) if value else ()))
    elif isinstance(value, dict):
        yield value | {"other": 1}
    elif isinstance(value, Path):
        yield value.with_name(f"{value.name}_")
    elif isinstance(value, str | bytes):
        yield value.swapcase()
    else:
        yield value / 2 if isinstance(value, float) else value + 1


def values_of(instance: Any) -> dict[str, Any]:
    """Return the value of each field of a dataclass by its name."""
    return {field.name: getattr(instance, field.name) for field in fields(instance)}


def at(path: str, content: str | bytes, seconds: int = 1) -> Path:
    """Write a file with this content and modification time; return its path."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_bytes(content.encode() if isinstance(content, str) else content)
    os.utime(path, (seconds, seconds))
    return Path(path)


def dataset(
    lengths: tuple[tuple[int, ...], ...], first: int, dtype: type, seconds: int, prefix: str, has_sidecar: bool = True
) -> IndexedDataset:
    """Write and open a dataset with these lengths of the sequences of its documents; its ids count on from `first`."""
    for path in Path().glob(f"{prefix}.*"):
        path.unlink()
    with DatasetWriter(Path(prefix), dtype) as writer:
        for document in lengths:
            add_document(writer, [np.arange(first, first + length, dtype=dtype) for length in document])
        if has_sidecar:
            writer.describe(tokenizer=b"{}", fingerprint="abc", vocab_size=99, eod_id=None, num_bytes=1)
    os.utime(f"{prefix}.idx", (seconds, seconds))
    return IndexedDataset.open(prefix)


def stream_key(
    settings: DataChoice, seq_len: int = 8, documents: range = range(2), tokens: range | None = None, **values: Any
) -> str:
    needs = DataRequirements(seq_len=seq_len, vocab_size=99, seed=1, num_samples=1, validate=False)
    return _stream_key(DatasetBuilder(settings, needs, reads_valid=False), part(documents, tokens=tokens, **values))


def part(documents: range, share: Fraction = Fraction(1), tokens: range | None = None, **values: Any) -> TrainingPart:
    unread: Any = None
    return TrainingPart(dataset(**LENGTHS | values), documents, tokens, unread, share, "a", 1)


def sample_identity(num_parts: int, documents: range, share: Fraction, values: Any, **settings: Any) -> dict[str, Any]:
    parts = [part(documents, share, **values), part(range(1), prefix="second")][:num_parts]
    return _sample_identity(DataSettings(path="a", **settings), parts, 1)


def journal_key(identity: str, **request: Any) -> bytes:
    journal = Journal(None)
    journal.set_identity(identity)
    return journal._key([MaskedRequest(**request)])


def results_origin(**contents: str) -> ResultsOrigin:
    model, task = at("hf/config.json", contents["model"]).parent, at("mine.yaml", contents["task"])
    texts = [str(at(path, contents[path])) for path in ("text[1].txt", "folder/inner/a.txt", "glob/in/ner/a.txt")]
    for name in ("shards-00000.idx", "shards-00001.bin", "shards-00001.idx"):
        at(name, contents[name])
    return ResultsOrigin.of({}, [model], [texts[0], "folder", "glob/**/*.txt", "shards"], [task])


RECIPE = BuildSettings(
    inputs=("in.jsonl",), output="out", clean=CleanSettings(), dedupe=DedupeSettings(), split=SplitSettings(),
    decontaminate=DecontaminateSettings(against=("eval.txt",)),
)  # fmt: skip
OTHER_RECIPES: dict[str, list[Any]] = {
    "inputs": [("in.jsonl", "more.jsonl")], "text": ["aa"], "passage": ["aa"],
    "split": [None, SplitSettings(by="id"), SplitSettings(ratios=(0.5, 0.5, 0.0))],
}  # fmt: skip
SPEC = PieceSpec("a", "F32", (4, 4), Box((0, 2), (4, 2)))
REQUEST = MaskedRequest(np.arange(5), 2, 0, 1.0, np.array([1, 3]), np.array([0, 0, 1]))
LENGTHS: dict[str, Any] = {"lengths": ((1, 2), (3,)), "first": 1, "dtype": np.uint16, "seconds": 1, "prefix": "data"}
OTHER_LENGTHS: dict[str, list[Any]] = {
    "lengths": [((2, 1), (3,)), ((1,), (2, 3)), ((3,), (3,)), ((1, 2), (4,)), ((1,), (2,), (3,))],
    "dtype": [np.int32], "prefix": ["data2"],
}  # fmt: skip
MASKS = {name: getattr(MaskedSettings(path="a"), name) for name in MaskedSettings.__annotations__}
SAMPLES = {
    "documents": range(2), "values": {}, "document_mask": False, "packing": "concatenate", "order": "own",
    "first_sample": 0, "restart": False,
}  # fmt: skip
OTHER_SAMPLES: dict[str, list[Any]] = {
    "documents": [range(1, 2), range(1)], "values": [{"lengths": ((1, 2), (4,))}, {"lengths": ((1,), (2,), (3,))}],
    "packing": ["document"], "order": ["megatron"], "share": [Fraction(1, 2)],
}  # fmt: skip
EVAL_FILES = (
    "model", "task", "text[1].txt", "folder/inner/a.txt", "glob/in/ner/a.txt", "shards-00000.idx", "shards-00001.bin",
    "shards-00001.idx",
)  # fmt: skip
CONTENTS = {"name": "a", "content": "text", "seconds": 1}
KEYS = {
    "runs of preprocess": Keyed(
        lambda tokenizer, **options: _run_identity([], tokenizer, Options(**options)),
        {"tokenizer": b"a"} | values_of(Options()), "workers max_bad overwrite names",
        {"filters": [Filters(min_chars=1)], "max_bad": [1], "shard_tokens": [1], "max_documents": [1]},
    ),
    "filters of preprocess": Keyed(
        lambda **values: Filters(**values).identity(),
        {name: value for name, value in values_of(Filters()).items() if name != "entry_points"}, "",
        {"scripts": [(("latin", 0.5),)]} | {f"{least}_{unit}": [7] for least in ("min", "max")
                                            for unit in ("chars", "tokens")},
    ),
    "input files of preprocess": Keyed(
        lambda **values: _run_identity([Source(**values)], b"", Options()), values_of(Source(Path("a"), "text", "gz")),
    ),
    "texts of data.text": Keyed(
        lambda content, **values: TextRequest(**values).identity([Source(at("a", content), "text", "")]),
        {"content": "a"} | values_of(TextRequest(texts=("a",))),
        "texts suffixes tokenizer max_vocab exact_vocab workers names",  # the tokenizer and its size are compared apart
        {"suffixes": [TextSuffixes((".py",))]},
    ),
    "outputs of corpus build": Keyed(
        lambda text, passage, seconds, **values: (
            at("in.jsonl", text, seconds), at("more.jsonl", ""), at("eval.txt", passage),
            build_from_yaml._made_from(BuildSettings(**values)),
        ),
        {"text": "a", "passage": "a", "seconds": 1} | values_of(RECIPE), "output",
        OTHER_RECIPES,
    ),
    "steps of corpus build": Keyed(
        lambda text, seconds, name, settings, inputs, **values: (
            at("in.jsonl", text, seconds), at("more.jsonl", ""),
            build_from_yaml._step_key(
                build_from_yaml._BuildStep(name, settings, lambda *paths: pytest.fail("is not run")), inputs,
                replace(RECIPE, **values),
            ),
        ),
        {"text": "a", "seconds": 1, "name": "a", "settings": {"a": 1}} | values_of(RECIPE),
        "output clean dedupe decontaminate shuffle split",  # of which each step has its own
        OTHER_RECIPES,
    ),
    "outputs of a corpus command": Keyed(
        lambda command, more, **params: check_outputs_of_command(
            command, params, [at("in.jsonl", "a")], [Path("out")], Path("report"), [at("more", more)],
        )[1],
        {"command": "clean", "more": "a", "key": "text", "seed": 1, "overwrite": False, "workers": 1, "memory": 1,
         "output": "out"},
        "overwrite workers memory output", {"more": ["aa"]},
    ),
    "inputs of signatures": Keyed(
        lambda name, content, seconds, **shape: _input_facts([at(f"{name}.jsonl", content, seconds)], MinHash(**shape)),
        CONTENTS | values_of(MinHash()), "", {"content": ["texts"]},
    ),
    "numbers of documents": Keyed(draw_number, {"seed": 1, "purpose": "split", "data": b"a"}),
    "lines of a journal": Keyed(_chained_hash, {"entry": {"a": 1}, "previous_hash": "a"}),
    "outputs": Keyed(
        lambda name, content, seconds, options: made_from(options, [at(name, content, seconds)]),
        CONTENTS | {"options": {"a": 1}}, "", {"content": ["texts"]},
    ),
    "copies of datasets": Keyed(
        lambda **suffixes: made_from("merge", (at("data", ""), *(
            at(str(path), suffixes[path.suffix[1:]]) for path in _files([dataset(**LENGTHS)])
        ))),
        {"bin": "a", "idx": "a", "json": "a"}, "", {name: ["aa"] for name in ("bin", "idx", "json")},
    ),
    "options of eval": Keyed(
        lambda **params: vars(ResultsOrigin.of(params, [], [])), dict.fromkeys(signature(evaluate).parameters),
        "output overwrite as_json full batch_size list_tasks nproc nproc_per_node",
    ),
    "files of eval": Keyed(
        results_origin, dict.fromkeys(EVAL_FILES, "a"), "", {name: ["aa"] for name in EVAL_FILES},
    ),
    "models of eval": Keyed(
        lambda name, content, seconds, how: model_identity(at(f"{name}/{name}", content, seconds).parent, how),
        CONTENTS | {"how": "fp32"}, "", {"content": ["texts"]},
    ),
    "answers in the journal of eval": Keyed(
        journal_key, {"identity": "a"} | values_of(REQUEST), "item weight",
    ),
    "answers that tasks share": Keyed(
        lambda **values: _request_key(MaskedRequest(**values)), values_of(REQUEST), "num_scored item weight",
    ),
    "work of reshard and merge": Keyed(
        lambda identity, name, **values: work_key(identity, {name: [PieceSpec(**values["spec"])]}),
        {"identity": "a", "name": "file", "spec": values_of(SPEC)}, "",
        {"spec": [values_of(other) for other in others_of(SPEC)]},
    ),
    "masks": Keyed(
        lambda **values: MaskedSettings(path="a", **values).sample_identity,
        MASKS,
    ),
    "indexes of a dataset": Keyed(
        lambda **values: index_identity(dataset(**values)), LENGTHS, "prefix", OTHER_LENGTHS,  # it is in its own folder
    ),
    "indexes of a dataset without a sidecar": Keyed(
        lambda **values: index_identity(dataset(**values, has_sidecar=False)), LENGTHS, "prefix first", OTHER_LENGTHS,
    ),
    "streams of samples": Keyed(
        lambda packing, **values: stream_key(DataSettings(path="a", packing=packing), **values),
        LENGTHS | {"seq_len": 8, "packing": "concatenate", "documents": range(2), "tokens": range(5)},
        "prefix seconds",
        OTHER_LENGTHS | {"packing": ["document"], "documents": [range(1, 3)], "tokens": [None, range(1, 6)]},
    ),
    "streams of masked samples": Keyed(lambda **values: stream_key(MaskedSettings(path="a", **values)), MASKS),
    "samples of a run": Keyed(
        lambda **values: sample_identity(1, share=Fraction(1), **values), SAMPLES, "", OTHER_SAMPLES,
    ),
    "samples of a blend": Keyed(
        lambda **values: sample_identity(2, **values), SAMPLES | {"share": Fraction(1, 3)}, "", OTHER_SAMPLES,
    ),
    "imports": Keyed(
        lambda config, vocab, merges, **values: _made_from(
            at("hf/config.json", config).parent, values["program"],
            (at("vocab.json", vocab), at("merges.txt", merges))[0].parent, values["overrides"],
        ),
        {"config": "a", "vocab": "a", "merges": "a", "program": "hf", "overrides": {"a": 1}}, "",
        {"vocab": ["aa"], "merges": ["aa"]},
    ),
    "checksums of tokens": Keyed(
        lambda **values: record_path(dataset(**values), Path()), LENGTHS, "first",  # because: damage must be noticed
        OTHER_LENGTHS | {"lengths": OTHER_LENGTHS["lengths"][2:]},
    ),
    "code": Keyed(
        lambda name, content: code_digests.__wrapped__(at(f"{name}/{name}.py", content).parent),
        {"name": "a", "content": "a"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KEYS)
def test_each_input_changes_the_key_and_no_other_does(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    row = KEYS[name]
    before = json.dumps(row.key(**row.inputs), default=str)
    changes = {
        input_name: {
            json.dumps(row.key(**row.inputs | {input_name: other}), default=str) != before
            for other in row.others.get(input_name) or others_of(value)
        }
        for input_name, value in row.inputs.items()
    }
    without_effect = row.without_effect.split()
    assert changes == {input_name: {input_name not in without_effect} for input_name in row.inputs}
    assert json.dumps(row.key(**row.inputs), default=str) == before


@pytest.mark.parametrize(("name", "module"), [("outputs", existing_output), ("steps of corpus build", build_from_yaml)])
def test_the_version_is_part_of_what_an_output_is_made_from(
    name: str, module: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = KEYS[name].key(**KEYS[name].inputs)
    monkeypatch.setattr(module, "__version__", "another")
    assert KEYS[name].key(**KEYS[name].inputs) != before
