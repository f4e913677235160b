"""`lmtrain.load` and the model that it returns: logits, losses, hidden states and text from a trained model.

One process holds the whole model, whatever the layout of the run that trained it. Every number comes from the functions
that `lmtrain eval` and `lmtrain generate` call.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lmtrain.api.check_arguments import check_dtype, check_token_ids, checked
from lmtrain.api.encode_and_decode_text import Tokenizer
from lmtrain.errors import UsageError
from lmtrain.eval import sample_text_from_prompt as generation
from lmtrain.eval.load_model import LoadedModel, load_source
from lmtrain.eval.sampling_and_precision_settings import DEFAULT_NEW_TOKENS, Sampling
from lmtrain.eval.score_targets import Scorer
from lmtrain.eval.windows import Request
from lmtrain.models.model_settings import ModelSettings
from lmtrain.runtime.machine.choose_device import memory_errors
from lmtrain.start.find_model_at_path import find_model
from lmtrain.train.record.facts_of_recorded_runs import facts_of_saved_run
from lmtrain.units import format_count, plural

_FEWER_ROWS = "Give fewer rows or shorter texts at a time, or load the model with another dtype."


@checked
def load(
    path: str | os.PathLike[str], dtype: str = "fp32", device: str | torch.device | None = None,
    weights: str = "model", step: int | None = None,
) -> tuple[Model, Tokenizer]:  # fmt: skip
    """Load a trained model and its tokenizer. `path` is a run's folder, whose newest checkpoint is loaded, or with
    `step` that of this step; a checkpoint; RUN@best; or a Hugging Face folder of one of the families that `lmtrain
    import` reads.

    `dtype` is the type to compute in: fp32, bf16 or fp16. `device` is cpu, cuda, or a GPU such as cuda:1; without it
    the first GPU is used if there is one, else the CPU. A GPU becomes torch's current device. With `weights` "ema" the
    model has the exponential average that the checkpoint holds beside its weights. Raise an LmtrainError if there is no
    such model or average, if a file is damaged, if the type or device cannot be used, or if memory does not suffice.
    """
    check_dtype(dtype)
    with memory_errors("Load the model with dtype bf16, or on another device."):
        loaded = load_source(find_model(Path(path), weights, step), _find_device(device), dtype)
    return Model(loaded), Tokenizer(loaded.subject.tokenizer)


def _find_device(device: str | torch.device | None) -> torch.device:
    """Return the device that `device` names; None is the first GPU, or the CPU if torch sees no GPU. A GPU also becomes
    torch's current device. Raise UsageError if there is no such device.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    name = str(device) if device is not None else "cuda" if num_gpus else "cpu"
    kind, _, index = name.partition(":")
    if name == "cpu":
        return torch.device("cpu")
    if kind != "cuda" or not (index or "0").isdecimal():
        raise UsageError(f"device={name} is not a device that models compute on. Use cpu, cuda, or a GPU as in cuda:1.")
    if int(index or 0) >= num_gpus:
        raise UsageError(
            f"device={name} does not exist: torch {torch.__version__} sees {plural(num_gpus, 'GPU')}. Use device=cpu "
            "or leave it out."
        )
    found = torch.device("cuda", int(index or 0))
    torch.cuda.set_device(found)  # because: Triton's kernels run on the current device
    return found


