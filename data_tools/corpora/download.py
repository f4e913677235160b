"""Downloads published files of known SHA-256, or explains how to provide them by hand.

A download resumes after a broken connection, and is kept only if its hash is right. Called by `lmtrain corpus get` and
`lmtrain corpus fetch` only: no other part of lmtrain opens a connection. https only, also after redirects; plain http
is allowed for the local machine.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import re
import shlex
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lmtrain.errors import DataError, StorageError, UsageError
from lmtrain.runtime.files.atomic_files import fsync_dir, fsync_file, open_output, storage_errors
from lmtrain.runtime.files.existing_output import Found, Kind, check_output

ReportBytes = Callable[[int, int | None], None]  # receives (bytes present, total bytes or None if unknown)
TIMEOUT_S = 60
_CHUNK = 1 << 20
_LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")


# because: there is one file with a hash, so that another one is never replaced
_NO_OTHER = Kind("the file with this SHA-256", lambda path: False, takes_empty=False)


@dataclass(frozen=True)
class RemoteFile:
    """A published file and its addresses, which all give the same bytes; none if the file is only in an archive."""

    name: str
    urls: tuple[str, ...]
    sha256: str
    num_bytes: int

    def describe(self) -> Iterator[str]:
        """Yield lines with the file's name, size, hash and addresses."""
        yield f"  {self.name}, {self.num_bytes:,} bytes, SHA-256 {self.sha256}"
        yield from (f"    {url}" for url in self.urls)


def manual_instructions(
    name: str, output: Path, files: Sequence[RemoteFile], archives: Sequence[RemoteFile] = ()
) -> str:
    """Return instructions for a user without internet access: which files to download by hand, the folder to put them
    in, and the command to run then. `name` is the corpus, `archives` contain the same files.
    """
    lines = [line for file in files for line in file.describe()]
    if archives:
        lines.append("also contained in" if any(file.urls for file in files) else "contained in")
        lines += [line for archive in archives for line in archive.describe()]
    command, option = f"  lmtrain corpus get {name}", f"--output {shlex.quote(str(output))}"
    subject = "the files, or an archive of that name," if archives else "it"
    lines += [f"Put {subject} into {output / 'source'} and run", f"{command} {option}"]
    return "\n".join([*lines, f"or leave {'them' if archives else 'it'} elsewhere and run", f"{command} PATH {option}"])


class UnreachableError(StorageError):
    """Raised if no address gave the file; the partial download is kept.

    `problems` are (host, cause) pairs; `instructions`, if given, say how to bring the file by hand.
    """

    def __init__(self, problems: Sequence[tuple[str, str]], instructions: str = "") -> None:
        self.problems = list(problems)  # (host, cause) per failed address
        causes = {cause: [host for host, host_cause in problems if host_cause == cause] for _, cause in problems}
        summary = "; ".join(f"{', '.join(dict.fromkeys(hosts))}: {cause}" for cause, hosts in causes.items())
        alternative = f", or bring it by other means:\n{instructions}" if instructions else "."
        super().__init__(f"Nothing could be fetched ({summary}). Start again to continue where it stopped{alternative}")


def fetch(
    urls: Sequence[str], target: Path, *, sha256: str, num_bytes: int | None = None, report: ReportBytes | None = None,
    instructions: str = "",
) -> bool:
    """Download a file to `target` from the first of `urls` that works and has the hash `sha256`. Return False if the
    file was there already. `report` is called with (bytes present, total bytes or None) while data arrives.

    A partial download in TARGET.part is continued, and deleted if the complete file has another hash. Raise
    UnreachableError, with `instructions` on how to bring the file by hand, if no address works.
    """
    if not re.fullmatch(r"[0-9a-f]{64}", sha256):
        raise UsageError(f"--sha256={sha256} is not a SHA-256. Give 64 lower-case hexadecimal digits.")
    for url in urls:
        check_address(url)
    if has_expected_file(target, sha256):
        return False
    partial = target.with_name(f"{target.name}.part")
    with storage_errors(partial, "Writing"):
        partial.parent.mkdir(parents=True, exist_ok=True)
    problems: list[tuple[str, str]] = []
    wrong_content: DataError | None = None
    for url in urls:
        try:
            _download(url, partial, num_bytes, report)
            _move_into_place(partial, target, sha256, url)
        except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError) as error:
            reason = getattr(error, "reason", None) or error
            problems.append((urlsplit(url).netloc, getattr(reason, "strerror", None) or str(reason)))
        except DataError as error:  # because: an address may give a login page instead, and the next may give the file
            partial.unlink(missing_ok=True)
            wrong_content = error
        else:
            return True
    if wrong_content is not None:
        raise wrong_content
    raise UnreachableError(problems, instructions)


