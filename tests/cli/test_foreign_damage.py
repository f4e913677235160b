"""Hostile checkpoints of other programs, and tokenizers, end soon in a message and exit code 65."""

from __future__ import annotations

import json
import os
import signal
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmtrain.exchange.huggingface.import_and_export import export_hf
from lmtrain.exchange.megatron.import_and_export import export_megatron
from tests.cli.harness import lmtrain
from tests.unit.exchange.models import gpt2, llama, save, tokenizer_for
from tests.unit.exchange.torch_files import hostile

RANK = "release/mp_rank_00/model_optim_rng.pt"


@pytest.fixture(autouse=True)
def soon() -> Iterator[None]:
    """because: what these files did was to run for ever"""

    def late(*_: object) -> None:
        raise TimeoutError("not done in 60 s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("words") / "tokenizer.json"
    tokenizer_for(gpt2()).save(path)
    return path


def refused(folder: Path, words: Path, *, of: str = "megatron") -> str:
    output = folder.parent / "imported"
    said = lmtrain("import", folder, "--format", of, "--output", output, "--tokenizer", words, code=65)
    assert not list(output.glob("step_*"))
    assert len(said) < 1500
    return " ".join(said.split())


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("model", hostile.tensor(hostile.NESTED), "a storage's key is a tuple"),
        ("model", hostile.NESTED + b"2\x93", "a name is a tuple"),
        ("model", hostile.COPIES, "makes more than"),
        ("model", hostile.SHARED, "more names than any model"),
        ("model", hostile.CYCLE, "more names than any model"),
        ("model", hostile.BYTES_2_40, "but only"),
        ("model", hostile.DEEP, "deeper than"),
        *[("iteration", value, "iteration") for value in hostile.NUMBERS.values()],
        ("iteration", hostile.GIANT, "a number has 1329 bits"),
        ("iteration", hostile.NESTED, "iteration tuple"),
        ("checkpoint_version", hostile.NUMBERS["nan"], "checkpoint_version nan"),
        ("checkpoint_version", b"K\x07", "checkpoint_version"),
    ],
    ids=lambda part: part[:20] if isinstance(part, str) else "",
)  # fmt: skip
def test_hostile_pickles_end_in_a_message(key: str, value: bytes, says: str, words: Path, tmp_path: Path) -> None:
    hostile.archive(tmp_path / "m" / RANK, hostile.state(key, value), **{"data/0": bytes(4)})
    assert says in refused(tmp_path / "m" / "release", words)


def test_a_grid_is_no_larger_than_the_folders_that_are_there(words: Path, tmp_path: Path) -> None:
    hostile.archive(tmp_path / "m" / "mp_rank_99999_99999" / "model_optim_rng.pt", hostile.state("model", b"}"))
    assert "lacks the files of 9999999999 ranks, the first at (tp, pp) = (0, 0)" in refused(tmp_path / "m", words)


def test_files_are_as_long_as_their_kind(words: Path, tmp_path: Path) -> None:
    hostile.archive(tmp_path / "m" / RANK, hostile.state("model", b"}"), **{"data/0": bytes(4)})
    hostile.with_a_longer_entry(tmp_path / "m" / RANK, "archive/data.pkl", 1 << 24)
    assert "data.pkl does not lie within the file" in refused(tmp_path / "m" / "release", words)
    tracker = tmp_path / "m" / "latest_checkpointed_iteration.txt"
    tracker.touch()
    os.truncate(tracker, 1 << 40)
    assert "latest_checkpointed_iteration.txt is larger than" in refused(tmp_path / "m", words)
    metadata = tmp_path / "d" / ".metadata"
    metadata.parent.mkdir()
    metadata.touch()
    os.truncate(metadata, 1 << 40)
    assert ".metadata is larger than" in refused(tmp_path / "d", words)


def test_a_changed_weight_is_found(words: Path, tmp_path: Path) -> None:
    export_megatron(save(tmp_path / "run", llama()), tmp_path / "m")
    data = bytearray((tmp_path / "m" / RANK).read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "m" / RANK).write_bytes(data)
    assert "does not have the CRC-32" in refused(tmp_path / "m", words)