class Model:
    """A trained model, loaded for use: no method trains it, and no result carries gradients.

    Ids are integers in a list, a numpy array or a tensor, of the shape [T] for one text or [B, T] for B texts of the
    same length. T is at most `seq_len`. Results have the axis B only if the ids have it.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        """Wrap a loaded model; `lmtrain.load` calls this."""
        self._model, self._subject, self._facts = loaded.model, loaded.subject, loaded.facts

    def __getattr__(self, name: str) -> NoReturn:
        """Raise AttributeError with the names that there are."""
        public = ", ".join(each for each in dir(type(self)) if not each.startswith("_"))
        raise AttributeError(
            f"a Model has no {name!r}. It has {public}; the log probabilities of the next tokens are "
            "model.logits(ids).log_softmax(-1).", name=name, obj=self,
        )  # fmt: skip

    @property
    def settings(self) -> ModelSettings:
        """The settings of the model, such as `settings.num_layers` and `settings.width`; `settings.to_dict()` has all.
        """
        return self._model.settings

    @property
    def num_parameters(self) -> int:
        """The number of parameters; tied weights count once, rows that pad the vocabulary not at all."""
        return self.settings.num_parameters

    @property
    def run(self) -> dict[str, Any] | None:
        """The facts about the run when it saved the checkpoint, by the names that `lmtrain.runs` has: `step`, `steps`,
        `stage`, `batch`, `seq_len`, `data`, `tokens`, `lr`, `starts`, `borders`, `parameters` and more. None for a
        Hugging Face folder.
        """
        facts = facts_of_saved_run(self.path)
        return None if facts is None else facts.to_dict()

    @property
    def seq_len(self) -> int:
        """The largest number of tokens that the model sees at once."""
        return self._subject.seq_len

    @property
    def path(self) -> Path:
        """The folder that was loaded: a checkpoint or a Hugging Face folder."""
        return Path(self._facts["checkpoint"])

    @property
    def device(self) -> torch.device:
        """The device that holds the weights, and on which results lie."""
        return self._model.device

    @property
    def dtype(self) -> str:
        """The type that the model computes in: fp32, bf16 or fp16."""
        return self._subject.dtype

    def __call__(self, ids: Any) -> Tensor:
        """Return `logits(ids)`."""
        return self.logits(ids)

    def logits(self, ids: Any) -> Tensor:
        """Return the logits of the next token after each position, in fp32: [T, V] or [B, T, V]. V is the size of the
        vocabulary.

        They are the numbers that `lmtrain eval` computes, bit for bit. For BERT they are those of the token at each
        position itself, and all tokens belong to the first segment.
        """
        ids_BT, has_rows = self._to_tensor(ids)
        with memory_errors(_FEWER_ROWS):
            logits_BTV = self._model.logits(generation.unlabelled_batch(ids_BT))
        return logits_BTV if has_rows else logits_BTV[0]

    @checked
    def loss(self, ids: Any, batch_size: int = 8) -> float:
        """Return the mean loss of the next token in nats: -log p(ids[t] | ids[:t]), averaged over all positions t from
        1 on, of all rows. The first token of a row is not scored, since nothing comes before it.

        The losses are those of `lmtrain eval`, summed in float64; `batch_size` rows are computed together. Raise
        UsageError for a model such as BERT, which predicts no next token.
        """
        if batch_size < 1:
            raise UsageError(f"batch_size={batch_size} must be at least 1. Leave it out for 8.")
        if not self._subject.causal:
            raise UsageError(
                f"loss() predicts the next token, but {self.path} is a {self.settings.kind} model, which predicts "
                "masked tokens. Use `lmtrain.evaluate` with a task."
            )
        rows = check_token_ids(ids, self._subject.vocab_size, self.seq_len + 1, num_axes=(1, 2))
        rows = rows.reshape(-1, rows.shape[-1])
        num_targets = rows.shape[1] - 1
        if num_targets == 0:
            raise UsageError("loss() needs two ids or more in a row, as it does not predict the first. Give more ids.")
        answers = Scorer(self._model, batch_size=batch_size).score([Request(row, num_targets) for row in rows])
        return float(sum(answer.nll.sum() for answer in answers)) / (len(rows) * num_targets)

    def hidden_states(self, ids: Any) -> dict[str, Tensor]:
        """Return the hidden states after each part of the model, in fp32, in the order of the model: `embedding`,
        `blocks.0`, `blocks.1`, ..., and `norm`, the final norm, if GPT or BERT has one. Each is [T, D] or [B, T, D].

        The last entry is what the head turns into logits. The names are those that weights begin with.
        """
        ids_BT, has_rows = self._to_tensor(ids)
        model = self._model.model
        assert isinstance(model, nn.Module)
        parts = dict(model.named_children()) | {f"blocks.{number}": block for number, block in model.blocks.items()}
        outputs: dict[str, Tensor] = {}
        hidden: dict[str, Tensor] = {}
        with ExitStack() as hooks:
            for name, part in parts.items():
                hooks.callback(part.register_forward_hook(partial(_keep_output, outputs, name)).remove)
            # because: the parts that are called after the model's own forward are heads
            hooks.callback(model.register_forward_hook(lambda *_: hidden.update(outputs)).remove)
            hooks.enter_context(memory_errors(_FEWER_ROWS))
            self._model.logits(generation.unlabelled_batch(ids_BT), torch.zeros_like(ids_BT, dtype=torch.bool))
        return {name: (hidden_BTD if has_rows else hidden_BTD[0]).float() for name, hidden_BTD in hidden.items()}

    @checked
    def generate(
        self, text: str = "", *, max_tokens: int | None = None, max_new_tokens: int | None = None,
        temperature: float = 0.8, top_k: int | None = None, top_p: float | None = None, seed: int = 0,
    ) -> str:  # fmt: skip
        """Return a continuation of `text`, without `text` itself; from an empty text a new document begins. It ends
        after `max_tokens` tokens, by default 200, or where the model ends the document. `max_new_tokens` is another
        name for `max_tokens`.

        Each token is drawn from the probabilities at `temperature` (0: always the likeliest), of the `top_k` likeliest
        tokens, and of the likeliest tokens that make up the probability `top_p`. The same `seed` gives the same text,
        which is that of `lmtrain generate`. A text longer than `seq_len` tokens is cut on its left.
        """
        if not self._subject.causal:
            raise UsageError(
                f"generate() continues a text, but {self.path} is a {self.settings.kind} model, which predicts masked "
                "tokens. Load a GPT."
            )
        num_tokens = _number_of_tokens(max_tokens, max_new_tokens)
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        return generation.generate(
            self._model, self._subject.tokenizer, text, num_tokens, sampling, self._subject.seq_len
        ).text

    def _to_tensor(self, ids: Any) -> tuple[Tensor, bool]:
        """Return the checked ids as [B, T] on the model's device, and whether they have the axis B."""
        checked = check_token_ids(ids, self._subject.vocab_size, self.seq_len, num_axes=(1, 2))
        return torch.from_numpy(checked.reshape(-1, checked.shape[-1])).to(self.device), checked.ndim == 2

    def __repr__(self) -> str:
        what = f"{self.settings.kind} of {format_count(self.num_parameters)} parameters"
        average = "the average in " * (self._facts.get("weights") == "ema")
        return f"<lmtrain.Model {what} from {average}{self.path}, {self.dtype} on {self.device}>"


def _number_of_tokens(max_tokens: int | None, max_new_tokens: int | None) -> int:
    """Return the largest number of tokens to generate, which has two names. Raise UsageError if both are given, or if
    the number is below 1.
    """
    if max_tokens is not None and max_new_tokens is not None:
        raise UsageError(
            f"max_tokens={max_tokens} and max_new_tokens={max_new_tokens} are two names of one parameter. Give one."
        )
    for name, number in (("max_tokens", max_tokens), ("max_new_tokens", max_new_tokens)):
        if number is not None and number < 1:
            raise UsageError(f"{name}={number} must be at least 1. Leave it out for {DEFAULT_NEW_TOKENS}.")
    return max_tokens or max_new_tokens or DEFAULT_NEW_TOKENS


def _keep_output(outputs: dict[str, Tensor], name: str, _part: nn.Module, _inputs: object, output: Tensor) -> None:
    """Forward hook: store the output of the module `name` in `outputs`."""
    outputs[name] = output
