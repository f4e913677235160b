"""The published protocols a second time, written from their descriptions: one window at a time, and slow.

Nothing here is shared with lmtrain/eval. `log_probs(fed)` gives, for a list of tokens, a row of log-probabilities
after each of them; `encode` gives a text's tokens. Whoever changes a task compares it with these.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

LogProbs = Callable[[list[int]], NDArray[np.float64]]
Encode = Callable[[str], list[int]]
IGNORE = -100


@dataclass
class Twin:
    """What a protocol found: sums, and the published figures by the names of our measures."""

    nll: float = 0.0
    targets: int = 0
    greedy: list[bool] = field(default_factory=list)  # of lines, where there are lines
    line_nll: list[float] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)


def detokenized(s: str) -> str:
    """The detokenizer that Megatron-LM and lm-evaluation-harness have in common."""
    for old, new in [("s '", "s'")]:
        s = s.replace(old, new)
    s = re.sub(r"/' [0-9]/", "/'[0-9]/", s)
    for mark in "-,.":
        s = s.replace(f" @{mark}@ ", mark)
    for mark in ":;.!?,":
        s = s.replace(f" {mark} ", f"{mark} ")
    s = re.sub(r"\(\s*([^\)]*?)\s*\)", lambda m: "(" + m[1] + ")", s)
    s = re.sub(r"\[\s*([^\]]*?)\s*\]", lambda m: "[" + m[1] + "]", s)
    s = re.sub(r"{\s*([^}]*?)\s*}", lambda m: "{" + m[1] + "}", s)
    s = re.sub(r"\"\s*([^\"]*?)\s*\"", lambda m: '"' + m[1] + '"', s)
    s = re.sub(r"'\s*([^']*?)\s*'", lambda m: "'" + m[1] + "'", s)
    for count in (4, 3, 2):
        s = s.replace(" ".join("=" * count), "=" * count)
    for old, new in [(" \u00b0 ", "\u00b0"), (" \n", "\n"), ("\n ", "\n"), (" N ", " 1 "), (" 's", "'s")]:
        s = s.replace(old, new)
    return s


def megatron_wikitext(text: str, encode: Encode, log_probs: LogProbs, seq_len: int, overlap: int, pad: int) -> Twin:
    """tasks/zeroshot_gpt, WIKITEXT103: windows of seq_len + 1 padded with `pad`, and a mask of what counts."""
    num_original = len(text.strip().split(" "))
    tokens = encode(detokenized(text))
    found = Twin()
    for number in range(max(math.ceil(max(len(tokens) - 1 - overlap, 0) / overlap) + 1, 1)):
        piece = tokens[number * overlap : number * overlap + seq_len + 1]
        mask = [1] * len(piece) + [0] * (seq_len + 1 - len(piece))
        piece = piece + [pad] * (seq_len + 1 - len(piece))
        mask = mask[1:]
        if overlap != seq_len and number != 0:
            mask[:-overlap] = [0] * (seq_len - overlap)
        if not any(mask):
            continue  # a window of padding alone adds nothing
        rows = log_probs(piece[:-1])
        found.nll -= sum(float(rows[at, piece[at + 1]]) for at in range(seq_len) if mask[at])
        found.targets += sum(mask)
    loss = found.nll / (len(tokens) - 1)
    token_ratio = (len(tokens) - 1) / (num_original - 1)
    found.figures = {
        "token_perplexity": math.exp(min(20, loss)),
        "word_perplexity_adjusted": math.exp(min(20, loss * token_ratio)),
    }
    return found


def hf_strided(text: str, encode: Encode, log_probs: LogProbs, seq_len: int, stride: int) -> Twin:
    """The page "Perplexity of fixed-length models": rows joined by blank lines, a mean loss for each window."""
    rows = [line if line.strip() else "" for line in re.findall(r"[^\n]*\n", text)]
    tokens = encode("\n\n".join(rows))
    found = Twin()
    loss_sum, loss_tokens, prev_end = 0.0, 0, 0
    for begin in range(0, len(tokens), stride):
        end = min(begin + seq_len, len(tokens))
        target_len = end - prev_end
        fed = tokens[begin:end]
        labels = [IGNORE] * (len(fed) - target_len) + fed[len(fed) - target_len :]
        after = log_probs(fed)
        losses = [-float(after[at, labels[at + 1]]) for at in range(len(fed) - 1) if labels[at + 1] != IGNORE]
        valid = sum(label != IGNORE for label in labels) - 1
        if losses:
            loss_sum += sum(losses) / len(losses) * valid
            loss_tokens += valid
        found.nll += sum(losses)
        found.targets += len(losses)
        prev_end = end
        if end == len(tokens):
            break
    found.figures = {"token_perplexity": math.exp(loss_sum / loss_tokens)}
    return found


def harness_pages(text: str) -> list[str]:
    pages, held = [], []  # type: ignore[var-annotated]
    for line in text.split("\n"):
        squeezed = line.replace("= = =", "===").replace("= =", "==").strip()
        if squeezed.startswith("= ") and squeezed.strip().endswith(" ="):
            if "\n".join(held).strip():
                pages.append("\n".join(held))
            held = []
        held.append(line)
    return [*pages, "\n".join(held)]


def harness_wikitext(text: str, encode: Encode, log_probs: LogProbs, seq_len: int, prefix: int) -> Twin:
    """lm-evaluation-harness, wikitext 2.0: rolling log-likelihood of each page, one token of context."""
    found, words, num_bytes = Twin(), 0, 0
    for page in harness_pages(text):
        tokens = encode(detokenized(page))
        words += len(re.split(r"\s+", page))
        num_bytes += len(page.encode())
        done = 0
        while done < len(tokens):
            if done == 0:
                count = min(seq_len, len(tokens))
                fed = [prefix, *tokens[: count - 1]]
            else:
                count = min(seq_len, len(tokens) - done)
                fed = tokens[done + count - seq_len - 1 : done + count - 1]
            rows = log_probs(fed)[-count:]
            found.nll -= sum(float(rows[at, tokens[done + at]]) for at in range(count))
            done += count
        found.targets += len(tokens)
    found.figures = {
        "word_perplexity": math.exp(found.nll / words),
        "byte_perplexity": math.exp(found.nll / num_bytes),
        "bits_per_byte": found.nll / num_bytes / math.log(2),
    }
    return found


def lambada(content: str, rule: str, encode: Encode, log_probs: LogProbs, seq_len: int, prefix: int) -> Twin:
    """`rule`: megatron-strict, megatron-token, lmeval."""
    found = Twin()
    for line in content.split("\n"):
        if not line.strip():
            continue
        context, target = _RULES[rule](json.loads(line)["text"] if line.startswith("{") else line, encode)
        fed = ((context or [prefix]) + target)[-(seq_len + 1) :][:-1]
        rows = log_probs(fed)[-len(target) :]
        line_nll = -sum(float(rows[at, token]) for at, token in enumerate(target))
        found.line_nll.append(line_nll)
        found.greedy.append(all(int(rows[at].argmax()) == token for at, token in enumerate(target)))
        found.nll += line_nll
        found.targets += len(target)
    accuracy = sum(found.greedy) / len(found.greedy)
    per_line = math.exp(found.nll / len(found.greedy))
    found.figures = (
        {"last_token_accuracy": accuracy, "last_token_perplexity": per_line}
        if rule == "megatron-token"
        else {"whole_word_accuracy": accuracy, "last_word_perplexity": per_line}
    )
    return found


def _strict(text: str, encode: Encode) -> tuple[list[int], list[int]]:
    last = text.split()[-1]
    return encode(text[: text.rfind(last)].strip()), encode(" " + last)


def _token(text: str, encode: Encode) -> tuple[list[int], list[int]]:
    tokens = encode(text)
    return tokens[:-1], tokens[-1:]


def _harness(text: str, encode: Encode) -> tuple[list[int], list[int]]:
    context, target = " ".join(text.split(" ")[:-1]), " " + text.split(" ")[-1]
    spaces = len(context) - len(context.rstrip())
    if spaces > 0:
        target = context[-spaces:] + target
        context = context[:-spaces]
    whole, alone = encode(context + target), encode(context)
    return alone, whole[len(alone) :]


_RULES: dict[str, Any] = {"megatron-strict": _strict, "megatron-token": _token, "lmeval": _harness}
