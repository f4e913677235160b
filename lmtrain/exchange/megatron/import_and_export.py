"""Export a checkpoint in Megatron-LM's format, and import a Megatron-LM checkpoint. One tensor is in memory at a time.

Called by `lmtrain export` and `lmtrain import`. An export has a file for each tensor- and
pipeline-parallel rank, in Megatron Core's names and layout: weights only, as a `release`, from which Megatron-LM starts
without an optimizer, or as an iteration, whose optimizer it must be told not to load. An import takes its settings from
the arguments and weights of the checkpoint. Of its optimizer only the fp32 weights are read, where a distributed
checkpoint names them: with its moments alone no run of ours could go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmtrain.checkpoint.disk.checkpoint_format import ITEM_BYTES
from lmtrain.checkpoint.find_and_prune import resolve_checkpoint
from lmtrain.checkpoint.read_verified_contents import checked_model
from lmtrain.checkpoint.tensor_reader import CheckpointReader
from lmtrain.checkpoint.unopened_model_on_disk import ORIGINAL_PREFIX
from lmtrain.checkpoint.view_with_ema_as_weights import WeightSet
from lmtrain.errors import UsageError, leave_out, shell_quoted
from lmtrain.exchange.detect_model_folder_format import TRACKER
from lmtrain.exchange.megatron.convert_arguments_and_settings import megatron_arguments, padded_rows
from lmtrain.exchange.megatron.convert_decoder_arguments import flags_to_repeat
from lmtrain.exchange.megatron.model_settings_of_checkpoint import read_megatron_model
from lmtrain.exchange.megatron.read_arguments_and_weights import RANK_FILE, WeightPart
from lmtrain.exchange.megatron.weight_names import fuse_qkv, megatron_core_name, split_qkv
from lmtrain.exchange.stream_tensors_to_disk import (
    Report,
    left_out_of_exports,
    load_tokenizer,
    parse_dtype,
    save_imported,
    tensor_bytes,
)
from lmtrain.exchange.torch_files.writer import Namespace, TensorToWrite, write_torch_file
from lmtrain.models.model_settings import ModelSettings
from lmtrain.placement.layers_and_shards_of_ranks import (
    Placement,
    parameter_names_of_stages,
    place_parameters,
    stages_of_rank,
)
from lmtrain.placement.parallel_settings import ParallelSettings
from lmtrain.runtime.files.atomic_files import is_safe_name, new_folder, read_bytes
from lmtrain.runtime.processes.fault_injection import fault_point
from lmtrain.spec import Split
from lmtrain.tokenizer.text_to_ids_and_back import MAX_BYTES

_VERSION = 3.0  # of the layout: query, key and value of a group lie together
_RELEASE = "release"
_MAX_ORIGINAL_FILES = 200


def export_megatron(
    source: Path,
    output: Path,
    *,
    tp: int = 1,
    pp: int = 1,
    dtype: str = "fp32",
    weights: WeightSet = "model",
    as_iteration: bool = False,
    transformer_engine: bool = True,
    report: Report | None = None,
    open_folder: Callable[[Path], AbstractContextManager[Path]] = new_folder,
) -> dict[str, Any]:
    """Export the checkpoint `source` as the Megatron-LM folder `output` for `tp` x `pp` ranks, and return the facts to
    report. `dtype` is fp32, bf16 or fp16. If `weights` is "ema", the average of the weights is exported.
    With `as_iteration` the files are in the folder of the iteration that is the checkpoint's step, else in `release`.
    `transformer_engine` chooses between the names that Megatron-LM gives weights with Transformer Engine and without
    it. `report` is called with bytes done and bytes in all.
    """
    if min(tp, pp) < 1:
        wrong = [f"--{name}" for name, size in (("tp", tp), ("pp", pp)) if size < 1]
        without = leave_out(*wrong, shown="Leave them out")
        raise UsageError(f"tp={tp} and pp={pp} must both be at least 1. {without} for one file.")
    reader = CheckpointReader(resolve_checkpoint(source), weights)
    settings = checked_model(reader)
    kind, code = parse_dtype(dtype)
    args = megatron_arguments(settings, tp, pp, dtype)
    args["transformer_impl"] = "transformer_engine" if transformer_engine else "local"
    export = _Export(reader, settings, ParallelSettings(tp=tp, pp=pp), kind, code, transformer_engine, report)
    place = f"iter_{reader.step:07d}" if as_iteration else _RELEASE
    with open_folder(output) as folder:
        for pipeline in range(pp):
            for tensor in range(tp):
                name = f"mp_rank_{tensor:02d}" + (f"_{pipeline:03d}" if pp > 1 else "")
                (folder / place / name).mkdir(parents=True)
                write_torch_file(folder / place / name / RANK_FILE, {
                    "args": Namespace(args), "checkpoint_version": _VERSION, "iteration": reader.step,
                    "model": export.model(tensor, pipeline),
                })  # fmt: skip
        (folder / TRACKER).write_text(str(reader.step) if as_iteration else _RELEASE)
        for name, data in reader.read_extra_files().items():
            (folder / name).write_bytes(data)
        fault_point("exchange.publish")
    return {
        "from": str(reader.path), "output": str(output), "dtype": dtype, "num_files": tp * pp, "tp": tp, "pp": pp,
        "written_as": _describe_place(place, as_iteration, reader.step),
        "to_load": f"--load {shell_quoted(str(output))} --ckpt-format torch --tensor-model-parallel-size {tp} "
        f"--pipeline-model-parallel-size {pp}{' --no-load-optim --no-load-rng' * as_iteration}",
        **reader.describe_weights(), "left_out": left_out_of_exports(reader),
    } | ({"flags_to_repeat": flags} if (flags := flags_to_repeat(settings)) else {})  # fmt: skip


def _describe_place(place: str, as_iteration: bool, step: int) -> str:
    """Return text on the folder of the files, and what Megatron-LM makes of it."""
    if as_iteration:
        return f"{place}, at which Megatron-LM goes on counting; it holds no optimizer, so that has to be said"
    return f"{place}, from whose weights Megatron-LM begins at iteration 0; --as-iteration writes iter_{step:07d}"


class _Export:
    """An export that is being written. Each rank gets what it would hold in a run of ours at this layout, with the
    vocabulary padded as Megatron-LM pads it.
    """

    def __init__(
        self, reader: CheckpointReader, settings: ModelSettings, parallel: ParallelSettings, dtype: torch.dtype,
        code: str, engine: bool, report: Report | None,
    ) -> None:  # fmt: skip
        self.reader, self.settings, self.parallel = reader, settings, parallel
        self.dtype, self.code, self.engine, self.report = dtype, code, engine, report
        cuts, padded = settings.cuts(), padded_rows(settings.shape.vocab_size, parallel.tp)
        shapes = {
            name: (padded, *shape[1:]) if cuts[name].split is Split.VOCAB else shape
            for name, shape in settings.weights().items()
        }
        layout, vocab = parallel.layout, settings.shape.vocab_size
        self.places = [
            place_parameters(shapes, cuts, layout, layout.coordinate(tensor), vocab) for tensor in range(parallel.tp)
        ]
        self.done = 0
        self.total = parallel.tp * sum(
            saved.num_bytes for stage in range(parallel.pp) for saved in self.model(0, stage).values()
        )

    def model(self, tensor: int, pipeline: int) -> dict[str, TensorToWrite]:
        (stage,), causal = stages_of_rank(self.settings, self.parallel, pipeline), self.settings.shape.causal
        result, copies = {}, {}
        for name in parameter_names_of_stages(self.settings, [stage]):
            saved = self._tensor_to_write(self.places[tensor][name])
            if name.startswith("embedding.") and not stage.first:
                copies["output_layer.weight"] = saved  # because: a tied model's last stage has it by this name
            else:
                result[megatron_core_name(name, stage.layers.start, causal=causal, engine=self.engine)] = saved
        return result | copies

    def _tensor_to_write(self, place: Placement) -> TensorToWrite:
        def parts() -> Iterator[memoryview]:
            part = self._read_part(place)
            fault_point("exchange.part")
            yield tensor_bytes(part)
            self.done += part.numel() * ITEM_BYTES[self.code]
            if self.report is not None:
                self.report(self.done, self.total)

        return TensorToWrite(self.code, place.part_shape, parts)

    def _read_part(self, place: Placement) -> Tensor:
        """Return one tensor-parallel rank's part of a weight, read from the checkpoint, with rows in Megatron-LM's
        order; rows that pad the vocabulary are 0. `place` says which weight it is and which rows and columns the rank
        holds.
        """
        part = torch.zeros(place.part_shape, dtype=self.dtype)
        for region in place.regions:
            part[region.local] = self.reader.read(f"model.{place.name}", region.offset, region.shape)
        if ".attention.qkv." not in place.name:
            return part
        model, sections = self.settings.shape, torch.split(part, [region.shape[0] for region in place.regions])
        return fuse_qkv(sections, model.num_heads // model.num_kv_heads, model.head_width)


def import_megatron(
    folder: Path,
    output: Path,
    *,
    tokenizer: Path | None = None,
    overrides: Mapping[str, object] | None = None,
    report: Report | None = None,
    made_from: str | None = None,
) -> dict[str, Any]:
    """Import the Megatron-LM folder `folder` as a checkpoint of the same step in `output`, and return the facts to
    report. `tokenizer` is the path of a tokenizer, by default tokenizer.json in the folder. `overrides` are settings
    that the user gives, such as those which the folder does not hold. `report` is called with bytes done and bytes in
    all. The checkpoint records `made_from`, a text about inputs and options.
    """
    if tokenizer is None and not (folder / "tokenizer.json").is_file():
        raise UsageError(f"{folder} holds no tokenizer.json. Give the model's tokenizer with --tokenizer PATH.")
    loaded_tokenizer = load_tokenizer(tokenizer or folder / "tokenizer.json")
    model = read_megatron_model(folder, loaded_tokenizer.vocab_size, overrides or {})
    source, settings = model.source, model.settings

    def parts(name: str) -> Iterator[Tensor]:
        if name in model.masters:
            tensors = model.masters[name]
            yield _join_parts(name, tensors, len(tensors) == 2, settings, source.version)
        else:
            yield _join_parts(name, model.weights[name], name in source.halves, settings, source.version)

    origin = {"format": "megatron", "checkpoint_version": source.version, "iteration": source.iteration}
    files = _read_original_files(folder) if tokenizer is None else {}
    return save_imported(
        output, settings, parts, loaded_tokenizer, origin, source=folder, step=source.iteration, files=files,
        report=report, made_from=made_from,
    ) | {
        "weights_from": model.weights_from(), "tensors_read": len(model.masters or model.weights),
        "left_out": model.left_out(), "ignored": model.ignored_arguments(),
    }  # fmt: skip


def _read_original_files(folder: Path) -> dict[str, bytes]:
    """Return the small files of a Hugging Face folder that an export has written beside a Megatron-LM model."""
    paths = sorted(folder.glob(f"{ORIGINAL_PREFIX}*"))[:_MAX_ORIGINAL_FILES]
    return {path.name: read_bytes(path, MAX_BYTES, follow_links=False) for path in paths if is_safe_name(path.name)}


def _join_parts(name: str, parts: list[WeightPart], by_half: bool, settings: ModelSettings, version: float) -> Tensor:
    """Return the whole weight `name`, with rows in lmtrain's order, joined from `parts`: those of the tensor-parallel
    ranks or, if `by_half`, its gate and its up projection. `version` is the checkpoint_version, which decides in which
    order Megatron-LM stores the rows of queries, keys and values.
    """
    placement, shape = settings.cuts()[name], settings.shape
    if placement.split is Split.NONE:
        return parts[0].read()
    tensors = [part.read() for part in parts]
    if placement.split is Split.ROW:
        return torch.cat(tensors, 1)
    if placement.split is Split.VOCAB:
        return torch.cat(tensors)[: shape.vocab_size]
    if ".attention.qkv." in name:
        # because: with more ranks than keys a group lies across ranks, so the newer layout is joined before it is split
        tensors = [torch.cat(tensors)] if version >= 2 else tensors
        queries = shape.num_heads // shape.num_kv_heads
        sections = zip(*(split_qkv(rows, version, queries, shape.head_width) for rows in tensors), strict=True)
        return torch.cat([section for ranks in sections for section in ranks])
    if len(placement.sections) > 1 and not by_half:
        return torch.cat([half for halves in zip(*(t.chunk(2) for t in tensors), strict=True) for half in halves])
    return torch.cat(tensors)
