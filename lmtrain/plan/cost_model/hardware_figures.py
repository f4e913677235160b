"""Machines as the planner models them: figures from data sheets, and fitted factors for the rest. Torch-free.

A `Hardware` is a device, the links within a node and the network between nodes, read from `conf/hardware/*.yaml`, where
each figure names its source. Each factor has a name, a range and a meaning. Factors belong to all machines and programs
alike, to a generation of devices or to a property of a program, never to a single run. `TIME_FACTORS` and
`MEMORY_FACTORS` hold the values assumed before fitting; fitted.yaml, beside this file, the values fitted to published
runs. Called by code that prices runs or fits factors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import yaml
from numpy.typing import NDArray

from lmtrain.config.name_suggestions import suggest_value
from lmtrain.config.settings_base import Facts, Problem, Settings
from lmtrain.errors import join_few, own

FITTED_FILE = Path(__file__).with_name("fitted.yaml")
GENERATIONS = ("volta", "ampere", "hopper", "blackwell", "cpu")
PRECISIONS = ("fp32", "fp16", "bf16", "float8", "mxfp8", "nvfp4")
NETWORKS = ("infiniband", "ethernet", "omnipath")


@dataclass(frozen=True)
class Factor:
    """A factor's value before fitting, the range within which it is fitted, and its meaning."""

    value: float
    low: float
    high: float
    meaning: str


TIME_FACTORS: dict[str, Factor] = {
    # products
    "sustain_volta": Factor(0.74, 0.55, 0.95, "share of the peak that a large product reaches, V100"),
    "sustain_ampere": Factor(0.84, 0.70, 0.95, "the same, A100: 263 of 312 measured by Fire-Flyer"),
    "sustain_hopper": Factor(0.72, 0.55, 0.85, "the same, H100: clocks fall under load"),
    "sustain_blackwell": Factor(0.70, 0.50, 0.90, "the same, GB200"),
    "sustain_low": Factor(0.85, 0.55, 1.0, "speed of products of 8-bit inputs, as a share of their sustained peak"),
    "sustain_4bit": Factor(0.70, 0.35, 1.0, "the same, 4-bit inputs"),
    "cast_passes": Factor(3.0, 0.5, 8.0, "passes over a product's inputs to scale and cast them to 8 bits or less"),
    "side_ramp": Factor(130.0, 20.0, 400.0, "length that a product loses on each side: to fill, drain and read tiles"),
    "small_tile": Factor(0.85, 0.6, 1.0, "speed of a 128 x 128 tile relative to one of 256 x 128"),
    "fill_power": Factor(0.7, 0.2, 1.0, "exponent of the fill of the last wave: libraries split such products"),
    "unaligned": Factor(0.75, 0.5, 1.0, "speed of a product with a side that is no multiple of 64"),
    "odd_heads": Factor(0.1, 0.02, 0.4, "speed of products of scores where a head's width is no multiple of 8"),
    "sustain_row": Factor(0.70, 0.4, 1.0, "speed of float8 with a scale per row, relative to float8"),
    "gap_s": Factor(1.5e-6, 0.3e-6, 5e-6, "seconds between two kernels"),
    # attention
    "scores_share": Factor(0.45, 0.2, 0.9, "share of the peak of batched products of scores and values"),
    "flash1_share": Factor(0.30, 0.15, 0.5, "share of the peak of the first flash kernels"),
    "flash2_share": Factor(0.50, 0.3, 0.7, "the same, FlashAttention 2 on the devices that it was written for"),
    "flash2_newer": Factor(0.65, 0.4, 1.0, "speed of FlashAttention 2 on later devices, relative to that"),
    "cudnn_share": Factor(0.55, 0.35, 0.75, "share of the peak of the vendor's kernel"),
    "seq_ramp": Factor(600.0, 50.0, 2500.0, "sequence that a flash kernel needs to fill the device"),
    "head_ramp": Factor(16.0, 0.0, 40.0, "width of each head that a flash kernel loses; the first kernels lose none"),
    "fused_bytes": Factor(22.0, 10.0, 45.0, "bytes moved per attention score, forward and backward, softmax fused"),
    "scores_bytes": Factor(60.0, 25.0, 120.0, "the same, a kernel for each operation"),
    # memory-bound work
    "stream_share": Factor(0.85, 0.6, 0.95, "share of the memory's bandwidth that streaming reaches"),
    "passes_eager": Factor(1.9, 1.0, 3.5, "memory traffic of pointwise operations, relative to the minimum"),
    "passes_fused": Factor(1.2, 0.8, 2.2, "the same, kernels fused by hand"),
    "passes_compiled": Factor(1.0, 0.6, 1.8, "the same, compiled"),
    "cached": Factor(0.3, 0.0, 0.8, "share of that traffic saved by a cache that holds all bytes of a pass"),
    "norm_bytes": Factor(60.0, 15.0, 160.0, "bytes per number moved by a norm of single operations, both directions"),
    "loss_bytes": Factor(30.0, 8.0, 70.0, "bytes per logit moved by the loss, a kernel for each operation"),
    "loss_fused": Factor(0.3, 0.15, 1.0, "share of these bytes if the loss is one kernel, which reads a logit twice"),
    # collectives
    "link_share": Factor(0.75, 0.4, 0.95, "share of the links' bandwidth inside a node"),
    "nic_share": Factor(0.70, 0.3, 0.95, "share of the adapters' bandwidth, InfiniBand"),
    "nic_share_other": Factor(0.55, 0.2, 0.95, "the same, Ethernet and cloud networks"),
    "nic_share_omnipath": Factor(0.3, 0.08, 0.7, "the same, Omni-Path: 0.1 measured by BigScience on four A100 nodes"),
    "link_latency_s": Factor(12e-6, 3e-6, 60e-6, "start of a collective inside a node"),
    "hop_latency_s": Factor(12e-6, 2e-6, 60e-6, "a step of a ring between nodes"),
    "step_latency_s": Factor(3.0e-6, 0.5e-6, 6e-6, "the same inside a node: the ring of a gather passes every rank"),
    "tp_exposed_none": Factor(0.95, 0.6, 1.0, "exposed share of tp's backward collectives without overlap"),
    "tp_exposed_weights": Factor(0.6, 0.2, 1.0, "the same, overlapped with the computation of weights' gradients"),
    "tp_exposed_chunked": Factor(0.3, 0.05, 0.8, "exposed share of tp's collectives with chunked products"),
    "dp_exposed": Factor(0.25, 0.0, 1.0, "exposed share of dp's collectives even if there is time to hide them"),
    "contention": Factor(0.15, 0.0, 0.6, "time that computation loses, as a share of the hidden collectives"),
    "fsdp_exposed": Factor(0.10, 0.0, 0.5, "the same for the collectives of sharded weights (zero 3)"),
    "send_exposed": Factor(0.8, 0.2, 2.5, "exposed pipeline messages, of two per micro-batch and boundary"),
    "send_overlapped": Factor(0.3, 0.0, 1.0, "the same, if messages overlap with computation"),
    # the step
    "update_bytes": Factor(32.0, 18.0, 60.0, "bytes per weight moved by optimizer, norm and clipping"),
    "update_eager": Factor(1.8, 1.0, 4.0, "multiple of that if each operation is a kernel: a guess, not measured"),
    "add_share": Factor(0.9, 0.4, 1.5, "traffic of a separate pass that adds up gradients, relative to the minimum"),
    "add_fused": Factor(0.35, 0.0, 1.0, "the same, if products add to the sum themselves, partly hidden"),
    "step_s": Factor(0.03, 0.0, 0.3, "seconds per step: loader, records, the host's wait"),
    "straggler": Factor(0.006, 0.0, 0.03, "spread of devices' speed: the slowest of n sets the pace"),
}  # fmt: skip

