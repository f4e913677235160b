"""Count the steps of an epoch, for another tool's option that gives a run's length in epochs.

Called while a line of another tool is translated. Reads the dataset as a dry run does, and writes nothing beside it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from lmtrain.config.compose_run_settings import compose
from lmtrain.errors import LmtrainError
from lmtrain.train.run_config import RunConfig

_MAX_INDEX_BYTES = 64 << 20  # of a dataset's .idx; because: an error message must not take minutes


def count_epoch(words: Sequence[str]) -> tuple[int, int] | None:
    """Return (samples of an epoch, samples of a step) of a run with these settings; None if they are wrong, or if the
    dataset is not there or is very large.
    """
    from lmtrain.data.data_settings import DataSettings
    from lmtrain.data.store.indexed_dataset import dataset_file
    from lmtrain.train.startup_checks.preflight import load_data

    with tempfile.TemporaryDirectory() as folder:
        try:
            config = compose(RunConfig, [*words, f"data.index_dir={folder}"])
            if config.stages or not isinstance(config.data, DataSettings) or config.data.text is not None:
                return None
            if dataset_file(Path(config.data.path), ".idx").stat().st_size > _MAX_INDEX_BYTES:
                return None
            _, _, data = load_data(config)
        except (LmtrainError, OSError):
            return None
        return data.train.num_samples, config.train.global_batch
