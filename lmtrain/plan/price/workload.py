"""What is priced: one step of a model on a machine, in a layout, by a program. Torch-free.

`Case` is one run in words and integers; `Columns` is many of them as arrays, so that ten thousand layouts are priced
in one pass. A program is described by properties that can be read in its source, never by its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from lmtrain.plan.price.hardware import GENERATIONS, NETWORKS, Hardware

Column = NDArray[np.float64]
LOW = ("float8", "mxfp8", "nvfp4", "float8_row")


class Attention(IntEnum):
    """How scores meet values: whole matrices of scores in memory, or a kernel that never writes them."""

    SCORES = 0  # a kernel for each operation
    FUSED = 1  # scale, mask and softmax in one
    FLASH1 = 2
    FLASH2 = 3
    CUDNN = 4  # the vendor's, which knows the newest tensor cores


class Pointwise(IntEnum):
    """How what is neither product nor attention runs."""

    EAGER = 0  # a kernel for each operation
    FUSED = 1  # by hand: bias with GELU, bias with dropout and sum
    COMPILED = 2


class Overlap(IntEnum):
    """What hides the collectives of tensor parallelism."""

    NONE = 0
    WEIGHTS = 1  # the gradient of the input travels while that of the weight is made
    CHUNKED = 2  # product and collective in pieces, one behind the other


class Schedule(IntEnum):
    ONE_F_ONE_B = 0  # and interleaved, by vp
    ZB_1 = 1  # weights' gradients apart, 1F1B's memory
    ZB_2 = 2  # and twice of that
    ZB_V = 3
    GPIPE = 4


@dataclass(frozen=True, kw_only=True)
class Program:
    attention: Attention = Attention.FLASH2
    pointwise: Pointwise = Pointwise.COMPILED
    fused_rotary: bool = False  # turning queries and keys is one kernel, whatever the rest is
    fused_loss: bool = False  # so is the loss, and writes the gradient of its logits
    eager_norm: bool = False  # a norm of single operations in fp32
    tp_overlap: Overlap = Overlap.WEIGHTS
    reduce_overlap: bool = True  # gradients are summed over dp behind the backward
    reduce_whole: bool = False  # ZeRO 1: each rank gets the sum of all gradients, not of its share alone
    reduce_each: bool = False  # ZeRO 2: gradients are summed for each microbatch, and the next one waits
    gather_overlap: bool = False  # ZeRO 1 and 2: weights are gathered behind the forward
    send_overlap: bool = False  # a pipeline's messages travel behind computation
    whole_messages: bool = False  # each tp rank sends all of a boundary, not its share
    reduce_bytes: int = 4  # of a number of the gradients' sum, on its way
    sum_bytes: int = 0  # of the same as it is kept; 0: as it travels
    fused_gradients: int = 0  # from so many microbatches on products add to the sum of gradients; 0: never
    fused_optimizer: bool = True
    whole_logits: bool = False  # each tp rank has the logits of all tokens in the vocabulary
    flat_copies: bool = False  # weights and gradients are copied to flat buffers on their way to the optimizer
    keeps_gathered: bool = False  # sequence parallelism: what is gathered for a product is kept for its backward
    group_buffers: bool = False  # over dp, weights are gathered and gradients summed a block at a time, from buffers
    loss_numbers: int = 0  # logits that the loss works on at a time; 0: all
    loss_bytes: int = 0  # of each of these
    over_logits: bool = False  # their gradient is written over them


@dataclass(frozen=True, kw_only=True)
class Again:
    """Which shares of a block's forward are done twice."""

    products: float = 0.0
    attention: float = 0.0
    pointwise: float = 0.0
    collectives: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Case:
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
    scored_share: float = 1.0  # of the tokens, those of which logits are made
    causal: bool = True
    window: int = 0  # 0: none
    rotary: bool = False
    parallel_block: bool = False
    dropout: bool = False
    # the layout
    pp: int = 1
    vp: int = 1
    dp: int = 1
    tp: int = 1
    zero: int = 0
    shard: int = 1  # ranks that share optimizer state, and with zero 2 and 3 gradients and weights
    regather: bool = True  # zero 3: weights are released after the forward
    each_microbatch: bool = True  # zero 3: weights are gathered and gradients reduced once for each, not for a step
    sequence_parallel: bool = False
    microbatch: int
    num_microbatches: int
    schedule: Schedule = Schedule.ONE_F_ONE_B
    largest_stage: int = 0  # layers of the fullest stage; 0: even
    first_stage: int = -1  # layers of the first stage; -1: as many as the fullest
    last_stage: int = -1  # layers of the last stage; -1: even
    again: Again = Again()
    precision: str = "bf16"
    optimizer_bytes: float = 12.0  # of state for a weight: master and two moments


class Columns:
    """Arrays by the names that `columns` gives them, with one entry a case: `c.tp`, `c.peak`."""

    def __init__(self, arrays: Mapping[str, Column]) -> None:
        self.arrays = arrays
        vars(self).update(arrays)  # because: prices ask for them in every line

    def __getattr__(self, name: str) -> Column:
        """Return nothing's column, where there is no case; raise for what no case has."""
        if self.arrays:
            raise AttributeError(f"a case has no {name}")
        return np.zeros(0)

    def __len__(self) -> int:
        return len(self.width)

    def take(self, rows: NDArray[np.int_] | NDArray[np.bool_]) -> Columns:
        return Columns({name: array[rows] for name, array in self.arrays.items()})


def columns(cases: Sequence[Case]) -> Columns:
    rows = [_numbers(case) for case in cases]
    return Columns({name: np.array([row[name] for row in rows], dtype=np.float64) for name in (rows or [{}])[0]})


def _numbers(case: Case) -> dict[str, float]:
    """Return the numbers of a case and of its program by name, and those that follow from the rest."""
    hardware, program = case.hardware, case.program
    fp32 = case.precision in ("fp32", "tf32")
    half = hardware.peak(case.precision) if fp32 else hardware.peak("bf16") or hardware.peak("fp16")
    even = -(-case.num_layers // case.pp)
    own = vars(case) | vars(program)
    return {name: float(value) for name, value in own.items() if isinstance(value, (int, float))} | {
        f"again_{name}": share for name, share in vars(case.again).items()
    } | {
        "generation": float(GENERATIONS.index(hardware.generation)),
        "peak": hardware.peak(case.precision.removesuffix("_row")) or half,
        "half_peak": half,
        "low_precision": float(LOW.index(case.precision) + 1 if case.precision in LOW else 0),
        "sustained": hardware.sustained,
        "memory_Bps": hardware.memory_GBps * 1e9,
        "memory_bytes": hardware.memory_GiB * 2**30,
        "num_cores": float(hardware.num_cores),
        "cache": hardware.cache_MB * 1e6,
        "node": float(hardware.gpus_per_node),
        "link_Bps": hardware.link_GBps * 1e9,
        "nic_Bps": hardware.nic_GBps * 1e9,
        "network": float(NETWORKS.index(hardware.network)),
        "sum_bytes": float(program.sum_bytes or program.reduce_bytes),
        "largest_stage": float(case.largest_stage or even),
        "first_stage": float((case.largest_stage or even) if case.first_stage < 0 else case.first_stage),
        "last_stage": float(even if case.last_stage < 0 else case.last_stage),
        "precision": 4.0 if fp32 else 2.0,
    }  # fmt: skip
