"""What can be seen of settings: the model they build, the samples they give, the run they make, the talk of its ranks.

Each takes settings and gives something that can be compared. None gives back what it was told: not the run folder's
config.json, not a line of its log, not the dry run's table. Called through Bench.see by the proofs.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from rich.console import Console
from safetensors.torch import load_file

from lmtrain.batch import IGNORED, Batch, StepBatches
from lmtrain.cli.screen.print_messages_and_json import progress
from lmtrain.config.compose_run_settings import compose
from lmtrain.data.assemble_training_data import open_datasets
from lmtrain.data.sample_dataset_interface import Dataset
from lmtrain.data.samples import masked_language_samples, megatron_sample_order, packing
from lmtrain.data.store import document_boundaries
from lmtrain.data.training_data_by_source import epoch_warnings
from lmtrain.errors import DataError, LmtrainError, SettingsError
from lmtrain.models.model_settings import ModelSettings
from lmtrain.observe.metrics import read_metrics
from lmtrain.observe.screen.training_view import RunView
from lmtrain.observe.spans.span_file import read_spans
from lmtrain.parallel.build_parallel_model import build_parallel
from lmtrain.parallel.mesh import build_mesh
from lmtrain.runtime.machine.choose_device import pick_device, set_deterministic, set_tf32, set_threads
from lmtrain.runtime.processes.fault_injection import arm
from lmtrain.runtime.processes.process_environment import ProcessEnv
from lmtrain.start.dataset_from_text import make_data_of_text
from lmtrain.start.launch_ranks import choose_layout
from lmtrain.train.layouts.dry_run_speed_and_memory import forecast_facts, planned_run, predict_step
from lmtrain.train.run_config import RunConfig
from lmtrain.train.run_objects_and_resume import Run
from lmtrain.train.set_up_run import open_run
from lmtrain.train.startup_checks.preflight import load_data, preflight
from tests.cli.harness import outcome
from tests.layouts.held import Living
from tests.promise.bench import Bench, Settings, config_of, tree_of, typed

_VOCABULARY, _ROWS, _MANY = 40, 4, 48
_STEP = ("step", "loss", "grad_norm", "samples", "tokens", "samples_hash", "skipped")


def built(bench: Bench, settings: Settings) -> Any:
    """The shape of every weight, and loss and gradient of one batch."""
    config = config_of(settings)
    described = config.model.with_vocab(_VOCABULARY)
    model = build_parallel(
        described, config.precision, config.compute, torch.device("cpu"), seed=config.train.seed, training=True
    )  # fmt: skip
    losses = model.forward_backward(_step_of(described)).tolist()
    norm = model.finish_gradients(None).item()
    shapes = {name: tuple(p.shape) for name, p in model.parameters.items()}
    return {"shapes": shapes, "losses": losses, "gradient": norm}


def forecast(bench: Bench, settings: Settings) -> Any:
    """What the planner makes of the machine, for this run and a larger one, in words and numbers."""
    config = config_of(settings)
    model = config.model.with_vocab(_VOCABULARY)
    run = planned_run(config, model)
    assert config.hardware is not None
    return forecast_facts(config, model), predict_step(run, config.hardware)


def layout(bench: Bench, settings: Settings) -> Any:
    """How a command of four processes shares out the work."""
    four = ProcessEnv(world_size=4, local_world_size=4, launcher="lmtrain", host="here")
    config = choose_layout(config_of(settings), [], four, print, elastic=False)
    return (config.parallel.layout, config.recompute, config.train.micro_batch)


def samples(bench: Bench, settings: Settings) -> Any:
    """The first samples to train on and to validate on, and the vocabulary."""
    _, model, data = load_data(config_of(settings))
    ids = data.order.ids(0, min(_MANY, data.num_samples))
    seen = {"vocabulary": model.shape.vocab_size, "train": _arrays(data.train.batch(ids))}
    for name, valid in data.valid.items():
        seen[f"valid {name}"] = _arrays(valid.batch(np.arange(min(_MANY, valid.num_samples))))
    return seen


def sources(bench: Bench, settings: Settings) -> Any:
    """The names of the sources of training and validation, and the warnings on their epochs."""
    config = config_of(settings)
    _, _, data = load_data(config)
    names = [[source.name for source in sources] for sources in (data.parts, data.valid_sources)]
    return {"names": names, "warnings": list(epoch_warnings([(config.data, data, config.seq_len)], {}))}


def made_of_text(bench: Bench, settings: Settings) -> Any:
    """The samples of a dataset that a run makes of a text, and where it lies; or that it makes none."""
    config = compose(RunConfig, typed(settings))
    try:
        with ExitStack() as made_text:
            make_data_of_text(config, [], ProcessEnv(), made_text, print, progress)
    except SettingsError:
        return "refused"
    _, model, data = load_data(config)
    train = _arrays(data.train.batch(data.order.ids(0, min(_MANY, data.num_samples))))
    return {"vocabulary": model.shape.vocab_size, "train": train, "files": sorted(map(str, Path().rglob("*.idx")))}


def indexes(bench: Bench, settings: Settings) -> Any:
    """Where an index of the data is kept, as that of a large dataset is."""
    before = {path.name for path in bench.folder.iterdir()}
    cached_by = (document_boundaries, megatron_sample_order, masked_language_samples, packing)
    with ExitStack() as patches:
        for module in cached_by:
            patches.enter_context(patch.multiple(module, _CACHED_FROM=0))
        load_data(config_of(settings))
    beside = sorted({path.name for path in bench.folder.iterdir()} - before)
    for name in beside:
        shutil.rmtree(bench.folder / name)
    return {"here": sorted(path.name for path in Path().iterdir()), "beside the data": beside}


def verified(bench: Bench, settings: Settings) -> Any:
    """When a flipped bit of the tokens is found: before the first step, when they are read, or never."""
    config = config_of(settings)
    path = Path(f"{open_datasets(config.data).train[0].prefix}.bin")
    whole = path.read_bytes()
    path.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    try:
        data = preflight(config, ProcessEnv()).data
    except DataError:
        return "before the first step"
    else:
        return "when it is read" if _refused(data.train, data.train.num_samples) else "never"
    finally:
        path.write_bytes(whole)


def _refused(dataset: Dataset, num_samples: int) -> bool:
    try:
        dataset.batch(np.arange(num_samples))
    except DataError:
        return True
    return False


@dataclass(frozen=True)
class Seen:
    """A run through the command line, as it looks from outside once it is over."""

    code: object
    rows: list[dict[str, Any]]
    weights: dict[str, str]  # what the last checkpoint holds, each tensor's bytes by a hash
    files: list[str]
    threads: list[str]  # which the run has started
    num_threads: int  # that torch uses
    refuses: bool  # whether torch refuses a kernel whose result can differ


def run(bench: Bench, settings: Settings, **env: str) -> Seen:
    started: list[str] = []
    start = threading.Thread.start

    def watched(thread: threading.Thread) -> None:
        started.append(thread.name)
        start(thread)

    with patch.object(threading.Thread, "start", watched):
        code = outcome("pretrain", *typed(settings), env=env)[0]
    try:
        return Seen(
            code, _rows(), _weights(), sorted(str(path) for path in Path().rglob("*")), sorted(set(started)),
            torch.get_num_threads(), _refuses(),
        )  # fmt: skip
    finally:
        set_deterministic(False)
        set_threads(1)


def rows(bench: Bench, settings: Settings) -> Any:
    """Losses, gradients, samples and validations of a run, step by step, and how it ended."""
    seen = bench.see(run, settings)
    return seen.code, [{key: row.get(key) for key in _STEP} for row in seen.rows]


def evaluations(bench: Bench, settings: Settings) -> Any:
    """What a run has measured besides its validation, of what, when and under which name."""
    keys = ("step", "name", "protocol", "num_targets", "nll_sum_nats")
    return [[row[key] for key in keys] for row in bench.see(run, settings).rows if row["event"] == "eval"]


def scored_together(bench: Bench, settings: Settings) -> Any:
    """How often a run comes to say how far its evaluations are."""
    said: list[str] = []
    with patch.object(RunView, "show_activity", lambda view, text: said.append(text)):
        assert run(bench, settings).code == 0
    return len([text for text in said if text.startswith("evaluating")])


def weights(bench: Bench, settings: Settings) -> Any:
    """What the last checkpoint of a run holds."""
    seen: Seen = bench.see(run, settings)
    assert seen.weights, "the run saved nothing"
    return seen.weights


def files(bench: Bench, settings: Settings) -> Any:
    """The files that a run leaves behind, by name."""
    return bench.see(run, settings).files


def traced(bench: Bench, settings: Settings) -> Any:
    """The steps of which a run has recorded what it did when."""
    assert run(bench, settings).code == 0
    return [sorted({int(step) for step in read_spans(path).spans["step"]}) for path in Path().rglob("*.spans")]


def profiles(bench: Bench, settings: Settings) -> Any:
    """Which ranks leave a profile of which steps."""
    bench.see(ranks, {**settings, "run.dir": str(folder := Path("run").absolute())})
    return sorted(path.name for path in (folder / "profile").glob("*"))


def events(bench: Bench, settings: Settings) -> Any:
    """At which steps event files have a histogram of a weight."""
    assert run(bench, settings).code == 0
    (file,) = Path().rglob("*tfevents*")
    return file.read_bytes().count(b"weights/embedding")


def told_to_wandb(bench: Bench, settings: Settings) -> Any:
    """What a package of that name, which writes down what it is asked for, hears from a run."""
    package = Path("packages/wandb/__init__.py").absolute()
    package.parent.mkdir(parents=True)
    package.write_text(_WRITES_DOWN)
    heard = Path("heard").absolute()
    with patch.object(sys, "path", [str(package.parents[1]), *sys.path]):
        found = run(bench, settings, PYTHONPATH=os.pathsep.join(sys.path), HEARD=str(heard))
    assert found.code == 0
    return heard.read_text() if heard.exists() else None


_WRITES_DOWN = """
import os
class Settings:
    def __init__(self, **more): pass
