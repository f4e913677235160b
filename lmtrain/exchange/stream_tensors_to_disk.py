"""Write tensors part by part, so that no model is ever in memory as a whole, and save imported weights as a checkpoint.

Called by the exchanges with Hugging Face and Megatron-LM. A checkpoint made of another program's weights can be
evaluated, generated from, resharded and exported, and a new run can begin from it. It says where they come from and has
no run's settings, so there is no run to go on with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from lmtrain.checkpoint.disk.safetensors_file import PieceSpec, RankData, encode_header
from lmtrain.checkpoint.disk.tensor_slice_geometry import full_box
from lmtrain.checkpoint.save.commit import save_checkpoint
from lmtrain.checkpoint.tensor_reader import CheckpointReader
from lmtrain.checkpoint.view_with_ema_as_weights import AVERAGE_PREFIX, OPTIMIZER_PREFIX
from lmtrain.config.name_suggestions import suggest_value
from lmtrain.errors import CheckpointError, MissingInputError, UsageError, own
from lmtrain.exchange.check_imported_files_unchanged import source_identity
from lmtrain.models.model_settings import ModelSettings, unpadded_shapes
from lmtrain.runtime.processes.fault_injection import fault_point
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer

PART_BYTES = 64 << 20  # of a tensor in memory at once
Report = Callable[[int, int], None]  # bytes done, bytes in all
DTYPES = {"fp32": (torch.float32, "F32"), "bf16": (torch.bfloat16, "BF16"), "fp16": (torch.float16, "F16")}


def parse_dtype(word: str) -> tuple[torch.dtype, str]:
    if word not in DTYPES:
        raise UsageError(f"Weights cannot be written as --dtype={word}. {suggest_value(word, DTYPES, own)}")
    return DTYPES[word]


def row_ranges(num_rows: int, row_bytes: int) -> Iterator[range]:
    """Yield consecutive ranges of row numbers that cover the `num_rows` rows of a tensor. Each range has as many rows
    of `row_bytes` bytes as fit into PART_BYTES, but at least one.
    """
    step = max(1, PART_BYTES // max(1, row_bytes))
    for start in range(0, num_rows, step):
        yield range(start, min(start + step, num_rows))


def tensor_bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def tensor_spec(name: str, code: str, shape: tuple[int, ...]) -> PieceSpec:
    return PieceSpec(name, code, shape, full_box(shape))


def write_tensors(path: Path, specs: list[PieceSpec], parts: Iterable[memoryview]) -> None:
    """Write a new safetensors file; an existing one is an error. `specs` describe its tensors, and `parts` are the
    bytes of all tensors in the order of `specs`, divided anyhow.
    """
    with open(path, "xb") as file:
        file.write(encode_header(specs))
        file.writelines(parts)


def report_progress(
    parts: Iterable[memoryview], total: int, report: Report | None, done: int = 0
) -> Iterator[memoryview]:
    """Yield `parts` unchanged. After each one call `report`, if given, with (`done` plus the bytes yielded so far,
    `total`).
    """
    for part in parts:
        fault_point("exchange.part")
        yield part
        done += len(part)
        if report is not None:
            report(done, total)


def load_tokenizer(path: Path) -> Tokenizer:
    try:
        return Tokenizer.load(path)
    except MissingInputError as error:
        raise MissingInputError(f"{error.marked} Give the tokenizer of the model with --tokenizer PATH.") from error


def left_out_of_exports(reader: CheckpointReader) -> dict[str, str]:
    """Return a dict, name -> reason, of what a checkpoint holds and an export leaves out, such as the optimizer's
    state.
    """
    names, left_out = reader.stored_manifest.tensors, dict[str, str]()
    if num_slots := sum(name.startswith(OPTIMIZER_PREFIX) for name in names):
        left_out[f"{num_slots} tensors of the optimizer"] = (
            "another program's run does not go on where this one stopped"
        )
    if num_averages := sum(name.startswith(AVERAGE_PREFIX) for name in names):
        if reader.weights == "ema":
            left_out["the weights themselves"] = "their average is exported; --weights model exports them"
        else:
            left_out[f"{num_averages} tensors of the average"] = "the weights are exported; --weights ema exports it"
    return left_out


def save_imported(
    output: Path,
    settings: ModelSettings,
    read_parts: Callable[[str], Iterable[Tensor]],
    tokenizer: Tokenizer,
    origin: Mapping[str, Any],
    *,
    source: Path | None = None,
    step: int = 0,
    files: Mapping[str, bytes] = MappingProxyType({}),
    report: Report | None = None,
    made_from: str | None = None,
) -> dict[str, Any]:
    """Save an imported model as the checkpoint of `step` in the folder `output`, and return the facts to report, such
    as its path. `read_parts` takes a name of settings.weights() and returns that weight as consecutive groups of rows.
    `origin` records where the weights come from, and `source` is the folder that holds them, if any. `files` are extra
    files (name -> content); a tokenizer.json among them replaces that of `tokenizer`. The checkpoint records
    `made_from`, a text about inputs and options.
    """
    vocab_size = settings.shape.vocab_size
    if tokenizer.vocab_size > vocab_size:
        raise CheckpointError(
            f"The tokenizer has {tokenizer.vocab_size} tokens, but the model has only {vocab_size}. Give the tokenizer "
            "that the model was trained with, as --tokenizer PATH."
        )
    specs = [tensor_spec(f"model.{name}", "F32", shape) for name, shape in unpadded_shapes(settings).items()]
    total = sum(spec.num_bytes for spec in specs)

    def rows() -> Iterator[memoryview]:
        for spec in specs:
            expected = spec.num_bytes
            for part in read_parts(spec.name.split(".", 1)[1]):
                expected -= 4 * part.numel()
                yield tensor_bytes(part.to(torch.float32))
            assert expected == 0, f"{spec.name} came in another size than its settings have"

    state = {
        "step": step,
        "samples": 0,
        "tokens": 0,
        "seq_len": settings.shape.seq_len,
        "model": settings.to_dict(),
        "tokenizer": {
            "fingerprint": tokenizer.fingerprint,
            "eod_id": tokenizer.eod_id,
            "vocab_size": tokenizer.vocab_size,
        },
        "imported": dict(origin)
        | ({"source": str(source), "files": source_identity(source)} if source else {})
        | ({} if made_from is None else {"made_from": made_from}),
    }
    data = RankData(specs, report_progress(rows(), total, report))
    path, _ = save_checkpoint(output, step, data, state, {"tokenizer.json": tokenizer.to_bytes()} | dict(files))
    return {
        "checkpoint": str(path), "step": step, "parameters": settings.num_parameters, "bytes": total, **origin,
        "tokens": tokenizer.vocab_size, "rows_without_token": vocab_size - tokenizer.vocab_size,
        "settings": settings.to_dict(),
    }  # fmt: skip