def test_a_hugging_face_folder_is_compared_before_a_model_is_made(words: Path, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    export_hf(save(tmp_path / "run", llama()), folder, check=False)
    config, weights = folder / "config.json", folder / "model.safetensors"
    whole, tensors = json.loads(config.read_text()), weights.read_bytes()

    def said(**changes: Any) -> str:
        config.write_text(json.dumps(whole | changes))
        return refused(folder, words, of="hf")

    assert "describes 4000 layers" in said(num_hidden_layers=4000)
    assert "n_layer=1" in said(num_hidden_layers=4000, n_layer=1)
    assert "does not hold the model" in said(vocab_size=10**12)
    assert "does not hold the model" in said(intermediate_size=10**12)
    assert "hidden_act" in said(hidden_act="x" * 70_000)
    assert "model_type" in said(model_type="x" * 70_000)
    config.write_text(json.dumps(whole))
    weights.write_bytes(struct.pack("<Q", 1 << 40) + tensors[8:])
    assert "states a header of 1099511627776 bytes" in refused(folder, words, of="hf")
    weights.unlink()
    os.mkfifo(weights)
    assert "is not a plain file" in refused(folder, words, of="hf")
    weights.unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": ["x" * 70_000]}}))
    assert "Use plain names that end in" in refused(folder, words, of="hf")


def tree(**parts: Any) -> dict[str, Any]:
    bpe = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}
    return {"version": "1.0", "added_tokens": [], "model": bpe, **parts}


_REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_WORDPIECE = {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "vocab": {"[UNK]": 0}}


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (tree(model={"type": "BPE", "vocab": {"a": 0, "b": 2**31 - 1}, "merges": []}), "has the id 2147483647"),
        (tree(normalizer={"type": "Sequence", "normalizers": [_REPLACE] * 40}), "a normalizer that makes a text"),
        (tree(decoder={"type": "Sequence", "decoders": [_REPLACE] * 40}), "a decoder that makes a text"),
        (tree(normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}] * 999}), "a normalizer of 1000 rules"),
        (tree(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAAAAAA"}), "cannot tokenize 'ab ab'"),
        (tree(normalizer={"type": "Precompiled", "precompiled_charsmap": "/////w=="}), "The library tokenizers cannot"),
        (tree(model={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}), "Missing [UNK] token"),
        (tree(model={"type": "Unigram", "unk_id": None, "vocab": [["a", -1.0]]}), "`unk_id` is missing"),
        (tree(model=_WORDPIECE | {"max_input_chars_per_word": 10**9}), "max_input_chars_per_word=1000000000"),
        (tree(model=_WORDPIECE | {"max_input_chars_per_word": 100, "continuing_subword_prefix": "#" * 999}), "prefix"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_hostile_tokenizers_end_in_a_message(made: dict[str, Any], says: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(made))
    said = " ".join(lmtrain("tokenizer", "show", path, "ab ab", code=65).split())
    assert says in said
    assert "tokenizer.json" in said


def test_a_tokenizer_that_fails_at_work_ends_the_work(tmp_path: Path) -> None:
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree(model=model)))
    (tmp_path / "text.jsonl").write_text('{"text": "ab ab"}\n')
    said = lmtrain("preprocess", tmp_path / "text.jsonl", "--tokenizer", tmp_path, "--output", tmp_path / "data",
                   "--no-append-eod", code=65)  # fmt: skip
    assert "cannot tokenize 'ab ab'" in said


def test_a_unigram_may_have_a_byte_level(tmp_path: Path) -> None:
    model = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0], ["b", -2.0]]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree(model=model, pre_tokenizer=_BYTES)))
    assert "2 tokens" in lmtrain("tokenizer", "show", tmp_path, "ab")


def test_a_piece_of_a_vocabulary_may_be_long_and_a_pipe_is_none(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("[UNK]\nthe\n##m\n" + "a" * 150_000 + "\n##" + "é" * 90_000 + "\n")
    (tmp_path / "text.jsonl").write_text('{"text": "the them aaa"}\n')
    lmtrain("preprocess", tmp_path / "text.jsonl", "--tokenizer", tmp_path / "vocab.txt", "--output", tmp_path / "data",
            "--no-append-eod")  # fmt: skip
    assert "4 tokens" in lmtrain("data", "inspect", tmp_path / "data")
    os.mkfifo(tmp_path / "pipe.tokenizer.json")
    assert "is not a plain file" in lmtrain("tokenizer", "show", tmp_path / "pipe.tokenizer.json", code=65)
    os.truncate(tmp_path / "vocab.txt", 1 << 40)
    assert "larger than 64 MiB" in lmtrain("tokenizer", "show", tmp_path / "vocab.txt", code=65)


def test_half_a_character_in_a_vocabulary_is_damage(tmp_path: Path) -> None:
    vocab = {letter: number for number, letter in enumerate(tokenizer_for(gpt2()).tree["model"]["vocab"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab | {"\ud800": len(vocab)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    assert "half of a character" in lmtrain("tokenizer", "show", tmp_path, code=65)


def test_pieces_reach_the_terminal_as_text(tmp_path: Path) -> None:
    words = {"type": "WordLevel", "vocab": {"[UNK]": 0, "\x1b[31ma": 1}, "unk_token": "[UNK]"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree(model=words)))
    assert r"\x1b[31ma" in lmtrain("tokenizer", "show", tmp_path, "\x1b[31ma")
