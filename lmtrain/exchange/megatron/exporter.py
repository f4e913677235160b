"""A checkpoint as Megatron-LM's: a file for each tensor- and pipeline-parallel rank, in core's names and layout.

Called by `lmtrain reshard --to megatron`. Weights only, as a `release`, from which Megatron-LM starts without an
optimizer. Each rank's part of each tensor is read by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmtrain.checkpoint.disk.format import ITEM_BYTES
from lmtrain.checkpoint.reader import CheckpointReader
from lmtrain.checkpoint.store import resolve
from lmtrain.errors import UsageError
from lmtrain.exchange.megatron.args import args_of, padded_rows
from lmtrain.exchange.megatron.folder import RANK_FILE, TRACKER
from lmtrain.exchange.megatron.names import core_name, fuse_qkv
from lmtrain.exchange.streaming import Report, bytes_of, checked_type
from lmtrain.exchange.torch_files.writer import Namespace, Saved, write_torch_file
from lmtrain.models.model_settings import ModelSettings
from lmtrain.placement.parallel_settings import ParallelSettings
from lmtrain.placement.places import Place, names_of_rank, place_all, stages_of_rank
from lmtrain.runtime.files.files import new_folder
from lmtrain.spec import Split

_VERSION = 3.0  # of the layout: query, key and value of a group lie together
_RELEASE = "release"


def export_megatron(
    source: Path,
    output: Path,
    *,
    tp: int = 1,
    pp: int = 1,
    dtype: str = "fp32",
    transformer_engine: bool = True,
    report: Report | None = None,
) -> dict[str, Any]:
    """Write the folder; returns what it is. Names are those of Megatron-LM with Transformer Engine, or without."""
    if min(tp, pp) < 1:
        raise UsageError(f"tp={tp}, pp={pp} is not a layout. Use numbers from 1.")
    reader = CheckpointReader(resolve(source))
    settings = reader.checked_model()
    kind, code = checked_type(dtype)
    args = args_of(settings, tp, pp, dtype)
    args["transformer_impl"] = "transformer_engine" if transformer_engine else "local"
    export = _Export(reader, settings, ParallelSettings(tp=tp, pp=pp), kind, code, transformer_engine, report)
    with new_folder(output) as folder:
        for pipeline in range(pp):
            for tensor in range(tp):
                name = f"mp_rank_{tensor:02d}" + (f"_{pipeline:03d}" if pp > 1 else "")
                (folder / _RELEASE / name).mkdir(parents=True)
                state = {"args": Namespace(args), "checkpoint_version": _VERSION, "iteration": reader.step}
                state["model"] = export.model(tensor, pipeline)
                write_torch_file(folder / _RELEASE / name / RANK_FILE, state)
        (folder / TRACKER).write_text(_RELEASE)
        if "tokenizer.json" in reader.manifest.files:
            (folder / "tokenizer.json").write_bytes(reader.read_file("tokenizer.json"))
    return {"from": str(reader.path), "output": str(output), "dtype": dtype, "num_files": tp * pp, "tp": tp, "pp": pp}


class _Export:
    """Each rank holds what it would hold in a run of ours at this layout, with the vocabulary padded as theirs is."""

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
            place_all(shapes, cuts, layout, layout.coordinate(tensor), vocab) for tensor in range(parallel.tp)
        ]
        self.done = 0
        models = [self.model(0, stage) for stage in range(parallel.pp)]
        self.total = parallel.tp * sum(saved.num_bytes for model in models for saved in model.values())

    def model(self, tensor: int, pipeline: int) -> dict[str, Saved]:
        (stage,), causal = stages_of_rank(self.settings, self.parallel, pipeline), self.settings.shape.causal
        result, copies = {}, {}
        for name in names_of_rank(self.settings, [stage]):
            saved = self._saved(self.places[tensor][name])
            if name.startswith("embedding.") and not stage.first:
                copies["output_layer.weight"] = saved  # because: a tied model's last stage has it by this name
            else:
                result[core_name(name, stage.layers.start, causal=causal, engine=self.engine)] = saved
        return result | copies

    def _saved(self, place: Place) -> Saved:
        def parts() -> Iterator[memoryview]:
            part = self._part(place)
            yield bytes_of(part)
            self.done += part.numel() * ITEM_BYTES[self.code]
            if self.report is not None:
                self.report(self.done, self.total)

        return Saved(self.code, place.part_shape, parts)

    def _part(self, place: Place) -> Tensor:
        """What a tensor-parallel rank has of one of our weights, in Megatron's order."""
        part = torch.zeros(place.part_shape, dtype=self.dtype)
        for region in place.regions:
            part[region.local] = self.reader.read(f"model.{place.name}", region.offset, region.shape)
        if ".attention.qkv." not in place.name:
            return part
        model, sections = self.settings.shape, torch.split(part, [region.shape[0] for region in place.regions])
        return fuse_qkv(sections, model.num_heads // model.num_kv_heads, model.head_width)
