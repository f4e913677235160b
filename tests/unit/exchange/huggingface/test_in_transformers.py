"""What transformers, of whichever version is installed, makes of an exported folder: ids, texts, settings, weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers import decoders, models, pre_tokenizers

from lmtrain.errors import CheckpointError
from lmtrain.eval.load_model import load_for_eval
from lmtrain.eval.sample_text_from_prompt import generate_tokens
from lmtrain.eval.sampling_and_precision_settings import Sampling
from lmtrain.exchange.huggingface.compare_with_transformers import compare_ids as compare_ids_of_export
from lmtrain.exchange.huggingface.compare_with_transformers import (
    largest_difference,
    model_scores,
    random_batch,
    transformers_scores,
)
from lmtrain.exchange.huggingface.exported_tokenizer_files import tokenizer_class_to_load
from lmtrain.exchange.huggingface.folder_reader import HFFolder
from lmtrain.exchange.huggingface.ignored_and_refused_config_keys import NOT_COMPUTED
from lmtrain.exchange.huggingface.import_and_export import export_hf, import_hf
from lmtrain.models.model_settings import ModelSettings
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer
from tests.marks import wide
from tests.unit.exchange.huggingface.published import (
    CHAT_TEMPLATE,
    SPECIAL,
    TOKENIZERS,
    exported,
    mixed_texts,
    publish,
)
from tests.unit.exchange.models import bert, gpt2, llama, save, tokenizer_for

transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed")
MODELS: dict[str, ModelSettings] = {
    "gpt2": gpt2(tied=False), "llama": llama(), "llama-theta": llama(rotary_base=500.0), "mistral": llama(window=9),
}  # fmt: skip

# What makes a LLaMA a model of another family.
CHANGES: dict[str, dict[str, Any]] = {
    "mistral": {"window": 9}, "megatron-bert": {"norm_order": "pre"}, "qwen2": {"bias": "qkv"},
    "qwen3": {"qk_norm": "head"}, "phi3": {"activation": "relu"},
    "starcoder2": {"norm": "layernorm", "norm_bias": True, "gated": False},
}  # fmt: skip


def compare_ids(folder: Path, ours: Tokenizer, texts: list[str]) -> None:
    """Raise unless transformers' ids are ours: of all texts where special tokens are plain text, and of texts without
    their spellings in any case. The tokenizer is loaded by AutoTokenizer, or by the class that an export names.
    """
    family = json.loads((folder / "config.json").read_text())["model_type"]
    theirs = getattr(transformers, tokenizer_class_to_load(family, ours)).from_pretrained(folder)
    expected = ours.encode_batch(texts)
    assert theirs(texts, add_special_tokens=False, split_special_tokens=True)["input_ids"] == expected
    spelled = [text for text in SPECIAL if ours.encode(text) != theirs(text, add_special_tokens=False)["input_ids"]]
    plain = [number for number, text in enumerate(texts) if not any(token in text for token in spelled)]
    found = theirs([texts[number] for number in plain], add_special_tokens=False)["input_ids"]
    assert found == [expected[number] for number in plain]
    for text in spelled:
        assert theirs(text, add_special_tokens=False)["input_ids"] == [theirs.convert_tokens_to_ids(text)]
    for ids in expected[:200]:
        assert theirs.decode(ids) == ours.decode(ids)


@pytest.mark.parametrize(
    ("kind", "family"),
    [("llama", "llama"), ("llama3", "mistral"),
     *wide(("qwen", "qwen2"), ("qwen", "qwen3"), ("qwen", "llama"), ("qwen", "phi3"), ("qwen", "starcoder2"),
           ("llama3", "qwen3"),
           ("llama3", "phi3"), ("llama3", "starcoder2"), ("llama", "phi3"), ("gpt2", "qwen3"), ("metaspace", "llama"),
           ("metaspace", "mistral"), ("llama", "mistral"), ("llama3", "llama"), ("gpt2", "gpt2"),
           ("gpt2", "llama"), ("bert", "bert"), ("bert", "megatron-bert"))],
)  # fmt: skip
def test_auto_tokenizer_gives_our_ids(kind: str, family: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    ours = TOKENIZERS[kind]()
    sizes: dict[str, Any] = {"vocab_size": ours.vocab_size, "num_layers": 1, "width": 8, "num_heads": 2}
    changes: dict[str, Any] = CHANGES.get(family, {})
    build: Any = gpt2 if family == "gpt2" else bert if "bert" in family else llama
    folder = exported(tmp_path, build(**sizes, **changes), ours)
    is_wide = request.node.get_closest_marker("wide") is not None
    compare_ids(folder, ours, list(mixed_texts(10_000 if is_wide else 300)))


# Tokenizers, families, and what tokenizer_config.json says of the class in folders of the hub.
CLASSES: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "llama", {"tokenizer_class": "LlamaTokenizer"}),
    ("llama3", "gpt2", {"tokenizer_class": "GPT2Tokenizer"}),
    ("llama", "mistral", {"tokenizer_class": "LlamaTokenizerFast"}),
    ("llama", "llama", {"tokenizer_class": "TokenizersBackend", "extra_special_tokens": ["<unk>"]}),
    ("llama", "llama", {}),
    ("metaspace", "llama", {"tokenizer_class": "LlamaTokenizer", "legacy": False}),
    ("metaspace", "mistral", {}),
    ("llama3", "llama", {"tokenizer_class": "PreTrainedTokenizerFast"}),
    ("llama3", "llama", {"tokenizer_class": "LlamaTokenizer"}),
    ("gemma", "llama", {"tokenizer_class": "GemmaTokenizer"}),
    ("neox", "llama", {"tokenizer_class": "GPTNeoXTokenizer"}),
    ("llama3", "llama", {"tokenizer_class": "GPTNeoXTokenizer"}),
    ("llama", "llama", {"tokenizer_class": "GemmaTokenizer"}),
    ("qwen", "qwen2", {"tokenizer_class": "Qwen2Tokenizer", "unk_token": None, "eos_token": "<|im_end|>"}),
    ("qwen", "qwen2", {}),
    ("qwen", "qwen3", {"tokenizer_class": "Qwen2TokenizerFast", "add_prefix_space": False}),
    ("llama3", "qwen3", {"tokenizer_class": "Qwen2Tokenizer"}),
    ("llama3", "phi3", {"tokenizer_class": "GPT2Tokenizer"}),
    ("small-bpe", "gpt2", {}),
    ("small-bpe", "gpt2", {"tokenizer_class": "GPT2TokenizerFast", "bos_token": "<|endoftext|>"}),
    ("small-wordpiece", "bert", {}),
    ("small-wordpiece", "megatron-bert", {"tokenizer_class": "BertTokenizer"}),
]
BEGINS = {"llama": "<s>", "gemma": "<bos>", "metaspace": "<s>", "llama3": "<|begin_of_text|>"}


@pytest.mark.parametrize(("kind", "family", "config"), [*CLASSES[:2], *wide(*CLASSES[2:])])
def test_a_tokenizer_that_comes_back_gives_our_ids_whatever_its_class(
    kind: str, family: str, config: dict[str, Any], tmp_path: Path
) -> None:
    build: Any = gpt2 if family == "gpt2" else bert if "bert" in family else llama
    settings = build(vocab_size=450, **CHANGES.get(family, {}))
    ours = tokenizer_for(settings) if kind.startswith("small") else TOKENIZERS[kind]()
    folder = exported(tmp_path, settings, ours)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "special_tokens_map.json").unlink()
    export_hf(Path(import_hf(folder, tmp_path / "imported")["checkpoint"]), tmp_path / "again", check=False)
    compare_ids(tmp_path / "again", ours, list(mixed_texts(400)))
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "again")
    found, text = again("the cat"), ours.encode("the cat")
    if "bert" in family:
        assert found["input_ids"] == [ours.special["cls"], *text, ours.special["sep"]]
    else:
        assert found["input_ids"] == ([again.convert_tokens_to_ids(BEGINS[kind])] if kind in BEGINS else []) + text
    if family != "llama":  # because: of LLaMA's own class transformers 4 lets the model ignore them
        assert ("token_type_ids" in found) == ("bert" in family)


@pytest.mark.wide
@pytest.mark.parametrize(("kind", "load_with"), [("qwen", "AutoTokenizer"), ("llama3", "PreTrainedTokenizerFast")])
def test_the_export_of_a_qwen_2_says_what_loads_its_tokenizer(kind: str, load_with: str, tmp_path: Path) -> None:
    """transformers 5 splits text as Qwen does in every folder of this model_type."""
    ours = TOKENIZERS[kind]()
    facts = export_hf(save(tmp_path / "run", llama(bias="qkv", vocab_size=450), tokenizer=ours), tmp_path / "hf")
    assert facts["texts_compared"] == 9
    assert ("load_the_tokenizer_with" in facts) == (load_with != "AutoTokenizer")
    assert facts.get("load_the_tokenizer_with", load_with).split(",")[0] == load_with
    assert f"tokenizer = {load_with}.from_pretrained(" in (tmp_path / "hf" / "README.md").read_text()
    theirs = getattr(transformers, load_with).from_pretrained(tmp_path / "hf")
    for text in mixed_texts(100):
        assert theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"] == ours.encode(text)


def test_a_prefix_space_is_ours(tmp_path: Path) -> None:
    tree = tokenizer_for(gpt2()).tree
    tree["pre_tokenizer"]["add_prefix_space"] = True
    ours = Tokenizer.from_bytes(json.dumps(tree).encode())
    compare_ids(exported(tmp_path, gpt2(), ours), ours, ["the cat", " the cat", "", "a\nb"])


@pytest.mark.parametrize("name", ["gpt2", "llama-theta", "mistral", *wide("llama")])
def test_greedy_texts_are_ours(name: str, tmp_path: Path) -> None:
    settings = MODELS[name]
    source = save(tmp_path / "run", settings)
    export_hf(source, tmp_path / "hf", check=False)
    loaded = load_for_eval(source, torch.device("cpu"), "fp32").subject
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    tokenizer = tokenizer_for(settings)
    for prompt in ("the", "a dog", "cats and dogs sat", "hill"):
        ids = tokenizer.encode(prompt)
        room = settings.shape.seq_len - len(ids)
        expected = list(generate_tokens(
            loaded.model, ids, room, Sampling(temperature=0), settings.shape.seq_len, tokenizer.end_ids
        ))  # fmt: skip
        found = model.generate(torch.tensor([ids]), max_new_tokens=room, do_sample=False)[0].tolist()
        assert found == ids + expected
        assert len(set(expected)) > 3
    assert room > 25


# All keys by which models of other types compute something else, at values that change nothing.
HARMLESS = {key: (*values, None)[0] for key, values in NOT_COMPUTED.items()}


@pytest.mark.parametrize(
    ("settings", "config"),
    [
        (gpt2(), {"num_attention_heads": 2}),
        *wide(
            (llama(), {"sliding_window": 5}),
            (llama(), {"layer_types": ["sliding_attention"] * 2, "sliding_window": 5, "use_sliding_window": True,
                       "max_window_layers": 1}),
            (llama(window=5), {"layer_types": ["full_attention"] * 2}),
            (llama(window=5), {"layer_types": ["sliding_attention"] * 2, "max_window_layers": 0}),
            (llama(rotary_base=77.0), {"rope_scaling": {"rope_type": "default"},
                                       "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 9.0}}),
            (llama(), {"rope_theta": 1e4, "rope_scaling": {"rope_type": "default", "rope_theta": 1e4},
                       "rope_parameters": {"rope_theta": 9.0}}),
            (llama(), HARMLESS | {"attention_bias": False}), (llama(window=5), HARMLESS), (gpt2(), HARMLESS),
            (bert(), HARMLESS), (bert(norm_order="pre"), HARMLESS),
            (bert(), {"chunk_size_feed_forward": 8, "pooler_type": "last_token_transform", "directionality": "uni",
                      "pooler_num_fc_layers": 9}),
            (llama(window=5), {"use_sliding_window": False}), (llama(), {"pretraining_tp": 2, "is_decoder": False}),
            (gpt2(), {"n_ctx": 8, "reorder_and_upcast_attn": True}), (bert(), {"is_causal": True}),
        ),
    ],
)  # fmt: skip
def test_a_key_does_what_it_does_there(settings: ModelSettings, config: dict[str, Any], tmp_path: Path) -> None:
    folder = exported(tmp_path, settings)
    whole = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(whole | config))
    opened = HFFolder(folder)
    batch = random_batch(opened.settings)
    answer = transformers_scores(folder, opened.settings, batch)
    assert answer is not None
    ours = model_scores(opened.settings, opened.weight_reader(opened.settings), batch)
    assert largest_difference(ours, answer[1]) < 1e-4


def test_a_text_ends_at_any_of_the_ids_that_end_it_there(tmp_path: Path) -> None:
    folder, ids = exported(tmp_path, llama()), [5, 77, 9]

    def texts(eos: list[int], name: str) -> list[list[int]]:
        """Return what both libraries generate from an import."""
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos, "pad_token_id": 0}))
        loaded = load_for_eval(Path(import_hf(folder, tmp_path / name)["checkpoint"]), torch.device("cpu"), "fp32")
        model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        end_ids = loaded.subject.tokenizer.end_ids
        assert end_ids == set(eos)
        return [
            list(generate_tokens(loaded.subject.model, ids, 20, Sampling(temperature=0), 40, end_ids)),
            model.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False)[0].tolist()[len(ids) :],
        ]

    ours, theirs = texts([330, 329], "whole")
    assert ours == theirs
    assert len(ours) == 20
    end = next(token for number, token in enumerate(ours) if number > 3 and token not in ours[:number])
    assert texts([330, end], "cut") == [ours[: ours.index(end) + 1]] * 2


def test_both_libraries_open_the_shards_by_the_index(tmp_path: Path) -> None:
    source = save(tmp_path / "run", llama())
    facts = export_hf(source, tmp_path / "hf", check=False, shard_bytes=60_000)
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "hf").glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == files
    assert len(files) == facts["num_files"] > 1
    size = 0
    for file in files:
        with safe_open(tmp_path / "hf" / file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            assert set(opened.keys()) == {name for name, place in index["weight_map"].items() if place == file}
            size += sum(opened.get_tensor(name).nbytes for name in opened.keys())  # noqa: SIM118 - not a dict
    assert size == index["metadata"]["total_size"]
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.state_dict().keys() >= index["weight_map"].keys()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_settings_are_read_right(dtype: str, tmp_path: Path) -> None:
    settings = llama(rotary_base=500.0, window=9, head_width=16)
    config = transformers.AutoConfig.from_pretrained(exported(tmp_path, settings, dtype=dtype))
    grouped = getattr(config, "rope_parameters", None)  # of transformers 5
    assert (grouped["rope_theta"] if grouped else config.rope_theta) == 500.0
    assert (config.sliding_window, config.head_dim, config.num_key_value_heads) == (9, 16, 2)
    assert config.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto")
    assert loaded.dtype == config.dtype


SIZES = {
    "vocab_size": 450, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "initializer_range": 0.3,
}  # fmt: skip
DECODER: dict[str, Any] = SIZES | {"num_key_value_heads": 2, "bos_token_id": 1}
# Classes, settings, tokenizers.
SAVED: list[tuple[str, dict[str, Any], str]] = [
    ("Llama", DECODER | {"eos_token_id": [2, 7], "tie_word_embeddings": True, "pad_token_id": 3}, "llama"),
    ("Mistral", DECODER | {"eos_token_id": 2, "sliding_window": 7, "head_dim": 16}, "metaspace"),
    ("Llama", DECODER | {"eos_token_id": [311, 312], "attention_bias": True, "mlp_bias": True}, "llama3"),
    ("GPT2", SIZES | {"bos_token_id": 0, "eos_token_id": 0}, "small-bpe"),
    ("Qwen2", DECODER | {"eos_token_id": [5, 7], "use_sliding_window": True, "sliding_window": 7,
                         "max_window_layers": 1}, "qwen"),
    ("Qwen3", DECODER | {"head_dim": 16, "eos_token_id": 2}, "qwen"),
    ("Phi3", DECODER | {"eos_token_id": 2, "pad_token_id": 0}, "llama"),
    ("Starcoder2", DECODER | {"eos_token_id": 0, "residual_dropout": 0.1, "attention_dropout": 0.1,
                              "embedding_dropout": 0.1}, "small-bpe"),
    ("Bert", SIZES | {"pad_token_id": 4}, "small-wordpiece"),
    ("MegatronBert", SIZES, "small-wordpiece"),
]


@pytest.mark.parametrize(("model", "sizes", "kind"), [SAVED[0], *wide(*SAVED[1:])])
@pytest.mark.parametrize("dtype", [torch.bfloat16, *wide(torch.float32, torch.float16)])
def test_what_transformers_saves_comes_back(
    model: str, sizes: dict[str, Any], kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    head = {"GPT2": "LMHeadModel", "Bert": "ForPreTraining", "MegatronBert": "ForPreTraining"}.get(model, "ForCausalLM")
    config = getattr(transformers, f"{model}Config")(**sizes)
    torch.manual_seed(0)
    getattr(transformers, f"{model}{head}")(config).to(dtype).save_pretrained(tmp_path / "hf", max_shard_size="30KB")
    ours = tokenizer_for(bert() if "Bert" in model else gpt2()) if kind.startswith("small") else TOKENIZERS[kind]()
    ours.save(tmp_path / "tokenizer.json")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    theirs.chat_template = CHAT_TEMPLATE
    theirs.save_pretrained(tmp_path / "hf")

    checkpoint = import_hf(tmp_path / "hf", tmp_path / "imported")["checkpoint"]
    assert export_hf(Path(checkpoint), tmp_path / "again")["compared_with"].startswith("transformers")
    came, returned = (all_tensors(tmp_path / name) for name in ("hf", "again"))
    assert returned.keys() == came.keys()
    assert all(came[name].dtype == dtype == returned[name].dtype for name in came)
    assert all(torch.equal(came[name].view(torch.uint8), returned[name].view(torch.uint8)) for name in came)
    read = [transformers.AutoConfig.from_pretrained(tmp_path / name).to_dict() for name in ("hf", "again")]
    added = {"_name_or_path", *({"rope_parameters"} - read[0].keys())}  # because: transformers 4 does not use these
    first, second = ({key: value for key, value in found.items() if key not in added} for found in read)
    assert first == second
    compare_ids(tmp_path / "again", ours, list(mixed_texts(100)))
    generation = [] if head == "ForPreTraining" else ["generation_config.json"]
    for name in ("tokenizer.json", "chat_template.jinja", *generation):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "hf" / name).read_bytes()


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(
    "rope", [{"rope_theta": 77.0}, {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}, {}]
)
def test_a_chat_model_that_comes_back_is_the_same_to_transformers(rope: dict[str, Any], tmp_path: Path) -> None:
    folder = exported(tmp_path, llama(vocab_size=450, rotary_base=77.0 if rope else 1e4), TOKENIZERS["llama"]())
    config = json.loads((folder / "config.json").read_text())
    for key in ("rope_theta", "rope_parameters"):
        del config[key]
    (folder / "config.json").write_text(json.dumps(config))
    publish(folder, rope)
    export_hf(Path(import_hf(folder, tmp_path / "imported")["checkpoint"]), tmp_path / "again")
    first, second = (transformers.AutoTokenizer.from_pretrained(path) for path in (folder, tmp_path / "again"))
    messages = [{"role": "user", "content": "the cat"}]
    assert first.chat_template == second.chat_template
    assert first.apply_chat_template(messages, tokenize=False) == "<s>user: the cat"
    assert second.apply_chat_template(messages, tokenize=False) == "<s>user: the cat"
    assert first.special_tokens_map == second.special_tokens_map
    assert first("<s> the cat")["input_ids"] == second("<s> the cat")["input_ids"]
    assert second.bos_token_id == 1
    ends = [
        transformers.AutoModelForCausalLM.from_pretrained(path).generation_config.eos_token_id
        for path in (folder, tmp_path / "again")
    ]
    assert ends == [[2, 7], [2, 7]]
    assert transformers.AutoConfig.from_pretrained(tmp_path / "again").eos_token_id == [2, 7]


def test_an_export_with_other_ids_is_found(tmp_path: Path) -> None:
    folder = exported(tmp_path, bert())
    ours = Tokenizer.load(folder)
    assert compare_ids_of_export(folder, ours, "bert") == {"texts_compared": 9}
    config = json.loads((folder / "tokenizer_config.json").read_text())
    changed = config | {"tokenizer_class": "BertTokenizer", "do_lower_case": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(changed))
    with pytest.raises(CheckpointError, match=r"transformers gives 'The cat' the ids .* and lmtrain gives it"):
        compare_ids_of_export(folder, ours, "bert")
    (folder / "tokenizer.json").write_text("{}")
    assert "does not load the tokenizer" in compare_ids_of_export(folder, ours, "bert")["texts_compared"]


@pytest.mark.wide
def test_a_large_vocabulary_is_not_taken_for_a_wrong_one(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """transformers 4.57 warns of a tokenizer above 100,000 tokens if config.json says no version."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(first, second) for first in letters for second in letters]
    triples = [(first + second, third) for first, second in pairs for third in letters[:1]]
    merges = [*pairs, *triples][: 100_100 - len(letters)]
    pieces = [*letters, *(first + second for first, second in merges)]
    made = tokenizers.Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    ours = Tokenizer(made)
    assert ours.vocab_size > 100_000
    folder = exported(tmp_path, llama(vocab_size=ours.vocab_size, num_layers=1, width=8, num_heads=2), ours)
    compare_ids(folder, ours, ["the cat", " 2024"])
    assert "regex" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("kind", "config"),
    [("gemma", {"tokenizer_class": "GemmaTokenizer"}), ("neox", {"tokenizer_class": "GPTNeoXTokenizer"})],
)
def test_a_class_that_gives_our_ids_stays(kind: str, config: dict[str, Any], tmp_path: Path) -> None:
    folder = exported(tmp_path, llama(vocab_size=450), TOKENIZERS[kind]())
    (folder / "tokenizer_config.json").write_text(text := json.dumps(config | {"note": 1}))
    export_hf(Path(import_hf(folder, tmp_path / "imported")["checkpoint"]), tmp_path / "again", check=False)
    assert (tmp_path / "again" / "tokenizer_config.json").read_text() == text
