"""A family of Hugging Face's models, such as LLaMA: its config.json and the names of its weights.

`families/` has a module for each, in which its class is found; nothing lists them. Torch-free. Called by config_json,
folder_reader and the two directions of the exchange.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, ClassVar, Generic, TypeVar

from lmtrain.config.settings_base import load_modules, show
from lmtrain.exchange.huggingface.weight_names import FamilyNames, WeightMapping, list_mappings
from lmtrain.models.model_settings import ModelSettings

Config = dict[str, Any]
Rule = tuple[bool, str]  # whether it holds, and the message if it does not
S = TypeVar("S", bound=ModelSettings)

NOT_READ = "transformers does not read it in a model of this type"  # a reason why a key changes nothing
PACKAGE = "lmtrain.exchange.huggingface.families"
_NONE: Mapping[str, Any] = MappingProxyType({})


class Family(ABC, Generic[S]):
    """A family of models with its own `model_type` in config.json. A subclass says what its keys mean; a key that is
    in none of its tables, nor in those of ignored_and_refused_config_keys, is refused.
    """

    model_type: ClassVar[str] = ""
    architecture: ClassVar[str]  # the class of transformers
    settings_class: ClassVar[type[ModelSettings]]
    # of several families that compute a model, the one with the lowest rank names it
    rank: ClassVar[int] = 100
    # the keys that decide a setting, with the values that transformers takes for those that are left out
    defaults: ClassVar[Mapping[str, Any]]
    # keys that must have one value, with that value; `defaults` has what they are if they are left out
    required: ClassVar[Mapping[str, object]] = _NONE
    inert: ClassVar[Mapping[str, str]] = _NONE  # keys that change nothing in this family, each with the reason
    aliases: ClassVar[Mapping[str, str]] = _NONE  # second names of keys, which transformers prefers -> first names
    dropouts: ClassVar[tuple[str, ...]]  # the keys of shares of dropout
    longest: ClassVar[str] = "max_position_embeddings"  # the key of the longest text in tokens
    prefix: ClassVar[str] = "model."  # before the names of weights, left out of files that were saved without heads
    heads: ClassVar[tuple[str, ...]] = ("lm_head.",)  # before the names of heads, which lack that prefix
    tied_names: ClassVar[tuple[str, ...]] = ("lm_head.weight",)  # second names of an embedding tied to the head
    tables: ClassVar[tuple[str, ...]] = (".inv_freq",)  # ends of the names of tensors that can be computed
    tokenizer_class: ClassVar[str]  # that transformers takes where tokenizer_config.json names none
    has_own_tokenizer: ClassVar[bool] = False  # whether transformers 5 takes it even if another class is named
    # the keys of rotary angles, which transformers 4 and 5 read in two forms; none of them: learned positions
    rotary_keys: ClassVar[tuple[str, ...]] = ()
    names: ClassVar[FamilyNames]
    rewritten: ClassVar[tuple[str, ...]] = ()  # keys that an export writes anew, though an import kept their values
    # arguments of from_pretrained with which every version of transformers computes the same
    load_options: ClassVar[Mapping[str, Any]] = _NONE
    # model types that are refused with a reason and a way out, since this family computes a part of theirs
    other_types: ClassVar[Mapping[str, str]] = _NONE

    @abstractmethod
    def rules(self, s: S) -> list[Rule]:
        """Return the conditions under which this family computes the model of the settings `s`."""

    @abstractmethod
    def config(self, s: S) -> Config:
        """Return the entries of config.json that decide what is computed."""

    @abstractmethod
    def settings(self, c: Config, problems: list[str]) -> Config:
        """Return the values of our settings, but dropout, for a config.json completed with `defaults`. Add a message
        to `problems` for each key with a value that lmtrain does not compute, but for those in `required`.
        """

    def dtype_problem(self, s: S, dtype: str) -> str:
        """Return why weights of the type that torch calls `dtype` would change what transformers computes, with a way
        out; empty if they do not.
        """
        return ""

    def in_fp32(self, s: S) -> S:
        """Return the settings of the model that transformers computes if it loads weights of another type in fp32."""
        return s

    def architecture_of(self, s: S) -> str:
        return self.architecture


@cache
def families() -> dict[str, Family[Any]]:
    """Return an object of each known family of Hugging Face models, by its model_type, in ascending order of rank."""
    found = {
        value.model_type: value()
        for module in load_modules(PACKAGE)
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Family) and value.model_type
    }
    return dict(sorted(found.items(), key=lambda item: (item[1].rank, item[0])))


def require_values(c: Config, problems: list[str], required: Mapping[str, object]) -> None:
    """Add a message to `problems` for each key of `required` that has another value in the config.json `c`."""
    problems += [f"{k}={show(c[k])} would have to be {show(v)}" for k, v in required.items() if c[k] != v]


def weight_mappings(settings: ModelSettings, family: str) -> Iterator[WeightMapping]:
    """Yield the mapping of each weight of a model of the family with the model_type `family`."""
    return list_mappings(settings, families()[family].names)
