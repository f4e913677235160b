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
from lmtrain.exchange.huggingface.exporter import check_weights, model_of
from lmtrain.exchange.huggingface.names import Shape, true_weights
from lmtrain.exchange.megatron.args import args_of, padded_rows
from lmtrain.exchange.megatron.folder import RANK_FILE, TRACKER
from lmtrain.exchange.megatron.names import core_name, fuse_qkv
from lmtrain.exchange.streaming import Progress, bytes_of, checked_type, new_folder, write_file
from lmtrain.exchange.torch_files.writer import Namespace, Saved, write_torch_file
from lmtrain.models.model_settings import ModelSettings
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
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write the folder; gives what it is. Names are those of Megatron-LM with Transformer Engine, or without."""
    if min(tp, pp) < 1:
        raise UsageError(f"tp={tp}, pp={pp} is no layout. Use numbers from 1.")
    reader = CheckpointReader(resolve(source))
    settings = model_of(reader)
    check_weights(reader, true_weights(settings))
    kind, code = checked_type(dtype)
    args = args_of(settings, tp, pp, dtype)
    args["transformer_impl"] = "transformer_engine" if transformer_engine else "local"
    export = _Export(reader, settings, tp, pp, kind, code, transformer_engine, progress)
    with new_folder(output) as folder:
        for pipeline in range(pp):
            for tensor in range(tp):
                name = f"mp_rank_{tensor:02d}" + (f"_{pipeline:03d}" if pp > 1 else "")
                (folder / _RELEASE / name).mkdir(parents=True)
                state = {"args": Namespace(args), "checkpoint_version": _VERSION, "iteration": reader.step}
                state["model"] = export.model(tensor, pipeline)
                write_torch_file(folder / _RELEASE / name / RANK_FILE, state)
        write_file(folder / TRACKER, _RELEASE.encode())
        if "tokenizer.json" in reader.manifest.files:
            write_file(folder / "tokenizer.json", reader.read_file("tokenizer.json"))
    return {"from": str(reader.path), "output": str(output), "dtype": dtype, "num_files": tp * pp, "tp": tp, "pp": pp}


class _Export:
    def __init__(
        self,
        reader: CheckpointReader,
        settings: ModelSettings,
        tp: int,
        pp: int,
        dtype: torch.dtype,
        code: str,
        engine: bool,
        progress: Progress | None,
    ) -> None:
        self.reader, self.settings, self.tp, self.pp = reader, settings, tp, pp
        self.dtype, self.code, self.engine, self.progress = dtype, code, engine, progress
        self.shapes, self.cuts = true_weights(settings), settings.cuts()
        self.done = 0
        self.total = tp * sum(saved.num_bytes for stage in range(pp) for saved in self.model(0, stage).values())

    def model(self, rank: int, stage: int) -> dict[str, Saved]:
        per_stage = self.settings.shape.num_layers // self.pp
        layers = range(stage * per_stage, (stage + 1) * per_stage)
        causal, result = self.settings.shape.causal, {}
        for name in self.shapes:
            if self._stage_of(name, layers) == stage:
                result[core_name(name, layers.start, causal=causal, engine=self.engine)] = self._saved(name, rank)
        if self.pp > 1 and stage == self.pp - 1 and self.settings.ties():
            # because: the last stage of a tied model has a copy of the embedding, by this name
            result["output_layer.weight"] = self._saved("embedding.token.weight", rank)
        return result

    def _stage_of(self, name: str, layers: range) -> int:
        if name.startswith("blocks."):
            return int(name.split(".")[1]) // len(layers)
        return 0 if name.startswith("embedding.") else self.pp - 1

    def _saved(self, name: str, rank: int) -> Saved:
        def parts() -> Iterator[memoryview]:
            part = self._part(name, rank)
            yield bytes_of(part.to(self.dtype))
            self.done += part.numel() * ITEM_BYTES[self.code]
            if self.progress is not None:
                self.progress(self.done, self.total)

        return Saved(self.code, self._part_shape(name), parts)

    def _part_shape(self, name: str) -> Shape:
        shape, cut = self.shapes[name], self.cuts[name]
        if cut.split is Split.VOCAB:
            return (padded_rows(shape[0], self.tp) // self.tp, *shape[1:])
        if cut.split is Split.COLUMN:
            return (shape[0] // self.tp, *shape[1:])
        return (shape[0], shape[1] // self.tp) if cut.split is Split.ROW else shape

    def _part(self, name: str, rank: int) -> Tensor:
        """What a tensor-parallel rank has of one of our weights, in Megatron's order."""
        cut, shape = self.cuts[name], self._part_shape(name)
        whole = self.shapes[name]
        if cut.split is Split.NONE:
            return self._read(name, 0, whole[0])
        if cut.split is Split.ROW:
            return self.reader.read(f"model.{name}", (0, rank * shape[1]), shape)
        if cut.split is Split.VOCAB:
            start = min(rank * shape[0], whole[0])
            rows = self._read(name, start, min(shape[0], whole[0] - start))
            return torch.cat((rows, rows.new_zeros(shape[0] - len(rows), *shape[1:])))
        sections, first = [], 0
        for size in cut.sections:
            sections.append(self._read(name, first + rank * (size // self.tp), size // self.tp))
            first += size
        if ".attention.qkv." in name:
            model = self.settings.shape
            return fuse_qkv(sections, model.num_heads // model.num_kv_heads, model.head_width)
        return torch.cat(sections)

    def _read(self, name: str, first: int, count: int) -> Tensor:
        rest = self.shapes[name][1:]
        return self.reader.read(f"model.{name}", (first, *(0 for _ in rest)), (count, *rest))