MEMORY_FACTORS: dict[str, Factor] = {
    "base_GiB": Factor(2.0, 0.5, 6.0, "GiB per rank: libraries, their work space and communicators"),
    "slack": Factor(0.08, 0.0, 0.4, "fragmentation, as a share of the allocator's transient bytes"),
    "unreused": Factor(0.4, 0.0, 1.0, "share of the smaller of two peaks whose blocks the other cannot reuse"),
    "kept_eager": Factor(1.1, 0.9, 1.7, "activations relative to the minimum, a kernel for each operation"),
    "kept_fused": Factor(1.0, 0.8, 1.3, "the same, kernels fused by hand"),
    "kept_compiled": Factor(0.9, 0.5, 1.2, "the same, compiled"),
    "kept_residual": Factor(1.1, 0.8, 1.8, "activations along the residual stream, relative to the minimum"),
    "norm_kept": Factor(8.0, 2.0, 20.0, "bytes per number kept by a norm of single operations"),
    "scores_kept": Factor(9.0, 4.0, 18.0, "bytes kept per attention score, a kernel for each operation"),
    "fused_kept": Factor(5.0, 2.0, 8.0, "the same, softmax fused"),
    "logit_eager": Factor(16.0, 8.0, 22.0, "bytes per logit while the loss is computed, a kernel for each operation"),
    "logit_fused": Factor(10.0, 4.0, 16.0, "the same, kernels fused by hand"),
    "logit_compiled": Factor(9.0, 4.0, 16.0, "the same, compiled"),
    "copied_bytes": Factor(2.0, 0.0, 6.0, "bytes per weight of flat copies for the optimizer"),
}  # fmt: skip


