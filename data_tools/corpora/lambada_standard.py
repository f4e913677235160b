"""LAMBADA (Paperno and others, 2016) as its authors published it: in lower case, punctuation apart from the words.

One passage a line. It is for evaluation: train on it and the measure is void. Found by recipe.py.
"""

from __future__ import annotations

from data_tools.corpora.published import Texts
from data_tools.corpora.remote import RemoteFile

# because: the archive holds 2,662 novels, too, and these are two files of it as they are
_SMALL_COPY = "https://raw.githubusercontent.com/Victorwz/VaLM/4b872cd0ee25de388cd7a6929bcfbf504364d891/data/lambada"

RECIPE = Texts(
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
)
