"""Nothing is accepted and then ignored: every key of every settings class changes something that can be seen.

What is in proofs.py is carried out here. An echo of a key in config.json, in the log or in the dry run does not count,
since no observer looks there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import pytest

from lmtrain.errors import LmtrainError
from lmtrain.runtime.processes.process_environment import ProcessEnv
from lmtrain.train.startup_checks.preflight import preflight
from tests.promise import observers as see
from tests.promise.bench import BASE, DONE, Bench, Observer, Settings, config_of
from tests.promise.keys import Key, every_key
from tests.promise.proofs import BERT, PROOFS, REFUSALS, TOGETHER, Proof, Refusal

# these need no run
QUICK = (see.built, see.samples, see.made_of_text, see.indexes, see.verified, see.forecast, see.layout)
# a word that means another one, whichever the machine allows
MEANS_ANOTHER = {(Key("", "compute.device"), "auto")}
IMPATIENT = TOGETHER | {"parallel.dp_shard": 2, "parallel.timeout_s": 1.0}
WAYS_OUT = ("Use ", "Set ", "Add ", "Leave ", "Choose ", "Give ", "Start ")


def marked(cases: Sequence[Any], name: Any, wide: Any) -> list[Any]:
    return [pytest.param(one, id=name(one), marks=[pytest.mark.wide] if wide(one) else []) for one in cases]


def test_every_key_has_a_proof_and_every_proof_has_a_key() -> None:
    proven = {one.key for one in PROOFS} | {one.key for one in REFUSALS}
    keys = set(every_key())
    assert proven == keys, "add to or take out of tests/promise/proofs.py: " + ", ".join(map(str, proven ^ keys))


def test_every_word_that_a_key_knows_is_tried() -> None:
    refused = {one.key for one in REFUSALS} - {one.key for one in PROOFS}
    missing = [
        f"{key}={word}"
        for key, words in every_key().items()
        for word in words
        if key not in refused and (key, word) not in MEANS_ANOTHER
        if word not in [value for one in PROOFS if one.key == key for value in one.values]
    ]
    assert not missing


# because: a dataset is made of a text for each value of these
MAKES_DATA = ("data.text", "data.tokenizer")


@pytest.mark.parametrize(
    "proof",
    marked(PROOFS, lambda p: p.name, lambda p: p.observer not in QUICK or p.key.name.startswith(MAKES_DATA)),
)
def test_a_key_does_something(bench: Bench, proof: Proof) -> None:
    assert alike(bench, proof) == []


def alike(bench: Bench, proof: Proof) -> list[str]:
    """Pairs of values that make no difference."""
    seen = [(value, bench.see(proof.observer, settings)) for value, settings in proof.variants()]
    return [
        f"{proof.key.name}={one} and {other} give the same {proof.observer.__name__}"
        for (one, this), (other, that) in combinations(seen, 2)
        if this == that
    ]


@pytest.mark.parametrize(
    "refusal",
    marked(REFUSALS, lambda r: "-".join(filter(None, reversed(r.key))), lambda r: DONE in r.on.values()),
)
def test_a_key_that_could_do_nothing_is_refused(bench: Bench, refusal: Refusal) -> None:
    message = bench.look(refused, refusal.on)
    assert f"{refusal.key.name}=" in re.sub(r"\[\d+\]", "", message)
    assert any(way in message for way in WAYS_OUT), message


def refused(bench: Bench, settings: Settings) -> str:
    with pytest.raises(LmtrainError) as error:
        preflight(config_of(settings), ProcessEnv.detect())
    return str(error.value)


@pytest.mark.parametrize(
    ("observer", "settings"),
    [
        (see.built, BASE), (see.samples, BASE), (see.samples, BERT), (see.indexes, BASE),
        *(pytest.param(one, BASE, marks=pytest.mark.wide)
          for one in (see.rows, see.weights, see.files, see.threads, see.torchs_state, see.bad_disk, see.activations,
                      see.graph)),
        pytest.param(see.peak, BASE | {"observe.peak_tflops": 1.0}, marks=pytest.mark.wide),
        pytest.param(see.ranks, TOGETHER | {"parallel.tp": 2}, marks=pytest.mark.wide),
        pytest.param(see.patience, IMPATIENT, marks=pytest.mark.wide),
    ],
)  # fmt: skip
def test_the_same_settings_look_the_same(bench: Bench, observer: Observer, settings: Settings) -> None:
    """Else a difference would prove nothing."""
    assert bench.see(observer, settings) == fresh(bench, observer, settings)


def fresh(bench: Bench, observer: Observer, settings: Settings) -> Any:
    """As a bench sees it that has seen nothing."""
    kept, bench.kept = bench.kept, {}
    try:
        return bench.see(observer, settings)
    finally:
        bench.kept = kept


@pytest.mark.wide
def test_a_key_that_does_nothing_is_told(bench: Bench) -> None:
    """How often rows are written changes no weight: the run's config.json repeats it, and still nothing is seen."""
    ignored = Proof(Key("", "observe.log_interval_steps"), (1, 2), see.weights, BASE)
    assert alike(bench, ignored) == ["observe.log_interval_steps=1 and 2 give the same weights"]
