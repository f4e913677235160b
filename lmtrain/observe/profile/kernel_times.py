"""A table of kernels by class, from a Chrome JSON trace written by torch.profiler. Torch-free.

Used by a run that has written a trace; `lmtrain report` reads the table. With a GPU the table counts device kernels;
without a GPU, the operators' own CPU time. Operators called inside an operator of a class in ENCLOSING_CLASSES count in
that class.
"""

from __future__ import annotations

import bisect
import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lmtrain.runtime.files.atomic_files import read_json, write_json

CLASSES = ("products", "attention", "elementwise", "norms", "collectives", "copies", "optimizer", "other")

# the first pattern that matches counts; because: an optimizer multiplies, attention does too, and NCCL copies
_CLASS_PATTERNS = [
    ("optimizer", r"Optimizer\.(step|zero_grad)|_fused_adam|adamw_step|multi_tensor_apply|aten::_foreach|_fused_sgd"),
    ("collectives", r"nccl|c10d|gloo|all_?reduce|all_?gather|reduce_?scatter|barrier|record_param_comms"
                    r"|_(send|recv)\b|fsdp::"),
    ("attention", r"attention|sdpa|fmha|flash_(fwd|bwd)|pytorch_flash|ScaledDotProduct"),
    ("norms", r"(layer|rms|batch|group)_?norm|LayerNorm|RMSNorm|GammaBeta|vectorized_layer_norm|fused_norm"),
    ("products", r"gemm|gemv|cutlass|cublas|nvjet|xmma|(add|b|badd)?mm(_out)?\b|\b(add)?mm|MmBackward|BmmBackward"
                 r"|matmul|aten::linear|mkldnn.*linear|mkl_linear|splitK|convolution|ColumnLinear|RowLinear"),
    ("copies", r"memcpy|memset|aten::(copy_|clone|contiguous|_to_copy|to|cat|fill_|zero_|zeros|index_select)\b"
               r"|CatArray|FillFunctor|copy_kernel|Memset|Memcpy"),
    ("elementwise", r"elementwise|cross_entropy_(sums|gradient)|activation_(for|back)ward"
                    r"|triton_poi|triton_(red|per)|cpp_fused|aten::(add|sub|mul|div|neg|pow|exp|gelu|silu"
                    r"|sigmoid|tanh|relu|where|dropout|native_dropout|bernoulli|threshold|lerp|addcmul|sqrt|rsqrt"
                    r"|masked_fill|sin|cos|clamp|maximum|gt|lt|eq|isfinite|sum|mean)_?(_backward)?\b"
                    r"|(Add|Sub|Mul|Div|Gelu|Silu|Sigmoid|Tanh|Pow|Sum|Mean)Backward|CompiledFunction|CompiledFxGraph"),
]  # fmt: skip
_COMPILED = [(name, re.compile(pattern, re.IGNORECASE)) for name, pattern in _CLASS_PATTERNS]
# operators called inside an operator of these classes count in its class
ENCLOSING_CLASSES = frozenset(("optimizer", "collectives", "attention", "norms", "products"))
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_MAX_KERNELS = 50  # rows in the table; the others count only in their class
TABLE_SUFFIX = ".kernels.json"


def kernel_class(name: str) -> str:
    """Return the class, one of CLASSES, of a kernel or operator by its name."""
    return next((kind for kind, pattern in _COMPILED if pattern.search(name)), "other")


@dataclass(frozen=True)
class Kernel:
    name: str
    kind: str  # one of CLASSES
    seconds: float
    calls: int


@dataclass(frozen=True)
class KernelTable:
    """Kernel times of one rank over one window of steps."""

    first_step: int
    last_step: int
    rank: int
    device: str  # cuda: times of device kernels; cpu: own times of operators
    window_s: float  # seconds from the beginning of the first step to the end of the last
    classes: dict[str, float]  # seconds by class, for all of CLASSES
    kernels: tuple[Kernel, ...]  # the kernels with the longest total time, longest first

    def lines(self) -> list[str]:
        """Return the table of kernel times as lines of text: the profiled steps with the total time of their kernels,
        then the time of each class of kernels, the longest first.
        """
        busy = sum(self.classes.values())
        what = "kernels on the GPU" if self.device == "cuda" else "operators on the CPU"
        shares = sorted(((seconds, name) for name, seconds in self.classes.items() if seconds), reverse=True)
        return [
            f"profile of steps {self.first_step} to {self.last_step}, rank {self.rank}: {what} took "
            f"{1e3 * busy:,.1f} of {1e3 * self.window_s:,.1f} ms",
            *(f"  {name:<12} {seconds / busy:6.1%} {1e3 * seconds:12,.1f} ms" for seconds, name in shares),
        ]


def write_table(path: Path, table: KernelTable) -> None:
    write_json(path, asdict(table))


