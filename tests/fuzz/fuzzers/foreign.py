"""Checkpoints of Hugging Face and Megatron-LM: what is changed in them is refused, or read as torch reads it."""

from __future__ import annotations

import argparse
import json
import pickletools
import random
import shutil
import struct
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from lmtrain.checkpoint.tensor_reader import CheckpointReader
from lmtrain.errors import LmtrainError
from lmtrain.exchange.huggingface.import_and_export import export_hf
from lmtrain.exchange.huggingface.model_family_base import families, weight_mappings
from lmtrain.exchange.megatron.import_and_export import export_megatron, import_megatron
from lmtrain.models.model_settings import ModelSettings
from tests.fuzz.fuzzer import Case, Ran, Runner, honest
from tests.fuzz.mutate import EDGES, change_any
from tests.unit.exchange.megatron.folders import arguments, old_state, write_rank
from tests.unit.exchange.models import bert, gpt2, llama, random_weights, save, tokenizer_for
from tests.unit.exchange.torch_files import hostile

RANK_FILE = "model_optim_rng.pt"
ROOMS = ("mp_rank_99999_99999", "mp_rank_00_000", "mp_rank_000", "mp_rank_01", "mp_rank_00_000_000", "mp_rank_1")


class Fuzz:
    def __init__(self, folder: Path, run: Runner) -> None:
        self.folder, self.words = folder, folder / "words"
        self.settings: dict[str, ModelSettings] = {}
        for name, made in (("gpt2", gpt2()), ("llama", llama()), ("bert", bert())):
            self.settings[name] = made
            export_hf(save(folder / "runs" / name, made), folder / "hf" / name, check=False)
        tokenizer_for(llama()).save(self.words / "tokenizer.json")
        export_megatron(folder / "runs" / "llama", folder / "megatron" / "core", tp=2, pp=2)
        settings = gpt2()
        for version in (0, 2):
            for rank in range(2):
                state = {"model": old_state(random_weights(settings), settings, version, rank, 2), "iteration": 9}
                state |= {"args": arguments(settings), "checkpoint_version": float(version)}
                room = folder / "megatron" / f"version{version}"
                write_rank(room, f"mp_rank_{rank:02d}", state, legacy=version == 0)
        self.honest: dict[str, Ran] = {}
        self.weights: dict[str, tuple[dict[str, Tensor], Any]] = {}
        for kind in ("hf", "megatron"):
            for source in sorted((folder / kind).iterdir()):
                output = folder / "imported" / source.name
                self.honest[source.name] = honest(run, *self._call(kind, source, output), folder=folder)
                self.weights[source.name] = imported(output)

    def _call(self, kind: str, source: Path, output: Path) -> tuple[object, ...]:
        words = () if kind == "hf" else ("--tokenizer", self.words)
        return "import", source, "--format", kind, "--output", output, *words

    def case(self, rng: random.Random, folder: Path) -> Case:
        kind = rng.choice(("hf", "megatron", "megatron"))
        source = rng.choice(sorted((self.folder / kind).iterdir()))
        copied = folder / source.name
        shutil.copytree(source, copied)
        what = self._changed(kind, copied, rng)
        judge = self._hf if kind == "hf" else self._megatron
        return Case(
            f"{source.name}: {what}", self._call(kind, copied, folder / "out"), self.honest[source.name],
            lambda ran: judge(copied, folder / "out"),
        )  # fmt: skip

    def _changed(self, kind: str, copied: Path, rng: random.Random) -> str:
        files = sorted(path for path in copied.rglob("*") if path.is_file())
        if kind == "hf":
            path = rng.choice([path for path in files if path.name != "README.md"])
            of_header = path.suffix == ".safetensors" and rng.random() < 0.6
            return header_changed(path, rng) if of_header else change_any(path, rng)
        if rng.random() < 0.06:
            room = next(path for path in sorted(copied.rglob("mp_rank_*")) if path.is_dir())
            name = rng.choice(ROOMS)
            if not (room.parent / name).exists():
                room.rename(room.parent / name)
            return f"{room.name} is now {name}"
        path = rng.choice(files)
        if path.name == RANK_FILE and rng.random() < 0.7:
            return pickle_changed(path, rng)
        return f"{path.parent.name}/{change_any(path, rng)}"

    def _hf(self, source: Path, output: Path) -> str:
        """The same tensors, put together by what an honest folder of this family has; and an export of them, since
        it repeats what the folder's small files say.
        """
        family = json.loads((self.folder / "hf" / source.name / "config.json").read_bytes())["model_type"]
        assert family in families()
        held = load_file(source / "model.safetensors")
        found, _ = imported(output)
        for match in weight_mappings(self.settings[source.name], family):
            names = (name for name, *_ in match.hf_tensors)
            # because: a model may be saved without its heads, whose names lack the first word
            parts = [held[name if name in held else name.split(".", 1)[1]].float() for name in names]
            if not _same(found[match.name], torch.cat([part.T if match.transposed else part for part in parts])):
                return f"{match.name} is not what the file holds"
        with suppress(LmtrainError):
            export_hf(output, output.parent / "again", check=False)
        return ""

    def _megatron(self, source: Path, output: Path) -> str:
        """Where torch reads other values than it did: what we make of the values that it reads."""
        found, model = imported(output)
        expected, expected_model = self.weights[source.name]
        read = _torch_states(source)
        before = _torch_states(self.folder / "megatron" / source.name)
        if read is not None and not _alike(read, before):
            again = output.parent / "again"
            for name, state in read.items():
                (again / name).parent.mkdir(parents=True)
                torch.save(state, again / name)
            for path in source.glob("latest*"):
                shutil.copy(path, again / path.name)
            try:
                import_megatron(again, again / "out", tokenizer=self.words)
            except LmtrainError as error:
                return f"what torch reads of it is refused: {error}"
            expected, expected_model = imported(again / "out")
        if found.keys() != expected.keys() or not all(_same(found[name], expected[name]) for name in found):
            return "numbers that torch does not read"
        return "" if model == expected_model else "a model that torch does not read"


