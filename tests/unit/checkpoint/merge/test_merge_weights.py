"""The shares of checkpoints in a merge: closed forms, and a sum of one."""

from __future__ import annotations

import math

import pytest

from lmtrain.checkpoint.merge.merge_coefficients import decay_mean, merge_weights, parse_mean
from lmtrain.errors import UsageError

MEANS = ("uniform", "linear", "ema:0.9", "ema:0.5", "decay:linear", "decay:sqrt")


def factors(shares: list[float]) -> list[float]:
    """Return the factor of each change between two checkpoints; the first change is that from nothing to the oldest."""
    return [math.fsum(shares[j:]) for j in range(len(shares))]


@pytest.mark.parametrize("mean", MEANS)
def test_shares_add_up_to_one_and_one_checkpoint_counts_whole(mean: str) -> None:
    assert merge_weights(mean, 1) == [1.0]
    for count in range(2, 60):
        shares = merge_weights(mean, count)
        assert len(shares) == count
        assert min(shares) > 0
        assert abs(math.fsum(shares) - 1) < 1e-15 * count


def test_a_decay_counts_each_change_by_its_learning_rate() -> None:
    for count in (2, 5, 10):
        shares = [j / count for j in range(count)]
        assert factors(merge_weights("decay:linear", count)) == pytest.approx([1 - x for x in shares])
        assert factors(merge_weights("decay:sqrt", count)) == pytest.approx([1 - math.sqrt(x) for x in shares])
        assert merge_weights("decay:linear", count) == merge_weights("uniform", count)
    assert [round(share, 3) for share in merge_weights("decay:sqrt", 10)][:4] == [0.316, 0.131, 0.101, 0.085]


def test_means() -> None:
    assert merge_weights("linear", 4) == [0.1, 0.2, 0.3, 0.4]
    # an average that begins as the oldest and takes a tenth of each that follows
    average = [1.0, 0.0, 0.0, 0.0]
    for newer in range(1, 4):
        average = [0.9 * share for share in average]
        average[newer] += 0.1
    assert merge_weights("ema:0.9", 4) == pytest.approx(average)


def test_words() -> None:
    assert [parse_mean(word) for word in ("uniform", "linear", "ema:0.90")] == ["uniform", "linear", "ema:0.9"]
    assert decay_mean("sqrt") == "decay:sqrt"
    for word in ("ema", "ema:1", "ema:0", "ema:nan", "ema:x", "mean", "decay:sqrt"):
        with pytest.raises(UsageError, match=f"--mean {word} names no mean. Use uniform, linear .* or ema:BETA"):
            parse_mean(word)
