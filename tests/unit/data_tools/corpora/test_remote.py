"""Instructions for providing files by hand: everything that can be copied and typed."""

from __future__ import annotations

from pathlib import Path

from data_tools.corpora.download import RemoteFile, manual_instructions

FILE = RemoteFile("a.txt", (), "a0" * 32, 1_234_567)
ARCHIVE = RemoteFile("x.zip", ("https://one.example/x.zip", "https://two.example/x.zip"), "b1" * 32, 99)


def test_a_file_in_an_archive() -> None:
    assert manual_instructions("x", Path("my data"), [FILE], [ARCHIVE]).splitlines() == [
        "  a.txt, 1,234,567 bytes, SHA-256 " + "a0" * 32,
        "contained in",
        "  x.zip, 99 bytes, SHA-256 " + "b1" * 32,
        "    https://one.example/x.zip",
        "    https://two.example/x.zip",
        "Put the files, or an archive of that name, into my data/source and run",
        "  lmtrain corpus get x --output 'my data'",
        "or leave them elsewhere and run",
        "  lmtrain corpus get x PATH --output 'my data'",
    ]


def test_instructions_for_a_single_file() -> None:
    assert manual_instructions("x", Path("out"), [ARCHIVE]).splitlines()[3:] == [
        "Put it into out/source and run",
        "  lmtrain corpus get x --output out",
        "or leave it elsewhere and run",
        "  lmtrain corpus get x PATH --output out",
    ]
