"""The names of Hugging Face's tensors that hold each of our weights. Torch-free; called by export and import alike.

Our weights are fused and [out, in]; Hugging Face's may come in parts (query, key, value; gate, up), with their rows in
another order and, in GPT-2, as [in, out].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from lmtrain.models.model_settings import ModelSettings, Shape, unpadded_shapes
from lmtrain.spec import ModelShape

RowOrder = Callable[[ModelShape], tuple[range, ...]]


class HFRows(NamedTuple):
    """A Hugging Face tensor and the rows of our weight that it holds: ranges, one below the other."""

    name: str
    rows: tuple[range, ...]

    @property
    def num_rows(self) -> int:
        return sum(map(len, self.rows))


class RowPlace(NamedTuple):
    """The place of a run of rows of our weight: `first` is its first row there, `rows` are the rows of the tensor with
    the number `tensor` of its mapping.
    """

    first: int
    tensor: int
    rows: range


@dataclass(frozen=True)
class WeightMapping:
    """A weight of ours and the Hugging Face tensors that hold its rows; a single tensor may be transposed."""

    name: str
    shape: Shape  # of our weight, without rows of padding
    hf_tensors: tuple[HFRows, ...]
    transposed: bool = False  # whether Hugging Face stores it as [in, out]

    def hf_shape(self, num_rows: int) -> Shape:
        return self.shape[::-1] if self.transposed else (num_rows, *self.shape[1:])

    def places(self, rows: range) -> list[RowPlace]:
        """Return where the rows with the numbers `rows` of lmtrain's weight lie in Hugging Face's tensors: consecutive
        runs, in the order of lmtrain's rows.
        """
        found = []
        for index, tensor in enumerate(self.hf_tensors):
            at = 0  # row of the tensor
            for ours in tensor.rows:
                start, stop = max(ours.start, rows.start), min(ours.stop, rows.stop)
                if start < stop:
                    found.append(RowPlace(start, index, range(at + start - ours.start, at + stop - ours.start)))
                at += len(ours)
        return sorted(found, key=lambda place: place.first)


@dataclass(frozen=True)
class FamilyNames:
    """The names of a family's weights in Hugging Face's files."""

    blocks: str  # the prefix before a block's number
    block_parts: Mapping[str, tuple[str, ...]]  # our name of a part of a block -> Hugging Face's names
    other_parts: Mapping[str, tuple[str, ...]]  # the same for parts outside of blocks
    transposed: tuple[str, ...] = ()  # our names of the matrices that are stored as [in, out]
    # our name of a part of a block that Hugging Face holds in one tensor -> its rows in the order of that tensor
    row_orders: Mapping[str, RowOrder] = field(default_factory=dict)


def list_mappings(settings: ModelSettings, names: FamilyNames) -> Iterator[WeightMapping]:
    """Yield for each weight of lmtrain's model which Hugging Face tensors hold its rows. `names` are the names of the
    family's tensors.
    """
    cuts = settings.cuts()
    for name, shape in unpadded_shapes(settings).items():
        part, _, leaf = name.rpartition(".")
        prefix, inner, hf_parts = "", part, names.other_parts
        if part.startswith("blocks."):
            _, layer, inner = part.split(".", 2)
            prefix, hf_parts = f"{names.blocks}{layer}.", names.block_parts
        hf_names = [f"{prefix}{hf_part}.{leaf}" for hf_part in hf_parts[inner]]
        if prefix and inner in names.row_orders:
            (hf_name,) = hf_names
            yield WeightMapping(name, shape, (HFRows(hf_name, names.row_orders[inner](settings.shape)),))
            continue
        sections = cuts[name].sections if len(hf_names) > 1 else (shape[0],)
        starts = [sum(sections[:index]) for index in range(len(sections))]
        tensors = [
            HFRows(hf_name, (range(start, start + rows),))
            for hf_name, start, rows in zip(hf_names, starts, sections, strict=True)
        ]
        yield WeightMapping(name, shape, tuple(tensors), bool(prefix) and inner in names.transposed and len(shape) == 2)


def qkv_rows_by_head(shape: ModelShape) -> tuple[range, ...]:
    """Return the order in which GPT-NeoX stores the rows of lmtrain's fused query-key-value weight, as ranges of its
    rows: for each key head the rows of its queries, of its key and of its value.
    """
    head, num_keys = shape.head_width, shape.num_kv_heads
    queries = shape.num_heads // num_keys * head
    first_key = shape.num_heads * head
    first_value = first_key + num_keys * head
    return tuple(
        range(start, start + size)
        for group in range(num_keys)
        for start, size in (
            (group * queries, queries), (first_key + group * head, head), (first_value + group * head, head)
        )
    )  # fmt: skip
