"""What of the product a benchmark can turn off, to see what it is worth: constants, patched in its own process.

Called by one_run.py. No user has these switches. One that this tree lacks is not among those `present`.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ATTENTION = ("flash", "efficient", "cudnn", "math")  # torch's kernels for it


@dataclass(frozen=True)
class Switch:
    """`name` of `module` becomes `off`."""

    module: str
    name: str
    off: Callable[[], Any]

    @property
    def file(self) -> Path:
        return ROOT.joinpath(*self.module.split(".")).with_suffix(".py")

    @property
    def is_there(self) -> bool:
        return self.file.exists() and bool(re.search(rf"\b{self.name}\b", self.file.read_text("utf-8")))


SWITCHES = {
    # products that add a weight's gradient to its fp32 sum by themselves
    "summed_products": Switch("lmtrain.parallel.linear_forward_backward_products", "SUMMING_DEVICES", set),
    # the kernels of lmtrain/kernels; their twins run in their place
    "kernels": Switch("lmtrain.kernels.triton_availability", "FUSED_DEVICES", set),
    # masks of blocks, for flex_attention; masks of all positions in their place
    "block_masks": Switch("lmtrain.parallel.build_parallel_model", "apply_block_masks", lambda: lambda *_, **__: None),
}


def present() -> list[str]:
    return [name for name, switch in SWITCHES.items() if switch.is_there]


def turn_off(names: list[str]) -> None:
    for name in names:
        switch = SWITCHES[name]
        if not switch.is_there:
            raise SystemExit(f"{switch.module} has no {switch.name}: this tree has no switch {name}.")
        setattr(importlib.import_module(switch.module), switch.name, switch.off())


def only_attention(kind: str) -> None:
    """No other of torch's kernels for attention."""
    import torch  # because: the others are looked up without it

    for other in ATTENTION:
        enable = getattr(torch.backends.cuda, f"enable_{'mem_efficient' if other == 'efficient' else other}_sdp")
        enable(other == kind)