class Run:
    def log(self, values, step): pass
    def finish(self, code): pass
def init(mode, project, entity, name, tags, **more):
    open(os.environ["HEARD"], "w").write(repr((mode, project, entity, name, tags)))
    return Run()
"""


def threads(bench: Bench, settings: Settings) -> Any:
    """The threads that a run starts."""
    seen: Seen = bench.see(run, settings)
    assert seen.code == 0
    return [name for name in seen.threads if name in ("loader", "checkpoint-writer")]


def torchs_state(bench: Bench, settings: Settings) -> Any:
    """How torch computes during a run: with how many threads, and what it refuses."""
    seen: Seen = bench.see(run, settings)
    return seen.code, seen.num_threads, seen.refuses


def peak(bench: Bench, settings: Settings) -> Any:
    """FLOP/s of which a run's MFU is a share."""
    row = bench.see(run, settings).rows[-1]
    return row["mfu"] and float(f"{row['flops_per_s'] / row['mfu']:.4g}")


def bad_disk(bench: Bench, settings: Settings) -> Any:
    """What a run makes of a disk that does not give back what was written."""
    fault = {"LMTRAIN_FAULT": "enospc:point=ckpt.read_back", "LMTRAIN_ALLOW_FAULTS": "1"}
    try:
        return run(bench, settings, **fault).code
    finally:
        arm()


