"""A loaded model gives the evaluator's numbers, the generator's texts, and hidden states that lead to its logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, assert_type

import numpy as np
import pytest
import torch

import lmtrain
from lmtrain.batch import Batch
from lmtrain.errors import CheckpointError, MissingInputError, OutOfMemoryError, UsageError
from lmtrain.eval.load_model import load_for_eval
from lmtrain.eval.read_texts import TextInput
from lmtrain.eval.run_task import run as run_task
from lmtrain.eval.sample_text_from_prompt import generate
from lmtrain.eval.sampling_and_precision_settings import DEFAULT_NEW_TOKENS, Sampling
from lmtrain.eval.task import find_task
from lmtrain.models.bert_settings import BertSettings
from lmtrain.models.gpt_settings import GPTSettings
from tests.unit.api.saved_models import VOCAB_SIZE, save_run, small_tokenizer

IDS = [[5, 80, 9, 261, 3], [7, 7, 90, 2, 11]]


@pytest.fixture(scope="module")
def gpt_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = GPTSettings(
        num_layers=2, width=16, num_heads=2, vocab_size=VOCAB_SIZE, vocab_multiple=64, seq_len=16, init_std=0.3
    )
    return save_run(tmp_path_factory.mktemp("gpt"), settings)


@pytest.fixture(scope="module")
def gpt(gpt_run: Path) -> lmtrain.Model:
    return lmtrain.load(gpt_run, device="cpu")[0]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> lmtrain.Model:
    settings = BertSettings(num_layers=2, width=16, num_heads=2, vocab_size=VOCAB_SIZE, seq_len=16)
    return lmtrain.load(save_run(tmp_path_factory.mktemp("bert"), settings), device="cpu")[0]


def test_types_are_known_to_checkers(gpt_run: Path) -> None:
    """`make check` judges these lines: mypy refuses a wrong type, and an `ignore` that it does not need."""
    loaded = lmtrain.load(str(gpt_run), dtype="fp32")
    assert_type(loaded, tuple[lmtrain.Model, lmtrain.Tokenizer])
    model, tokenizer = loaded
    assert_type(model.logits(IDS), torch.Tensor)
    assert_type(model.loss(IDS), float)
    assert_type(model.generate("a", max_tokens=1), str)
    assert_type(lmtrain.load(gpt_run, step=7), tuple[lmtrain.Model, lmtrain.Tokenizer])
    assert_type(tokenizer.encode("a"), list[int])
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        lmtrain.lode  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_logits_are_the_evaluators_bit_for_bit(gpt_run: Path, dtype: str) -> None:
    model, _ = lmtrain.load(gpt_run, dtype, "cpu")
    tokens_BT = torch.tensor(IDS)
    expected_BTV = load_for_eval(gpt_run, torch.device("cpu"), dtype).subject.model.logits(Batch(tokens_BT, tokens_BT))
    for ids in (IDS, np.array(IDS, np.uint16), tokens_BT, tokens_BT.int()):
        assert torch.equal(model.logits(ids), expected_BTV)
    assert torch.equal(model(IDS), expected_BTV)
    assert expected_BTV.shape == (2, 5, model.settings.shape.vocab_size)
    assert model.logits(IDS).dtype == torch.float32
    assert torch.equal(model.logits(IDS[1]), model.logits(IDS[1:])[0])


def test_the_loss_is_the_evaluators(gpt: lmtrain.Model, gpt_run: Path) -> None:
    subject = load_for_eval(gpt_run, torch.device("cpu"), "fp32").subject
    text = "The old mill"
    result = run_task(find_task("perplexity"), subject, TextInput("text", [text], "", "")).result
    ids = [subject.tokenizer.eod_id, *subject.tokenizer.encode(text)]
    assert gpt.loss(ids) == result.measures["nll_per_token_nats"]
    by_hand_BT = -gpt.logits(IDS).double().log_softmax(-1)[:, :-1].gather(-1, torch.tensor(IDS)[:, 1:, None])
    assert gpt.loss(IDS) == pytest.approx(float(by_hand_BT.mean()), rel=1e-6)
    assert gpt.loss(np.arange(17)) > 0, "a model of 16 positions predicts 16 tokens from 16"


def test_hidden_states_are_named_and_lead_to_the_logits(gpt: lmtrain.Model, bert: lmtrain.Model) -> None:
    bert_has_norm = bert.settings.to_dict()["norm_order"] == "pre"
    for model, last in ((gpt, "norm"), (bert, "norm" if bert_has_norm else "blocks.1")):
        hidden = model.hidden_states(IDS)
        names = ["embedding", "blocks.0", "blocks.1", "norm"]
        assert list(hidden) == names[: names.index(last) + 1]
        assert all(each.shape == (2, 5, 16) and each.dtype == torch.float32 for each in hidden.values())
        inner: Any = model._model.model
        with torch.no_grad():
            contexts = inner.block_contexts(Batch(torch.tensor(IDS), None))
            for number, before in enumerate(names[:2]):
                after_BTD = inner.blocks[str(number)](hidden[before], contexts[str(number)])
                assert torch.equal(after_BTD, hidden[f"blocks.{number}"])
            logits_BTV = inner.logits(hidden[last])[..., : model.settings.shape.vocab_size]
        assert torch.equal(logits_BTV, model.logits(IDS))
        for name, each in model.hidden_states(IDS[0]).items():
            assert torch.allclose(each, hidden[name][0], atol=1e-5)


def test_a_name_that_a_model_lacks_is_answered_with_those_it_has(gpt: lmtrain.Model) -> None:
    with pytest.raises(AttributeError, match=r"no 'token_score'\. It has .*generate.*log_softmax"):
        gpt.token_score  # noqa: B018  # type: ignore[attr-defined]


def test_a_text_is_the_generators_and_that_of_its_seed(gpt: lmtrain.Model) -> None:
    sampling = Sampling(temperature=0.9, top_k=20, top_p=0.95, seed=4)
    expected = generate(gpt._model, small_tokenizer(), "The mill", 12, sampling, 16).text
    asked: dict[str, Any] = {"max_tokens": 12, "temperature": 0.9, "top_k": 20, "top_p": 0.95}
    assert gpt.generate("The mill", seed=4, **asked) == expected
    assert gpt.generate("The mill", seed=5, **asked) != expected
    assert gpt.generate(max_tokens=3) == gpt.generate("", max_tokens=3)


def test_the_defaults_of_generate_are_those_of_the_command(gpt: lmtrain.Model) -> None:
    import inspect

    from lmtrain.cli.generate_command import generate as command

    def defaults(function: Callable[..., Any]) -> dict[str, Any]:
        return {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}

    ours, theirs = defaults(gpt.generate), defaults(command)
    assert theirs["max_new_tokens"] == DEFAULT_NEW_TOKENS
    assert ours["max_tokens"] is ours["max_new_tokens"] is None, "the same number, for both names"
    assert all(ours[name] == theirs[name] for name in ("temperature", "top_k", "top_p", "seed"))


def test_a_model_says_what_it_is(gpt: lmtrain.Model, gpt_run: Path) -> None:
    assert gpt.settings.to_dict()["num_layers"] == 2
    assert gpt.num_parameters == gpt.settings.num_parameters
    assert (gpt.seq_len, gpt.dtype, str(gpt.device)) == (16, "fp32", "cpu")
    assert gpt.path == gpt_run / "checkpoints" / "step_00000007"
    assert f"gpt of {gpt.num_parameters / 1000:.1f}k parameters from {gpt.path}, fp32 on cpu" in repr(gpt)


def test_bert_has_logits_and_refuses_what_needs_a_next_token(bert: lmtrain.Model) -> None:
    assert bert.logits(IDS).shape == (2, 5, bert.settings.shape.vocab_size)
    for call in (bert.loss, lambda ids: bert.generate("The")):
        with pytest.raises(UsageError, match="is a bert model, which predicts masked tokens"):
            call(IDS)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: model.logits([[5, 4], [3, 700]]), r"ids\[1\]\[1\] is 700, outside the vocabulary, whose ids"),
        (lambda model: model.logits([5, -1, 900]), r"ids\[1\] is -1, .*, and 1 other id too"),
        (lambda model: model.loss([1] * 18), "18 ids in a row, and the model takes at most 17"),
        (lambda model: model.hidden_states([1] * 17), "17 ids in a row, and the model takes at most 16"),
        (lambda model: model.loss([1, 2], batch_size=0), "batch_size=0 must be at least 1"),
        (lambda model: model.loss([1]), "needs two ids or more in a row"),
        (lambda model: model.generate("a", temperature=-1), "temperature=-1 must be at least 0"),
        (lambda model: model.generate("a", max_tokens=0), "max_tokens=0 must be at least 1"),
    ],
)
def test_wrong_input_is_named(gpt: lmtrain.Model, call: Callable[[lmtrain.Model], object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        call(gpt)


def test_what_cannot_be_loaded_is_refused(gpt_run: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"dtype=float32 is not a type.*Use fp32, bf16, fp16"):
        lmtrain.load(gpt_run, "float32")
    with pytest.raises(UsageError, match="device=tpu is not a device"):
        lmtrain.load(gpt_run, device="tpu")
    with pytest.raises(UsageError, match=r"device=cuda:99 does not exist: torch .* sees"):
        lmtrain.load(gpt_run, device=torch.device("cuda", 99))
    with pytest.raises(MissingInputError, match="does not exist"):
        lmtrain.load(tmp_path / "nothing")
    with pytest.raises(lmtrain.LmtrainError) as error:
        lmtrain.load(gpt_run / "checkpoints" / "step_00000007" / "manifest.json")
    assert isinstance(error.value, MissingInputError | CheckpointError)


def test_a_lack_of_memory_names_a_way_out(gpt: lmtrain.Model) -> None:
    def run_out(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80.00 GiB.")

    inner: Any = gpt._model.model
    hook = inner.embedding.register_forward_hook(run_out)
    try:
        for call, way_out in (
            (gpt.logits, "fewer rows"), (gpt.hidden_states, "fewer rows"), (gpt.loss, "batch size below 8")
        ):  # fmt: skip
            with pytest.raises(OutOfMemoryError, match=way_out):
                call(IDS)
    finally:
        hook.remove()
    assert gpt.logits(IDS).shape[0] == 2


def test_a_step_chooses_among_the_checkpoints_of_a_run(gpt_run: Path, gpt: lmtrain.Model) -> None:
    assert lmtrain.load(gpt_run, device="cpu", step=7)[0].path == gpt.path
    with pytest.raises(MissingInputError, match=r"has no checkpoint of step 8\. Give one of these steps: 7\."):
        lmtrain.load(gpt_run, step=8)
    for path in (gpt.path, f"{gpt_run}@best"):
        with pytest.raises(UsageError, match=r"step=7 chooses a checkpoint of a run, and .* is not"):
            lmtrain.load(path, step=7)


def test_both_names_of_the_number_of_tokens_mean_the_same(gpt: lmtrain.Model) -> None:
    assert gpt.generate("a", max_new_tokens=3, seed=2) == gpt.generate("a", max_tokens=3, seed=2)
    with pytest.raises(UsageError, match="max_tokens=3 and max_new_tokens=4 are two names"):
        gpt.generate("a", max_tokens=3, max_new_tokens=4)
    with pytest.raises(UsageError, match="max_new_tokens=0 must be at least 1"):
        gpt.generate("a", max_new_tokens=0)
