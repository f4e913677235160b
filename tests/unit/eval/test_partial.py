"""The first items alone: requests and documents may be walked again, and other items never show."""

from __future__ import annotations

from lmtrain.eval.read_texts import TextInput
from lmtrain.eval.run_task import first_items
from lmtrain.eval.task import TaskOptions
from lmtrain.eval.tasks.perplexity import TASK
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer


def test_requests_and_documents_can_be_walked_twice(tokenizer: Tokenizer) -> None:
    texts = TextInput(name="four", documents=["one two three", "a", "four five", "six"], sha256="", sha256_of="")
    whole = TASK.prepare_texts(texts, TaskOptions(tokenizer=tokenizer, seq_len=4))
    first = first_items(whole, 3)
    assert first.documents is not None
    assert whole.documents is not None
    asked = [(request.item, request.num_scored) for request in whole.requests if request.item < 3]
    assert {item for item, _ in asked} == {0, 1, 2}
    assert {request.item for request in whole.requests} == {0, 1, 2, 3}
    for _ in range(2):
        assert [(request.item, request.num_scored) for request in first.requests] == asked
        assert [tokens.tolist() for tokens in first.documents] == [tokens.tolist() for tokens in whole.documents][:3]