def has_expected_file(target: Path, sha256: str) -> bool:
    """Return True if a file with this SHA-256 is at `target`, False if nothing is there. Raise OutputError if anything
    else is there.
    """
    is_same = target.is_file() and not target.is_symlink() and file_sha256(target) == sha256
    return check_output(target, _NO_OTHER, overwrite=False, is_same=is_same) is Found.SAME


def check_address(url: str) -> None:
    """Raise UsageError unless an address begins with https, or with http and is on this machine."""
    parts = urlsplit(url)
    if parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in _LOCAL_HOSTS):
        raise UsageError(f"{url} is not an https address. Give an address that begins with https://.")


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits."""
    with storage_errors(path, "Reading"), open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class _SafeRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        check_address(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _download(url: str, partial: Path, num_bytes: int | None, report: ReportBytes | None) -> None:
    """Download a file to `partial`, continuing after the bytes that `partial` already has. Raise ConnectionError if the
    connection breaks early, DataError if more than `num_bytes` bytes arrive.
    """
    num_done = partial.stat().st_size if partial.exists() else 0
    if num_bytes is not None and num_done >= num_bytes:
        return  # complete or too long; the hash check decides
    request = urllib.request.Request(url, headers={"User-Agent": "lmtrain", "Accept-Encoding": "identity"})  # noqa: S310
    if num_done:
        request.add_header("Range", f"bytes={num_done}-")
    try:
        response = urllib.request.build_opener(_SafeRedirects).open(request, timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        if error.code == 416 and num_done:  # the requested range is empty: the file is complete
            return
        raise
    with response:
        if num_done and response.status != 206:
            num_done = 0  # the server ignored the range and sends the whole file
        length = response.headers.get("Content-Length", "")
        expected = num_done + int(length) if length.isdecimal() else None
        with storage_errors(partial, "Writing"):
            fd = open_output(partial, os.O_RDWR | os.O_CREAT | (0 if num_done else os.O_TRUNC))
        with open(fd, "wb") as file:
            file.seek(num_done)
            while data := response.read(_CHUNK):
                num_done += len(data)
                if num_bytes is not None and num_done > num_bytes:
                    raise DataError(
                        f"{url} sends more than the {num_bytes:,} bytes of the published file. Do not trust it."
                    )
                # because: a broken connection is an OSError too and must not be reported as a disk error
                with storage_errors(partial, "Writing"):
                    file.write(data)
                    file.flush()
                if report is not None:
                    report(num_done, num_bytes or expected)
            file.truncate()
    if expected is not None and num_done < expected:
        raise ConnectionError(f"the connection was lost after {num_done} of {expected} bytes")


def _move_into_place(partial: Path, target: Path, sha256: str, url: str) -> None:
    """Rename the finished download `partial` to `target`. Raise DataError if it does not have the expected SHA-256;
    `url` is for the message.
    """
    actual = file_sha256(partial)
    if actual != sha256:
        raise DataError(
            f"{url} gave a file with SHA-256 {actual}, not {sha256}. The file was deleted; do not trust the address."
        )
    with storage_errors(target, "Writing"):
        fsync_file(partial)
        partial.rename(target)
        fsync_dir(target.parent)
