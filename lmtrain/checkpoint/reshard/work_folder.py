"""The folder beside an output, OUTPUT.resharding, in which an attempt works until its files take the output's name.

Called by reshard and its attempt. Whatever is killed when, the output is the old checkpoint, nothing or the new one.
Torch-free.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from lmtrain.checkpoint.disk.format import MANIFEST
from lmtrain.errors import OutputError
from lmtrain.runtime.files.files import put_in_place
from lmtrain.runtime.processes.faults import fault_point

SLACK_BYTES = 16 << 20  # manifest, lists of blocks, and the file system's own records


@dataclass(frozen=True)
class WorkFolder:
    output: Path

    @property
    def path(self) -> Path:
        return self.output.with_name(f"{self.output.name}.resharding")

    @property
    def files(self) -> Path:
        """What becomes the output."""
        return self.path / "files"

    @property
    def journal(self) -> Path:
        return self.path / "journal.jsonl"

    @property
    def _aside(self) -> Path:
        return self.path / "replaced"

    def check_free(self, overwrite: bool) -> None:
        """Refuse an output that is there, unless it is a checkpoint that may go, and a link in place of this folder."""
        if self.path.is_symlink():
            raise OutputError(f"{self.path}, where reshard works, is a link. Remove it or choose another output.")
        if not os.path.lexists(self.output):
            return
        if not overwrite:
            raise OutputError(f"{self.output} exists. Choose another output, or replace it with --overwrite.")
        is_checkpoint = (self.output / MANIFEST).is_file() and not self.output.is_symlink()
        if not is_checkpoint and not (self.output.is_dir() and not os.listdir(self.output)):
            raise OutputError(f"{self.output} is not a checkpoint, so it is not replaced. Choose another output.")

    def bring_back(self) -> None:
        """A checkpoint that was moved aside for one that never took its place."""
        if self._aside.exists() and not os.path.lexists(self.output):
            os.rename(self._aside, self.output)

    def publish(self, overwrite: bool) -> None:
        fault_point("reshard.publish")
        put_in_place(self.files, self.output, self._aside if overwrite else None)
        fault_point("reshard.cleanup")
        self.clean_up()

    def clean_up(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
