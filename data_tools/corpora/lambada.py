"""LAMBADA (Paperno and others, 2016) as OpenAI published it with GPT-2: capitals and punctuation as in the books.

Passages whose last word needs the whole passage. They are for evaluation: train on them and the measure is void.
Found by recipe.py.
"""

from __future__ import annotations

from data_tools.corpora.published import Texts
from data_tools.corpora.remote import RemoteFile

_REVISION = "900124bf3b8235c6daf21033af9948b3f07346c4"

RECIPE = Texts(
    name="lambada",
    about="LAMBADA's test set as OpenAI published it with GPT-2: 5,153 passages as they stand in the books",
    files=(
        RemoteFile(
            "lambada_test.jsonl",
            (
                "https://openaipublic.blob.core.windows.net/gpt-2/data/lambada_test.jsonl",
                f"https://huggingface.co/datasets/EleutherAI/lambada_openai/resolve/{_REVISION}/data/lambada_test.jsonl",
                "https://raw.githubusercontent.com/cybertronai/bflm/master/lambada_test.jsonl",
            ),
            "4aa8d02cd17c719165fc8a7887fddd641f43fcafa4b1c806ca8abc31fabdb226",
            1_819_752,
        ),
    ),
)
