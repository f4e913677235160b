"""The ids that end a text, as a Hugging Face folder names them."""

from __future__ import annotations

import pytest

from lmtrain.tokenizer.vocabulary_files import end_ids

LIST, ONE, NONE = (b'{"eos_token_id": %s}' % ids for ids in (b"[2, 7]", b"3", b"null"))


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config.json": LIST, "config.json": ONE}, {2, 7}),
        ({"generation_config.json": NONE, "config.json": ONE}, set()),
        ({"config.json": ONE}, {3}),
        ({"config.json": b'{"eos_token_id": [true, -1, "2", 4]}'}, {4}),
        ({"config.json": b"[]"}, set()),
        ({}, set()),
    ],
)
def test_they_are_a_number_or_a_list_in_the_file_that_transformers_reads(
    files: dict[str, bytes], expected: set[int]
) -> None:
    assert end_ids(files) == expected
