"""What `lmtrain eval` evaluates, and on which processes: found and judged before torch is there, then loaded.

Called by evaluate. A subject is a checkpoint of any layout, or a folder of Hugging Face's, converted on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmtrain.checkpoint.disk.format import MANIFEST
from lmtrain.config.build import build_settings
from lmtrain.config.overrides import apply_override, parse_overrides, sweep_refusal
from lmtrain.errors import LayoutError, MissingInputError, SettingsError, spelling_hint
from lmtrain.eval.source import Source, Weights, checkpoint_source
from lmtrain.models.model_settings import ModelSettings
from lmtrain.placement.parallel_settings import ParallelSettings, check_layout
from lmtrain.runtime.files.files import read_json
from lmtrain.runtime.machine.gpus import Gpus, device_problem
from lmtrain.runtime.processes.process import ProcessEnv
from lmtrain.tokenizer.base import Tokenizer
from lmtrain.train.before.preflight import process_problems
from lmtrain.train.layouts.layout_table import layout_words
from lmtrain.train.ranks.rank_facts import Fact, checkpoint_fact, program_facts

if TYPE_CHECKING:
    from lmtrain.eval.load import LoadedModel

_KEYS = ("tp", "pp", "dp_shard", "dp_replicate", "sequence_parallel", "balance", "timeout_s")
KEYS, TRAINING = ([f"parallel.{key}" for key in keys] for keys in (_KEYS, ("vp", "zero", "schedule")))


def find_subject(path: Path) -> Source:
    if (path / "config.json").is_file():
        config = read_json(path / "config.json")
        if not isinstance(config, dict) or "model" not in config:  # because: a run has a file of this name too
            return _huggingface(path, config)
    return checkpoint_source(path)


def _huggingface(path: Path, config: Any) -> Source:
    from lmtrain.exchange.huggingface.config import settings_of

    family, settings = settings_of(config, path / "config.json", pair_head=False, dropout=None)

    def opened() -> Weights:
        from lmtrain.exchange.huggingface.convert import HFWeights

        return HFWeights(path)

    def tokenizer() -> Tokenizer:
        try:
            return Tokenizer.load(path)
        except MissingInputError as error:
            raise MissingInputError(
                f"{error} Put it there, or make a checkpoint by `lmtrain reshard --from hf --tokenizer PATH`."
            ) from error

    return Source(
        path=path, settings=settings, open=opened, tokenizer=tokenizer,
        facts={"checkpoint": str(path), "format": "huggingface", "model_type": family},
    )  # fmt: skip


def settle_layout(words: Sequence[str], model: ModelSettings, env: ProcessEnv) -> ParallelSettings:
    """`parallel.tp=2 parallel.pp=2` for these processes; what they leave are copies, with batches of their own each."""
    given = _given(words)
    asked = build_settings(ParallelSettings, given, "parallel")
    each = asked.pp * asked.tp * asked.dp_shard
    parallel = replace(
        asked,
        dp_replicate=asked.dp_replicate if "dp_replicate" in given else max(env.world_size // each, 1),
        zero=3 if asked.dp_shard > 1 else 1,  # because: weights are all there is to share
        sequence_parallel=given.get("sequence_parallel", model.shape.seq_len % asked.tp == 0),
    )
    check_layout(model, parallel)
    if wrong := list(process_problems(parallel.layout, env)):
        raise LayoutError(*wrong)
    return parallel


def _given(words: Sequence[str]) -> dict[str, Any]:
    tree: dict[str, Any] = {"parallel": {}}
    problems = []
    for override in parse_overrides(words, {}) if words else ():
        key = str(override.key_or_group)
        if override.is_sweep_override():
            problems.append(sweep_refusal(override))
        elif key in TRAINING:
            problems.append(
                f"{override.input_line} is about training, and an evaluation has no gradients. Leave it out."
            )
        elif key not in KEYS:
            problems.append(f"{override.input_line} is not a setting of an evaluation. {spelling_hint(key, KEYS)}")
        elif problem := apply_override(tree, override):
            problems.append(problem)
    if problems:
        raise SettingsError(problems)
    return {key: value for key, value in tree["parallel"].items() if value is not None}


def check_device(name: str, env: ProcessEnv) -> None:
    """Raise unless each process of this node can have a device of its own."""
    if name != "cpu" and env.world_size > 1 and (problem := device_problem(name, Gpus.detect(), env)):
        raise problem


@contextmanager
def on_processes(
    env: ProcessEnv, settled: Sequence[ParallelSettings], device: str, precision: str
) -> Iterator[Callable[[Source, ParallelSettings], LoadedModel]]:
    """Yield a function that loads a model, each process its shard, for as long as the block lasts; all end it together.

    Several models in turn have one layout, whatever else is settled for each.
    """
    from lmtrain.eval.load import load_source
    from lmtrain.parallel.mesh import build_mesh
    from lmtrain.runtime.machine.device import memory_errors, pick_device
    from lmtrain.runtime.processes.process_group import open_process_group
    from lmtrain.train.ranks.compare_ranks import check_facts_agree

    first = settled[0]
    with memory_errors("Use a smaller --batch-size, --precision bf16, or more processes and parallel.tp or pp."):
        picked = pick_device(device, env)
        with open_process_group(env, picked, first.timeout_s) as met:
            check_facts_agree(partial(_computed_by, first), met.hosts)
            mesh = build_mesh(first.layout, picked, first.timeout_s)

            def loaded(source: Source, parallel: ParallelSettings) -> LoadedModel:
                check_facts_agree(partial(_model_of, source), met.hosts)
                found = load_source(source, picked, precision, mesh, parallel)
                if env.world_size == 1:
                    return found
                return replace(found, subject=replace(found.subject, layout=layout_words(parallel).partition(",")[0]))

            yield loaded


def _computed_by(parallel: ParallelSettings) -> dict[str, Fact]:
    """Return the facts that must be equal on all ranks before scoring starts: parallel settings and code versions."""
    return {
        f"parallel.{key}": Fact(str(value), str(value)) for key, value in parallel.to_dict().items()
    } | program_facts()


def _model_of(source: Source) -> dict[str, Fact]:
    if (source.path / MANIFEST).is_file():
        return {"checkpoint": checkpoint_fact(source.path)}
    files = [f"{file.name} of {file.stat().st_size} bytes" for file in sorted(source.path.iterdir())]
    return {"model": Fact(", ".join(files), f"{len(files)} files in {source.path}")}
