"""Which tests are an item of the day: of every file a few, then the rest of it, the longest files in slices.

Called by parts.py; a test of the day asks that each test is in one of them, but for those of many that run on a CPU
(`cuda` leaves these out). How long they take is a guess: a compiled case 6 s, one over several ranks 3 s.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# because: of what was cut off the last line says where
PYTEST = ("-m", "pytest", "-p", "no:cacheprovider", "-v")
_FEW, _REST, _SLOW = "not wide and not slow", "wide and not slow", "slow"


@dataclass(frozen=True)
class Item:
    name: str
    words: tuple[str, ...]  # for python
    expect_s: int
    limit_s: int = 240  # well below what a part may take, so that none is cut off for lack of room twice
    env: dict[str, str] = field(default_factory=dict)


def _of(file: str, marks: str, expect_s: int, names: str = "", item: str = "") -> Item:
    """Tests of tests/gpu/test_FILE.py that bear these marks, and whose names have these words."""
    words = (*PYTEST, f"tests/gpu/test_{file}.py", "-m", marks, *(("-k", names) if names else ()))
    return Item(item or file, words, expect_s)


def _compiled(precision: str) -> tuple[Item, Item]:
    cheap = "(operators or full)"
    return (
        _of("gradients", _REST, 95, f"compiled and {precision} and not {cheap}", f"{precision}_kept"),
        _of("gradients", _REST, 95, f"compiled and {precision} and {cheap}", f"{precision}_recomputed"),
    )


FEW = (
    _of("products", _FEW, 15),
    _of("kernels", _FEW, 45),
    _of("gradients", _FEW, 80),
    _of("block_masks", _FEW, 45),
    _of("fsdp_of_one", _FEW, 15),
    _of("syncs", _FEW, 10),
    _of("checkpoints", _FEW, 10),
    _of("cuda", _FEW, 70),
)
FEW_OF_RANKS = (
    _of("nccl", "not slow", 25, "loss or leak", "lost_rank"),
    _of("nccl", _REST, 60, "2ranks and not compile", "two_ranks"),
)
MORE_OF_RANKS = (
    _of("nccl", _REST, 90, "4ranks and not compile", "four_ranks"),
    _of("nccl", _REST, 20, "tied_copies", "tied_copies"),
    _of("nccl", _SLOW, 100, "cuda and pp2", "pp2_200_steps"),
    _of("nccl", _SLOW, 100, "cuda and not pp2", "200_steps"),
    _of("nccl", _REST, 90, "ranks and compile", "compiled_ranks"),
)
GRADIENTS = (
    _of("gradients", _REST, 60, "cuda", "eager"),
    *_compiled("bf16"),
    _of("checkpoints", _REST, 70, "cuda"),
    _of("fsdp_of_one", _REST, 20, "cuda"),
)
MORE_GRADIENTS = (*_compiled("fp32"), *_compiled("fp16"))
MORE_MASKS = tuple(
    _of("block_masks", _REST, expect_s, precision, precision)
    for precision, expect_s in (("bf16", 75), ("fp32", 105), ("fp16", 105))
)
