"""How many processes share the work, axis by axis. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from lmtrain.config.base import Problem, Settings, problem_if
from lmtrain.layout import Layout


@dataclass(frozen=True, kw_only=True)
class ParallelSettings(Settings):
    pp: int = 1
    vp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1

    def problems(self) -> Iterator[Problem]:
        for field in fields(self):
            size = getattr(self, field.name)
            yield from problem_if(
                size != 1, field.name, size,
                "asks for several processes, and this version trains with one", f"Set parallel.{field.name}=1.",
            )

    @property
    def layout(self) -> Layout:
        return Layout(self.pp, self.vp, self.dp_replicate, self.dp_shard, self.tp)
