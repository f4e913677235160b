"""The layout of `lmtrain eval`, checked before torch is imported, and the loading of models on all its processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from lmtrain.checkpoint.disk.checkpoint_format import MANIFEST
from lmtrain.checkpoint.model_on_disk import ModelSource
from lmtrain.config.overrides import apply_override, parse_overrides, sweep_refusal
from lmtrain.config.settings_builder import build_settings
from lmtrain.errors import LayoutError, SettingsError, spelling_hint
from lmtrain.models.model_settings import ModelSettings
from lmtrain.placement.parallel_settings import ParallelSettings, check_layout
from lmtrain.runtime.machine.gpus import Gpus, device_problem
from lmtrain.runtime.processes.process_environment import ProcessEnv
from lmtrain.train.before.preflight import process_problems
from lmtrain.train.ranks.facts_equal_on_all_ranks import Fact, checkpoint_fact, program_facts

if TYPE_CHECKING:
    from lmtrain.eval.load_model import LoadedModel

_KEYS = ("tp", "pp", "dp_shard", "dp_replicate", "sequence_parallel", "balance", "timeout_s")
LAYOUT_KEYS, TRAINING_KEYS = ([f"parallel.{key}" for key in keys] for keys in (_KEYS, ("vp", "zero", "schedule")))


def choose_layout(overrides: Sequence[str], model: ModelSettings, env: ProcessEnv) -> ParallelSettings:
    """Return the parallel layout of an evaluation from overrides such as `parallel.tp=2`. Processes that the layout
    leaves over become data-parallel replicas.

    Each copy of the model (dp_replicate) scores batches of its own. Raise if the layout does not fit the model or the
    processes.
    """
    sizes = _parse_layout(overrides)
    requested = build_settings(ParallelSettings, sizes, "parallel")
    copy_size = requested.pp * requested.tp * requested.dp_shard
    parallel = replace(
        requested,
        dp_replicate=requested.dp_replicate if "dp_replicate" in sizes else max(env.world_size // copy_size, 1),
        zero=3 if requested.dp_shard > 1 else 1,  # because: only weights can be sharded
        sequence_parallel=sizes.get("sequence_parallel", model.shape.seq_len % requested.tp == 0),
    )
    check_layout(model, parallel)
    if problems := list(process_problems(parallel.layout, env)):
        raise LayoutError(*problems)
    return parallel


def _parse_layout(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the values of overrides of the group `parallel` by key ("tp" -> 2). Raise on keys that an evaluation does
    not have.
    """
    tree: dict[str, Any] = {"parallel": {}}
    problems = []
    for override in parse_overrides(overrides, {}) if overrides else ():
        key = str(override.key_or_group)
        if override.is_sweep_override():
            problems.append(sweep_refusal(override))
        elif key in TRAINING_KEYS:
            problems.append(
                f"{override.input_line} is about training, and an evaluation has no gradients. Leave it out."
            )
        elif key not in LAYOUT_KEYS:
            hint = spelling_hint(key, LAYOUT_KEYS)
            problems.append(f"{override.input_line} is not a setting of an evaluation. {hint}")
        elif problem := apply_override(tree, override):
            problems.append(problem)
    if problems:
        raise SettingsError(problems)
    return {key: value for key, value in tree["parallel"].items() if value is not None}


def check_device(name: str, env: ProcessEnv) -> None:
    """Raise unless each process on this node can have its own device."""
    if name != "cpu" and env.world_size > 1 and (problem := device_problem(name, Gpus.detect(), env)):
        raise problem


@contextmanager
def open_model_loader(
    env: ProcessEnv, layouts: Sequence[ParallelSettings], device: str, precision: str
) -> Iterator[Callable[[ModelSource, ParallelSettings], LoadedModel]]:
    """Context manager: open the process group and yield `load(source, layout)`, which loads a model, on each process
    its shard. `layouts` are those that will be used; the first one defines the device mesh and the timeout.

    All processes leave the block together. Models that are loaded in turn share the mesh of the first layout.
    """
    from lmtrain.eval.load_model import load_source
    from lmtrain.parallel.mesh import build_mesh
    from lmtrain.runtime.machine.choose_device import memory_errors, pick_device
    from lmtrain.runtime.processes.process_group import open_process_group
    from lmtrain.train.ranks.compare_ranks import check_facts_agree

    first_layout = layouts[0]
    with memory_errors("Use a smaller --batch-size, --precision bf16, or more processes and parallel.tp or pp."):
        picked_device = pick_device(device, env)
        with open_process_group(env, picked_device, first_layout.timeout_s) as peers:
            check_facts_agree(partial(_shared_facts, first_layout), peers.hosts)
            mesh = build_mesh(first_layout.layout, picked_device, first_layout.timeout_s)

            def load_model(source: ModelSource, parallel: ParallelSettings) -> LoadedModel:
                check_facts_agree(partial(_model_facts, source), peers.hosts)
                loaded = load_source(source, picked_device, precision, mesh, parallel)
                if env.world_size == 1:
                    return loaded
                return replace(loaded, subject=replace(loaded.subject, layout=parallel.layout_text.partition(",")[0]))

            yield load_model


def _shared_facts(parallel: ParallelSettings) -> dict[str, Fact]:
    """Return the values that must be equal on all ranks before scoring starts, by name: parallel settings and code
    versions.
    """
    return {
        f"parallel.{key}": Fact(str(value), str(value)) for key, value in parallel.to_dict().items()
    } | program_facts()


def _model_facts(source: ModelSource) -> dict[str, Fact]:
    """Return what identifies a model's files, which must be equal on all ranks: a checkpoint's digest, or the names and
    sizes of the files.
    """
    if (source.path / MANIFEST).is_file():
        return {"checkpoint": checkpoint_fact(source.path)}
    files = [f"{file.name} of {file.stat().st_size} bytes" for file in sorted(source.path.iterdir())]
    return {"model": Fact(", ".join(files), f"{len(files)} files in {source.path}")}
