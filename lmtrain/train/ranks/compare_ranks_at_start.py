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
from lmtrain.parallel.mesh import peers_before_mesh
from lmtrain.runtime.processes import current_phase
from lmtrain.runtime.processes.process_environment import ranks_text
from lmtrain.runtime.processes.process_group import gather_to_rank0, wait_for_rank0_exit
from lmtrain.runtime.processes.stop_signals import ignore_stops
from lmtrain.runtime.processes.succeed_on_all_ranks_or_none import collective_phase
from lmtrain.train.ranks.facts_equal_on_all_ranks import Fact, rank_facts
from lmtrain.train.run_config import RunConfig
from lmtrain.train.startup_checks.preflight import Inputs

_PURPOSE = "the agreement on settings"
_DIGEST_BYTES = 8  # because: a vote sends int64 numbers; collisions by chance are negligible, and there is no attacker
_NUM_LINES = 20  # differences in a message
_NUM_VALUES = 3  # values in a line
_NUM_CHARACTERS = 100  # characters of a value
_MISSING = Fact("", "not there")


def check_ranks_agree(config: RunConfig, inputs: Inputs, hosts: Sequence[str]) -> None:
    """Raise RanksDifferError on every rank if settings, data, tokenizer, checkpoint, code or libraries differ between
    ranks. All ranks take part. `hosts` has each rank's host name, on rank 0.
    """
    check_facts_agree(partial(rank_facts, config, inputs), hosts)


def check_facts_agree(find_facts: Callable[[], Mapping[str, Fact]], hosts: Sequence[str]) -> None:
    """Call `find_facts` on each rank and raise RanksDifferError on every rank if the results, name -> Fact, differ. An
    error in `find_facts` on any rank is raised on all. `hosts` has each rank's host name, on rank 0.
    """
    peers = peers_before_mesh(_PURPOSE)
    if peers.num_ranks == 1:
        return
    with collective_phase(peers, 2) as exchange:
        own_facts = find_facts()
        encoded, values = encode_facts(own_facts), sorted((key, fact.value) for key, fact in own_facts.items())
        digest = hashlib.sha256(json.dumps(values).encode()).digest()[:_DIGEST_BYTES]
        exchange.own_numbers = int.from_bytes(digest, "big", signed=True), len(encoded)
    if len({digest for digest, _ in exchange.all_numbers}) == 1:
        return
    with current_phase.within("collective", _PURPOSE):
        rows = gather_to_rank0(encoded, max(length for _, length in exchange.all_numbers))
    ignore_stops()  # because: a launcher stops all ranks once the first has ended, and rank 0 must report first
    if peers.rank > 0:
        wait_for_rank0_exit()
        raise RanksDifferError("The ranks of this run differ; rank 0 has reported the differences.")
    raise RanksDifferError(difference_message([decode_facts(row) for row in rows], hosts))


def encode_facts(facts: Mapping[str, Fact]) -> bytes:
    """Return the facts as JSON bytes, to send to rank 0."""
    return json.dumps({key: [fact.value, fact.text] for key, fact in facts.items()}).encode()


def decode_facts(row: bytes) -> dict[str, Fact]:
    """Return the facts that `encode_facts` encoded."""
    return {key: Fact(value, text) for key, (value, text) in json.loads(row).items()}


def difference_message(facts_by_rank: Sequence[Mapping[str, Fact]], hosts: Sequence[str]) -> str:
    """Return the error message for facts that differ between ranks: a line per fact, and how to correct it.
    `facts_by_rank` has name -> Fact for each rank, `hosts` each rank's host name.
    """
    lines = list(_difference_lines(facts_by_rank, hosts))
    way_out = (
        "Start all ranks with the same settings, data, tokenizer, checkpoint, code and libraries; only the places of "
        "data, tokenizer and first weights may differ."
    )
    if len(lines) == 1:
        return f"The ranks of this run differ: {lines[0]}. {way_out}"
    numbered = [f"  {number}. {line}" for number, line in enumerate(lines[:_NUM_LINES], 1)]
    numbered += [f"  and {len(lines) - _NUM_LINES} more"] * (len(lines) > _NUM_LINES)
    return "\n".join([f"The ranks of this run differ in {len(lines)} things:", *numbered, way_out])


def _difference_lines(facts_by_rank: Sequence[Mapping[str, Fact]], hosts: Sequence[str]) -> Iterator[str]:
    """Yield a line of text for each fact that differs between ranks, with its values and the ranks that have each
    value.
    """
    for key in dict.fromkeys(key for row in facts_by_rank for key in row):
        holders: dict[str, list[int]] = {}
        texts: dict[str, str] = {}
        for rank, row in enumerate(facts_by_rank):
            fact = row.get(key, _MISSING)
            holders.setdefault(fact.value, []).append(rank)
            texts.setdefault(fact.value, fact.text)
        if len(holders) == 1:
            continue
        # because: the majority is most likely right; with a tie, all values are shown
        by_size = sorted(holders.items(), key=lambda item: -len(item[1]))
        tied = len(by_size[0][1]) == len(by_size[1][1])
        odd_texts = [
            f"{_printable(texts[value])} on {_ranks_text(ranks, hosts)}"
            for value, ranks in (by_size if tied else by_size[1:])
        ]
        usual = "" if tied else f", and {_printable(texts[by_size[0][0]])} on the other {len(by_size[0][1])}"
        yield f"{_printable(key)} is {join_few(odd_texts, max_shown=_NUM_VALUES)}{usual}"


def _ranks_text(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Return rank numbers as text, followed by their host names if the run has several hosts. `hosts` has each rank's
    host name.
    """
    if len(set(hosts)) < 2:
        return ranks_text(ranks)
    return f"{ranks_text(ranks)} ({join_few(dict.fromkeys(hosts[rank] for rank in ranks))})"


def _printable(text: str) -> str:
    """Return a value for a message, shortened and with control characters escaped."""
    text = text if text.isprintable() else ascii(text)
    return text if len(text) <= _NUM_CHARACTERS else f"{text[:_NUM_CHARACTERS]}..."