def advice(bench: Bench, settings: Settings) -> Any:
    """How often the dry run says to save, reckoned from the saves that the run has made."""
    code, said = outcome("pretrain", *typed(settings), "--dry-run", "--json")
    assert code == 0, said
    return json.loads(said).get("save_every", "").partition(",")[0]


def damaged(bench: Bench, settings: Settings) -> Any:
    """How a run ends whose newest checkpoint cannot be read when it is started again."""
    for _ in range(2):
        code = run(bench, settings).code
        (newest := Path(str(settings["run.dir"])) / "checkpoints" / "step_00000004" / "manifest.json").write_text("{")
    return code, newest.exists()


def activations(bench: Bench, settings: Settings) -> Any:
    """Bytes that live between forward and backward of a microbatch."""
    with opened(settings) as it:
        (batch, *_) = it.loader.read(0).microbatches
        with Living() as live:
            loss = it.model.objective.loss_sums(it.model.model, it.model.model(batch), batch).sum()
            found = sum(live.sizes().values())
        torch.autograd.backward(loss)
        return found


def graph(bench: Bench, settings: Settings) -> Any:
    """Where the model's weights lie, and whether its blocks are compiled; or why there is no model."""
    try:
        with opened(settings) as it:
            forwards = [block.forward for block in it.model.model.blocks.values()]
            places = {p.device.type for p in it.model.parameters.values()}
            return sorted(places), [hasattr(forward, "_torchdynamo_orig_callable") for forward in forwards]
    except LmtrainError as error:
        return type(error).__name__


