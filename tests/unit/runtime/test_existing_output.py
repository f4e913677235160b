"""What becomes of an output that is there: every state of it, beside everything a command can say of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmtrain.errors import OutputError
from lmtrain.runtime.files.existing_output import Found, Kind, begins_with, check_output, has_rows_with

FILE = Kind("a file of ours", begins_with(b"ours"))
STRICT = Kind("a file of ours", begins_with(b"ours"), takes_empty=False)
FOLDER = Kind("a folder of ours", lambda path: (path / "ours").exists(), is_folder=True)
SAID: tuple[dict[str, bool], ...] = (
    {}, {"overwrite": True}, {"is_default": True}, {"is_same": True}, {"is_same": True, "overwrite": True},
    {"is_unfinished": True},
)  # fmt: skip
NOT_FILE = "is not a file, is not a file, is not a file, nothing to do, is not a file, goes on"
NOT_FOLDER = NOT_FILE.replace("file", "folder")
# what is there, for which kind, and what follows from each of SAID: an answer, or words of the refusal
ROWS = {
    "nothing": (FILE, ", ".join(["nothing"] * 6)),
    "ours": (FILE, "already, replaced, replaced, nothing to do, replaced, goes on"),
    "empty": (FILE, "already, replaced, replaced, nothing to do, replaced, goes on"),
    "empty ": (STRICT, NOT_FILE),
    "theirs": (FILE, NOT_FILE),
    "read-only": (FILE, "already, read-only, read-only, nothing to do, read-only, goes on"),
    "link": (FILE, ", ".join(["link"] * 6)),
    "folder": (FILE, NOT_FILE),
    "ours ": (FOLDER, NOT_FOLDER),
    "folder ": (FOLDER, "nothing, nothing, nothing, nothing to do, nothing, goes on"),
    "folder of theirs": (FOLDER, NOT_FOLDER),
    "folder of ours": (FOLDER, "already, replaced, replaced, nothing to do, replaced, goes on"),
}


def _put(path: Path, what: str) -> None:
    match what.strip():
        case "nothing":
            pass
        case "link":
            path.symlink_to(path.with_name("elsewhere"))
        case "folder" | "folder of ours" | "folder of theirs":
            path.mkdir()
            if what.startswith("folder of "):
                (path / what.removeprefix("folder of ")).touch()
        case _:
            path.write_bytes({"empty": b"", "theirs": b"theirs"}.get(what.strip(), b"ours"))
            if what == "read-only":
                path.chmod(0o444)


@pytest.mark.parametrize("what", ROWS)
def test_what_is_there_is_answered_or_refused(tmp_path: Path, what: str) -> None:
    kind, answers = ROWS[what]
    path = tmp_path / "output"
    _put(path, what)
    for said, answer in zip(SAID, answers.split(", "), strict=True):
        try:
            heard = check_output(path, kind, **{"overwrite": False} | said).value
        except OutputError as error:
            heard = str(error)
        assert answer in heard
        assert (answer == "nothing") == (heard == Found.NOTHING.value)


def test_rows_are_known_by_all_their_keys(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    for text, fits in (('{"a": 1, "b": 2, "c": 3}\n', True), ('{"a": 1}\n', False), ("[]\n", False), ("", False)):
        file.write_text(text)
        assert has_rows_with("a", "b")(file) is fits
