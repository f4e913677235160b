"""Checkpoints of small models at any layout, written as the processes of a run write them; numpy only."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from lmtrain.checkpoint.read_verified_contents import Contents, checked_model
from lmtrain.checkpoint.reshard.reshard_tensors import WrittenCheckpoint, reshard
from lmtrain.checkpoint.reshard.write_target_files import Limits, files_of_layout, state_at_layout
from lmtrain.checkpoint.save.commit import RankRecord, commit_checkpoint, write_rank
from lmtrain.layout import Piece
from lmtrain.models.bert_settings import BertSettings
from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.models.model_settings import ModelSettings
from lmtrain.placement.layers_and_shards_of_ranks import placements_of_rank
from lmtrain.placement.parallel_settings import ParallelSettings, parse_layout
from tests.unit.checkpoint.arrays import rank_data

Arrays = dict[str, np.ndarray[Any, np.dtype[Any]]]
SLOTS = ("model", "optim.exp_avg", "optim.exp_avg_sq")
AVERAGE = {"decay": 0.999, "every_steps": 1, "from_step": 0, "since_step": 2}
# 5 layers and 67 tokens: no pp and no tp of these layouts divides them
MODELS: dict[str, ModelSettings] = {
    "tied": GPTSettings(num_layers=5, width=24, num_heads=4, vocab_size=67, vocab_multiple=1, seq_len=8),
    "gqa": GPTSettings(
        num_layers=5, width=24, num_heads=4, num_kv_heads=2, ffn_width=40, vocab_size=67, vocab_multiple=16, seq_len=8,
        tied=False, bias="none", positions="rotary", norm="rmsnorm", activation="silu", gated=True,
    ),
    "bert": BertSettings(num_layers=5, width=24, num_heads=4, vocab_size=67, vocab_multiple=1, seq_len=8),
}  # fmt: skip
LAYOUTS = (
    "tp=1", "tp=2", "pp=2", "tp=2,pp=2", "dp=2", "dp=2,tp=2", "pp=2,vp=2", "dp=2,tp=2,pp=2",
    "dp_replicate=2,dp_shard=2,zero=3", "pp=3,dp_replicate=2,zero=0",
)  # fmt: skip


def at(layout: str) -> ParallelSettings:
    return parse_layout(layout)


def draw(model: ModelSettings, seed: int = 3, *, average: bool = False) -> Arrays:
    """Weights and two slots of each, in their true shapes, and a tensor that is no parameter's. The average is half of
    each weight.
    """
    generator = np.random.default_rng(seed)
    places = placements_of_rank(model, at("tp=1"), at("tp=1").layout.coordinate(0))
    arrays: Arrays = {
        f"{slot}.{name}": generator.standard_normal(place.global_shape, dtype=np.float32)
        for slot in SLOTS
        for name, place in places.items()
    }
    if average:
        weights = {name: array for name, array in arrays.items() if name.startswith("model.")}
        arrays |= {name.replace("model.", "ema.", 1): array / 2 for name, array in weights.items()}
    return arrays | {"optim.scale": np.array(0.5, np.float16), "optim.seen": np.arange(70, dtype=np.int64)}


def write(
    folder: Path, model: ModelSettings, layout: str, arrays: Arrays, step: int = 7, **more_state: object
) -> Path:
    """What the owners of each number save; the tensors that are no parameter's come from the last rank."""
    parallel = at(layout)
    attempt = folder / f"step_{step:08d}.tmp-{os.getpid()}-0"
    attempt.mkdir(parents=True)
    records: list[RankRecord] = []
    world, average = parallel.layout.world_size, any(name.startswith("ema.") for name in arrays)
    slots = (*SLOTS, "ema") if average else SLOTS
    for rank in range(world):
        places = placements_of_rank(model, parallel, parallel.layout.coordinate(rank))
        pieces, seen = [], {(s.name, p.box.offset) for record in records for s, p in record.pieces}
        for slot in slots:
            for name, place in places.items():
                for block in place.regions if place.is_owner else ():
                    key, index = f"{slot}.{name}", tuple(map(slice, block.offset, np.add(block.offset, block.shape)))
                    if (key, block.offset) not in seen:  # of a tied weight the first stage's
                        pieces.append(Piece(key, place.global_shape, block.offset, arrays[key][index]))
        if rank == world - 1:
            rest = [n for n in arrays if not any(n.startswith(s) and n[len(s) + 1 :] in model.weights() for s in slots)]
            pieces += [Piece(name, arrays[name].shape, (0,) * arrays[name].ndim, arrays[name]) for name in rest]
        records.append(write_rank(attempt, rank, rank_data(pieces)))
    state = {
        "step": step, "samples": 28, "tokens": 224, "precision": {"kind": "fp16", "loss_scale": 4096.0},
        "settings": {"parallel": parallel.to_dict(), "train": {"seed": 1}}, "model": model.to_dict(), "seq_len": 8,
    } | ({"ema": AVERAGE} if average else {}) | more_state  # fmt: skip
    return commit_checkpoint(attempt, step, records, state, {"tokenizer.json": b'{"vocab": ["a", "b"]}'})[0]


def reshard_to(
    source: Path, output: Path, layout: str, limits: Limits | None = None, **options: Any
) -> WrittenCheckpoint:
    """As the command line does it."""
    limits = limits or Limits()
    contents = Contents(source, limits.num_cached_blocks)
    state, model, parallel = contents.manifest.state, checked_model(contents), at(layout)
    files = files_of_layout(contents.manifest, model, parallel)
    return reshard(contents, output, files, state_at_layout(state, parallel), limits, **options)


def read_all(path: Path) -> Arrays:
    """Every tensor, verified, and nothing else wrong with the checkpoint."""
    contents = Contents(path)
    assert contents.find_damage() == []
    checked_model(contents)
    types = {"F32": np.float32, "F16": np.float16, "I64": np.int64}
    return {name: contents.read_bits(name).view(types[t.dtype]) for name, t in contents.manifest.tensors.items()}


def assert_same(found: Arrays, wanted: Arrays) -> None:
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype
        assert found[name].shape == array.shape
        assert found[name].tobytes() == array.tobytes(), name


def bytes_of(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}