@dataclass(frozen=True)
class FittedFactors:
    """Values of the cost model's factors by name: `factors["gap_s"]` is the time between two kernels in seconds."""

    values: Mapping[str, float]

    def __getitem__(self, name: str) -> float:
        return self.values[name]

    def by_index(self, names: Sequence[str], index: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return one factor value per run: for a run whose entry in `index` is i, the factor named `names[i]`."""
        values: NDArray[np.float64] = np.array([self.values[name] for name in names])[index.astype(np.intp)]
        return values


def fitted_time_factors() -> FittedFactors:
    """Return the factors that predict step time, fitted to published runs."""
    return FittedFactors(_read_fitted()["time"])


def fitted_memory_factors(*, on_cpu: bool = False) -> FittedFactors:
    """Return the factors that predict memory, fitted to published runs. On a CPU, the factors for CUDA libraries, NCCL
    and the caching allocator are 0.
    """
    zeros = dict.fromkeys(("base_GiB", "slack", "unreused"), 0.0)
    return FittedFactors(_read_fitted()["memory"] | (zeros if on_cpu else {}))


def fitted_interval() -> float:
    """Return the half-width i of the 80% interval of a predicted step time, measured on sources that were not fitted
    to.

    Four of five steps take between 1 / (1 + i) and 1 + i times the predicted time.
    """
    return float(_read_fitted()["interval"])


@cache
def _read_fitted() -> dict[str, Any]:
    """Return the content of fitted.yaml."""
    fitted: dict[str, Any] = yaml.safe_load(FITTED_FILE.read_text(encoding="utf-8"))
    return fitted


@dataclass(frozen=True, kw_only=True)
class Hardware(Settings):
    field_facts: ClassVar[Facts] = Facts(affects="nothing")

    name: str  # the product name
    generation: str
    memory_GiB: float
    peak_tflops: dict[str, float]  # precision of the inputs -> dense TFLOP/s; absent: the device has no such units
    memory_GBps: float
    num_cores: int  # streaming multiprocessors, which process the tiles of a product
    cache_MB: float  # last-level cache
    gpus_per_node: int
    link_GBps: float  # from a device to the others of its node, one direction
    nic_GBps: float  # from a whole node to the network, one direction
    network: str = "infiniband"  # the network between nodes, from NETWORKS
    power_W: float = 0.0
    sustained: float = 1.0  # clock under load relative to its generation; below 1: a lower power limit
    unchecked: bool = False  # predictions were never compared with a measured run
    factors: dict[str, float] = field(default_factory=dict)  # planner factors that were fitted to runs on this machine
    interval: float | None = None  # half-width of the 80% interval of a step's time, from runs on this machine

    def problems(self) -> Iterator[Problem]:
        sizes = ("memory_GiB", "memory_GBps", "num_cores", "cache_MB", "gpus_per_node", "link_GBps", "nic_GBps")
        unknown = sorted(set(self.peak_tflops) - set(PRECISIONS))
        no_factors = [name for name, value in self.factors.items() if name not in TIME_FACTORS or value < 0]
        yield from self.checked(
            (self.generation not in GENERATIONS, "generation", "is not known",
             suggest_value(self.generation, GENERATIONS, own)),
            (self.network not in NETWORKS, "network", "is not known",
             suggest_value(self.network, NETWORKS, own)),
            *((getattr(self, key) <= 0, key, "must be above 0", "Give the data sheet's figure.") for key in sizes),
            (
                bool(unknown), "peak_tflops", f"has the unknown precision {', '.join(unknown)}",
                f"Give figures of {', '.join(PRECISIONS)} only.",
            ),
            (
                min(self.peak_tflops.values(), default=0.0) <= 0, "peak_tflops", "must be above 0",
                "Give the data sheet's figures.",
            ),
            (self.power_W < 0, "power_W", "must be 0 or above", f"Use {own(0)} where it is not known."),
            (self.sustained <= 0, "sustained", "must be above 0", f"Use {own('1.0')}."),
            (
                bool(no_factors), "factors",
                f"has {join_few(no_factors)}, which is below 0 or no factor of the planner",
                "Give the factors that `lmtrain plan --calibrate` wrote.",
            ),
            self.above_0("interval", f"Use {own('null')} for the interval of all machines."),
        )  # fmt: skip

    @property
    def device(self) -> str:
        """The value of compute.device for this machine."""
        return "cpu" if self.generation == "cpu" else "cuda"

    @property
    def memory_bytes(self) -> float:
        return self.memory_GiB * 2**30

    def peak(self, precision: str) -> float:
        """Return the peak FLOP/s of the device for matrix products whose inputs have the number format `precision`,
        such as "bf16" or "fp32"; 0 if the device does not support it.

        tf32 stands for fp32 inputs that are cut to tf32.
        """
        if precision == "tf32":  # because: every data sheet gives half of bf16, and devices without bf16 lack tf32
            return self.peak("bf16") / 2 or self.peak("fp32")
        return self.peak_tflops.get(precision, 0.0) * 1e12