def rounding(bench: Bench, settings: Settings) -> Any:
    """Whether a GPU may round the factors of products, or why there is none to do so."""
    try:
        with opened(settings):
            return torch.backends.cuda.matmul.allow_tf32
    except LmtrainError as error:
        return type(error).__name__
    finally:
        set_tf32(False)


def ranks(bench: Bench, settings: Settings) -> Any:
    """What each process of a run holds, and in which order it multiplies and talks."""
    tree = tree_of(settings)
    parallel = config_of(settings).parallel
    arguments = {"tree": tree, "place": os.getcwd()}
    return bench.pool.run("tests.promise.ranks:trained", parallel.layout.world_size, arguments)


def patience(bench: Bench, settings: Settings) -> Any:
    """Whether a process still waits for a peer that is three seconds late, beyond what is always added."""
    return bench.pool.run("tests.promise.ranks:met", 2, {"tree": tree_of(settings)})[0]


@contextmanager
def opened(settings: Settings) -> Iterator[Run]:
    """A run that is set up and does not begin."""
    config, env = config_of(settings), ProcessEnv.detect()
    inputs = preflight(config, env)
    device = pick_device(config.compute.device)
    mesh = build_mesh(config.parallel.layout, device)
    config, inputs = inputs.stages(config)[0]
    with open_run(config, inputs, Console(quiet=True), mesh, device) as it:
        yield it


def _step_of(model: ModelSettings) -> StepBatches:
    """A batch that is the same for all models of this length."""
    rng, shape = np.random.default_rng(3), (_ROWS, model.shape.seq_len)
    tokens = rng.integers(_VOCABULARY, size=shape)
    batch = Batch(tokens, np.roll(tokens, -1, axis=1))
    counts: tuple[int, ...] = (tokens.size,)
    if model.terms != ("lm",):
        labels = np.where(rng.random(shape) < 0.3, tokens, IGNORED)
        pairs = {"segments_BT": rng.integers(2, size=shape), "pair_labels_B": rng.integers(2, size=_ROWS)}
        batch = Batch(tokens, labels, not_padding_BT=np.ones(shape, bool), **pairs)
        counts = (int((labels != IGNORED).sum()), *[_ROWS] * ("pair" in model.terms))
    return StepBatches(0, [batch.map(torch.from_numpy)], _ROWS, counts, np.arange(_ROWS), tokens.size)


def _arrays(batch: Batch) -> dict[str, Any]:
    found = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return {name: array.tolist() for name, array in found.items() if array is not None}


def _rows() -> list[dict[str, Any]]:
    found = [row for file in Path().rglob("metrics.jsonl") for row in read_metrics(file)]
    return [row for row in found if row["event"] in ("step", "valid", "eval")]


def _weights() -> dict[str, str]:
    saved = sorted(Path().rglob("rank_00000.safetensors"))
    tensors = load_file(saved[-1]) if saved else {}
    return {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in tensors.items()}


def _refuses() -> bool:
    try:
        torch.zeros(2).put_(torch.tensor([0]), torch.ones(1))
    except RuntimeError:
        return True
    return False
