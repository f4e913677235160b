"""Several processes pretended by threads: each steps on its rows of every weight, and Whole goes through a board."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from lmtrain.optim.interface_to_whole_weights import WholeTensors

TIMEOUT_S = 120


class Board:
    """Where each rank lays something and everybody reads all of it."""

    def __init__(self, size: int) -> None:
        self.size, self.laid = size, [torch.empty(0)] * size
        self.barrier = threading.Barrier(size, timeout=TIMEOUT_S)
        self.num_sums = 0

    def all(self, rank: int, tensor: Tensor) -> list[Tensor]:
        self.laid[rank] = tensor
        self.barrier.wait()
        found = list(self.laid)
        self.barrier.wait()
        return found


class PretendedTensors:
    """Rank r of `copies` x `shards` holds rows chunk(shards)[r % shards] of each weight, as another copy does too."""

    def __init__(self, board: Board, rank: int, shards: int, sections: Mapping[str, tuple[int, ...]]) -> None:
        self.board, self.rank, self.shards, self.sections = board, rank, shards, sections

    @property
    def num_sharers(self) -> int:
        return self.board.size

    @property
    def sharer_index(self) -> int:
        return self.rank

    def broadcast(self, owner: int, tensor: Tensor) -> Tensor:
        return self.board.all(self.rank, tensor)[owner]

    def counted(self, name: str, shard: Tensor) -> Tensor:
        return shard

    def sum_over_shards(self, names: Sequence[str], values_PN: Tensor) -> Tensor:
        assert values_PN.shape[0] == len(names)
        self.board.num_sums += self.rank == 0
        copies = self.board.size // self.shards
        return torch.stack(self.board.all(self.rank, values_PN)).sum(0) / copies

    def gather_sections(self, name: str, local: Tensor) -> list[Tensor]:
        whole = torch.cat(self.board.all(self.rank, local)[: self.shards])
        return list(torch.split(whole, list(self.sections.get(name, whole.shape[:1]))))

    def local_shard(self, name: str, sections: list[Tensor]) -> Tensor:
        return shard(torch.cat(sections), self.shards, self.rank % self.shards)


def shard(whole: Tensor, shards: int, index: int) -> Tensor:
    """torch.chunk, with nothing for ranks that it has no rows for."""
    chunks = whole.chunk(shards)
    return chunks[index] if index < len(chunks) else whole[:0]


def stepped(
    weights: Mapping[str, Tensor],
    gradients: Sequence[Mapping[str, Tensor]],
    optimizer_of: Callable[[dict[str, nn.Parameter], WholeTensors], torch.optim.Optimizer],
    *,
    copies: int,
    shards: int,
    sections: Mapping[str, tuple[int, ...]],
) -> tuple[dict[str, Tensor], Board]:
    """The whole weights after one update for each set of gradients, each copy of them checked to be the same."""
    board, held, failures = Board(copies * shards), [dict[str, nn.Parameter]()] * copies * shards, list[Exception]()

    def work(rank: int) -> None:
        mine = {name: nn.Parameter(shard(w, shards, rank % shards).clone()) for name, w in weights.items()}
        held[rank] = mine
        optimizer = optimizer_of(mine, PretendedTensors(board, rank, shards, sections))
        try:
            for step in gradients:
                for name, parameter in mine.items():
                    parameter.grad = shard(step[name], shards, rank % shards).clone()
                optimizer.step()
        except Exception as error:
            failures.append(error)
            board.barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(board.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    if failures:
        raise failures[0]
    for rank, mine in enumerate(held):
        assert all(torch.equal(p, held[rank % shards][name]) for name, p in mine.items())
    return {name: torch.cat([held[i][name].detach() for i in range(shards)]) for name in weights}, board
