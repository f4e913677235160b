"""Checkpoints that claim what they are not, or are damaged, through the verbs that open one."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lmtrain.checkpoint.disk.checkpoint_format import digest_of
from lmtrain.observe.metrics import read_metrics
from tests.cli.harness import Toy, lmtrain
from tests.marks import wide

NEWEST, OLDER = "checkpoints/step_00000012", "checkpoints/step_00000008"
WIDE = pytest.mark.wide
Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def run(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damaged") / "run"
    lmtrain("pretrain", *toy.settings(folder, model__num_layers=1))
    return folder


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "run"))


def edit(checkpoint: Path, change: Change, *, seal: bool = True) -> None:
    """Change the manifest, with its digest made to fit as whoever hands it on would do."""
    path = checkpoint / "manifest.json"
    manifest = json.loads(path.read_bytes())
    change(manifest)
    path.write_text(json.dumps(manifest | ({"digest": digest_of(manifest)} if seal else {})))


def claims(**model: Any) -> Change:
    return lambda manifest: manifest["state"]["model"].update(model)


def vast(manifest: dict[str, Any]) -> None:
    """All of it says that it is of a model of terabytes."""
    manifest["state"]["model"] |= {"width": 1_000_000, "num_heads": 2}
    for tensor in manifest["tensors"].values():
        tensor["shape"] = [{32: 10**6, 96: 3 * 10**6, 128: 4 * 10**6}.get(size, size) for size in tensor["shape"]]
        tensor["pieces"] = [tensor["pieces"][0] | {"offset": [0] * len(tensor["shape"]), "shape": tensor["shape"]}]


def verbs(toy: Toy, path: Path, out: Path) -> dict[str, tuple[object, ...]]:
    settings = toy.settings(out / "new", model__num_layers=1)
    return {
        "verify": ("verify", path),
        "reshard": ("reshard", path, "--to", "tp=2", "--output", out / "two"),
        "to hf": ("export", path, "--to", "hf", "--output", out / "hf"),
        "to megatron": ("export", path, "--to", "megatron", "--output", out / "megatron"),
        "eval": ("eval", path, "--task", "perplexity", "--data", toy.text / "page_003.txt"),
        "generate": ("generate", path, "--prompt", "def", "--max-new-tokens", 2),
        "init_from": ("pretrain", *settings, f"checkpoint.init_from={path}"),
        "resume": ("pretrain", *settings, f"checkpoint.resume={path}"),
    }


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param(claims(num_layers=4000), "its model has 4000 layers and it holds", id="num_layers"),
        pytest.param(claims(ffn_width=4_000_000), "and the model says [4000000", id="ffn_width", marks=WIDE),
        pytest.param(claims(width=1_000_000), "and the model says [", id="width", marks=WIDE),
        pytest.param(
            claims(vocab_multiple=1 << 20), "vocab_multiple=1048576 must be at most 65536", id="padding", marks=WIDE
        ),
        pytest.param(vast, "bytes, but its pieces have", id="all of it", marks=WIDE),
    ],
)
def test_a_model_is_not_built_before_its_tensors_are_seen(
    toy: Toy, copy: Path, tmp_path: Path, change: Change, said: str
) -> None:
    edit(copy / NEWEST, change)
    for name, command in verbs(toy, copy / NEWEST, tmp_path).items():
        began = time.process_time()
        output = lmtrain(*command, code=65)
        assert time.process_time() - began < 2, name
        assert said in output or (name == "resume" and "was made with other settings" in output), f"{name}: {output}"


@pytest.mark.parametrize(
    ("key", "value", "verb"), [("seq_len", "32", "eval"), ("seq_len", 10**9, "generate"), ("step", "12", "generate")]
)
def test_what_the_state_says_twice_must_agree(
    toy: Toy, copy: Path, tmp_path: Path, key: str, value: object, verb: str
) -> None:
    edit(copy / NEWEST, lambda manifest: manifest["state"].update({key: value}))
    output = lmtrain(*verbs(toy, copy / NEWEST, tmp_path)[verb], code=65)
    assert f"contradicts itself: its state.{key} is {value}" in output


def test_a_state_of_other_types_is_not_gone_on_from(toy: Toy, copy: Path) -> None:
    edit(copy / NEWEST, lambda manifest: manifest["state"].update(tokens="many", skipped=None))
    output = lmtrain("pretrain", *toy.settings(copy, model__num_layers=1, train__steps=14), code=65)
    assert "manifest.json does not hold the state of a run: state.tokens=many is not a number from 0; " in output
    assert "state.skipped=null" in output


@pytest.mark.parametrize("text", ['{"a":' * 100_000, *wide("[" + "[]," * 20_000_000 + "0]", " " * (65 << 20))])
def test_a_manifest_is_bounded_before_it_is_read(copy: Path, text: str) -> None:
    (copy / NEWEST / "manifest.json").write_text(text)
    began = time.process_time()
    assert "manifest.json is" in lmtrain("verify", copy / NEWEST, code=65)
    assert time.process_time() - began < 3


# A run whose newest checkpoint is damaged


def torn(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").write_text("{")


def flipped(checkpoint: Path, rank: int = 0) -> None:
    path = checkpoint / f"rank_{rank:05d}.safetensors"
    data = bytearray(path.read_bytes())
    data[-9] ^= 4
    path.write_bytes(data)


def unsealed(checkpoint: Path) -> None:
    edit(checkpoint, lambda manifest: manifest["state"].update(seed=5), seal=False)


def gone(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").unlink()


@pytest.mark.parametrize("damage", [torn, pytest.param(unsealed, marks=WIDE), pytest.param(gone, marks=WIDE)])
def test_the_newest_is_not_passed_over(toy: Toy, copy: Path, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    damage(copy / NEWEST)
    settings = toy.settings(copy, model__num_layers=1, train__steps=14)
    output = lmtrain("pretrain", *settings, code=65)
    assert f"{NEWEST}/manifest.json" in output
    assert f"The newest readable checkpoint before it is {copy / OLDER}." in output
    assert "add checkpoint.fallback=true" in output
    for name, command in verbs(toy, copy, tmp_path).items():
        output = lmtrain(*command, code=65)
        assert f"{NEWEST}/manifest.json" in output, name
        assert str(copy / OLDER) in output
    shutil.rmtree(copy / OLDER)
    for more in ((), ("checkpoint.fallback=true",)):
        assert "add checkpoint.fallback" not in lmtrain("pretrain", *settings, *more, code=65)
    assert "already holds checkpoints" in lmtrain("pretrain", *settings, "checkpoint.resume=none", code=73)


@pytest.mark.parametrize("damage", [torn, *(pytest.param(one, marks=WIDE) for one in (unsealed, flipped))])
def test_with_fallback_it_is_passed_over_aloud_and_kept(
    toy: Toy, run: Path, copy: Path, damage: Callable[[Path], None]
) -> None:
    damage(copy / NEWEST)
    kept = {file.name: file.read_bytes() for file in (copy / NEWEST).iterdir()}
    settings = toy.settings(copy, model__num_layers=1, checkpoint__keep_last=1)
    output = lmtrain("pretrain", *settings, "checkpoint.fallback=true")
    assert f"continuing from {copy / OLDER} at step 8" in output
    assert re.search(f"warning: (The checkpoint )?{copy / NEWEST} is ", output)
    rows = [row for row in read_metrics(copy / "metrics.jsonl") if row["event"] == "start"]
    assert str(copy / NEWEST) in rows[-1]["passed_over"][0]
    names = sorted(path.name for path in (copy / "checkpoints").iterdir())
    assert names == ["step_00000012", "step_00000012.damaged-1"]
    aside = copy / f"{NEWEST}.damaged-1"
    assert {file.name: file.read_bytes() for file in aside.iterdir()} == kept
    assert json.loads(lmtrain("inspect", copy / NEWEST, "--diff", run / NEWEST, "--json"))["same_tensors"]
    assert "step_00000012.damaged-1" in lmtrain("inspect", copy)


def test_nothing_begins_anew_beside_damaged_checkpoints(toy: Toy, copy: Path) -> None:
    shutil.rmtree(copy / OLDER)
    (copy / NEWEST).rename(copy / f"{NEWEST}.damaged-1")
    output = lmtrain("pretrain", *toy.settings(copy, model__num_layers=1), code=65)
    assert "holds no checkpoint but step_00000012.damaged-1" in output


# The same on two ranks, each of which reads its own half of every tensor


@pytest.fixture(scope="module")
def shared_run(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damaged") / "run"
    lmtrain("pretrain", "--nproc", 2, *two_ranks(toy, folder))
    return folder


def two_ranks(toy: Toy, folder: Path) -> list[str]:
    return toy.settings(folder, model__num_layers=1, parallel__dp_shard=2, checkpoint__keep_last=9)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("damaged", "step"),
    [
        pytest.param({12: torn}, 8, id="both see it"),
        pytest.param({12: flipped}, 8, id="rank 0 sees it"),
        pytest.param({12: partial(flipped, rank=1)}, 8, id="rank 1 sees it"),
        pytest.param({12: partial(flipped, rank=1), 8: flipped}, 4, id="each sees another"),
    ],
)
def test_all_ranks_fall_back_to_one_checkpoint(
    toy: Toy, shared_run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str],
    damaged: dict[int, Callable[[Path], None]], step: int,
) -> None:  # fmt: skip
    run = Path(shutil.copytree(shared_run, tmp_path / "run"))
    places = {number: run / "checkpoints" / f"step_{number:08d}" for number in (4, 8, 12)}
    for number, damage in damaged.items():
        damage(places[number])
    lmtrain("pretrain", "--nproc", 2, *two_ranks(toy, run), "checkpoint.fallback=true")
    said = capfd.readouterr().out
    assert f"continuing from {places[step]} at step {step}" in said
    for number in damaged:
        assert re.search(f"warning: (The checkpoint )?{places[number]} is ", said)
    assert json.loads(lmtrain("inspect", places[12], "--diff", shared_run / NEWEST, "--json"))["same_tensors"]
