"""Whether a dataset that was finished earlier, and perhaps half renamed since, is still what was written. Torch-free.

Called where a killed preprocess is gone on with: what lies there was written by another process, at another time.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from lmtrain.data.store.blocks import TokenBlocks, read_block_file
from lmtrain.data.store.format import DatasetInfo
from lmtrain.data.store.mapped import Mapped
from lmtrain.errors import DataError
from lmtrain.runtime.files import files
from lmtrain.runtime.files.checksum import crc32c


def check_finished(path_of: Callable[[str], Path], sidecar_sha256: str, tokenizer: bytes) -> None:
    """Raises where any of the files, which may lie in several folders, is not the one of this sidecar."""
    info = DatasetInfo.read(path_of(".json"))
    if info.sidecar_sha256 != sidecar_sha256 or info.blocks_sha256 is None:
        raise DataError(f"{path_of('.json')} is not the sidecar that was written here. Make the dataset again.")
    if files.read_bytes(path_of(".tokenizer.json"), len(tokenizer)) != tokenizer:
        raise DataError(f"{path_of('.tokenizer.json')} is not the tokenizer of this work. Make the dataset again.")
    index, tokens = (Mapped(path_of(suffix), path_of(suffix).stat().st_size) for suffix in (".idx", ".bin"))
    sums, index_crc = read_block_file(path_of(".blocks"), info.blocks_sha256, tokens.num_bytes)
    if crc32c(index.bytes) != index_crc:
        raise DataError(f"{index.path} is not the index that was written here. Make the dataset again.")
    TokenBlocks.known(tokens, np.dtype(info.dtype).itemsize, sums).check_all()
