"""Ranks that were started differently are refused before anything is built, at a cost that grows with their number."""

from __future__ import annotations

import importlib
import os
import signal
import socket
import stat
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lmtrain.config.compose_run_settings import compose
from lmtrain.errors import DataError, LmtrainError, RanksDifferError
from lmtrain.runtime.processes.process_environment import ProcessEnv
from lmtrain.train.ranks import facts_equal_on_all_ranks
from lmtrain.train.ranks.compare_ranks_at_start import (
    check_facts_agree,
    check_ranks_agree,
    decode_facts,
    difference_message,
    encode_facts,
)
from lmtrain.train.ranks.facts_equal_on_all_ranks import Fact
from lmtrain.train.run_config import RunConfig
from lmtrain.train.startup_checks.preflight import preflight
from tests.apart import World, given, make_world
from tests.layouts.workers import Pool

NUMBERS = 24  # bytes: an exit code, a digest and a length
AROUND = 8 * 48  # bytes by each but one, of what gloo says around numbers
_BYTES_SENT = 200  # where Linux's struct tcp_info holds tcpi_bytes_sent


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("apart"))


def start(settings: list[str], modules: list[str], num: int) -> dict[str, Any]:
    """On each rank: begin a run with the settings of this rank, and say what it was refused for and what was sent."""
    rank = dist.get_rank()
    mine = next(line for line in settings if line.startswith(f"{rank}|")).split("|")[1:]
    env = ProcessEnv(rank, num, rank, "torchrun", f"n{rank // 2}", local_world_size=num)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    package = facts_equal_on_all_ranks.PACKAGE
    try:
        if modules[rank].endswith("code"):
            facts_equal_on_all_ranks.PACKAGE = Path(modules[rank]) / "lmtrain"
        sys.path.insert(0, modules[rank])
        importlib.invalidate_caches()
        config = compose(RunConfig, [*mine, f"parallel.dp_shard={num}"])
        inputs = preflight(config, env)
        before = sent()
        try:
            check_ranks_agree(config, inputs, [f"n{i // 2}" for i in range(num)] if rank == 0 else [])
        except RanksDifferError as error:
            if rank == 0:
                dist.destroy_process_group()  # as its end would
            return {"said": str(error), "code": error.exit_code, "sent": sent() - before}
        return {"said": None, "sent": sent() - before}
    finally:
        facts_equal_on_all_ranks.PACKAGE = package
        sys.path.remove(modules[rank])
        for number, handler in handlers.items():
            signal.signal(number, handler)


def most_sent(num: int) -> int:
    """Bytes by all of them: numbers to rank 0, and those of all back; messages grow as their number."""
    return (NUMBERS + NUMBERS * num + AROUND) * (num - 1)


def sent() -> int:
    """Bytes that this process has sent through its TCP connections, counted by the system."""
    total = 0
    for entry in os.scandir("/proc/self/fd"):
        fd = int(entry.name)
        try:
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
        except OSError:  # the descriptor of this listing itself
            continue
        with socket.socket(fileno=os.dup(fd)) as one:
            if one.family != socket.AF_UNIX and one.type == socket.SOCK_STREAM:
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 232)
                total += struct.unpack_from("<Q", info, _BYTES_SENT)[0] if len(info) >= _BYTES_SENT + 8 else 0
    return total


def begin(pool: Pool, world: World, apart: Mapping[int, list[str]], num: int) -> list[dict[str, Any]]:
    """A run of so many ranks, some of which are apart from the others in these ways."""
    ways = {rank: [world.ways[name] for name in names] for rank, names in apart.items()}
    lines = ["|".join([str(rank), *given(world.settings, ways.get(rank, []))]) for rank in range(num)]
    modules = [next((way.modules for way in ways.get(rank, []) if way.modules), "/nothing") for rank in range(num)]
    return pool.run(f"{__name__}:start", num, {"settings": lines, "modules": modules, "num": num})


NAMES = ("lr", "seed", "weight_decay", "dropout", "clip_norm", "data", "tokenizer", "steps", "precision", "schedule",
         "code", "library")  # fmt: skip


@pytest.mark.wide
@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_that_differ_in_one_thing_are_both_named(pool: Pool, world: World, name: str) -> None:
    first, second = begin(pool, world, {1: [name]}, 2)
    assert world.ways[name].named in first["said"]
    assert "on rank 0" in first["said"]
    assert "on rank 1" in first["said"]
    assert first["code"] == second["code"] == 2
    assert "rank 0 has reported" in second["said"]


def test_twelve_ways_among_four_ranks(pool: Pool, world: World) -> None:
    """Three ranks are apart in four ways each, and the message says in which: the other three agree."""
    apart = {rank: list(NAMES[rank - 1 :: 3]) for rank in (1, 2, 3)}
    said = begin(pool, world, apart, 4)[0]["said"]
    for rank, names in apart.items():
        for name in names:
            (line,) = [line for line in said.splitlines() if world.ways[name].named in line]
            assert f"on rank {rank} (n{rank // 2}), and " in line
            assert line.endswith("on the other 3")


