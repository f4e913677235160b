"""The prompts of `lmtrain generate`: one from an option, a file or standard input, or a file with one on each line.

Called by the command, and by the check of a corrected line. Torch-free, so that a wrong file is refused at once.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lmtrain.errors import DataError, UsageError, leave_out, shell_quoted, way
from lmtrain.runtime.files.atomic_files import read_bytes
from lmtrain.runtime.files.similar_path import refuse_file_as_text

_MAX_PROMPT_BYTES = 64 << 20
_KEYS = ("prompt", "text")  # of a prompt in a line of JSON


def check_prompt_options(prompt: str | None, prompt_file: Path | None, prompts: Path | None) -> None:
    """Raise UsageError if several options name a prompt, or if --prompt has the name of a file in place of a text."""
    given = {"--prompt": prompt, "--prompt-file": prompt_file, "--prompts": prompts}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        typed = " and ".join(name if name == "--prompt" else f"{name} {given[name]}" for name in names)
        raise UsageError(
            f"{typed} {'both' if len(names) == 2 else 'all'} give the text to continue. "
            f"Leave out {' or '.join(leave_out(name, shown=name) for name in names)}."
        )
    if prompt is None:
        return
    file = prompt.removeprefix("FILE:").removeprefix("@")
    if file != prompt and Path(file).is_file():
        raise UsageError(
            f"--prompt {shell_quoted(prompt)} is continued as it is written, and names a file. Use "
            f"{way('--prompt-file', file, instead_of='--prompt')} to continue the text in the file."
        )
    refuse_file_as_text("--prompt", prompt, "--prompt-file")


def read_given_prompts(
    prompt: str | None, prompt_file: Path | None, prompts: Path | None, report: Callable[[str], None]
) -> list[str]:
    """Return the prompts that these options name, or standard input if all are None. `report` receives a note if the
    lines of a file are one prompt.
    """
    if prompts is not None:
        return read_prompts(prompts)
    text = read_prompt(prompt_file) if prompt is None else prompt
    if note := note_on_lines(prompt_file, text):
        report(note)
    return [text]


def read_prompt(file: Path | None) -> str:
    """Return the text of a prompt's file, or of standard input if `file` is None or -, without the line break that ends
    it; "" if no file is named and standard input is a terminal. Raise DataError if the text is not UTF-8.
    """
    if file is None and sys.stdin.isatty():
        return ""
    file = None if file == Path("-") else file
    content = sys.stdin.buffer.read() if file is None else read_bytes(file, _MAX_PROMPT_BYTES)
    try:
        return content.decode("utf-8-sig").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        name = "Standard input" if file is None else str(file)
        raise DataError(
            f"{name} cannot be a prompt: it is not text in UTF-8 from byte {error.start} on. Give a text file."
        ) from error


def read_prompts(file: Path) -> list[str]:
    """Return the prompts of a file, or of standard input if `file` is -: its lines without blank ones or, if its name
    ends in .jsonl, the text under "prompt" or "text" in each line. Raise DataError if a line has none, or if there is
    no prompt.
    """
    lines = [(number, line) for number, line in enumerate(_lines(read_prompt(file)), 1) if line.strip()]
    if not lines:
        raise DataError(f"--prompts {file} holds no prompt. Give a file with one on each line.")
    return [_prompt_of_json(file, *line) if file.suffix == ".jsonl" else line[1] for line in lines]


def _lines(text: str) -> list[str]:
    """Return the lines of a text, which end with a newline and perhaps a carriage return before it."""
    return [line.removesuffix("\r") for line in text.split("\n")]


def _prompt_of_json(file: Path, number: int, line: str) -> str:
    """Return the prompt in line `number` of a .jsonl file."""
    row: Any = None
    with suppress(ValueError):
        row = json.loads(line)
    texts = [row[key] for key in _KEYS if isinstance(row.get(key), str)] if isinstance(row, dict) else []
    if not texts:
        raise DataError(
            f"--prompts {file}:{number} is not an object of JSON with a text under {' or '.join(_KEYS)}. Mend this "
            "line, or give a text file with a prompt on each line."
        )
    return str(texts[0])


def note_on_lines(file: Path | None, text: str) -> str | None:
    """Return a note for the user if a prompt's file, None for standard input, has several lines; else None."""
    num_lines = sum(bool(line.strip()) for line in _lines(text))
    if file is None or num_lines < 2:
        return None
    return (
        f"the {num_lines} lines of {file} are continued as one prompt; --prompts {shell_quoted(str(file))} takes each "
        "line as a prompt of its own"
    )
