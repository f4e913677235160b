"""WikiText-2 (Merity and others, 2016), raw: what lm-evaluation-harness calls wikitext. Found by recipe.py.

Its test articles are those of WikiText-103: an archive of either, raw, will do where it holds this very file.
"""

from __future__ import annotations

from data_tools.corpora.published import Texts
from data_tools.corpora.remote import RemoteFile

RECIPE = Texts(
    name="wikitext2",
    about="WikiText-2, raw: 60 articles of Wikipedia for tests, no word left out",
    files=(
        RemoteFile("wiki.test.raw", (), "173c87a53759e0201f33e0ccf978e510c2042d7f2cb78229d9a50d79b9e7dd08", 1_290_590),
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
)
