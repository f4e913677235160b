"""The base class of GPT and BERT: blocks in order, and an optional final norm."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor, nn

from lmtrain.batch import Batch
from lmtrain.models.layers.attention import BuildMask, build_mask, scatter_to_sequence, select_query_positions
from lmtrain.models.layers.block import Block, BlockContext
from lmtrain.models.layers.rotary import Rotation, build_rotation
from lmtrain.models.layers.token_and_position_embedding import positions_of, text_lengths_of
from lmtrain.models.model_settings import TransformerSettings
from lmtrain.models.rotary_settings import RotarySettings
from lmtrain.spec import Cuts, ModelShape, Start, Tie

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


class Stack(nn.Module):
    """A transformer, or a pipeline stage of it: the parts of other stages are None, and blocks keep their numbers."""

    parts_after_blocks: ClassVar[tuple[str, ...]] = ("norm", "head")  # names of the parts after the last block
    separates_documents: ClassVar[bool] = True
    build_mask: BuildMask = staticmethod(build_mask)  # parallel may replace it by a function that builds block masks

    settings: TransformerSettings
    embedding: nn.Module | None
    blocks: nn.ModuleDict
    norm: nn.Module | None
    head: nn.Module | None

    def __init__(
        self,
        embedding: nn.Module,
        blocks: dict[str, Block],
        norm: nn.Module | None,
        head: nn.Module,
        *,
        causal: bool,
    ) -> None:
        super().__init__()
        self.embedding = embedding
        self.blocks = nn.ModuleDict(blocks)
        self.norm = norm
        self.head = head
        self.causal = causal

    @property
    def shape(self) -> ModelShape:
        return self.settings.shape

    def ties(self) -> tuple[Tie, ...]:
        return self.settings.ties()

    def cuts(self) -> Cuts:
        return {name: self.settings.cut_of(name) for name, _ in self.named_parameters(remove_duplicate=False)}

    def starts(self) -> dict[str, Start]:
        """Return GPT-2's initialization: one std for all weights except the last linear of a branch."""
        return {name: _start_of(name, self.settings) for name, _ in self.named_parameters(remove_duplicate=False)}

    def forward(self, batch: Batch, hidden_BTD: Tensor | None = None) -> Tensor:
        """Return the hidden states [B, T, D] after this pipeline stage's blocks, and after the final norm if the stage
        has it. `hidden_BTD` is the output of the previous stage; None for the first, which embeds the batch's tokens.
        """
        x_BTD = hidden_BTD if self.embedding is None else self.embedding(batch)
        assert x_BTD is not None, "a stage without an embedding needs the hidden states of the stage before it"
        contexts = self.block_contexts(batch)
        blocks = list(self.blocks.items())
        query_positions_BQ = self._query_positions(x_BTD, batch) if blocks else None
        for name, block in blocks if query_positions_BQ is None else blocks[:-1]:
            x_BTD = block(x_BTD, contexts[name])
        if query_positions_BQ is not None:
            name, block = blocks[-1]
            x_BQD = block(x_BTD, replace(contexts[name], query_positions_BQ=query_positions_BQ))
            x_BTD = scatter_to_sequence(x_BQD, query_positions_BQ, x_BTD.shape[1])
        return x_BTD if self.norm is None else self.norm(x_BTD)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits over the padded vocabulary, -inf at padding, for any leading dims."""
        return hidden if self.head is None else self.finish_logits(self.head(hidden))

    def finish_logits(self, logits: Tensor) -> Tensor:
        """Return logits from the head's output, number by number, as a rank holds only some columns."""
        return logits

    def cut(self, layers: range, *, first: bool, last: bool) -> None:
        """Keep only the modules of one pipeline stage, and remove all others in place: keep the blocks with the numbers
        `layers`, the embedding if `first`, and the modules after the blocks (final norm, heads) if `last`.
        """
        if not first:
            self.embedding = None
        for name in () if last else self.parts_after_blocks:
            setattr(self, name, None)
        self.blocks = nn.ModuleDict({name: block for name, block in self.blocks.items() if int(name) in layers})

    def _query_positions(self, x_BTD: Tensor, batch: Batch) -> Tensor | None:
        """Return the positions [B, Q] for which the stage's last block computes outputs, if these are few: those that
        `batch.is_query_BT` marks. Return None if it computes all positions, since none or many are marked, the stage
        has no head, or `x_BTD` is a sequence shard.
        """
        if batch.is_query_BT is None or self.head is None or x_BTD.shape[1] != batch.tokens_BT.shape[1]:
            return None
        return select_query_positions(batch.is_query_BT)

    def block_contexts(self, batch: Batch) -> dict[str, BlockContext]:
        """Return the attention mask and the rotary angles of each block of this stage, by the block's number as a str.
        Blocks of the same kind share them. They cover the batch's whole sequence, even if the hidden states are a shard
        of it.
        """
        all_kinds = self.settings.layer_kinds
        kinds = {name: all_kinds[int(name)] for name in self.blocks}
        used = set(kinds.values())
        masks = {has_window: self._mask(batch, has_window) for has_window in {kind.window for kind in used}}
        is_local = {kind: kind.window and self._has_local_angles for kind in used if kind.rotary}
        angles = {local: self._rotation(batch, local) for local in set(is_local.values())}
        contexts = {
            kind: BlockContext(masks[kind.window], angles[is_local[kind]] if kind.rotary else None) for kind in used
        }
        return {name: contexts[kind] for name, kind in kinds.items()}

    @property
    def _has_local_angles(self) -> bool:
        """True if layers with a window have rotary angles of their own."""
        return isinstance(self.settings, RotarySettings) and self.settings.local_rotary_base is not None

    def _mask(self, batch: Batch, has_window: bool) -> Tensor | BlockMask | None:
        return self.build_mask(
            batch.tokens_BT.shape[1],
            causal=self.causal,
            window=self.shape.window if has_window else None,
            documents_BT=batch.documents_BT,
            not_padding_BT=batch.not_padding_BT,
            device=batch.tokens_BT.device,
            always=self.settings.caps_scores,
        )

    def _rotation(self, batch: Batch, is_local: bool) -> Rotation:
        """Return the rotary angles at the batch's positions: those of a decoder's layers with a window if `is_local`,
        otherwise those of its other layers.
        """
        settings = self.settings
        assert isinstance(settings, RotarySettings), "only a model with settings of rotary positions has such layers"
        width, head_width = batch.tokens_BT.shape[1], self.shape.head_width
        may_be_long = settings.rotary_scaling == "longrope" and width > (settings.rotary_original_len or 0)
        length = text_lengths_of(batch) if may_be_long else width
        return build_rotation(positions_of(batch), head_width, settings, length=length, is_local=is_local)


def _start_of(name: str, settings: TransformerSettings) -> Start:
    """Return the distribution from which the parameter `name` is initialized: the constant 0 for biases, 0 or 1 for
    norms, and a normal distribution for all other weights, narrower for the last linear of attention and MLP.
    """
    match name.split(".")[-2:]:
        case [_, "bias"]:
            return Start()
        case [part, _] if part.endswith("norm"):
            return Start(mean=settings.norm_start)
        case ["out" | "down", _]:
            return Start(std=settings.branch_std)
        case ["token" | "head" | "decoder", _]:
            return Start(std=settings.init_std, num_rows=settings.vocab_size)
    return Start(std=settings.init_std)
