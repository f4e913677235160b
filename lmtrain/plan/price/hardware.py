"""What is known of a machine: one device, what joins the devices of a node, and what joins nodes. Torch-free.

Read from `conf/hardware/*.yaml`, where each figure names its source. Called by whoever prices a run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from lmtrain.config.base import Problem, Settings
from lmtrain.errors import a_few
from lmtrain.plan.price.factors import FACTORS

GENERATIONS = ("volta", "ampere", "hopper", "blackwell", "cpu")
PRECISIONS = ("fp32", "fp16", "bf16", "float8", "mxfp8", "nvfp4")
NETWORKS = ("infiniband", "ethernet", "omnipath")


@dataclass(frozen=True, kw_only=True)
class Hardware(Settings):
    name: str  # what people call it
    generation: str
    memory_GiB: float
    peak_tflops: dict[str, float]  # dense, by precision of the products' factors; absent: the device has no such units
    memory_GBps: float
    num_cores: int  # streaming multiprocessors: tiles of a product are dealt out to them
    cache_MB: float  # of the last level
    gpus_per_node: int
    link_GBps: float  # of one device to the others of its node, one way
    nic_GBps: float  # of a whole node to the network, one way
    network: str = "infiniband"  # what joins nodes, of NETWORKS
    power_W: float = 0.0
    sustained: float = 1.0  # of its generation's usual clock under load; below 1: a lower limit of power
    unchecked: bool = False  # no measured run was at hand to compare with
    factors: dict[str, float] = field(default_factory=dict)  # of the planner, where runs on this machine showed others
    interval: float | None = None  # half of that of a step's time, as runs on this machine showed it

    def problems(self) -> Iterator[Problem]:
        sizes = ("memory_GiB", "memory_GBps", "num_cores", "cache_MB", "gpus_per_node", "link_GBps", "nic_GBps")
        unknown = sorted(set(self.peak_tflops) - set(PRECISIONS))
        no_factors = [name for name, value in self.factors.items() if name not in FACTORS or value < 0]
        yield from self.checked(
            (self.generation not in GENERATIONS, "generation", "is not known", f"Use one of {', '.join(GENERATIONS)}."),
            (self.network not in NETWORKS, "network", "is not known", f"Use one of {', '.join(NETWORKS)}."),
            *((getattr(self, key) <= 0, key, "must be above 0", "Use the data sheet's figure.") for key in sizes),
            (bool(unknown), "peak_tflops", f"has {', '.join(unknown)}, no precision", f"Use {', '.join(PRECISIONS)}."),
            (
                min(self.peak_tflops.values(), default=0.0) <= 0, "peak_tflops", "must be above 0",
                "Use the data sheet's figures.",
            ),
            (self.power_W < 0, "power_W", "must be 0 or above", "Use 0 where it is not known."),
            (self.sustained <= 0, "sustained", "must be above 0", "Use 1.0."),
            (
                bool(no_factors), "factors", f"has {a_few(no_factors)}, no factor of the planner or below 0",
                "Use what `lmtrain plan --calibrate` wrote.",
            ),
            self.above_0("interval", "Use null for that of all machines."),
        )  # fmt: skip

    @property
    def device(self) -> str:
        """As compute.device names it."""
        return "cpu" if self.generation == "cpu" else "cuda"

    def peak(self, precision: str) -> float:
        """FLOP/s of products whose factors have this precision, or, as tf32, are cut to it."""
        if precision == "tf32":  # because: on every data sheet it is half of bf16, and what has no bf16 has no tf32
            return self.peak("bf16") / 2 or self.peak("fp32")
        return self.peak_tflops.get(precision, 0.0) * 1e12