def read_tables(folder: Path) -> list[KernelTable]:
    """Return the tables of kernel times in `folder`, a run's `profile` folder: one per profiled rank and range of
    steps, in order of step and rank.
    """
    return [
        KernelTable(**table | {"kernels": tuple(Kernel(**kernel) for kernel in table["kernels"])})
        for table in map(read_json, sorted(folder.glob(f"*{TABLE_SUFFIX}")))
    ]


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Return the events of the trace file `path`: gzipped Chrome trace JSON, as torch.profiler writes it."""
    with gzip.open(path, "rt", encoding="utf-8", errors="replace") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return events


def build_table(events: Iterable[Mapping[str, Any]], steps: tuple[int, int], rank: int, window_s: float) -> KernelTable:
    """Sum the kernel times in a torch.profiler trace by class and by kernel name. `events` are the events of rank
    `rank`'s trace; `steps` are the first and the last traced step, which took `window_s` seconds together.
    """
    spans = [event for event in events if event.get("ph") == "X" and "dur" in event]
    on_device = [event for event in spans if event.get("cat") in _ON_DEVICE]
    operators = _build_operators(event for event in spans if event.get("cat") in ("cpu_op", "user_annotation"))
    if on_device:
        timed = _kernel_times(on_device, spans, operators)
    else:
        timed = [
            (operator.name, operator.kind, operator.own_us)
            for of_thread in operators.values()
            for operator in of_thread
            if operator.counts
        ]
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    calls: dict[tuple[str, str], int] = defaultdict(int)
    for name, kind, micros in timed:
        seconds[name, kind] += micros / 1e6
        calls[name, kind] += 1
    classes = dict.fromkeys(CLASSES, 0.0)
    for (_, kind), spent in seconds.items():
        classes[kind] += spent
    longest = sorted(seconds, key=lambda key: (-seconds[key], key))[:_MAX_KERNELS]
    kernels = tuple(Kernel(name, kind, seconds[name, kind], calls[name, kind]) for name, kind in longest)
    return KernelTable(*steps, rank, "cuda" if on_device else "cpu", window_s, classes, kernels)


@dataclass
class _Operator:
    name: str
    kind: str
    begin: float
    end: float
    own_us: float  # microseconds, without the operators it called
    counts: bool  # False for an annotation, which is no work by itself
    parent: _Operator | None


def _build_operators(spans: Iterable[Mapping[str, Any]]) -> dict[Any, list[_Operator]]:
    """Return the CPU operators in a trace by thread id, each list in order of start times. `spans` are the trace's
    events that are operators or annotations.

    An operator inside another operator of a class in ENCLOSING_CLASSES takes that class.
    """
    operators: dict[Any, list[_Operator]] = defaultdict(list)
    threads: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for span in spans:
        threads[span["tid"]].append(span)
    for thread, thread_spans in threads.items():
        thread_spans.sort(key=lambda span: (span["ts"], -span["dur"]))
        open_: list[_Operator] = []
        for span in thread_spans:
            begin, end = float(span["ts"]), float(span["ts"]) + float(span["dur"])
            while open_ and open_[-1].end <= begin:
                open_.pop()
            parent = open_[-1] if open_ else None
            kind = parent.kind if parent and parent.kind in ENCLOSING_CLASSES else kernel_class(span["name"])
            operator = _Operator(span["name"], kind, begin, end, end - begin, span["cat"] == "cpu_op", parent)
            if parent:
                parent.own_us = max(0.0, parent.own_us - (end - begin))
            open_.append(operator)
            operators[thread].append(operator)
    return operators


def _kernel_times(
    on_device: Sequence[Mapping[str, Any]], spans: Iterable[Mapping[str, Any]], operators: Mapping[Any, list[_Operator]]
) -> list[tuple[str, str, float]]:
    """Return (name, class, microseconds) for each GPU kernel or copy in `on_device`; the class is one of CLASSES.
    `spans` are all timed events of the trace, and `operators` are its CPU operators by thread id.

    A kernel takes the class of the operator that launched it if that class is in ENCLOSING_CLASSES.
    """
    launched = {  # correlation id -> thread and time of the CPU call that launched the kernel
        span.get("args", {}).get("correlation"): (span["tid"], float(span["ts"]))
        for span in spans
        if span.get("cat") in ("cuda_runtime", "cuda_driver")
    }
    begins = {thread: [operator.begin for operator in of_thread] for thread, of_thread in operators.items()}
    times = []
    for kernel in on_device:
        kind = kernel_class(kernel["name"])
        thread, at = launched.get(kernel.get("args", {}).get("correlation"), (None, 0.0))
        if kind != "collectives" and thread in begins:
            enclosing = _enclosing_class(operators[thread], begins[thread], at)
            kind = enclosing if enclosing in ENCLOSING_CLASSES else kind
        times.append((kernel["name"], kind, float(kernel["dur"])))
    return times


def _enclosing_class(operators: Sequence[_Operator], begins: Sequence[float], at: float) -> str | None:
    """Return the class, one of CLASSES, of the innermost CPU operator that runs at time `at` (microseconds), or None if
    none runs. `operators` are those of one thread in order of time, and `begins` their start times.
    """
    place = bisect.bisect_right(begins, at) - 1
    operator = operators[place] if place >= 0 else None
    while operator is not None and operator.end < at:
        operator = operator.parent
    return operator.kind if operator else None
