"""The scaling study of 2024: Llama 2 7B sharded over 128 to 2,048 H100: a GPU loses 37% of its speed, 6% of its power.

Its batch and length are unpublished, and so are tried in turn. Prints what is lost, and from how many GPUs on a few
stages or cuts are faster by a twentieth than weights sharded over all.

    python -m tests.benchmarks.plan_scaling
"""

from __future__ import annotations

from itertools import product

from lmtrain.plan.search.predict_layout_cost import CurvePoint, LayoutResult
from tests.unit.plan.test_curve import points_of

GPUS = [8, 32, 128, 256, 512, 1024, 2048]
_CLEAR = 1.05


def main() -> None:
    print("tokens x sequences a GPU | lost from 128 to 2,048, with its interval | power | a few stages or cuts")
    for seq_len, per_gpu in product((2048, 4096), (1, 2, 4)):
        found = {point.gpus: point for point in points_of(GPUS, seq_len=seq_len, per_gpu=per_gpu)}
        few, many = found[128].zero3_only, found[2048].zero3_only
        if few is None or many is None:
            print(f"{seq_len} x {per_gpu}: does not fit")
            continue
        low, middle, high = (1 - _each(many, at) / _each(few, None) for at in (0, None, 1))
        power = 1 - many.watts / few.watts
        print(f"{seq_len} x {per_gpu} | {middle:.1%} ({low:.1%} to {high:.1%}) | {power:.1%} | {_takeover(found)}")


def _each(one: LayoutResult, end: int | None) -> float:
    seconds = one.seconds if end is None else one.interval_s[end]
    return one.tokens_per_step / seconds / one.gpus


def _takeover(found: dict[int, CurvePoint]) -> str:
    for gpus, point in found.items():
        if point.best and point.zero3_only and point.zero3_only.seconds > _CLEAR * point.best.seconds:
            parallel = point.best.run.parallel
            return f"from {gpus:,} GPUs: pp {parallel.pp}, tp {parallel.tp}"
    return "nowhere"


if __name__ == "__main__":
    main()
