"""Text generation: sampling token by token, streamed in whole characters.

Called by `lmtrain generate` and the Python interface. A context longer than the model's window is cropped on its left;
the end-of-document token ends a sample, or for an imported model the tokens that its generation_config.json names. A
seed gives the same text on every device, because tokens are drawn on the host.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmtrain.batch import IGNORED, Batch
from lmtrain.errors import NonFiniteLossError, UsageError, way
from lmtrain.eval.sampling_and_precision_settings import Sampling
from lmtrain.eval.score_targets import Scorable, Subject
from lmtrain.runtime.files.atomic_files import atomic_file
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer


@dataclass(frozen=True)
class GeneratedText:
    """A generated text with its number of tokens and the reason why it ends."""

    text: str
    num_tokens: int
    stopped_by: str  # "end_of_document" or "max_new_tokens"


def generate(
    model: Scorable, tokenizer: Tokenizer, prompt: str, max_new_tokens: int, sampling: Sampling, seq_len: int
) -> GeneratedText:
    """Generate up to `max_new_tokens` tokens after `prompt`. Return their text without the prompt, their number, and
    why generation stopped. `seq_len` is the number of tokens that the model sees at once.
    """
    context = prompt_tokens(tokenizer, prompt)
    ids = list(generate_tokens(model, context, max_new_tokens, sampling, seq_len, tokenizer.end_ids))
    ended = bool(ids) and ids[-1] in tokenizer.end_ids
    return GeneratedText(
        tokenizer.decode(ids[:-1] if ended else ids), len(ids), "end_of_document" if ended else "max_new_tokens"
    )


def generate_stream(
    model: Scorable, tokenizer: Tokenizer, prompt: str, max_new_tokens: int, sampling: Sampling, seq_len: int
) -> Iterator[str]:
    """Yield the text that `generate` returns in pieces, each as soon as its characters are complete. `seq_len` is the
    number of tokens that the model sees at once.
    """
    context = prompt_tokens(tokenizer, prompt)
    tokens = generate_tokens(model, context, max_new_tokens, sampling, seq_len, tokenizer.end_ids)
    return stream_text(tokenizer, (token for token in tokens if token not in tokenizer.end_ids))


def generate_rows(
    subject: Subject, prompts: Sequence[str], max_new_tokens: int, samplings: Sequence[Sampling]
) -> Iterator[dict[str, Any]]:
    """Yield a dict of JSON values for each prompt and sampling, all of a prompt before the next: the prompt, the
    sampling, the text that continues the prompt, and facts about it.
    """
    for prompt, sampling in product(prompts, samplings):
        text = generate(subject.model, subject.tokenizer, prompt, max_new_tokens, sampling, subject.seq_len)
        yield {"prompt": prompt} | asdict(sampling) | asdict(text)


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Write each row as a line of JSON to a file, and yield it. The file is there once all are."""
    with atomic_file(path) as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
            yield row


def stream_text(tokenizer: Tokenizer, tokens: Iterable[int]) -> Iterator[str]:
    """Yield the text of `tokens` in pieces as the tokens come. The bytes of an incomplete UTF-8 character are held back
    until the rest has come.
    """
    decoded: list[int] = []
    num_yielded = 0  # number of characters yielded
    for token in tokens:
        decoded.append(token)
        # an incomplete character decodes to U+FFFD at the end; the text before it is final
        text = tokenizer.decode(decoded).rstrip("\ufffd")
        if len(text) > num_yielded:
            yield text[num_yielded:]
            num_yielded = len(text)
    if rest := tokenizer.decode(decoded)[num_yielded:]:
        yield rest


def prompt_tokens(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Return the token ids of `prompt`. For an empty prompt that is the end-of-document token, after which a new
    document starts; raise UsageError if the tokenizer has none.
    """
    tokens = tokenizer.encode(prompt)
    if tokens:
        return tokens
    if tokenizer.eod_id is None:
        raise UsageError(
            "The prompt is empty, and the tokenizer has no end-of-document token to begin with. Give a prompt."
        )
    return [tokenizer.eod_id]


def generate_tokens(
    model: Scorable, context: list[int], max_new_tokens: int, sampling: Sampling, seq_len: int, end_ids: frozenset[int]
) -> Iterator[int]:
    """Yield up to `max_new_tokens` token ids that continue the token ids `context`, drawn as `sampling` says. An id of
    `end_ids` is yielded as the last. `seq_len` is the number of tokens that the model sees at once.
    """
    generator = torch.Generator().manual_seed(int(sampling.seed))  # because: it may be a number of numpy
    tokens = list(context)
    for _ in range(max_new_tokens):
        token = draw_token(next_logits(model, tokens[-seq_len:]), sampling, generator)
        yield token
        if token in end_ids:
            return
        tokens.append(token)


@torch.no_grad()
def next_logits(model: Scorable, tokens: list[int]) -> Tensor:
    """Return the model's logits for the token that follows the token ids `tokens`: shape [vocabulary], float64, on the
    host.
    """
    tokens_BT = torch.tensor([tokens], device=model.device)
    keep_BT = torch.zeros_like(tokens_BT, dtype=torch.bool)
    keep_BT[0, -1] = True
    return model.logits(unlabelled_batch(tokens_BT), keep_BT)[0].double().cpu()  # waits for the device once per token


def unlabelled_batch(tokens_BT: Tensor) -> Batch:
    """Return a batch of these token ids in which no position has a label, to compute outputs but no loss."""
    return Batch(tokens_BT=tokens_BT, labels_BT=torch.full_like(tokens_BT, IGNORED))


def draw_token(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Draw a token id from the logits `logits_V`, as `sampling` says. Raise NonFiniteLossError if a logit is NaN or
    none is finite.
    """
    if torch.isnan(logits_V).any() or not torch.isfinite(logits_V).any():
        raise NonFiniteLossError(
            f"The logits of the model are not finite. Try {way('--precision', 'fp32')}; if that fails too, "
            "the weights are damaged."
        )
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    logits_V = _keep_top_p(_keep_top_k(logits_V / sampling.temperature, sampling.top_k), sampling.top_p)
    return int(torch.multinomial(logits_V.softmax(-1), 1, generator=generator))


def _keep_top_k(logits_V: Tensor, top_k: int | None) -> Tensor:
    """Return the logits with all but the `top_k` largest set to -inf; unchanged if `top_k` is None."""
    if top_k is None or top_k >= len(logits_V):
        return logits_V
    chosen = logits_V.topk(top_k)
    return torch.full_like(logits_V, -torch.inf).scatter(0, chosen.indices, chosen.values)


def _keep_top_p(logits_V: Tensor, top_p: float | None) -> Tensor:
    """Return the logits with all but the most likely tokens set to -inf: the fewest tokens, at least one, whose
    probabilities reach `top_p` together. Unchanged if `top_p` is None.
    """
    if top_p is None or top_p >= 1:
        return logits_V
    ordered, order = logits_V.sort(descending=True, stable=True)
    probabilities = ordered.softmax(-1)
    return logits_V.index_fill(0, order[probabilities.cumsum(-1) - probabilities >= top_p], -torch.inf)
