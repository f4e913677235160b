"""Recipes of evaluation texts; training on them invalidates the evaluation. Found by corpus_definition.py.

LAMBADA (Paperno and others, 2016): passages whose last word needs the whole passage. WikiText (Merity and others,
2016): articles of Wikipedia; to train on them, use wikitext103_raw.
"""

from __future__ import annotations

from data_tools.corpora.corpus_definition import PublishedTexts
from data_tools.corpora.download import RemoteFile

_OPEN_COPY = "https://huggingface.co/datasets/EleutherAI/lambada_openai/resolve/900124bf3b8235c6daf21033af9948b3f07346c4"
# because: the archive also has 2,662 novels (334 MB), and this copy has just the two files, unchanged
_SMALL_COPY = "https://raw.githubusercontent.com/Victorwz/VaLM/4b872cd0ee25de388cd7a6929bcfbf504364d891/data/lambada"

RECIPES = (
    # the text of the books, with capitals and punctuation
    PublishedTexts(
        name="lambada",
        about="LAMBADA's test set as OpenAI published it with GPT-2: 5,153 passages as they stand in the books",
        files=(
            RemoteFile(
                "lambada_test.jsonl",
                (
                    "https://openaipublic.blob.core.windows.net/gpt-2/data/lambada_test.jsonl",
                    f"{_OPEN_COPY}/data/lambada_test.jsonl",
                    "https://raw.githubusercontent.com/cybertronai/bflm/master/lambada_test.jsonl",
                ),
                "4aa8d02cd17c719165fc8a7887fddd641f43fcafa4b1c806ca8abc31fabdb226",
                1_819_752,
            ),
        ),
    ),
    # lower case, punctuation separated from words, one passage per line
    PublishedTexts(
        name="lambada_standard",
        about="LAMBADA as its authors published it, lower-cased: 5,153 passages for tests, 4,869 for development",
        files=(
            RemoteFile(
                "lambada_test_plain_text.txt",
                (f"{_SMALL_COPY}/lambada_test_plain_text.txt",),
                "4ab6062b68422bf2e83653d367c9765d42404f7ec21b8b59b6518b45606aaef2",
                1_755_107,
            ),
            RemoteFile(
                "lambada_development_plain_text.txt",
                (f"{_SMALL_COPY}/lambada_development_plain_text.txt",),
                "f5b0f1e38fcdad6a1cd3a17bee4b6932a28cd9c5f463ada970c61de0f8679f2f",
                1_668_790,
            ),
        ),
        archives=(
            RemoteFile(
                "lambada-dataset.tar.gz",
                ("https://zenodo.org/records/2630551/files/lambada-dataset.tar.gz?download=1",),
                "8fbe499096ddbdcbbd0cac406861b5026fb451d15b8fe04e0e4f3d082f2ad5d7",
                334_527_694,
            ),
        ),
    ),
    # word level: rare words are `<unk>`, tokens are separated by spaces; papers report perplexity on this version
    PublishedTexts(
        name="wikitext103",
        about="WikiText-103, word level: 60 articles of Wikipedia for tests and 60 for validation",
        files=(
            RemoteFile(
                "wiki.test.tokens", (), "56db52eb157b1ab5c89646eef70510c1eca6e12a3bfdb99f0d6b05b4eacb75b9", 1_281_077
            ),
            RemoteFile(
                "wiki.valid.tokens", (), "9aee9f52d6e77de6c7751fc5e7c44287db3ec0eaf15477098acc6b93c1c4250b", 1_142_309
            ),
        ),
        archives=(
            RemoteFile(
                "wikitext-103-v1.zip",
                (
                    "https://wikitext.smerity.com/wikitext-103-v1.zip",
                    "https://s3.amazonaws.com/research.metamind.io/wikitext/wikitext-103-v1.zip",
                ),
                "242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590",
                190_229_076,
            ),
        ),
    ),
    # raw: the version that lm-evaluation-harness calls wikitext. Its test articles equal WikiText-103's, so a raw
    # archive of either corpus is accepted if it holds exactly this file
    PublishedTexts(
        name="wikitext2",
        about="WikiText-2, raw: 60 articles of Wikipedia for tests, no word left out",
        files=(
            RemoteFile(
                "wiki.test.raw", (), "173c87a53759e0201f33e0ccf978e510c2042d7f2cb78229d9a50d79b9e7dd08", 1_290_590
            ),
        ),
        archives=(
            RemoteFile(
                "wikitext-2-raw-v1.zip",
                (
                    "https://huggingface.co/datasets/ggml-org/ci/resolve/main/wikitext-2-raw-v1.zip",
                    "https://wikitext.smerity.com/wikitext-2-raw-v1.zip",
                    "https://s3.amazonaws.com/research.metamind.io/wikitext/wikitext-2-raw-v1.zip",
                ),
                "ef7edb566e3e2b2d31b29c1fdb0c89a4cc683597484c3dc2517919c615435a11",
                4_721_645,
            ),
        ),
    ),
)
