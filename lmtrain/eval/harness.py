"""Adapter that lets lm-evaluation-harness score lmtrain checkpoints: `--model lmtrain`, with any of its tasks.

Version 0.4.13 finds models only in its own package: cli/harness.py imports this file and starts the harness's command,
and a Python caller must import this file first. No other code imports it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from lm_eval.__main__ import cli_evaluate as cli_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from lmtrain.checkpoint.view_with_ema_as_weights import check_weight_set
from lmtrain.errors import DataError, UsageError, own, shorten, spelling_hint
from lmtrain.eval.load_model import load_for_eval
from lmtrain.eval.sample_text_from_prompt import generate_tokens, prompt_tokens
from lmtrain.eval.sampling_and_precision_settings import Sampling
from lmtrain.eval.score_targets import Scorer, TargetScores
from lmtrain.eval.task import eod_id
from lmtrain.eval.windows import Request
from lmtrain.runtime.machine.choose_device import pick_device
from lmtrain.runtime.processes.process_environment import ProcessEnv

MAX_NEW_TOKENS = 256  # the harness's default if a task sets none
ARGUMENTS = ("pretrained", "precision", "device", "batch_size", "weights")


@register_model("lmtrain")
class LmtrainModel(TemplateLM):  # type: ignore[misc]  # because: the harness may be absent where types are checked
    """A checkpoint or run folder as a harness model: its own tokenizer encodes texts, lmtrain's scorer scores them."""

    def __init__(
        self,
        pretrained: str,
        precision: str = "fp32",
        device: str = "auto",
        batch_size: int | str = 8,
        max_batch_size: int | None = None,
        weights: str = "model",
        **unknown: Any,
    ) -> None:
        super().__init__()
        for name, value in unknown.items():
            raise UsageError(f"--model_args {name}={value} is not known to lmtrain. {spelling_hint(name, ARGUMENTS)}")
        if max_batch_size is not None or not str(batch_size).isdecimal() or int(batch_size) == 0:
            raise UsageError(
                f"--batch_size={batch_size} must be a whole number, since lmtrain does not search for a size. "
                f"Use {own(8)}."
            )
        env = ProcessEnv.detect()
        if env.world_size > 1:
            raise UsageError(
                f"{env.launcher} started {env.world_size} processes, but each would score everything. Start only one."
            )
        weight_set = check_weight_set(weights, "--model_args weights")
        self.subject = load_for_eval(Path(pretrained), pick_device(device), precision, weight_set).subject
        self.batch_size = int(batch_size)

    @property
    def max_length(self) -> int:
        return self.subject.seq_len

    @property
    def eot_token_id(self) -> int:
        return eod_id(self.subject.tokenizer)

    @property
    def tokenizer_name(self) -> str:
        return self.subject.tokenizer.fingerprint

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return a text's token ids; no special tokens are added, so the ids do not depend on the text's position."""
        return self.subject.tokenizer.encode(string)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        for texts, _context, target in requests:
            if not 1 <= len(target) <= self.max_length:
                raise DataError(
                    f"The answer {shorten(texts[1], 60)!r} has {len(target)} tokens; the model takes 1 to "
                    f"{self.max_length} tokens. Use a task that fits the model."
                )
        scoring_requests = [_request(context, target, self.max_length) for _given, context, target in requests]
        answers = []
        for (texts, *_rest), scores in zip(requests, self._score(scoring_requests), strict=True):
            answers.append((-float(scores.nll.sum()), bool(scores.greedy.all())))
            self.cache_hook.add_partial("loglikelihood", texts, answers[-1])
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood in nats of each request's whole text, scored in the windows that the harness cuts.
        `disable_tqdm` belongs to the harness's interface and is ignored.
        """
        windows = [
            _request(context, target, self.max_length, item)
            for item, (text,) in enumerate(request.args for request in requests)
            for context, target in map(
                make_disjoint_window,
                get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, context_len=1),
            )
        ]
        sums = np.zeros(len(requests))
        for window, scores in zip(windows, self._score(windows), strict=True):
            sums[window.item] -= scores.nll.sum()
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, float(total))
        return [float(total) for total in sums]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        texts = []
        for request in tqdm(requests, desc="generate_until", disable=disable_tqdm):
            prompt, generation_kwargs = request.args
            texts.append(self._generate(prompt, normalize_gen_kwargs(generation_kwargs, MAX_NEW_TOKENS)))
            self.cache_hook.add_partial("generate_until", (prompt, generation_kwargs), texts[-1])
        return texts

    def _generate(self, prompt: str, generation_kwargs: dict[str, Any]) -> str:
        until, num_new, sampling = _parse_generation(generation_kwargs)
        tokenizer, room = self.subject.tokenizer, self.max_length - num_new
        if room < 1:
            raise UsageError(
                f"max_gen_toks={num_new} leaves no room for a prompt: the model's window is {self.max_length} tokens. "
                "Give fewer."
            )
        context, ends = prompt_tokens(tokenizer, prompt)[-room:], tokenizer.end_ids
        ids: list[int] = []
        for token in generate_tokens(self.subject.model, context, num_new, sampling, self.max_length, ends):
            ids += [token] if token not in ends else []
            if any(stop in tokenizer.decode(ids) for stop in until):
                break
        return str(postprocess_generated_text(tokenizer.decode(ids), until, None))

    def _score(self, requests: Sequence[Request]) -> list[TargetScores]:
        scorer = Scorer(self.subject.model, batch_size=self.batch_size)
        return list(tqdm(scorer.score(requests), desc="scored by lmtrain", total=len(requests)))


def _request(context: list[int], target: list[int], max_length: int, item: int = 0) -> Request:
    """Build a request for the target after the context, cut on the left to the model's window."""
    return Request(np.array((context + target)[-(max_length + 1) :], np.int64), len(target), item)


def _parse_generation(generation_kwargs: dict[str, Any]) -> tuple[list[str], int, Sampling]:
    """Parse a harness task's arguments for generation. Return (stop strings, largest number of new tokens, sampling
    settings). Raise UsageError for an unknown argument.
    """
    rest = dict(generation_kwargs)
    until, num_new, samples = rest.pop("until"), rest.pop("max_gen_toks"), rest.pop("do_sample")
    temperature = rest.pop("temperature", 0.0)
    chosen = {key: rest.pop(key) for key in ("top_k", "top_p", "seed") if key in rest}
    for key, value in rest.items():
        hint = spelling_hint(key, tuple(generation_kwargs))
        raise UsageError(f"--gen_kwargs {key}={value} is not known to lmtrain. {hint}")
    # because: the harness's own model samples at temperature 1 if a task sets do_sample and no temperature
    settings = Sampling(temperature=(temperature or 1.0) if samples else 0.0, **chosen)
    return [stop for stop in until if stop], num_new, settings