@pytest.mark.wide
@pytest.mark.parametrize("num", [4, 8])
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts the bytes of a connection")
def test_what_ranks_that_agree_send_grows_as_their_number(pool: Pool, world: World, num: int) -> None:
    found = begin(pool, world, {}, num)
    assert [one["said"] for one in found] == [None] * num
    total = sum(one["sent"] for one in found)
    print(f"{num} ranks that agree sent {total} bytes")
    assert 2 * NUMBERS * (num - 1) <= total <= most_sent(num)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts the bytes of a connection")
def test_only_the_content_of_the_data_counts(pool: Pool, world: World, tmp_path: Path) -> None:
    """Copies elsewhere are as good; and what two ranks that agree send is what the tests of more find."""
    settings = dict(one.split("=", 1) for one in world.settings)
    for suffix in (".bin", ".idx"):
        (tmp_path / f"copy{suffix}").write_bytes(Path(settings["data.path"] + suffix).read_bytes())
    (tmp_path / "words.json").write_bytes(Path(settings["data.tokenizer"]).read_bytes())
    here = [f"data.path={tmp_path / 'copy'}", f"data.tokenizer={tmp_path / 'words.json'}", "data.index_dir=null"]
    lines = ["|".join(["0", *world.settings]), "|".join(["1", *world.settings[3:], *here])]
    found = pool.run(f"{__name__}:start", 2, {"settings": lines, "modules": ["/nothing"] * 2, "num": 2})
    assert [one["said"] for one in found] == [None, None]
    assert 2 * NUMBERS <= sum(one["sent"] for one in found) <= most_sent(2)


def unread() -> tuple[str, int]:
    """What each rank is told, and with which exit code it ends, where the last one cannot read its data."""

    def find() -> dict[str, Fact]:
        if dist.get_rank() == 1:
            raise DataError("b.idx is damaged. Copy it again.")
        return facts(a="1")

    with pytest.raises(LmtrainError) as caught:
        check_facts_agree(find, [])
    return str(caught.value), caught.value.exit_code


def test_what_one_rank_cannot_read_ends_all_with_its_reason(pool: Pool) -> None:
    first, second = pool.run(f"{__name__}:unread", 2)
    assert tuple(second) == ("b.idx is damaged. Copy it again.", 65)
    assert tuple(first) == ("rank 1 of 2: b.idx is damaged. Copy it again.", 65)


def facts(**values: str) -> dict[str, Fact]:
    return {key: Fact(value, value) for key, value in values.items()}


def said(*told: Mapping[str, Fact]) -> str:
    return difference_message(told, ["here"] * len(told))


def test_most_ranks_are_right_and_a_tie_names_both() -> None:
    one, two = facts(a="1", b="x"), facts(a="2", b="x")
    assert "differ: a is 2 on rank 3, and 1 on the other 3. Start all" in said(one, one, one, two)
    assert "differ: a is 2 on ranks 0-1, 1 on ranks 2-3. Start all" in said(two, two, one, one)
    assert "a is 2 on rank 1, 3 on rank 2, and 1 on the other 2" in said(one, two, facts(a="3", b="x"), one)
    assert "differ: b is not there on rank 1, and x on the other 2." in said(one, facts(a="1"), one)


def test_a_host_is_named_where_there_are_several() -> None:
    one, two = facts(a="1"), facts(a="2")
    text = difference_message([one, one, two, two, one, one], ["n0", "n0", "n1", "n1", "n2", "n2"])
    assert "a is 2 on ranks 2-3 (n1), and 1 on the other 4" in text


def test_a_message_stays_short() -> None:
    many = [facts(**{f"key{i}": f"{rank}" * 500 for i in range(300)}) for rank in range(8)]
    text = said(*many)
    assert len(text) < 12000
    assert "differ in 300 things" in text
    assert "and 280 more" in text
    assert "\x1b" not in said(facts(a="\x1b[2J"), facts(a="1"))


def test_what_is_sent_comes_back() -> None:
    found = {"a": Fact("1", "shown"), "ü\udc80": Fact("x\n", "")}
    assert decode_facts(encode_facts(found)) == found
    assert b"\0" not in encode_facts(found)


def test_every_setting_is_compared_but_places(world: World) -> None:
    config = compose(RunConfig, [*world.settings, "hardware=cpu"])
    inputs = preflight(config, ProcessEnv(), starts_run=False)
    found = facts_equal_on_all_ranks.rank_facts(config, inputs)
    left = {f"{group}.{key}" for group, values in config.to_dict().items() for key in values} - found.keys()
    # compared as hardware.peak_tflops.fp32 and its like
    by_entry = {"hardware.peak_tflops", "hardware.factors", "checkpoint.ema"}
    of_data = {f"data.{key}" for key in ("index_dir", "text", "text_dir", "valid_path", "valid_paths")}
    assert left - by_entry == {"checkpoint.resume", *of_data}
    assert "hardware.peak_tflops.fp32" in found
    assert {"lmtrain/train/loop.py", "python", "torch", "checkpoint", "data: num_tokens"} <= found.keys()
    assert facts_equal_on_all_ranks.rank_facts(config, inputs) == found
