"""WikiText-103 (Merity and others, 2016), word level: what perplexities of papers are measured on. Found by recipe.py.

Rare words are `<unk>` and all words stand apart. To train on its articles, take wikitext103_raw.
"""

from __future__ import annotations

from data_tools.corpora.published import Texts
from data_tools.corpora.remote import RemoteFile

RECIPE = Texts(
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
)
