"""Count the steps of an epoch, for another tool's option that gives a run's length in epochs.

Called while a line of another tool is translated. Reads the dataset as a dry run does, and writes nothing beside it.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stderr, suppress
from pathlib import Path

from lmtrain.config.compose_run_settings import compose
from lmtrain.errors import LmtrainError
from lmtrain.train.run_config import RunConfig

_MAX_INDEX_BYTES = 64 << 20  # of a dataset's .idx; because: an error message must not take minutes


def count_epoch(words: Sequence[str]) -> tuple[int, int, bool] | None:
    """Return (samples of an epoch, samples of a step, whether the first is an estimate) of a run with these settings;
    None if they are wrong, or if the dataset or the text is not there or is very large. A text is encoded, or the
    beginning of a long one.
    """
    from lmtrain.data.data_settings import DataSettings
    from lmtrain.data.store.indexed_dataset import dataset_file
    from lmtrain.start.dataset_from_text import preview_data_of_text
    from lmtrain.train.startup_checks.preflight import load_data

    with tempfile.TemporaryDirectory() as folder, suppress(LmtrainError, OSError), redirect_stderr(io.StringIO()):
        config = compose(RunConfig, [*words, f"data.index_dir={folder}"])
        if config.stages or not isinstance(config.data, DataSettings):
            return None
        with preview_data_of_text(config, words, lambda _: None) as (checked, text):
            assert isinstance(checked.data, DataSettings)
            if dataset_file(Path(checked.data.path), ".idx").stat().st_size > _MAX_INDEX_BYTES:
                return None
            _, _, data = load_data(checked)
            share = text.share if text is not None else 1.0
        return round(data.train.num_samples / share), config.train.global_batch, share < 1
    return None
