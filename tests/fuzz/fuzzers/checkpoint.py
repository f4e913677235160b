"""Checkpoint folders through every verb that opens one: whatever is changed in them, also by who seals the change."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmtrain.checkpoint.disk.checkpoint_format import BLOCK_BYTES, MANIFEST, digest_of
from tests.fuzz.fuzzer import Case, Ran, Runner, honest
from tests.fuzz.mutate import as_json, change_any, change_bytes, change_file, some_json

STEPS, MORE = 6, 8  # what the run has trained, with a save every 3; and what going on comes to
NEWEST, OLDER = "checkpoints/step_00000006", "checkpoints/step_00000003"
TEXT = "A checkpoint is a folder. It is whole, or it is not there; what is in it is believed when it is verified. "
Numbers = Callable[[Path, Ran], Any]
CLOCKED = ("seconds", "tokens_per_s", "checkpoint", "verified")  # what tells of one call alone
CLAIMS: dict[str, tuple[Any, ...]] = {
    "num_layers": (0, 1, 3, 10**6, 10**9, 10**18), "width": (1, 64, 10**6, 10**18), "ffn_width": (4_000_000, 10**18),
    "num_heads": (1, 4, 10**9), "num_kv_heads": (1, 10**6), "head_width": (1, 16, 10**9), "seq_len": (1, 64, 10**12),
    "num_positions": (1, 64, 10**12),
    "vocab_size": (1, 10**9), "vocab_multiple": (1, 64, 10**6, 10**9, 10**18), "norm_eps": (1e-300, 1e300),
    "rotary_base": (1e-300, 1e300), "positions": ("rotary",), "kind": ("bert", "none"), "window": (1, 10**18),
    "dropout": (0.5,), "tied": (False,), "bias": (False,), "activation": ("swiglu",), "norm": ("rmsnorm",),
    "parallel_block": (True,), "init_std": (1e300,),
}  # fmt: skip


@dataclass(frozen=True)
class Verb:
    arguments: Callable[[Path, Path], tuple[object, ...]]  # of the checkpoint or run, and the folder to write to
    numbers: Numbers
    run_only: bool = False


def said(folder: Path, ran: Ran) -> Any:
    """The JSON that a verb has printed, without what tells of this call alone."""
    text = ran.output
    start = min((at for at in (text.find("{"), text.find("[\n")) if at >= 0), default=0)
    value, _ = json.JSONDecoder().raw_decode(text[start:])
    return json.loads(json.dumps(_bare(value)).replace(str(folder), "FOLDER"))


def _bare(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _bare(one) for key, one in value.items() if key not in CLOCKED}
    return [_bare(one) for one in value] if isinstance(value, list) else value


def written(*names: str) -> Numbers:
    def numbers(folder: Path, ran: Ran) -> Any:
        return [hashlib.sha256((folder / "out" / name).read_bytes()).hexdigest() for name in names]

    return numbers


def last_loss(name: str) -> Numbers:
    def numbers(folder: Path, ran: Ran) -> Any:
        rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
        begun = [row for row in rows if row["event"] == "start"][-1]
        assert begun["resumed_from"] or begun["weights_from"], "it began from nothing"
        return [row["loss"] for row in rows if row["event"] == "step"][-1]

    return numbers


class Fuzz:
    def __init__(self, folder: Path, run: Runner) -> None:
        self.run, self.folder = run, folder
        text, self.source = folder / "text.txt", folder / "run"
        text.write_text(TEXT * 60)
        honest(run, "tokenizer", "train", text, "--output", folder / "tokenizer", "--vocab-size", 300, folder=folder)
        data = folder / "data"
        honest(run, "preprocess", text, "--tokenizer", folder / "tokenizer", "--output", data, folder=folder)
        settings = (
            f"data.path={data}", "train.global_batch=2", "train.micro_batch=2", "train.valid_interval_steps=0",
            "model.seq_len=16", "model.num_layers=2", "model.width=16", "model.num_heads=2", "model.vocab_multiple=8",
            "observe.log_interval_steps=1", "observe.tensorboard=false", "schedule=constant", "compute.device=cpu",
        )  # fmt: skip
        started = (f"train.steps={STEPS}", "checkpoint.interval_steps=3", f"run.dir={self.source}")
        honest(run, "pretrain", *settings, *started, folder=folder)
        more = ("pretrain", *settings, f"train.steps={MORE}", "checkpoint.interval_steps=0")
        first, evaluated = self.source / NEWEST, ("--task", "perplexity", "--data", text, "--device", "cpu", "--json")
        self.verbs = {
            "verify": Verb(lambda path, out: ("verify", path, "--json"), said),
            "inspect": Verb(lambda path, out: ("inspect", path, "--json"), said),
            "inspect --all": Verb(lambda path, out: ("inspect", path, "--all"), lambda folder, ran: None),
            "inspect --verify": Verb(lambda path, out: ("inspect", path, "--verify", "--json"), said),
            "inspect --diff": Verb(lambda path, out: ("inspect", path, "--diff", first, "--json"), said),
            "reshard": Verb(
                lambda path, out: ("reshard", path, "--to", "tp=2", "--output", out),
                written("rank_00000.safetensors", "rank_00001.safetensors", "tokenizer.json"),
            ),
            "merge": Verb(
                lambda path, out: ("merge", path, "--output", out), written("rank_00000.safetensors", "tokenizer.json")
            ),
            "to hf": Verb(
                lambda path, out: ("export", path, "--to", "hf", "--output", out), written("model.safetensors")
            ),
            "to megatron": Verb(
                lambda path, out: ("export", path, "--to", "megatron", "--output", out),
                written("release/mp_rank_00/model_optim_rng.pt"),
            ),
            "eval": Verb(lambda path, out: ("eval", path, *evaluated), said),
            "generate": Verb(
                lambda path, out: (
                    "generate", path, "--prompt", "A check", "--max-new-tokens", 6, "--device", "cpu", "--json",
                ),
                said,
            ),
            "init_from": Verb(
                lambda path, out: (*more, f"run.dir={out}", f"checkpoint.init_from={path}"), last_loss("out")
            ),
            "resume from": Verb(
                lambda path, out: (*more, f"run.dir={out}", f"checkpoint.resume={path}"), last_loss("out")
            ),
            "resume": Verb(lambda path, out: (*more, f"run.dir={path}"), last_loss("run"), run_only=True),
            "fallback": Verb(
                lambda path, out: (*more, f"run.dir={path}", "checkpoint.fallback=true"), last_loss("run"),
                run_only=True,
            ),
        }  # fmt: skip
        self.honest: dict[str, tuple[Ran, Any]] = {}

    def _honest(self, name: str) -> tuple[Ran, Any]:
        """How the verb fares on the honest checkpoint, and its numbers; it is called when it is first asked for."""
        if name not in self.honest:
            verb, place = self.verbs[name], self.folder / f"honest{len(self.honest)}"
            shutil.copytree(self.source, place / "run")
            ran = honest(self.run, *self._call(verb, place, whole=verb.run_only), folder=place)
            self.honest[name] = ran, verb.numbers(place, ran)
        return self.honest[name]

    def _call(self, verb: Verb, folder: Path, *, whole: bool) -> tuple[object, ...]:
        return verb.arguments(folder / "run" if whole else folder / "run" / NEWEST, folder / "out")

    def case(self, rng: random.Random, folder: Path) -> Case:
        shutil.copytree(self.source, folder / "run")
        name = rng.choice(sorted(self.verbs))
        verb, (ran, numbers) = self.verbs[name], self._honest(name)
        checkpoint = folder / "run" / (NEWEST if rng.random() < 0.9 else OLDER)
        kind = rng.choice(("raw", "raw", "sealed", "sealed", "claim", "header", "folder"))
        what = _CHANGES[kind](checkpoint, rng)

        # because: who seals a change may say anything of the run, and who takes its newest checkpoint away has an older
        same = kind in ("raw", "folder") and "renamed" not in what

        def wrong(ran: Ran) -> str:
            found = verb.numbers(folder, ran)
            return f"other numbers: {found} and not {numbers}" if same and found != numbers else ""

        # because: what inspect says of a run is another answer than what it says of its newest checkpoint
        whole = verb.run_only or (rng.random() < 0.3 and not name.startswith(("inspect", "verify")))
        return Case(f"{kind}: {what}, {name}", self._call(verb, folder, whole=whole), ran, wrong)


def raw(checkpoint: Path, rng: random.Random) -> str:
    return change_any(checkpoint / rng.choice(sorted(os.listdir(checkpoint))), rng)


def sealed(checkpoint: Path, rng: random.Random) -> str:
    """A change to a small file or to the manifest, and all hashes made to fit."""
    others = ("rank_00000.blocks.json", "tokenizer.json", "rank_00000.safetensors")
    name = rng.choice((MANIFEST, MANIFEST, MANIFEST, *others))
    if name != MANIFEST:
        change = change_bytes if rng.random() < 0.5 else change_any
        what = change(checkpoint / name, rng)
        seal(checkpoint)
        return what
    manifest = json.loads((checkpoint / MANIFEST).read_bytes())
    part = rng.choice(("state", "state", "tensors", "files", None))
    what, value = some_json(manifest[part] if part else manifest, rng)
    seal(checkpoint, {**manifest, part: value} if part else value, files=False)
    return f"manifest's {part or 'whole'}: {what}"


def claim(checkpoint: Path, rng: random.Random) -> str:
    """Another model than the tensors are of."""
    manifest = json.loads((checkpoint / MANIFEST).read_bytes())
    keys = [rng.choice(sorted(CLAIMS)) for _ in range(rng.choice((1, 1, 2)))]
    claimed = {key: rng.choice(CLAIMS[key]) for key in keys}
    manifest["state"]["model"] |= claimed
    if rng.random() < 0.5 and "seq_len" in claimed:
        manifest["state"]["seq_len"] = claimed["seq_len"]
    if rng.random() < 0.3:
        factor = rng.choice((2, 1000, 10**6))
        for tensor in manifest["tensors"].values():
            for sizes in (tensor["shape"], *(piece["shape"] for piece in tensor["pieces"])):
                sizes[-1] *= factor
        claimed["every last axis"] = f"x {factor}"
    seal(checkpoint, manifest, files=False)
    return str(claimed)


def header(checkpoint: Path, rng: random.Random) -> str:
    """A tensor file with another header, and all hashes made to fit."""
    path = checkpoint / "rank_00000.safetensors"
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    what, value = some_json(json.loads(data[8 : 8 + length]), rng)
    text = as_json(value)
    claimed = len(text) if rng.random() < 0.9 else rng.choice((0, 1, 2**40, 2**63))
    path.write_bytes(struct.pack("<Q", claimed) + text + data[8 + length :])
    seal(checkpoint)
    return f"header: {what}"


def folder(checkpoint: Path, rng: random.Random) -> str:
    """The folder itself, its name and what lies beside it."""
    kind = rng.choice(("file more", "renamed", "link", "emptied", "beside", "something else"))
    beside = checkpoint.parent
    if kind == "file more":
        kind = rng.choice(("notes.txt", "rank_00001.safetensors", ".hidden", "a b", "\x1b[31m"))
        (checkpoint / kind).write_text("x")
    elif kind == "renamed":
        kind = rng.choice(("step_00000009", "step_00000001", "step_6", f"{checkpoint.name}.tmp-1-1"))
        checkpoint.rename(beside / kind)
        kind = f"renamed {kind}"
    elif kind == "link":
        checkpoint.rename(beside / "there")
        checkpoint.symlink_to(rng.choice(("there", checkpoint.name, "nowhere", "/")))
    elif kind == "emptied":
        for name in os.listdir(checkpoint):
            os.unlink(checkpoint / name)
    elif kind == "beside":
        made = beside / rng.choice(
            ("step_00000009", "step_999999999999999999", "step_00000006.replaced-1-0", "step_00000005.damaged-1", "x")
        )
        if rng.random() < 0.5:
            made.mkdir()
        else:
            made.write_text("")
        kind = f"{made.name} {kind}"
    else:
        kind = change_file(checkpoint / MANIFEST, rng)
    return f"folder: {kind}"


def seal(checkpoint: Path, manifest: Any = None, *, files: bool = True) -> None:
    """Make hashes and sizes fit the files again, and the digest the manifest, as far as they still can."""
    path = checkpoint / MANIFEST
    manifest = json.loads(path.read_bytes()) if manifest is None else manifest
    if files:
        tensors = checkpoint / "rank_00000.safetensors"
        blocks = checkpoint / "rank_00000.blocks.json"
        if _small(tensors) and _small(blocks):
            size, root, digests = _hashed(tensors)
            try:
                listing = json.loads(blocks.read_bytes())
                listing |= {"size": size, "root": root, "blocks": digests}
                blocks.write_text(json.dumps(listing))
            except (ValueError, TypeError):
                pass
        for name, entry in manifest["files"].items():
            if _small(checkpoint / name):
                entry["size"], entry["root"], _ = _hashed(checkpoint / name)
    if isinstance(manifest, dict):
        try:
            manifest["digest"] = digest_of(manifest)
        except ValueError:  # not a number
            manifest["digest"] = "0" * 64
    path.write_bytes(as_json(manifest))


def _small(path: Path) -> bool:
    return path.is_file() and path.stat().st_size < 64 << 20


def _hashed(path: Path) -> tuple[int, str, list[str]]:
    data = path.read_bytes()
    digests = [hashlib.sha256(data[at : at + BLOCK_BYTES]).digest() for at in range(0, len(data), BLOCK_BYTES)]
    return len(data), hashlib.sha256(b"".join(digests)).hexdigest(), [digest.hex() for digest in digests]


_CHANGES: Mapping[str, Callable[[Path, random.Random], str]] = {
    "raw": raw, "sealed": sealed, "claim": claim, "header": header, "folder": folder,
}  # fmt: skip
