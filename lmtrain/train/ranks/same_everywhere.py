"""The check at start that all ranks have equal settings, data, tokenizer, checkpoint, code and libraries.

Called by the command line once the process group exists, before anything is built, because later collectives have
sizes that follow from the settings. Each rank sends 24 bytes to rank 0 and receives as much per rank. If digests
differ, each rank sends its facts, about 35 KB, and rank 0 reports the differences.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from lmtrain.errors import RanksDifferError, join_few
from lmtrain.observe.measure import phases
from lmtrain.parallel.mesh import peers_before_mesh
from lmtrain.runtime.processes.agreement import collective_phase
from lmtrain.runtime.processes.process import ranks_text
from lmtrain.runtime.processes.process_group import gather_to_rank0, wait_for_rank0_exit
from lmtrain.runtime.processes.signals import ignore_stops
from lmtrain.train.before.preflight import Inputs
from lmtrain.train.config import RunConfig
from lmtrain.train.ranks.run_facts import Fact, facts

_WHAT = "the agreement on settings"
_DIGEST_BYTES = 8  # because: a vote sends int64 numbers; collisions by chance are negligible, and there is no attacker
_NUM_LINES = 20  # differences in a message
_NUM_VALUES = 3  # values in a line
_NUM_CHARACTERS = 100  # characters of a value
_NONE = Fact("", "not there")


def agree(config: RunConfig, inputs: Inputs, hosts: Sequence[str]) -> None:
    """Raise on every rank if any rank's facts differ. All ranks take part; `hosts` is by rank, on rank 0."""
    agree_on(partial(facts, config, inputs), hosts)


def agree_on(find: Callable[[], Mapping[str, Fact]], hosts: Sequence[str]) -> None:
    """Raise on every rank if the facts returned by `find` differ, or if `find` fails on any rank."""
    peers = peers_before_mesh(_WHAT)
    if peers.num_ranks == 1:
        return
    with collective_phase(peers, 2) as seen:
        mine = find()
        told, values = encode(mine), sorted((key, fact.value) for key, fact in mine.items())
        digest = hashlib.sha256(json.dumps(values).encode()).digest()[:_DIGEST_BYTES]
        seen.own_numbers = int.from_bytes(digest, "big", signed=True), len(told)
    if len({digest for digest, _ in seen.all_numbers}) == 1:
        return
    with phases.within("collective", _WHAT):
        rows = gather_to_rank0(told, max(length for _, length in seen.all_numbers))
    ignore_stops()  # because: a launcher stops all ranks once the first has ended, and rank 0 must report first
    if peers.rank > 0:
        wait_for_rank0_exit()
        raise RanksDifferError("The ranks of this run differ, and rank 0 has said in what.")
    raise RanksDifferError(difference([decode(row) for row in rows], hosts))


def encode(found: Mapping[str, Fact]) -> bytes:
    return json.dumps({key: [fact.value, fact.shown] for key, fact in found.items()}).encode()


def decode(row: bytes) -> dict[str, Fact]:
    return {key: Fact(value, shown) for key, (value, shown) in json.loads(row).items()}


def difference(told: Sequence[Mapping[str, Fact]], hosts: Sequence[str]) -> str:
    """Return the message on the differences between ranks: a line for each fact, and a way out."""
    lines = list(_lines(told, hosts))
    way_out = (
        "Start all ranks with the same settings, data, tokenizer, checkpoint, code and libraries; only the places at "
        "which data, tokenizer and first weights lie may differ."
    )
    if len(lines) == 1:
        return f"The ranks of this run differ: {lines[0]}. {way_out}"
    shown = [f"  {number}. {line}" for number, line in enumerate(lines[:_NUM_LINES], 1)]
    if len(lines) > _NUM_LINES:
        shown.append(f"  and {len(lines) - _NUM_LINES} more")
    return "\n".join([f"The ranks of this run differ in {len(lines)} things:", *shown, way_out])


def _lines(told: Sequence[Mapping[str, Fact]], hosts: Sequence[str]) -> Iterator[str]:
    for key in dict.fromkeys(key for row in told for key in row):
        holders: dict[str, list[int]] = {}
        shown: dict[str, str] = {}
        for rank, row in enumerate(told):
            fact = row.get(key, _NONE)
            holders.setdefault(fact.value, []).append(rank)
            shown.setdefault(fact.value, fact.shown)
        if len(holders) == 1:
            continue
        # because: the majority is most likely right; with a tie, all values are shown
        by_size = sorted(holders.items(), key=lambda item: -len(item[1]))
        tied = len(by_size[0][1]) == len(by_size[1][1])
        odd = by_size if tied else by_size[1:]
        said = [f"{_clean(shown[value])} on {_who(ranks, hosts)}" for value, ranks in odd]
        usual = "" if tied else f", and {_clean(shown[by_size[0][0]])} on the other {len(by_size[0][1])}"
        yield f"{_clean(key)} is {join_few(said, max_shown=_NUM_VALUES)}{usual}"


def _who(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    if len(set(hosts)) < 2:
        return ranks_text(ranks)
    return f"{ranks_text(ranks)} ({join_few(dict.fromkeys(hosts[rank] for rank in ranks))})"


def _clean(text: str) -> str:
    text = text if text.isprintable() else ascii(text)
    return text if len(text) <= _NUM_CHARACTERS else f"{text[:_NUM_CHARACTERS]}..."
