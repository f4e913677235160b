"""`python -m tests.promise` counts how the promise is kept: how many keys, seen by which observer, how many refused."""

from __future__ import annotations

from collections import Counter

from tests.promise.keys import every_key
from tests.promise.proofs import PROOFS, REFUSALS


def main() -> None:
    keys, seen = every_key(), {proof.key for proof in PROOFS}
    print(f"{len(keys)} keys, {len(PROOFS)} proofs that their values make a difference, {len(REFUSALS)} refusals")
    counts = Counter(observer for _, observer in {(p.key, p.observer) for p in PROOFS})
    for observer, count in counts.most_common():
        print(f"{count:4} keys  {observer.__name__:13} {(observer.__doc__ or '').strip()}")
    only = [str(key) for key in keys if key not in seen]
    print(f"{len(only):4} keys  only refused: {', '.join(only)}")


if __name__ == "__main__":
    main()
