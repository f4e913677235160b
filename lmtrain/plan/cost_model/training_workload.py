"""The workload whose time and memory are predicted: model, machine, layout and training program. Torch-free.

`Case` is a single run as numbers; `Cases` holds many of them as arrays, so that ten thousand layouts are priced in one
pass. A program is described by properties that can be read in its source, never by its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lmtrain.plan.cost_model.hardware_figures import GENERATIONS, NETWORKS, Hardware

PerCase = NDArray[np.float64]  # an entry per run (case) to be predicted
LOW_PRECISIONS = ("float8", "mxfp8", "nvfp4", "float8_row")


class Attention(IntEnum):
    """Kinds of attention kernels: score matrices written to memory, or a fused kernel that never writes them."""

    SCORES = 0  # a kernel for each operation
    FUSED = 1  # scale, mask and softmax in one
    FLASH1 = 2
    FLASH2 = 3
    CUDNN = 4  # the vendor's kernel, made for the newest tensor cores


class Pointwise(IntEnum):
    """Kinds of kernels for all operations except products and attention."""

    EAGER = 0  # a kernel for each operation
    FUSED = 1  # fused by hand: bias with GELU, bias with dropout and residual sum
    COMPILED = 2


class Overlap(IntEnum):
    """Ways to hide the collectives of tensor parallelism."""

    NONE = 0
    WEIGHTS = 1  # the input's gradient is reduced while the weight's gradient is computed
    CHUNKED = 2  # product and collective are split in chunks and pipelined


class Schedule(IntEnum):
    """Pipeline schedules."""

    ONE_F_ONE_B = 0  # interleaved if vp > 1
    ZB_1 = 1  # zero bubble: deferred weight gradients, memory as 1F1B
    ZB_2 = 2  # zero bubble: twice the memory of 1F1B
    ZB_V = 3
    GPIPE = 4


@dataclass(frozen=True, kw_only=True)
class Program:
    """Properties of a training program (this one or another framework) that decide its time and memory."""

    attention: Attention = Attention.FLASH2
    pointwise: Pointwise = Pointwise.COMPILED
    fused_rotary: bool = False  # rotary embedding is a single kernel, even if `pointwise` is eager
    fused_loss: bool = False  # the loss is a single kernel that also writes the gradient of the logits
    eager_norm: bool = False  # norms run as single operations in fp32
    tp_overlap: Overlap = Overlap.WEIGHTS
    reduce_overlap: bool = True  # the reduction of gradients over dp overlaps with the backward
    reduce_whole: bool = False  # ZeRO 1: gradients are all-reduced, not reduce-scattered
    reduce_each: bool = False  # ZeRO 2: gradients are reduced after each micro-batch, before the next begins
    gather_overlap: bool = False  # ZeRO 1 and 2: the all-gather of weights overlaps with the forward
    send_overlap: bool = False  # pipeline messages overlap with computation
    whole_messages: bool = False  # each tp rank sends the full boundary tensor, not its share
    reduce_bytes: int = 4  # bytes per gradient in the reduction over dp
    sum_bytes: int = 0  # bytes per gradient in the accumulated sum; 0: as reduce_bytes
    fused_gradients: int = 0  # least micro-batches for which products add to the gradients' sum themselves; 0: never
    fused_optimizer: bool = True
    whole_logits: bool = False  # each tp rank holds the logits of the whole vocabulary
    flat_copies: bool = False  # weights and gradients are copied to flat buffers for the optimizer
    keeps_gathered: bool = False  # sequence parallelism: gathered inputs of products are kept for the backward
    group_buffers: bool = False  # over dp, weights are gathered and gradients reduced block by block, through buffers
    loss_numbers: int = 0  # logits that the loss processes at a time; 0: all
    loss_bytes: int = 0  # working bytes per such logit
    over_logits: bool = False  # the gradient of the logits overwrites them


@dataclass(frozen=True, kw_only=True)
class RecomputedShares:
    """Shares of a block's forward, from 0 to 1, that backward recomputes."""

    products: float = 0.0
    attention: float = 0.0
    pointwise: float = 0.0
    collectives: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training run whose time and memory are to be predicted: model, machine, layout and program."""

    hardware: Hardware
    program: Program = Program()
    # the model
    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_width: int
    ffn_width: int
    gated: bool
    vocab: int  # columns of the logits, padding included
    seq_len: int
    tied: bool = True
    scored_share: float = 1.0  # share of tokens for which logits are computed
    causal: bool = True
    window: int = 0  # positions; 0: no window
    window_share: float = 1.0  # share of layers with the window; the others attend to all positions
    rotary: bool = False
    parallel_block: bool = False
    extra_norms: int = 0  # norms of hidden states in a block, beyond two, or one if the block is parallel
    qk_norm: bool = False  # norms of queries and keys
    scaled_logits: bool = False  # logits are multiplied by a number, or capped
    capped_logits: bool = False
    dropout: bool = False
    # the layout
    pp: int = 1
    vp: int = 1
    dp: int = 1
    tp: int = 1
    zero: int = 0
    shard: int = 1  # ranks that share optimizer state, and with zero 2 and 3 gradients and weights
    regather: bool = True  # zero 3: weights are released after the forward
    each_microbatch: bool = True  # zero 3: weights are gathered and gradients reduced per micro-batch, not per step
    sequence_parallel: bool = False
    microbatch: int
    num_microbatches: int
    schedule: Schedule = Schedule.ONE_F_ONE_B
    largest_stage: int = 0  # layers of the fullest stage; 0: layers are divided evenly
    first_stage: int = -1  # layers of the first stage; -1: as many as the fullest
    last_stage: int = -1  # layers of the last stage; -1: layers are divided evenly
    recomputed: RecomputedShares = RecomputedShares()
    precision: str = "bf16"
    optimizer_bytes: float = 12.0  # bytes of optimizer state per weight: master and two moments; and of its average
    average_bytes: float = 0.0  # bytes per weight that updates of an average of the weights move in a mean step


class Cases:
    """Many runs to be predicted at once. Each attribute is an array with an entry per run: `cases.tp`, `cases.peak`."""

    def __init__(self, arrays: Mapping[str, PerCase]) -> None:
        self.arrays = arrays
        vars(self).update(arrays)  # because: pricing reads them in every line, and attributes are fast

    def __getattr__(self, name: str) -> PerCase:
        """Return an empty column if there are no cases; else raise AttributeError for an unknown name."""
        if self.arrays:
            raise AttributeError(f"The cases have no column {name}.")
        return np.zeros(0)

    def __len__(self) -> int:
        return len(self.width)

    @cached_property
    def tokens(self) -> PerCase:
        """Tokens of a micro-batch."""
        return self.microbatch * self.seq_len

    @cached_property
    def query_width(self) -> PerCase:
        """Width of the queries on one tp rank."""
        return self.num_heads * self.head_width / self.tp

    @cached_property
    def key_width(self) -> PerCase:
        """Width of the keys on one tp rank. Ranks hold copies if there are fewer heads of keys than ranks."""
        return np.maximum(self.num_kv_heads, self.tp) * self.head_width / self.tp

    @cached_property
    def sequence_shards(self) -> PerCase:
        """Number of shards of the sequence outside of attention and MLP."""
        return np.where(self.sequence_parallel > 0, self.tp, 1.0)

    @cached_property
    def state_shards(self) -> PerCase:
        """Number of ranks that share the optimizer state."""
        return np.where(self.zero > 0, self.shard, 1.0)

    def take(self, rows: NDArray[np.int_] | NDArray[np.bool_]) -> Cases:
        """Return only the runs that `rows` selects, by indices or by a mask."""
        return Cases({name: array[rows] for name, array in self.arrays.items()})


def stack_cases(cases: Sequence[Case]) -> Cases:
    """Turn a list of runs into arrays with an entry per run."""
    rows = [_case_values(case) for case in cases]
    return Cases({name: np.array([row[name] for row in rows], dtype=np.float64) for name in (rows or [{}])[0]})


def _case_values(case: Case) -> dict[str, float]:
    """Return all numbers that describe a run, by name: the fields of the Case and of its program, and the machine's
    figures in bytes, seconds and FLOP/s. Values that are names, such as the kind of network, become index numbers.
    """
    hardware, program = case.hardware, case.program
    fp32 = case.precision in ("fp32", "tf32")
    half_peak = hardware.peak(case.precision) if fp32 else hardware.peak("bf16") or hardware.peak("fp16")
    layers_per_stage = -(-case.num_layers // case.pp)
    fields = vars(case) | vars(program)
    return {name: float(value) for name, value in fields.items() if isinstance(value, (int, float))} | {
        f"recomputed_{name}": share for name, share in vars(case.recomputed).items()
    } | {
        "generation": float(GENERATIONS.index(hardware.generation)),
        "peak": hardware.peak(case.precision.removesuffix("_row")) or half_peak,
        "half_peak": half_peak,
        "low_precision": float(LOW_PRECISIONS.index(case.precision) + 1 if case.precision in LOW_PRECISIONS else 0),
        "sustained": hardware.sustained,
        "memory_Bps": hardware.memory_GBps * 1e9,
        "memory_bytes": hardware.memory_bytes,
        "num_cores": float(hardware.num_cores),
        "cache": hardware.cache_MB * 1e6,
        "node": float(hardware.gpus_per_node),
        "link_Bps": hardware.link_GBps * 1e9,
        "nic_Bps": hardware.nic_GBps * 1e9,
        "network": float(NETWORKS.index(hardware.network)),
        "sum_bytes": float(program.sum_bytes or program.reduce_bytes),
        "largest_stage": float(case.largest_stage or layers_per_stage),
        "first_stage": float((case.largest_stage or layers_per_stage) if case.first_stage < 0 else case.first_stage),
        "last_stage": float(layers_per_stage if case.last_stage < 0 else case.last_stage),
        "precision": 4.0 if fp32 else 2.0,
    }  # fmt: skip