def imported(output: Path) -> tuple[dict[str, Tensor], Any]:
    (path,) = output.glob("step_*")
    reader = CheckpointReader(path)
    return {name.split(".", 1)[1]: reader.read(name) for name in reader.manifest.tensors}, reader.state["model"]


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.float().view(torch.int32), b.float().contiguous().view(torch.int32))


def _torch_states(folder: Path) -> dict[str, Any] | None:
    """Every rank's file as torch reads it; None where it does not."""
    result = {}
    for path in sorted(folder.rglob(RANK_FILE)):
        try:
            with torch.serialization.safe_globals([argparse.Namespace]):
                result[str(path.relative_to(folder))] = torch.load(path, weights_only=True)
        except Exception:  # whatever it is, torch does not read it
            return None
    return result


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and _same(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(_alike(a[key], b[key]) for key in a)
    return type(a) is type(b) and bool(a == b)


def header_changed(path: Path, rng: random.Random) -> str:
    """What the file says of its tensors, in a file that is otherwise as it should be."""
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    names = [name for name in header if name != "__metadata__"]
    name, other = rng.choice(names), rng.choice(names)
    kind, tensors = rng.choice(("shape", "dtype", "name", "swap", "same", "size")), data[8 + size :]
    entry = header[name]
    if kind == "shape":
        entry["shape"] = rng.choice((entry["shape"][::-1], [*entry["shape"], 1], [], [0, 10**18], [1] * 200))
    elif kind == "dtype":
        entry["dtype"] = rng.choice(("BF16", "I32", "F64", "F8_E4M3", "none"))
    elif kind == "name":
        header[rng.choice((f"module.{name}", name.upper(), "../x", "x" * 9000, name.split(".", 1)[-1]))] = entry
        del header[name]
    elif kind == "swap":
        header[name], header[other] = header[other], entry
    elif kind == "same":
        header[name] = header[other]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    claimed = rng.choice(EDGES) % (1 << 64) if kind == "size" else len(text)
    path.write_bytes(struct.pack("<Q", claimed) + text + tensors)
    return f"{path.name}: {kind} of {name} in the header"


SNIPPETS: dict[str, bytes] = {
    "nested tuples": hostile.NESTED, "shared dicts": hostile.SHARED, "a cycle": hostile.CYCLE,
    "copies of a list": hostile.COPIES, "a giant number": hostile.GIANT, "2^40 bytes": hostile.BYTES_2_40,
    "a deep tuple": hostile.DEEP, "an empty dict": b"}", "nothing": b"N", "a mark": b"(", "a pop": b"0",
    "a second": b"2", "a call": b")R", "os.system": b"cos\nsystem\nX\x02\x00\x00\x00id\x85R", "a list": b"]",
    "an extension": b"\x82\x01", "a text": hostile.text("x" * 70_000), "an end": b".", "inf": hostile.NUMBERS["inf"],
}  # fmt: skip


def pickle_changed(path: Path, rng: random.Random) -> str:
    """One instruction of the pickle; an archive's sums are those of the changed bytes."""
    data = path.read_bytes()
    if not zipfile.is_zipfile(path):
        what, changed = instruction_changed(data, rng, within=_length(data))
        path.write_bytes(changed)
        return f"{path.parent.name}: {what}"
    with zipfile.ZipFile(path) as archive:
        entries = {info.filename: archive.read(info) for info in archive.infolist()}
    name = next(entry for entry in entries if entry.endswith("data.pkl"))
    what, entries[name] = instruction_changed(entries[name], rng)
    if rng.random() < 0.1:
        what, gone = f"{what}, and an entry is gone", rng.choice(sorted(entries))
        del entries[gone]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for entry, content in entries.items():
            archive.writestr(entry, content)
    return f"{path.parent.name}: {what}"


def _length(data: bytes) -> int:
    """Of the pickles at the start of a legacy file: number, version, machine, the value, and the keys."""
    at = 0
    for _ in range(5):
        *_, (_, _, last) = pickletools.genops(data[at:])
        at += (last or 0) + 1
    return at


def instruction_changed(data: bytes, rng: random.Random, within: int | None = None) -> tuple[str, bytes]:
    starts, at = [], 0
    end = len(data) if within is None else within
    while at < end:
        found = list(pickletools.genops(data[at:end]))
        starts += [(at + (position or 0), opcode, argument) for opcode, argument, position in found]
        at = starts[-1][0] + 1
    number = rng.randrange(len(starts))
    start, opcode, argument = starts[number]
    stop = starts[number + 1][0] if number + 1 < len(starts) else end
    whole = data[start:stop]
    kind = rng.choice(("gone", "twice", "snippet", "before", "argument", "argument", "argument", "exchange"))
    if kind == "argument":
        return f"argument of {opcode.name} ({str(argument)[:30]!a})", data[:start] + _other(
            opcode.name, argument, whole, rng
        ) + data[stop:]
    if kind == "gone":
        return f"{opcode.name} is gone", data[:start] + data[stop:]
    if kind == "twice":
        return f"{opcode.name} twice", data[:stop] + whole + data[stop:]
    if kind == "exchange":
        other, _, _ = starts[rng.randrange(len(starts))]
        changed = bytearray(data)
        changed[start], changed[other] = changed[other], changed[start]
        return f"instructions at {start} and {other} exchanged", bytes(changed)
    name = rng.choice(sorted(SNIPPETS))
    return f"{name} {'before' if kind == 'before' else 'for'} {opcode.name}", (
        data[:start] + SNIPPETS[name] + (data[start:] if kind == "before" else data[stop:])
    )


def _other(name: str, argument: Any, whole: bytes, rng: random.Random) -> bytes:
    """The same instruction with another argument of its kind."""
    makers: dict[str, Callable[[], bytes]] = {
        "BINUNICODE": lambda: hostile.text(rng.choice((argument[1:], argument + "x", "", "args", "model", "../x"))),
        "BININT1": lambda: b"K" + bytes([rng.randrange(256)]),
        "BININT2": lambda: b"M" + rng.randbytes(2),
        "BININT": lambda: b"J" + rng.choice((bytes(4), b"\xff" * 4, rng.randbytes(4))),
        "BINFLOAT": lambda: b"G" + struct.pack(">d", rng.choice((0.0, -1.0, 1e308, float("nan"), float("inf"), 2.0))),
        "BINGET": lambda: b"h" + bytes([rng.randrange(256)]),
        "BINPUT": lambda: b"q" + bytes([rng.randrange(256)]),
        "GLOBAL": lambda: b"c" + rng.choice((b"os\nsystem\n", b"builtins\nlist\n", b"collections\nOrderedDict\n",
                                             b"torch\nBFloat16Storage\n", b"torch\nDoubleStorage\n",
                                             b"torch._utils\n_rebuild_parameter\n", b"torch\nSize\n")),
        "LONG1": lambda: b"\x8a\x09" + rng.randbytes(9),
    }  # fmt: skip
    if name in makers:
        return makers[name]()
    at = rng.randrange(len(whole))
    return whole[:at] + bytes([rng.randrange(256)]) + whole[at + 1 :]
