"""Every kind of data: settings become samples, order, validation and identity; the loader resumes at any step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest

from lmtrain.batch import IGNORED
from lmtrain.data import training_data_by_source
from lmtrain.data.assemble_training_data import build_training_data, open_datasets
from lmtrain.data.batch_size_per_step import BatchPlan
from lmtrain.data.cut_datasets_into_samples import ALL_SHARES, READ_SHARES, DataRequirements
from lmtrain.data.data_settings import BlendPart, BlendSettings, DataChoice, DataSettings, MaskedSettings
from lmtrain.data.loader import Loader
from lmtrain.data.resume_position_by_source import DataHistory
from lmtrain.data.sample_dataset_interface import ShuffledOrder
from lmtrain.data.samples.blend import integer_shares
from lmtrain.data.samples.megatron_sample_order import MegatronDataset, split_sequences
from lmtrain.data.store.block_checksums import BLOCK_BYTES
from lmtrain.data.store.dataset_writer import DatasetWriter
from lmtrain.data.store.indexed_dataset import IndexedDataset
from lmtrain.data.training_data_by_source import TrainingData
from lmtrain.errors import DataError, SettingsError
from tests.marks import wide
from tests.unit.data.conftest import Make
from tests.unit.data.writing import add_document

ASKED = DataRequirements(seq_len=8, vocab_size=10**6, seed=3, num_samples=96, validate=True)
PLAN = BatchPlan(8)
SPLIT = (0.7, 0.3)

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "mask": {"document_mask": True},
    "document": {"packing": "document"},
    "best_fit": {"packing": "best_fit", "document_mask": True},
    "megatron": {"order": "megatron"},
    "megatron_mask": {"order": "megatron", "document_mask": True},
    "later": {"first_sample": 17},
    "megatron_later": {"order": "megatron", "first_sample": 17, "megatron_samples": 200},
}


@pytest.fixture
def paths(make: Make) -> list[str]:
    chance = np.random.default_rng(0)
    lengths = [chance.integers(1, 30, size).tolist() for size in (40, 25, 60)]
    return [str(make(f"d{i}", one, base=10_000 * i, described=True).prefix) for i, one in enumerate(lengths)]


def settings_of(kind: str, blended: bool, paths: list[str]) -> DataChoice:
    common = KINDS[kind] | {"split": SPLIT}
    if not blended:
        return DataSettings(path=paths[0], **common)
    return BlendSettings(
        datasets=tuple(BlendPart(path=path, weight=w) for path, w in zip(paths, (3.0, 1.0, 0.5), strict=True)), **common
    )


def build(settings: DataChoice, asked: DataRequirements = ASKED) -> TrainingData:
    return build_training_data(settings, open_datasets(settings), asked)


def load(data: TrainingData, start: int, dp: int = 1, rank: int = 0, micro_batch: int = 2) -> list[Any]:
    loader = Loader(data.train, data.order, PLAN, micro_batch, rank, dp)
    steps = [
        (step.step, step.counts, step.sample_ids.tolist(),
         [[None if array is None else array.tolist() for array in vars(batch).values()] for batch in step.microbatches])
        for step in loader.steps(start, 12)
    ]  # fmt: skip
    loader.close()
    return steps


@pytest.mark.parametrize("blended", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_start_has_the_same_order(kind: str, blended: bool, paths: list[str]) -> None:
    settings = settings_of(kind, blended, paths)
    begun = build(settings)
    resumed = build(settings, replace(ASKED, history=DataHistory.from_dict(begun.history.to_dict())))
    assert resumed.order.ids(0, 96).tolist() == begun.order.ids(0, 96).tolist()
    assert (resumed.history, resumed.sample_identity) == (begun.history, begun.sample_identity)
    assert resumed.contributions(8) == begun.contributions(8)


@pytest.mark.parametrize(
    ("kind", "blended"),
    [*((kind, True) for kind in KINDS), ("plain", False), ("megatron", False),
     *wide(*((kind, False) for kind in KINDS if kind not in ("plain", "megatron")))],
)  # fmt: skip
def test_any_step_is_read_alone(paths: list[str], kind: str, blended: bool) -> None:
    settings = settings_of(kind, blended, paths)
    unbroken = load(build(settings), 0)
    for step, counts, _, batches in unbroken:
        labels = np.array([batch[1] for batch in batches])
        assert counts == (int((labels != IGNORED).sum()),) > (0,)
        assert labels.shape == (4, 2, 8), step
    for start in (1, 7):
        assert load(build(settings), start) == unbroken[start:]


@pytest.mark.parametrize("kind", ["plain", "best_fit", "megatron"])
def test_the_samples_of_a_blend_know_no_layout(paths: list[str], kind: str) -> None:
    data = build(settings_of(kind, True, paths))
    alone = load(data, 0, micro_batch=1)
    ranks = [load(data, 0, dp=4, rank=rank, micro_batch=1) for rank in range(4)]
    for step in range(12):
        turns = [ranks[rank][step][3][m] for m in range(2) for rank in range(4)]
        assert turns == alone[step][3]
    longer = DataRequirements(**(vars(ASKED) | {"num_samples": 960}))
    if kind != "megatron":  # whose order depends on the length of the run
        assert load(build(settings_of(kind, True, paths), longer), 0, micro_batch=1) == alone


@pytest.mark.parametrize("blended", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_training_and_validation_share_no_token(paths: list[str], kind: str, blended: bool) -> None:
    data = build(settings_of(kind, blended, paths))
    valid = data.valid[""].batch(np.arange(data.valid[""].num_samples))
    num_train = data.train.num_samples
    train = data.train.batch(np.arange(num_train))
    seen = [set(batch.labels_BT[batch.labels_BT != IGNORED].ravel().tolist()) for batch in (train, valid)]
    assert seen[0]
    assert seen[1]
    assert not seen[0] & seen[1]
    ids = np.arange(data.valid[""].num_samples)
    assert data.valid[""].counts(ids).labels == int((valid.labels_BT != IGNORED).sum())


def test_a_blend_is_read_by_its_shares(paths: list[str]) -> None:
    data = build(settings_of("plain", True, paths))
    rows = data.contributions(8)
    assert [row["run_samples"] for row in rows] == [64, 22, 10]  # of 96: 64, 21.33, 10.67, none off by one
    assert sum(row["run_tokens"] for row in rows) == 96 * 8
    assert [round(row["share"] * 9) for row in rows] == [6, 2, 1]
    ids = data.order.ids(0, 96)
    offsets = np.cumsum([row["samples"] for row in rows])
    assert np.bincount(np.searchsorted(offsets, ids, side="right")).tolist() == [64, 22, 10]


@pytest.mark.parametrize("counted", [1 << 18, 20])
@pytest.mark.parametrize("blended", [False, True])
@pytest.mark.parametrize("kind", ["best_fit", "document"])
def test_tokens_of_a_run_are_counted_without_padding(
    paths: list[str], kind: str, blended: bool, counted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_data_by_source, "_EXACT_SAMPLES", counted)
    data = build(settings_of(kind, blended, paths))
    rows, real = data.contributions(8), data.train.counts(data.order.ids(0, data.num_samples)).tokens
    found = sum(row["run_tokens"] for row in rows)
    assert real < data.num_samples * 8
    assert found == real if counted > data.num_samples else abs(found - real) < 0.1 * real


def test_tokens_and_epochs_are_amounts(paths: list[str]) -> None:
    parts = (BlendPart(path=paths[0], tokens=8000), BlendPart(path=paths[1], epochs=2.5))
    data = build(BlendSettings(datasets=parts, split=(1.0,)), DataRequirements(**(vars(ASKED) | {"validate": False})))
    samples = data.parts[1].dataset.num_samples
    assert integer_shares([part.share for part in data.parts]) == integer_shares([2000, 5 * samples])


def test_blends_to_validate_on(paths: list[str]) -> None:
    settings = BlendSettings(
        datasets=(BlendPart(path=paths[0], weight=1.0),), split=(1.0,),
        valid_datasets=(BlendPart(path=paths[1], weight=2.0), BlendPart(path=paths[2], weight=1.0)),
    )  # fmt: skip
    data = build(settings)
    tokens = data.valid[""].batch(np.arange(6)).tokens_BT[:, 0] // 10_000
    assert sorted(tokens.tolist()) == [1, 1, 1, 1, 2, 2]


def test_a_blend_is_validated_on_until_its_first_dataset_runs_out(paths: list[str]) -> None:
    both = tuple(BlendPart(path=path, weight=1.0) for path in paths[1:])  # of 25 and of 60 documents
    data = build(BlendSettings(datasets=(BlendPart(path=paths[0], weight=1.0),), split=(1.0,), valid_datasets=both))
    valid, small = data.valid[""], build(DataSettings(path=paths[1], split=(1.0,)), replace(ASKED, validate=False))
    tokens = valid.batch(np.arange(valid.num_samples)).tokens_BT
    assert len(np.unique(tokens, axis=0)) == len(tokens)  # none is read twice
    assert (tokens[:, 0] < 20_000).sum() == small.train.num_samples


def test_megatrons_split_leaves_no_sequence_of_long_documents_out(tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "d", np.int32) as writer:
        for document in np.arange(600).reshape(20, 3, 10):  # of three sequences each
            add_document(writer, list(document))
    data = build(DataSettings(path=str(tmp_path / "d"), split=(0.5, 0.5), order="megatron"))
    for dataset, sequences in ((data.train, range(30)), (data.valid[""], range(30, 60))):
        labels = dataset.batch(np.arange(dataset.num_samples)).labels_BT
        assert {*(labels // 10).ravel().tolist()} == {*sequences}


def test_valid_path_and_its_absence(paths: list[str]) -> None:
    data = build(DataSettings(path=paths[0], valid_path=paths[1], split=(1.0,)))
    assert data.valid[""].batch(np.array([0])).tokens_BT[0, 0] == 10_000
    for settings in (DataSettings(path=paths[0], split=(1.0,)), settings_of("plain", True, paths[:3])):
        if isinstance(settings, BlendSettings):
            settings = BlendSettings(datasets=settings.datasets, split=(1.0,))
        with pytest.raises(SettingsError, match="leaves no document to validate on"):
            build(settings)
        assert build(settings, DataRequirements(**(vars(ASKED) | {"validate": False}))).valid == {}


@pytest.mark.parametrize(
    ("split", "valid", "shares", "order", "expected"),
    [
        ((0.5, 0.25, 0.25), False, READ_SHARES, "own", 27),  # nothing reads a third share
        ((0.5, 0.25, 0.25), True, READ_SHARES, "own", 40),  # nor the second where others are validated on
        ((0.5, 0.25, 0.25), False, ALL_SHARES, "own", 20),
        ((0.5, 0.25, 0.25), True, ALL_SHARES, "own", 20),
        ((0.5, 0.25, 0.25), True, READ_SHARES, "megatron", 20),  # as its --split cuts, whoever reads
    ],
)
def test_training_keeps_what_nothing_else_reads(
    paths: list[str], split: tuple[float, ...], valid: bool, shares: str, order: Literal["own", "megatron"],
    expected: int,
) -> None:  # fmt: skip
    asked = replace(ASKED, shares=shares)
    data = build(DataSettings(path=paths[0], valid_path=paths[1] if valid else None, split=split, order=order), asked)
    given = data.parts[0].documents
    assert given == range(expected)
    parts = (BlendPart(path=paths[0], weight=1.0), BlendPart(path=paths[2], weight=1.0))
    others = (BlendPart(path=paths[1], weight=1.0),) if valid else ()
    blend = build(BlendSettings(datasets=parts, valid_datasets=others, split=split, order=order), asked)
    assert blend.parts[0].documents == given
    assert (data.sample_identity.get("shares") == READ_SHARES) == (order == "own" and shares == READ_SHARES)


@pytest.mark.parametrize("lengths", [[1000], [400, 300, 300]], ids=["one document", "a few"])
@pytest.mark.parametrize("mask", [False, True])
def test_a_share_that_rounds_to_no_document_is_a_tail_of_tokens(make: Make, lengths: list[int], mask: bool) -> None:
    prefix = str(make("few", lengths).prefix)  # token t is the number t
    data = build(DataSettings(path=prefix, split=(0.9, 0.1), document_mask=mask))
    train, valid = (one.batch(np.arange(one.num_samples)) for one in (data.train, data.valid[""]))
    assert valid.tokens_BT.ravel()[:3].tolist() == [900, 901, 902]
    labels = [batch.labels_BT[batch.labels_BT != IGNORED] for batch in (train, valid)]
    assert max(labels[0].max(), train.tokens_BT.max()) < 900
    assert labels[1].max() == 900 + 8 * 12  # twelve samples of 8 tokens and a label behind them
    assert data.sample_identity["held_out_tokens"] == 100
    assert data.validation_note is not None
    assert "the last 100 of 1,000 tokens" in data.validation_note
    everything = build(DataSettings(path=prefix, split=(0.9, 0.1)), replace(ASKED, validate=False))
    assert (everything.sample_identity["held_out_tokens"], everything.train.num_samples) == (0, 124)


def test_a_tail_is_a_sample_at_least_and_leaves_one(make: Make) -> None:
    data = build(DataSettings(path=str(make("short", [40]).prefix)))
    assert (data.valid[""].num_samples, data.train.num_samples, data.sample_identity["held_out_tokens"]) == (1, 3, 9)
    with pytest.raises(DataError, match="17 tokens, too few for two samples of 8"):
        build(DataSettings(path=str(make("shorter", [17]).prefix)))


@pytest.mark.parametrize("other", [{"packing": "document"}, {"order": "megatron"}, {"split": (1.0,)}])
def test_only_running_text_is_cut_in_the_middle(make: Make, other: dict[str, Any]) -> None:
    with pytest.raises((SettingsError, DataError), match=r"to validate on|gives 0 samples"):
        build(DataSettings(path=str(make("one", [1000]).prefix), **other))


def test_one_dataset_is_read_as_ever(paths: list[str]) -> None:
    data = build(DataSettings(path=paths[0], split=SPLIT))
    assert data.order == ShuffledOrder(data.train.num_samples, 3)
    assert (data.sample_identity["train_documents"], data.sample_identity["shares"]) == ([0, 26], "tokens")
    older = build(DataSettings(path=paths[0], split=SPLIT), replace(ASKED, shares=READ_SHARES))
    assert older.sample_identity["train_documents"] == [0, 28]


def test_a_long_last_document_does_not_make_the_share_larger(make: Make) -> None:
    """Running text is cut within it; other samples are not, and the share that they take is said."""
    prefix = str(make("long", [50] * 12 + [400]).prefix)
    data = build(DataSettings(path=prefix))
    assert (data.sample_identity["held_out_tokens"], data.warning) == (20, None)
    assert "the last 20 of 1,000 tokens" in (data.validation_note or "")
    data = build(DataSettings(path=prefix, packing="document"))
    assert (data.validation_note or "").startswith("400 of 1,000 tokens of ")
    assert (data.validation_note or "").endswith("/long (40.0%), which are not trained on")
    assert (data.warning or "").startswith("validation takes 40.0% of the tokens of ")
    assert "but data.split asks for 2.0%." in (data.warning or "")
    data = build(DataSettings(path=str(make("even", [50] * 100).prefix)))
    assert ("100 of 5,000 tokens" in (data.validation_note or ""), data.warning) == (True, None)


def test_a_blend_says_which_dataset_validation_does_not_read(make: Make) -> None:
    made = [str(make(name, lengths).prefix) for name, lengths in (("one", [900]), ("many", [50] * 20))]
    data = build(BlendSettings(datasets=tuple(BlendPart(path=path, weight=1.0) for path in made), split=(0.9, 0.1)))
    note = data.validation_note or ""
    assert note.startswith("100 of 1,900 tokens of 2 datasets (5.3%), which are not trained on; ")
    assert (data.validation_note or "").endswith("/one has no document to hold out")
    with pytest.raises(SettingsError, match=r"has only one document, so none is left to validate on\. Preprocess"):
        build(DataSettings(path=made[0], packing="document"))


def test_megatrons_run_is_gone_on_with(paths: list[str]) -> None:
    """Positions from first_sample on are the samples that the other run would have taken next."""
    data = build(settings_of("megatron_later", False, paths))
    indexed = IndexedDataset.open(paths[0])
    theirs = MegatronDataset(indexed, split_sequences(indexed.num_sequences, SPLIT)[0], 8, 200, 3)
    expected = theirs.batch(np.arange(17, 17 + 96)).tokens_BT
    assert data.train.batch(data.order.ids(0, 96)).tokens_BT.tolist() == expected.tolist()


def test_megatron_samples_must_reach(paths: list[str]) -> None:
    with pytest.raises(SettingsError, match=r"megatron_samples=100 is less than data\.first_sample=17 plus the 96"):
        build(DataSettings(path=paths[0], split=SPLIT, order="megatron", first_sample=17, megatron_samples=100))


def test_identities_differ_where_samples_do(paths: list[str]) -> None:
    every = [build(settings_of(kind, blended, paths)) for kind in KINDS for blended in (False, True)]
    every.append(build(settings_of("plain", True, paths[::-1])))
    texts = [repr((data.sample_identity, data.content_sha256)) for data in every]
    assert len(set(texts)) == len(texts)
    assert [data.content_sha256 is None for data in every] == [False] * len(every)


def test_data_of_another_kind_is_refused() -> None:
    with pytest.raises(SettingsError, match="is not read from datasets"):
        open_datasets(DataChoice())


class Words:
    """Six roles, then a hundred words and as many pieces that go on with one."""

    vocab_size = 206
    special: ClassVar[dict[str, int]] = {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}

    def piece(self, token: int) -> str:
        return f"##{token}" if token >= 106 else f"w{token}"


def test_a_dataset_too_small_for_a_blend(make: Make, paths: list[str]) -> None:
    parts = (BlendPart(path=paths[0], weight=1.0), BlendPart(path=str(make("small", [3]).prefix), weight=1.0))
    with pytest.raises(DataError, match="0 samples of 8 tokens"):
        build(BlendSettings(datasets=parts, split=SPLIT))


def test_small_datasets_may_lack_documents_to_validate_on(make: Make, paths: list[str]) -> None:
    parts = (BlendPart(path=paths[0], weight=1.0), BlendPart(path=str(make("one", [30], 5000).prefix), weight=1.0))
    data = build(BlendSettings(datasets=parts, split=SPLIT))
    assert data.valid[""].batch(np.arange(data.valid[""].num_samples)).tokens_BT.max() < 5000


def test_indexes_are_written_to_index_dir(paths: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmtrain.data.store.document_boundaries._CACHED_FROM", 0)
    build(DataSettings(path=paths[0], split=SPLIT))
    assert list((tmp_path / "d0.index").glob("documents-*"))
    build(DataSettings(path=paths[1], split=SPLIT, index_dir=str(tmp_path / "elsewhere")))
    assert list((tmp_path / "elsewhere").glob("documents-*"))
    assert not (tmp_path / "d1.index").exists()


def _flip(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        [byte] = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize(
    "kind", ["plain", "best_fit", "megatron", "masked", *wide("mask", "document", "blend", "masked_twin")]
)
def test_no_kind_of_samples_reads_a_damaged_block(
    kind: str, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever block holds the flipped bit: some sample needs it, and no sample is made of it."""
    masked = kind.startswith("masked")
    lengths = np.random.default_rng(0).integers(1, 30, 2500).tolist()
    prefix = make("d", lengths, described=True).prefix
    asked = replace(ASKED, seq_len=64, validate=False)
    settings: DataChoice = DataSettings(path=str(prefix), split=(1.0,), **({} if masked else KINDS.get(kind, {})))
    if kind == "blend":
        settings = BlendSettings(datasets=(BlendPart(path=str(prefix), weight=1.0),), split=(1.0,))
    if masked:
        settings = MaskedSettings(path=str(prefix), split=(1.0,), pairs="next_sentence")
        with DatasetWriter(prefix, np.uint16, overwrite=True) as writer:
            for _ in range(900):
                add_document(writer, [np.full(size, 100) for size in lengths[:9]])
            writer.describe(tokenizer=b"{}", fingerprint="abc", vocab_size=206, eod_id=None, num_bytes=42)
        asked = replace(asked, tokenizer=Words(), vocab_size=206)
    if kind == "masked_twin":
        monkeypatch.setattr("lmtrain.runtime.compiled_helpers.lib", None)
    size = (prefix.parent / "d.bin").stat().st_size
    assert size > 2 * BLOCK_BYTES
    for block in range(-(-size // BLOCK_BYTES)):
        _flip(prefix.parent / "d.bin", min(block * BLOCK_BYTES + 5000, size - 100))
        data = build(settings, asked)
        with pytest.raises(DataError, match=rf"d\.bin is damaged: bytes {block * BLOCK_BYTES} to \d+ "):
            data.train.batch(np.arange(data.train.num_samples))
        if masked:
            with pytest.raises(DataError, match=rf"block {block}"):
                build(settings, asked).train.counts(np.arange(data.train.num_samples))
        unchecked = replace(settings, verify="none")
        build(unchecked, asked).train.batch(np.arange(10))
        _flip(prefix.parent / "d.bin", min(block * BLOCK_BYTES + 5000, size - 100))
    data = build(settings, asked)
    data.train.batch(np.arange(data.train.num_samples))


def test_what_validation_reads_is_compared_with_its_own_checksums(make: Make) -> None:
    prefix = make("d", [30_000] * 4, described=True).prefix
    _flip(prefix.parent / "d.bin", 4 * 90_001)
    data = build(DataSettings(path=str(prefix), split=(0.5, 0.5)), replace(ASKED, seq_len=64))
    data.train.batch(np.arange(data.train.num_samples))
    with pytest.raises(DataError, match=rf"block {4 * 90_001 // BLOCK_BYTES}\)"):
        data.valid[""].batch(np.arange(data.valid[""].num_samples))


@pytest.mark.parametrize("blended", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_domains_are_read_whole_and_take_nothing_from_training(paths: list[str], kind: str, blended: bool) -> None:
    domains = {"one": paths[1], "two": paths[2]}
    common = KINDS[kind] | {"split": SPLIT, "valid_paths": domains}
    parts = (BlendPart(path=paths[0], weight=1.0),)
    data = build(BlendSettings(datasets=parts, **common) if blended else DataSettings(path=paths[0], **common))
    assert data.valid.keys() == domains.keys()
    for name, path in domains.items():
        alone = build(DataSettings(path=paths[0], valid_path=path, split=SPLIT, **KINDS[kind]))
        ids = np.arange(alone.valid[""].num_samples)
        assert np.array_equal(data.valid[name].batch(ids).tokens_BT, alone.valid[""].batch(ids).tokens_BT)
        assert data.parts[0].documents == alone.parts[0].documents
